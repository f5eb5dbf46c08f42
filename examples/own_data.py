"""Your own arrays and your own nn.Module in; personal models and alpha out."""

import numpy as np
import torch
from torch import nn

import pfedla

# Four sites, 60 patients each; sites 0 and 1 measure with one device, 2 and 3 with another.
rng = np.random.default_rng(0)
site = np.repeat(np.arange(4), 60)
x = rng.normal(size=(240, 8)).astype("float32")
y = (x[:, 0] * np.where(site < 2, 1, -1) + x[:, 1] > 0).astype(int)

federation = pfedla.federation_of(x, y, client=site)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
result = pfedla.simulate(federation, model, "pfedla", rounds=40, lr=0.1)

print("accuracy of each site's personal model:", result.accuracy.numpy().round(2))
print("weights of the last layer, receiver by sender:")
print(result.alpha[:, -1].numpy().round(2))
prediction = result.personal_model(3)(torch.from_numpy(x[-1:])).argmax(1)
