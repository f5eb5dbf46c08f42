"""A model and its loss as functions of tensors: `task_of` makes them of any nn.Module.

`ClassificationTask` runs under torch.func.vmap. `DirectTask` does the same for one client at a time, faster: plain autograd
on a module whose tensors are put in place, images and convolutions channels last. `CompiledTask` has torch compile the step.
"""

import copy
import threading
from collections.abc import Container
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.fx.experimental.proxy_tensor import make_fx

from pfedla.contracts import LocalTraining
from pfedla.errors import PfedlaError
from pfedla.layers import Layers
from pfedla.tree import Params


def load_tensors(module: nn.Module, tensors: Params) -> nn.Module:
    """A copy of `module` with these parameters and statistics, ready for use (eval mode)."""
    module = copy.deepcopy(module)
    # Not strict: a tied weight has two names in a state_dict and one here.
    module.load_state_dict(tensors, strict=False)
    return module.eval()


class _OwnCopies(threading.local):
    """Every thread's own; they do not travel: a task begins without any in another process."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _OwnCopies, ()


class ClassificationTask:
    """An nn.Module that maps a batch to logits, with cross-entropy."""

    def __init__(self, module: nn.Module) -> None:
        self._module = copy.deepcopy(module)
        self._layers = Layers.of(self._module)
        self._copies = _OwnCopies()

    @property
    def layers(self) -> Layers:
        return self._layers

    @property
    def module(self) -> nn.Module:
        return self._module

    def to(self, device: torch.device) -> "ClassificationTask":
        return ClassificationTask(copy.deepcopy(self._module).to(device))

    def direct(self, shape: tuple[int, ...]) -> "DirectTask":
        return DirectTask(self._module, self._takes_channels_last(shape))

    def compiled(self, shape: tuple[int, ...], training: LocalTraining) -> "CompiledTask":
        return CompiledTask(self, shape, training)

    def _takes_channels_last(self, shape: tuple[int, ...]) -> bool:
        """Whether the model can be fed so: one that calls `view` on its feature maps cannot."""
        if len(shape) != 3:
            return False
        device = next(self._module.parameters()).device
        try:
            with torch.no_grad():
                functional_call(
                    self._own_copy("train"), self.initial(), (channels_last(torch.zeros(2, *shape, device=device)),)
                )
        except Exception:  # whatever the user's module raises
            return False
        return True

    def initial(self) -> Params:
        tensors = [*self._module.named_parameters(), *self._module.named_buffers()]
        return {name: value.detach().clone() for name, value in tensors}

    def _own_copy(self, mode: str) -> nn.Module:
        # The tensors inside the module are swapped while it runs: every thread needs a module of its own.
        if not hasattr(self._copies, mode):
            module = copy.deepcopy(self._module).train(mode != "eval")
            if mode == "recalibrate":
                for part in module.modules():
                    if isinstance(part, nn.modules.batchnorm._NormBase):
                        part.momentum = 1.0  # the statistics become those of the one batch they see
            setattr(self._copies, mode, module)
        return getattr(self._copies, mode)  # type: ignore[no-any-return]

    def check(self, x: Tensor, num_classes: int) -> None:
        """Try the model on a batch in training mode and refuse what could not be trained or repeated."""
        before = torch.random.get_rng_state()
        try:
            with torch.no_grad():
                logits = functional_call(self._own_copy("train"), self.initial(), (x,))
        except Exception as error:  # whatever the user's module raises
            reason = str(error).splitlines()[0]
            raise PfedlaError(f"the model cannot train on a batch of shape {tuple(x.shape)}: {reason}") from error
        if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape != (len(x), max(num_classes, logits.shape[1])):
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise PfedlaError(f"the model should give a logit for each of the {num_classes} classes, it gives {shape}")
        if not torch.equal(before, torch.random.get_rng_state()):
            torch.random.set_rng_state(before)
            raise PfedlaError(
                "the model draws random numbers while it trains (dropout?): they come from a stream shared by all clients, "
                "so no run could be repeated; switch them off"
            )

    def laid_out(self, value: Tensor) -> Tensor:
        """Images or weights as the model likes them in memory."""
        return value

    def loss(self, parameters: Params, statistics: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Params]:
        return loss_of(self._own_copy("train"), parameters, statistics, x, y)

    def gradient(
        self, parameters: Params, statistics: Params, x: Tensor, y: Tensor, only: Container[str] | None = None
    ) -> tuple[Params, Tensor, Params]:
        moving = {name: value for name, value in parameters.items() if only is None or name in only}

        def objective(moving: Params) -> tuple[Tensor, Params]:
            return self.loss({**parameters, **moving}, statistics, x, y)

        gradients, (loss, updated) = grad_and_value(objective, has_aux=True)(moving)
        return gradients, loss, updated

    def descended(self, parameters: Params, gradients: Params, lr: float) -> Params:
        return {name: torch.add(value, gradients[name], alpha=-lr) for name, value in parameters.items()}

    def step(self, parameters: Params, statistics: Params, x: Tensor, y: Tensor, lr: float) -> tuple[Params, Tensor, Params]:
        gradients, loss, statistics = self.gradient(parameters, statistics, x, y)
        return self.descended(parameters, gradients, lr), loss, statistics

    def logits(self, tensors: Params, x: Tensor) -> Tensor:
        return functional_call(self._own_copy("eval"), tensors, (x,))  # type: ignore[no-any-return]

    def recalibrated(self, tensors: Params, x: Tensor) -> Params:
        fresh = {**tensors, **{name: tensors[name].clone() for name in self._layers.statistics}}
        functional_call(self._own_copy("recalibrate"), fresh, (x,))
        return fresh


class DirectTask(ClassificationTask):
    """The same numbers without torch.func, which costs a tenth of a small network's step."""

    def __init__(self, module: nn.Module, channels_last: bool) -> None:
        super().__init__(module)
        self._channels_last = channels_last

    def laid_out(self, value: Tensor) -> Tensor:
        return channels_last(value) if self._channels_last and value.ndim == 4 else value

    def gradient(
        self, parameters: Params, statistics: Params, x: Tensor, y: Tensor, only: Container[str] | None = None
    ) -> tuple[Params, Tensor, Params]:
        leaves = {name: self.laid_out(value).detach() for name, value in parameters.items()}
        moving = {name: leaf.requires_grad_() for name, leaf in leaves.items() if only is None or name in only}
        statistics = {name: value.clone() for name, value in statistics.items()}
        module = self._own_copy("train")
        for holder, key, name in self._slots(module):
            holder[key] = leaves[name] if name in leaves else statistics[name]
        loss = F.cross_entropy(module(self.laid_out(x)), y)
        gradients = torch.autograd.grad(loss, list(moving.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(moving, gradients, strict=True)), loss.detach(), statistics

    def descended(self, parameters: Params, gradients: Params, lr: float) -> Params:
        moved = torch._foreach_add(list(parameters.values()), [gradients[name] for name in parameters], alpha=-lr)
        return dict(zip(parameters, moved, strict=True))

    def _slots(self, module: nn.Module) -> list[tuple[dict[str, Tensor | None], str, str]]:
        """Where the module keeps each of its tensors; a tied weight is kept in two places."""
        if not hasattr(self._copies, "slots"):
            names = {id(value): name for name, value in [*module.named_parameters(), *module.named_buffers()]}
            holders = [holder for part in module.modules() for holder in (part._parameters, part._buffers)]
            self._copies.slots = [
                (holder, key, names[id(value)]) for holder in holders for key, value in holder.items() if value is not None
            ]
        return self._copies.slots  # type: ignore[no-any-return]


class CompiledTask(DirectTask):
    """The whole step of a full batch (forward, backward, update) as one compiled function; other batches go uncompiled.

    So there is one thing to compile whatever the clients' sizes; torch keeps its compiled code on disk for the next process.
    Traced and compiled here and now, without torch.compile's look at every call: that costs a twentieth of a small network's
    step, and several threads in it at once had it compile again.
    """

    def __init__(self, task: ClassificationTask, shape: tuple[int, ...], training: LocalTraining) -> None:
        from torch import _inductor  # seconds to import

        super().__init__(task.module, task._takes_channels_last(shape))
        self._training = training
        initial = {name: self.laid_out(value) for name, value in self.initial().items()}
        parameters, statistics = self.layers.parameters(initial), self.layers.only_statistics(initial)
        self._order = [*parameters, *statistics]
        count, module = len(parameters), task._own_copy("train")
        gradient = grad_and_value(loss_of, argnums=1, has_aux=True)

        def whole_step(x: Tensor, y: Tensor, *flat: Tensor) -> list[Tensor]:
            given = dict(zip(parameters, flat[:count], strict=True)), dict(zip(statistics, flat[count:], strict=True))
            gradients, (loss, updated) = gradient(module, *given, x, y)
            # Not add(…, alpha=…): the compiler of torch 2.13 makes an addmm of it and forgets the rate.
            moved = (value - training.lr * gradients[name] for name, value in given[0].items())
            return [loss, *moved, *updated.values()]

        x = self.laid_out(torch.zeros(training.batch_size, *shape))
        y = torch.zeros(training.batch_size, dtype=torch.int64)
        tensors: list[Any] = [x, y, *parameters.values(), *statistics.values()]
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as it will be called: the compiled code is for one number of threads
        try:
            graph = make_fx(whole_step)(*tensors)
            for node in graph.graph.nodes:
                node.meta.clear()  # of the tracing's own fake tensors, which the compiler would take for its own
            self._compiled = _inductor.compile(graph, tensors, {"cpp_wrapper": True})  # no Python between its parts
        except Exception as error:  # the tracer's and the compiler's own kinds
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise PfedlaError(f"the model's training step cannot be compiled ({reason}); use --compile off") from error
        finally:
            torch.set_num_threads(threads)

    def step(self, parameters: Params, statistics: Params, x: Tensor, y: Tensor, lr: float) -> tuple[Params, Tensor, Params]:
        if len(y) != self._training.batch_size or lr != self._training.lr:
            return super().step(parameters, statistics, x, y, lr)
        given = {**parameters, **statistics}
        loss, *updated = self._compiled(self.laid_out(x), y, *(self.laid_out(given[name]) for name in self._order))
        after = dict(zip(self._order, updated, strict=True))
        return {name: after[name] for name in parameters}, loss, {name: after[name] for name in statistics}


def loss_of(module: nn.Module, parameters: Params, statistics: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Params]:
    statistics = {name: value.clone() for name, value in statistics.items()}  # BatchNorm writes into them
    return F.cross_entropy(functional_call(module, {**parameters, **statistics}, (x,)), y), statistics


def channels_last(images: Tensor) -> Tensor:
    """The same numbers, the channels of a pixel side by side: convolutions and pooling on CPUs are faster so.

    Also for a single channel, where torch sees no difference and would go on with channels first.
    """
    _, channels, height, width = images.shape
    strides = (height * width * channels, 1, width * channels, channels)
    if images.stride() == strides:
        return images
    return torch.empty_strided(images.shape, strides, dtype=images.dtype, device=images.device).copy_(images)


def task_of(module: nn.Module) -> ClassificationTask:
    """Any classifier as a task: takes a batch, returns logits; its present weights are the common initialisation."""
    if not isinstance(module, nn.Module):
        raise PfedlaError(f"the model should be an nn.Module (an instance), it is {module!r}")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise PfedlaError("the model has no trainable parameter")
    return ClassificationTask(module)
