"""Random layers (dropout) draw from a stream of their client and round, the same in every engine and thread.

Under vmap the leading axis of a random operator's tensor is the clients: each row is drawn from its own stream.
"""

import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pfedla.core.errors import PfedlaError

_current = threading.local()
_default_stream = threading.Lock()


@contextmanager
def draw_from(*streams: torch.Generator, secret: bool = False) -> Iterator[None]:
    """Let the models that run in this thread draw from these streams, one per stacked client.

    `secret`: the noise of private training comes from the operating system.
    """
    before = getattr(_current, "streams", ()), getattr(_current, "secret", False)
    _current.streams, _current.secret = streams, secret
    try:
        yield
    finally:
        _current.streams, _current.secret = before


def drawing() -> AbstractContextManager[object]:
    """Return a context in which random operators draw from the streams of `draw_from`, if there are any."""
    streams = getattr(_current, "streams", ())
    return _Drawing(streams) if streams else nullcontext()


def draw_normal(like: Tensor) -> Tensor:
    """Return standard normal numbers of the shape, dtype and device of a tensor, from the streams of `draw_from`."""
    if getattr(_current, "secret", False):
        uniform = 1.0 - draw_uniform(2 * like.numel(), None)  # more than zero: its logarithm is finite
        radius, angle = (-2.0 * uniform[::2].log()).sqrt(), 2.0 * math.pi * uniform[1::2]
        return (radius * angle.cos()).view(like.shape).to(like)  # Box and Muller
    if not getattr(_current, "streams", ()):
        raise PfedlaError("private training needs a source of noise: use draw_from")
    with drawing():
        noise = torch.randn(like.shape, dtype=like.dtype)
    return noise.to(like.device)


def draw_uniform(count: int, draws: torch.Generator | None) -> Tensor:
    """Return numbers in [0, 1), in double precision; without `draws` from the operating system."""
    if draws is not None:
        return torch.rand(count, generator=draws, dtype=torch.float64)
    bits = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> 11
    return torch.from_numpy(bits * 2.0**-53)


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, streams: Sequence[torch.Generator]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or _is_attention_without_dropout(func, args, kwargs):
            return func(*args, **kwargs)
        drawn = [_draw(func, stream, *self._part(row, args, kwargs)) for row, stream in enumerate(self.streams)]
        if len(drawn) == 1:
            found = drawn[0]
        elif isinstance(drawn[0], Tensor):
            found = torch.stack(drawn)
        else:
            found = tuple(map(torch.stack, zip(*drawn, strict=True)))
        return args[0].copy_(found) if func._schema.is_mutable else found

    def _part(self, row: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return one client's arguments: of stacked ones a row of every tensor, a size without its first axis."""
        stacked = len(self.streams) > 1

        def part(value: Any) -> Any:
            if isinstance(value, Tensor):  # a copy in plain order: numbers are drawn in the order of the memory
                own = value[row] if stacked and value.ndim else value
                return own.clone(memory_format=torch.contiguous_format)
            is_size = isinstance(value, list | tuple) and all(isinstance(one, int) for one in value)
            return value[1:] if stacked and is_size else value

        return tuple(map(part, args)), {key: part(value) for key, value in kwargs.items()}


def _is_attention_without_dropout(func: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether an operator is tagged as random and draws nothing."""
    place = next((n for n, one in enumerate(func._schema.arguments) if one.name == "dropout_p"), None)
    return place is not None and not kwargs.get("dropout_p", args[place] if place < len(args) else 0.0)


def _draw(func: Any, stream: torch.Generator, args: Any, kwargs: Any) -> Any:
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func(*args, **{**kwargs, "generator": stream})
    with _default_stream:  # an operator that takes no generator draws from the default one
        before = torch.get_rng_state()
        torch.set_rng_state(stream.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            stream.set_state(torch.get_rng_state())
            torch.set_rng_state(before)
