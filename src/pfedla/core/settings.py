"""Settings: each is declared once, with type, bounds, default and description, and all else is made from it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

AUTO: Literal["auto"] = "auto"
Auto = Literal["auto"]
Recalibrate = Literal["unsampled", "never", "always"]
CodecName = Literal["none", "float16", "bfloat16", "int8", "topk", "randk"]
Attack = Literal["none", "nan", "noise", "sign-flip", "scale", "label-flip", "initial", "free-rider"]

Rate = Annotated[float, Field(gt=0, le=1e38, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=0, le=1e38, allow_inf_nan=False)]  # a rate that may be zero
Positive = Annotated[int, Field(ge=1, le=10**9)]
Natural = Annotated[int, Field(ge=0, le=10**9)]
Share = Annotated[float, Field(gt=0, lt=1)]
Chance = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Option:
    """Marks a field that has an option of its own on the command line; `simulate` takes it under the same name."""

    name: str
    short: str = ""


class Section(BaseModel):
    """One section of the experiment file: strict, frozen, described by the docstrings of its fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class Training(Section):
    """The local budget and the optimiser, the same for every method."""

    lr: Annotated[Rate | Auto, Option("lr")] = AUTO
    """Learning rate of local training. auto: the data set's (the paper's, if it has one), else 0.01."""
    local_epochs: Annotated[int, Field(ge=1, le=10_000), Option("local-epochs")] = 5
    """Local epochs per round."""
    batch_size: Annotated[Positive, Option("batch-size")] = 32
    """Local batch size."""
    optimizer: Annotated[Literal["sgd", "adamw"], Option("optimizer")] = "sgd"
    """sgd (the paper's, plain by default) or adamw. What it remembers starts afresh in every round."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of sgd."""
    nesterov: bool = False
    """Nesterov's form of the momentum."""
    weight_decay: Factor = 0.0
    """sgd: added to the gradient; adamw: decoupled."""
    clip_norm: Factor = 0.0
    """Largest norm of a gradient; longer ones are scaled to it. 0: no bound."""
    schedule: Annotated[Literal["constant", "cosine", "step"], Option("schedule")] = "constant"
    """Learning rate over the rounds. cosine: to zero at the last; step: times `decay` every `decay_every` rounds."""
    warm_up_rounds: Natural = 0
    """Rounds in which the learning rate rises linearly to its value."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Factor of schedule step."""
    decay_every: Positive = 100
    """Rounds between two steps of schedule step."""

    @property
    def learning_rate(self) -> float:
        """The learning rate, once "auto" is resolved."""
        assert self.lr != AUTO
        return self.lr


class EngineSettings(Section):
    """Where the clients run. The results do not depend on the number of threads."""

    name: Annotated[Literal["auto", "threaded", "vectorized"], Option("engine")] = AUTO
    """threaded: a thread pool; vectorized: one stacked tensor (vmap). auto: vectorized without [privacy] on a GPU, and
    for small networks without convolutions, attention or recurrence if clients have equal sizes, else threaded."""
    threads: Annotated[int, Field(ge=0, le=1024), Option("threads")] = 0
    """Clients trained at once (threaded). 0: one per core. Does not change the results."""
    device: Annotated[str, Option("device")] = "cpu"
    """cpu, cuda, … as torch names them."""
    compile: Annotated[bool, Option("compile")] = False
    """Compile the training step with torch and a C++ compiler (threaded on the CPU): up to half a minute first, then
    faster steps."""


class UploadSettings(Section):
    """Which uploads are refused, beside those that are malformed or not finite, and how much the others count."""

    norm_bound: Annotated[float, Field(ge=1, allow_inf_nan=False)] | Literal["off"] = 100.0
    """Refuse updates longer than this many medians: of the last accepted updates of all clients, or of that client."""
    max_examples: Positive | Literal["off"] = "off"
    """Most examples that a client counts for in weighted means; 1 weighs all clients alike."""
    max_failed_rounds: Positive = 5
    """Stop the run after this many rounds in a row without a usable upload."""


class WireSettings(Section):
    """How the trained tensors are encoded when they are sent, for every method (docs/compression.md)."""

    upload: Annotated[CodecName, Option("upload")] = "none"
    """What clients send. none: the numbers as they are. The others encode the difference to what the server has of the
    client: float16, bfloat16, int8 (a scale per 256 numbers, stochastic rounding), topk (the largest), randk (random
    ones)."""
    download: Annotated[CodecName, Option("download")] = "none"
    """What clients are sent, encoded likewise as the difference to what the client has received before."""
    share: Annotated[float, Field(gt=0, le=0.5)] = 0.05
    """Share of a tensor's numbers that topk and randk send, one at least."""


class CheckpointSettings(Section):
    """How often the run is saved. It is always saved when it is stopped and at its end."""

    rounds: Annotated[Natural, Option("checkpoint-every")] = 0
    """Save after every so many rounds. 0: not by rounds."""
    minutes: Annotated[float, Field(ge=0, le=10**6)] = 10.0
    """Save after the first round that ends this many minutes after the last save. 0: not by time."""


class Privacy(Section):
    """Differential privacy of the single training example, in all that a client sends. By default off."""

    epsilon: Rate | Literal["off"] = "off"
    """The ε that no client exceeds in all rounds of the run; the noise follows from it. off: see `noise_multiplier`."""
    noise_multiplier: Factor | Literal["off"] = "off"
    """Standard deviation of the noise, in units of `max_grad_norm`, in place of an `epsilon`; ε is then reported."""
    delta: Share | Auto = AUTO
    """The δ of each client. auto: a tenth of one over its number of training examples."""
    max_grad_norm: Rate = 1.0
    """Largest norm of one example's gradient; longer ones are scaled to it."""

    @property
    def is_on(self) -> bool:
        """Whether training is private."""
        return self.epsilon != "off" or self.noise_multiplier != "off"


class Faults(Section):
    """What goes wrong on purpose, drawn from the seed. By default nothing."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Chance that a client of the cohort does not answer, each round."""
    stragglers: Chance = 0.0
    """Chance that a client does only some of its local epochs, each round."""
    attack: Attack = "none"
    """What the attackers send in place of their update. label-flip: what they learn from the labels C-1-y in place of y
    of C classes; initial: the initial model, in every round; free-rider: the model that they were sent."""
    attackers: Chance = 0.0
    """Share of the clients that attack, the same ones in every round."""
    attack_rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Chance that an attacker attacks, each round."""
    attack_from: Positive = 1
    """First round of the attack; the attackers are honest before."""
    attack_until: Positive | Literal["end"] = "end"
    """Last round of the attack; the attackers are honest again afterwards."""
    attack_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Auto = AUTO
    """sign-flip, scale: factor of the update; noise: size relative to it. auto: 1, for scale 10."""
