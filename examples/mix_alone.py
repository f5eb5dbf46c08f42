"""Use the layer-wise aggregation in your own federated code, without pfedla's engines and rounds."""

import torch
from torch import nn

from pfedla import Layers, LayerWeightHypernetwork, layer_gradient, mix

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
layers = Layers.of(model)  # two layers, "0" and "2", each with weight and bias

# The parameters of three clients, stacked: the same names, one leading client axis.
torch.manual_seed(0)
models = {name: torch.randn(3, *value.shape) for name, value in model.named_parameters()}

# One hypernetwork per client, stacked too. alpha[i, layer, j]: i receives, j sends. It starts uniform.
network = LayerWeightHypernetwork(num_senders=3, num_layers=len(layers))
hypernetworks = network.init(num_clients=3, generator=torch.Generator().manual_seed(0))

for _ in range(20):
    personal = mix(network.alpha(hypernetworks), models, layers)  # send personal[...][i] to client i
    # The clients would train here. Assume that training moves client 0 towards client 1's model
    # and the other clients towards their own.
    target = {name: value[[1, 1, 2]] for name, value in models.items()}
    change = {name: 0.1 * (target[name] - personal[name]) for name in personal}
    hypernetworks = network.step(hypernetworks, layer_gradient(change, models, layers), lr=0.1)

weights = network.alpha(hypernetworks)[0, 1]
print("client 0 takes layer 2 from clients 0, 1, 2 with weights", weights.numpy().round(2))
