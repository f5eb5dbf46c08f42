"""The layer-wise aggregator on its own, in any federated code: no engine, no round loop of ours."""

import torch
from torch import nn

from pfedla import Layers, LayerWeightHypernetwork, layer_gradient, mix

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
layers = Layers.of(model)  # two layers, "0" and "2": weight and bias together

# Three clients' parameters, stacked: the same names, one leading axis.
torch.manual_seed(0)
models = {name: torch.randn(3, *value.shape) for name, value in model.named_parameters()}

# Every client's hypernetwork, stacked too. alpha[i, layer, j]: i receives, j sends; it starts uniform.
network = LayerWeightHypernetwork(num_senders=3, num_layers=len(layers))
hypernetworks = network.init(num_clients=3, generator=torch.Generator().manual_seed(0))
clients = torch.arange(3)

for _ in range(20):
    personal = mix(network.alpha(hypernetworks, clients), models, layers)  # send personal[...][i] to client i
    # Here the clients would train. Say training pulls client 0 towards client 1's model, the others towards their own.
    target = {name: value[[1, 1, 2]] for name, value in models.items()}
    change = {name: 0.1 * (target[name] - personal[name]) for name in personal}
    hypernetworks = network.step(hypernetworks, clients, layer_gradient(change, models, layers), lr=0.1)

print("client 0 now takes of layer 2 from clients 0, 1, 2:", network.alpha(hypernetworks, clients)[0, 1].numpy().round(2))
