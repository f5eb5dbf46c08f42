"""A model and its objective as functions of tensors: `task_of` makes them of any nn.Module."""

import copy
import threading
from collections.abc import Container
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.overrides import TorchFunctionMode

from pfedla.core.errors import PfedlaError, first_line, shown
from pfedla.core.layers import Layers, Params
from pfedla.core.objectives import CLASSIFICATION, OBJECTIVES, Objective, main_output
from pfedla.core.optimizers import is_plain_sgd
from pfedla.core.randomness import drawing
from pfedla.core.settings import Training
from pfedla.core.trees import Tree, arguments, leaves, length, map_tree

Step = tuple[Params, Tensor, Params]  # gradients or new parameters, loss, statistics after the batch
Only = Container[str] | None  # names of some parameters; None: all


def load_tensors(module: nn.Module, tensors: Params) -> nn.Module:
    """Return a copy of `module` with these parameters and statistics, in eval mode."""
    module = copy.deepcopy(module)
    # Not strict: frozen parameters are not among `tensors`, and a tied weight has one name instead of two.
    module.load_state_dict(tensors, strict=False)
    return module.eval()


def copy_module(module: nn.Module) -> nn.Module:
    """Return a copy that shares the frozen parameters with the original."""
    return copy.deepcopy(module, {id(p): p for p in module.parameters() if not p.requires_grad})


class Task:
    """A module that maps a batch to outputs, with an objective, as functions of its tensors; they run under vmap."""

    def __init__(self, module: nn.Module, objective: Objective = CLASSIFICATION) -> None:
        self.module = copy_module(module)  # frozen parameters stay inside: they are in no dictionary
        self.objective = objective
        self.layers = Layers.of(self.module)
        self.draws = False  # whether the model draws random numbers while it trains: `try_out` finds out
        self._copies = threading.local()
        self._channels_last = False

    def to(self, device: torch.device) -> "Task":
        return self if device.type == "cpu" else Task(copy.deepcopy(self.module).to(device), self.objective)

    def initial(self) -> Params:
        """Return a copy of the common initialisation: trained parameters and statistics."""
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {name: value.detach().clone() for name, value in tensors if name not in self.layers.frozen}

    def _own_copy(self, mode: str) -> nn.Module:
        # The tensors inside the module are swapped while it runs: every thread needs a module of its own.
        if not hasattr(self._copies, mode):
            module = copy_module(self.module).train(mode != "eval")
            for part in module.modules():
                if mode == "recalibrate" and isinstance(part, nn.modules.batchnorm._NormBase):
                    part.momentum = 1.0  # the statistics become those of the one batch they see
            setattr(self._copies, mode, module)
        return getattr(self._copies, mode)  # type: ignore[no-any-return]

    def _call(self, mode: str, tensors: Params, x: Tree) -> Tree:
        with drawing() if self.draws else nullcontext():
            return functional_call(self._own_copy(mode), tensors, *arguments(x))

    def try_out(self, x: Tree) -> Tree:
        """Return the outputs for a batch in training mode; find out whether the model draws random numbers."""
        before = torch.random.get_rng_state()
        with torch.no_grad():
            outputs = functional_call(self._own_copy("train"), self.initial(), *arguments(x))
        self.draws = not torch.equal(before, torch.random.get_rng_state())
        torch.random.set_rng_state(before)
        return outputs

    def check(self, x: Tree, y: Tensor, num_outputs: int) -> None:
        """Try the model and its loss on a batch; refuse what could not be trained."""
        try:
            outputs = self.try_out(x)
        except Exception as error:  # whatever the user's module raises
            batch = map_tree(lambda part: f"{part.dtype} batch of shape {tuple(part.shape)}", x)
            raise PfedlaError(f"the model cannot train on a {batch}: {first_line(error)}") from error
        main = main_output(outputs)
        found: Any = tuple(main.shape) if isinstance(main, Tensor) else type(main).__name__
        name = self.objective.name
        if name == "classification" and (len(found) != 2 or found[0] != length(x) or found[1] < num_outputs):
            raise PfedlaError(f"the model should return a logit for each of the {num_outputs} classes, not {found}")
        wide = not isinstance(main, Tensor) or main.numel() != length(x) * num_outputs
        if name in OBJECTIVES and name != "classification" and wide:
            raise PfedlaError(f"the model should return [examples, {num_outputs}] for task {name}, not {found}")
        try:
            loss = self.objective.loss(outputs, y)
            is_scalar = isinstance(loss, Tensor) and loss.shape == ()
        except Exception as error:  # whatever the user's loss raises
            raise PfedlaError(f"the loss of task {name} cannot be computed: {first_line(error)}") from error
        if not is_scalar:
            raise PfedlaError(f"the loss of task {name} should be a tensor with a single number, not {shown(loss)}")
        if x_is_finite(x) and not loss.isfinite():
            raise PfedlaError(f"the loss of task {name} is {loss.item()} for the first batch, before any training")

    def lay_out(self, value: Tensor) -> Tensor:
        """Return images or weights as the model is fastest with them: channels last, also if there is only one."""
        if not self._channels_last or value.ndim != 4:
            return value
        _, channels, height, width = value.shape
        strides = (height * width * channels, 1, width * channels, channels)
        if value.stride() == strides:
            return value
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)

    def gradient(self, parameters: Params, statistics: Params, x: Tree, y: Tensor, only: Only = None) -> Step:
        """Return the gradient (by `only` some parameters), the loss, and the statistics after this batch."""
        moving = {name: value for name, value in parameters.items() if only is None or name in only}

        def objective(moving: Params) -> tuple[Tensor, Params]:
            updated = {name: value.clone() for name, value in statistics.items()}  # BatchNorm writes into them
            return self.objective.loss(self._call("train", {**parameters, **moving, **updated}, x), y), updated

        gradients, (loss, updated) = grad_and_value(objective, has_aux=True)(moving)
        return gradients, loss, updated

    def step(self, parameters: Params, statistics: Params, x: Tree, y: Tensor, lr: float) -> Step:
        """Take one step of SGD: return the parameters after it, the loss, and the statistics."""
        before = {name: self.lay_out(value) for name, value in parameters.items()}  # copies in the first step only
        gradients, loss, statistics = self.gradient(before, statistics, x, y)
        return descend(before, gradients, lr), loss, statistics

    def outputs(self, tensors: Params, x: Tree) -> Tree:
        return self._call("eval", tensors, x)

    def recalibrate(self, tensors: Params, x: Tree) -> Params:
        """Return the same model with its statistics estimated anew from `x`."""
        fresh = {**tensors, **{name: tensors[name].clone() for name in self.layers.statistics}}
        self._call("recalibrate", fresh, x)
        return fresh


class DirectTask(Task):
    """The same numbers for one client without torch.func, which costs a tenth of a small network's step."""

    def __init__(self, module: nn.Module, objective: Objective, examples: Tree) -> None:
        """`examples`: two, in the form that the model takes."""
        super().__init__(module, objective)
        self._channels_last = isinstance(examples, Tensor) and examples.ndim == 4
        try:  # a model that calls `view` on its feature maps cannot be fed channels last
            self.try_out(map_tree(self.lay_out, examples))
        except Exception:  # whatever the user's module raises
            self._channels_last = False
            self.try_out(examples)

    def gradient(self, parameters: Params, statistics: Params, x: Tree, y: Tensor, only: Only = None) -> Step:
        leaves = {name: self.lay_out(value).detach() for name, value in parameters.items()}
        moving = [name for name in leaves if only is None or name in only]
        statistics = {name: value.clone() for name, value in statistics.items()}
        module = self._own_copy("train")
        for holder, key, name in self._slots(module):
            holder[key] = leaves[name] if name in leaves else statistics[name]
        wanted = [leaves[name].requires_grad_() for name in moving]
        positional, named = arguments(map_tree(self.lay_out, x))
        with drawing() if self.draws else nullcontext():
            outputs = module(*positional, **named)
        loss = self.objective.loss(outputs, y)
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        return dict(zip(moving, gradients, strict=True)), loss.detach(), statistics

    def _slots(self, module: nn.Module) -> list[tuple[dict[str, Tensor | None], str, str]]:
        """Return where the module keeps each tensor but the frozen; a tied weight is kept in two places."""
        if not hasattr(self._copies, "slots"):
            named = [*module.named_parameters(), *module.named_buffers()]
            names = {id(value): name for name, value in named if name not in self.layers.frozen}
            holders = [holder for part in module.modules() for holder in (part._parameters, part._buffers)]
            places = [(holder, key, id(value)) for holder in holders for key, value in holder.items()]
            self._copies.slots = [(holder, key, names[value]) for holder, key, value in places if value in names]
        return self._copies.slots  # type: ignore[no-any-return]


class CompiledTask(DirectTask):
    """The step of a full batch (forward, backward, update) as one compiled function; others are not compiled."""

    def __init__(self, module: nn.Module, objective: Objective, examples: Tree, y: Tensor, training: Training) -> None:
        super().__init__(module, objective, examples)
        if self.draws or not isinstance(examples, Tensor) or not is_plain_sgd(training):
            takes = "plain sgd, one tensor as input, a model without dropout"
            raise PfedlaError(f"cannot compile the training step: it needs {takes}; leave --compile out")
        self._training, lr = training, training.learning_rate
        initial = {name: self.lay_out(value) for name, value in self.initial().items()}
        parameters, statistics = self.layers.parameters(initial), self.layers.only_statistics(initial)
        self._order = [*parameters, *statistics]

        def whole_step(x: Tensor, y: Tensor, *flat: Tensor) -> list[Tensor]:
            given = dict(zip(self._order, flat, strict=True))
            before = {name: given[name] for name in parameters}
            gradients, loss, updated = Task.gradient(self, before, {name: given[name] for name in statistics}, x, y)
            # Not add(…, alpha=…): the compiler of torch 2.13 makes an addmm of it and loses the rate.
            after = (value - lr * gradients[name] for name, value in before.items())
            return [loss, *after, *updated.values()]

        rows = torch.zeros(training.batch_size, dtype=torch.int64)
        x, y = self.lay_out(examples[rows].contiguous()), y[rows]
        self._compiled = _compile(whole_step, [x, y, *parameters.values(), *statistics.values()])

    def step(self, parameters: Params, statistics: Params, x: Tensor, y: Tensor, lr: float) -> Step:
        if len(y) != self._training.batch_size or lr != self._training.lr:
            return super().step(parameters, statistics, x, y, lr)
        given = {**parameters, **statistics}
        loss, *updated = self._compiled(self.lay_out(x), y, *(self.lay_out(given[name]) for name in self._order))
        after = dict(zip(self._order, updated, strict=True))
        return {name: after[name] for name in parameters}, loss, {name: after[name] for name in statistics}


def _compile(function: Any, tensors: list[Any]) -> Any:
    # Not torch.compile: its guards cost a twentieth of a small network's step, and threads in them compiled again.
    from torch import _inductor  # seconds to import
    from torch.fx.experimental.proxy_tensor import make_fx

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as it will be called: the compiled code is for one number of threads
    try:
        with _FusedPooling():
            graph = make_fx(function)(*tensors)
        for node in graph.graph.nodes:
            node.meta.clear()  # the tracer's own fake tensors, which the compiler would take for its own
        return _inductor.compile(graph, tensors, {"cpp_wrapper": True})  # no Python between its parts
    except Exception as error:  # the tracer's and the compiler's own kinds
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise PfedlaError(f"cannot compile the training step ({reason}); leave --compile out") from error
    finally:
        torch.set_num_threads(threads)


class _FusedPooling(TorchFunctionMode):
    """While tracing, write F.max_pool2d(x, 2) as comparisons, which the compiler fuses with their surroundings."""

    # Numbers and gradients are those of max_pool2d: NaN passes, of equal numbers the first gets the gradient.
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.max_pool2d or args[1:] != (2,) or kwargs:
            return func(*args, **(kwargs or {}))
        x = args[0]
        rows, columns = x.shape[-2] // 2 * 2, x.shape[-1] // 2 * 2
        best, *others = (x[..., down:rows:2, right:columns:2] for down in (0, 1) for right in (0, 1))
        for other in others:
            # Not isnan(): with it the compiled step takes half as long again.
            best = torch.where((other <= best).logical_or(best != best), best, other)
        return best


def x_is_finite(x: Tree) -> bool:
    return all(bool(part.isfinite().all()) for part in leaves(x))


def descend(parameters: Params, gradients: Params, lr: float) -> Params:
    return {name: torch.add(value, gradients[name], alpha=-lr) for name, value in parameters.items()}


def task_of(module: nn.Module, objective: Objective = CLASSIFICATION) -> Task:
    """Make a task of a model and an objective; the model's weights are the common initialisation."""
    if not isinstance(module, nn.Module):
        raise PfedlaError(f"the model should be an nn.Module (an instance), not {module!r}")
    for name, part in module.named_modules():
        if any(isinstance(parameter, nn.UninitializedParameter) for parameter in part.parameters(recurse=False)):
            what = f"{type(part).__name__} {name!r}".removesuffix(" ''")
            raise PfedlaError(f"the model has a layer without weights yet ({what}); call the model on a batch first")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise PfedlaError("the model has no trainable parameter")
    return Task(module, objective)
