"""pFedLA with one mistake each that public implementations make, to measure what each costs. Not for use."""

import torch
from torch import Tensor

from pfedla.algorithms.partial import draw_linears
from pfedla.algorithms.pfedla import TRUNK_DEPTH, WIDTH, PFedLA
from pfedla.core.contracts import Cohort, Payload, ServerState, generator
from pfedla.core.layers import stack, take


class InvertedSign(PFedLA):
    """pFedLA that steps against the client's update: v − η Jᵀ Δθ."""

    def gradient(self, server: ServerState, downloads: Payload, uploads: Payload) -> Tensor | None:
        found = super().gradient(server, downloads, uploads)
        return None if found is None else -found


class FrozenAlpha(PFedLA):
    """pFedLA whose hypernetworks start at random and receive no gradient."""

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        server, (layers, senders) = super().init_server(num_clients, seed), (len(self.task.layers), num_clients)
        sizes = {f"trunk{depth}": (WIDTH, WIDTH) for depth in range(TRUNK_DEPTH)} | {"heads": (WIDTH, layers * senders)}
        drawn = []
        for client in range(num_clients):
            draws = generator(seed, "frozen hypernetwork", client=client)
            drawn.append({"embedding": torch.randn(WIDTH, generator=draws)} | draw_linears(sizes, draws))
        heads = {"heads.weight": (layers, senders, WIDTH), "heads.bias": (layers, senders)}
        networks = stack(drawn)
        networks |= {name: networks[name].view(num_clients, *shape) for name, shape in heads.items()}
        return server | {"hypernetworks": networks}

    def gradient(self, server: ServerState, downloads: Payload, uploads: Payload) -> Tensor | None:
        return None


class FrozenAlphaOldModel(FrozenAlpha):
    """FrozenAlpha whose server adds Δθ to the client's old model, in place of the mix that it trained from."""

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        old = take(server["models"], cohort.ids)
        wrong = {name: old[name] + value - downloads.tensors[name] for name, value in uploads.tensors.items()}
        return super().aggregate(server, cohort, downloads, uploads._replace(tensors=wrong))
