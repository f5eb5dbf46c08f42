"""What a passive server can reconstruct: gradient inversion of what our own clients send.

A federation is trained by pfedla-heldout. The attacker is its server: it knows the model that it sent in each of the
ten learning rounds, the hash of each sketch, and, being as strong as we can make it, the labels. It moves images until
they would have caused the same messages. Cells whose results are in --out are not run again.

python benchmarks/privacy/inversion.py digits fashion-mnist --seeds 0,1,2
"""

import base64
import json
import math
import time
import zlib
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import typer
from scipy.optimize import brentq, linear_sum_assignment
from scipy.stats import norm
from torch import Tensor
from torch.func import functional_call, grad, vmap

from pfedla.algorithms.pfedla_heldout import HASH, count_sketch, layer_rows
from pfedla.core.contracts import Cohort, Params, generator
from pfedla.core.layers import stack
from pfedla.core.tasks import Task
from pfedla.data.federation import Federation
from pfedla.runs.build import build
from pfedla.runs.experiment import Experiment
from pfedla.runs.run import Run

OUT = Path(__file__).parent.parent / "results" / "inversion.jsonl"
DATA: dict[str, dict[str, Any]] = {
    "digits": {"dataset": "digits"},
    "fashion-mnist": {"dataset": "fashion-mnist", "samples_per_client": 200},
    "heart-disease": {"dataset": "heart-disease"},  # records of a hospital, and an MLP
}
HELD_OUT = {"digits": 0.25, "fashion-mnist": 0.2, "heart-disease": 0.2}  # so that 28 examples are held out
LARGE = 28, 0.5  # for larger batches, this share is held out
KINDS = ("exact", "sketch 256", "sketch 64", "sketch 1024", "update 1", "update 10", "noise 0.1", "noise 1", "random")
LEARNING_ROUNDS, CLIP, DELTA = 10, 1.0, 1e-5
STEPS = {
    "digits": 2000,
    "fashion-mnist": 1000,
    "heart-disease": 3000,
}  # of Adam; a quarter of them against updates of ten steps
SMOOTH = {
    "digits": 0.001,
    "fashion-mnist": 0.003,
    "heart-disease": 0.0,
}  # weight of the total variation; chosen on exact gradients, seed 0
RATE = 0.05  # of Adam, in the range of a pixel
WHITE = {"digits": 16.0, "fashion-mnist": 255.0}
RECORDS = -3.0, 3.0  # where the attacker looks for the features of a record, in standard deviations
SHOWN = 8  # images of a cell that are kept for the picture, of the first seed

View = Callable[[Tensor], list[Tensor]]  # images -> the message that they would have caused, by layer


class Message(NamedTuple):
    """What the server received in one round, and what it knows of how it came about."""

    seen: list[Tensor]  # by layer
    view: View


class Found(NamedTuple):
    images: Tensor
    mismatch: float  # mean over the messages


class Scene(NamedTuple):
    """One client of a trained federation, and what its server sent to it in the learning rounds."""

    task: Task
    lr: float
    models: list[Params]
    hashes: list[Tensor]
    x: Tensor  # held-out images, normalised
    y: Tensor
    others: Tensor  # training images of the other clients, normalised
    low: float
    high: float

    def scale(self, x: Tensor) -> Tensor:
        """Return images with pixels from 0 to 1."""
        return (x - self.low) / (self.high - self.low)


# What the attacker knows how to repeat


def batch_gradient(task: Task, parameters: Params, x: Tensor, y: Tensor) -> Params:
    """Return the mean gradient, through which it can be differentiated by `x`."""
    leaves = {name: value if value.requires_grad else value.requires_grad_() for name, value in parameters.items()}
    loss = task.objective.loss(functional_call(task.module, leaves, (x,)), y)
    gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    return dict(zip(leaves, gradients, strict=True))


def clipped_gradient(task: Task, parameters: Params, x: Tensor, y: Tensor) -> Params:
    """Return the mean over the examples of their gradients, each of a norm of at most CLIP."""

    def of_one(parameters: Params, x: Tensor, y: Tensor) -> Tensor:
        return task.objective.loss(functional_call(task.module, parameters, (x[None],)), y[None])

    each = vmap(grad(of_one), (None, 0, 0))(parameters, x, y)
    norms = torch.stack([value.flatten(1).square().sum(1) for value in each.values()]).sum(0).sqrt()
    share = (CLIP / norms.clamp(min=1e-12)).clamp(max=1)
    return {name: torch.tensordot(share, value, 1) / len(y) for name, value in each.items()}


def local_update(task: Task, start: Params, x: Tensor, y: Tensor, *, lr: float, steps: int) -> Params:
    """Return how far `steps` of SGD on the whole batch move the model, divided by the learning rate and the steps."""
    model = dict(start)
    for _ in range(steps):
        gradient = batch_gradient(task, model, x, y)
        model = {name: value - lr * gradient[name] for name, value in model.items()}
    return {name: (start[name] - value) / (lr * steps) for name, value in model.items()}


def by_layer(task: Task, tensors: Params, hashes: Tensor, sketch: Any) -> list[Tensor]:
    """Return the rows that pfedla-heldout would send of these tensors, by layer."""
    rows = [layer_rows(stack([tensors]), task.layers, layer) for layer in range(len(task.layers))]
    return [count_sketch(row, constants, sketch)[0] for row, constants in zip(rows, hashes, strict=True)]


def make_message(kind: str, scene: Scene, round: int, x: Tensor, y: Tensor, seed: int) -> Message:
    """Return what a client that holds `x` sends in a learning round, and how the server would recompute it.

    `kind`: exact, "sketch 256", "update 10" (steps on the whole batch), "noise 0.1" (times CLIP) or random.
    """
    name, _, number = kind.partition(" ")
    task, model, hashes = scene.task, scene.models[round], scene.hashes[round]
    sketch = int(number) if name == "sketch" else "exact"

    def view(x: Tensor) -> list[Tensor]:
        if name == "update":
            tensors = local_update(task, model, x, y, lr=scene.lr, steps=int(number))
        else:
            tensors = (clipped_gradient if name == "noise" else batch_gradient)(task, model, x, y)
        return by_layer(task, tensors, hashes, sketch)

    sent = [row.detach() for row in view(x)]
    if name == "update":  # models travel in float32: their difference is rounded to the spacing of their numbers
        start = by_layer(task, model, hashes, "exact")
        factor = scene.lr * int(number)
        sent = [
            (before.detach() - (before.detach() - factor * row)) / factor
            for before, row in zip(start, sent, strict=True)
        ]
    draws = generator(seed, "benchmark noise", round)
    if name == "noise":
        size = float(number) * CLIP / len(y)
        sent = [row + size * torch.randn(row.shape, generator=draws) for row in sent]
    if name == "random":  # the control: what the attack finds where nothing is to be found
        sent = [torch.randn(row.shape, generator=draws) for row in sent]
    return Message(sent, view)


# The attack


def mismatch(message: Message, x: Tensor) -> Tensor:
    """Return one minus the cosine between the message that `x` would have caused and the one that was seen."""
    caused, seen = torch.cat(message.view(x)), torch.cat(message.seen)
    return 1 - F.cosine_similarity(caused, seen, dim=0, eps=1e-12)


def total_variation(x: Tensor) -> Tensor:
    return x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean()


def invert(
    messages: list[Message], start: Tensor, *, low: float, high: float, steps: int, smooth: float = 0.0, seed: int = 0
) -> Found:
    """Move images from `start` by Adam until they explain the messages, one of them in each step, drawn at random.

    `smooth`: weight of the total variation, by which an attacker says that it looks for images.
    """
    draws, x = torch.Generator().manual_seed(seed), start.clone().requires_grad_()
    optimiser = torch.optim.Adam([x], lr=RATE * (high - low))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        pick = int(torch.randint(len(messages), (), generator=draws))
        loss = mismatch(messages[pick], x)
        if smooth:
            loss = loss + smooth * total_variation(x)
        (x.grad,) = torch.autograd.grad(loss, x)
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(low, high)
    error = sum(mismatch(message, x).item() for message in messages) / len(messages)
    return Found(x.detach(), error if math.isfinite(error) else math.inf)


def psnr(first: Tensor, second: Tensor) -> Tensor:
    """Return [first, second]: the peak signal-to-noise ratio in dB of every pair of images with pixels of 0 to 1."""
    squares = (first.flatten(1)[:, None] - second.flatten(1)[None]).square().mean(-1)
    return -10 * squares.clamp(min=1e-10).log10()


def match(true: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """Return the reconstructions in the order of the true images, and the PSNR of each."""
    table = psnr(true, found)
    _, columns = linear_sum_assignment(table.numpy(), maximize=True)
    order = torch.from_numpy(columns)
    return found[order], table[torch.arange(len(true)), order]


def epsilon(multiplier: float, rounds: int, delta: float = DELTA) -> float:
    """Return the ε of releasing a Gaussian sum `rounds` times, exact (Balle and Wang, ICML 2018)."""
    shift = math.sqrt(rounds) / multiplier  # the release of all is one of a Gaussian that is moved so far

    def excess(value: float) -> float:
        tail = math.exp(value + norm.logcdf(-shift / 2 - value / shift))
        return float(norm.cdf(shift / 2 - value / shift) - tail - delta)

    return float(brentq(excess, 0, shift**2 / 2 + 10 * shift)) if excess(0) > 0 else 0.0


# The cells


def set_scene(dataset: str, seed: int, held_out: float) -> Scene:
    """Run a federation through its learning rounds and return what concerns its first client."""
    algorithm = {"name": "pfedla-heldout", "learning_rounds": LEARNING_ROUNDS, "held_out": held_out}
    values = {"seed": seed, "data": DATA[dataset], "algorithm": algorithm, "engine": {"threads": 1}}
    warm_up = 5  # the method's default
    rounds = warm_up + LEARNING_ROUNDS
    run = Run(build(Experiment.parse({**values, "rounds": rounds, "evaluate_every": rounds})))
    federation, sent = run.built.federation, []
    assert isinstance(federation, Federation)
    with run:
        for round in range(1, rounds + 1):
            cohort = Cohort.everyone(federation.num_examples, round, seed)
            if round > warm_up:
                download = run.algorithm.download(run.state.server, cohort).rows(0)
                sent.append(download.map(torch.clone))
            run.step()
        data = run.engine.clients[0].local_data(cohort, sent[-1])  # type: ignore[attr-defined]
    others = torch.cat([federation.normalise(one.x) for one in federation.train[1:]])
    low, high = RECORDS
    if others.ndim > 2:
        black, white = torch.zeros(1, *others.shape[1:]), torch.full((1, *others.shape[1:]), WHITE[dataset])
        low, high = (federation.normalise(value).min().item() for value in (black, white))
    models, hashes = [one.tensors for one in sent], [one.extras[HASH] for one in sent]
    # Laid out plainly, which is faster to differentiate twice, and in the order in which they were drawn.
    x, y = data.held_out_x.contiguous(), data.held_out_y
    order = torch.randperm(len(y), generator=generator(seed, "benchmark order"))
    return Scene(
        run.algorithm.task, run.algorithm.training.learning_rate, models, hashes, x[order], y[order], others, low, high
    )


def attack(
    scene: Scene, kind: str, batch: int, *, seed: int, restart: int, steps: int, smooth: float
) -> dict[str, Any]:
    """Return how well the server reconstructs the first `batch` images from ten messages of a kind."""
    begun, x, y = time.process_time(), scene.x[:batch], scene.y[:batch]
    if len(y) < batch:
        raise typer.BadParameter(f"the client holds out only {len(y)} examples")
    messages = [make_message(kind, scene, round, x, y, seed) for round in range(LEARNING_ROUNDS)]
    spread, mean = 0.1 * (scene.high - scene.low), scene.others.mean(0, keepdim=True)
    draws = generator(seed, "benchmark start", restart)
    start = (mean + spread * torch.randn(x.shape, generator=draws)).clamp(scene.low, scene.high)
    bounds = {"low": scene.low, "high": scene.high, "smooth": smooth, "seed": restart}
    found, true = invert(messages, start, steps=steps, **bounds), scene.scale(x)
    images, values = match(true, scene.scale(found.images))
    nearest = psnr(true, scene.scale(scene.others)).amax(1)
    line: dict[str, Any] = {
        "psnr": to_list(values),
        "nearest": to_list(nearest),  # of the images of other clients, the one most like the true image
        "mean_image": to_list(psnr(true, scene.scale(mean)).squeeze(1)),
        "mismatch": found.mismatch,
        "seconds": round(time.process_time() - begun, 1),
    }
    if seed == restart == 0 and x.ndim > 2:
        line |= {"images": pack(images[:SHOWN]), "true": pack(true[:SHOWN])}
    return line


def to_list(values: Tensor) -> list[float]:
    return [round(value, 2) for value in values.tolist()]


def pack(images: Tensor) -> str:
    """Return images with pixels from 0 to 1 as text, in 256 shades."""
    shades = (255 * images.clamp(0, 1)).round().to(torch.uint8).numpy()
    return base64.b64encode(zlib.compress(shades.tobytes(), 9)).decode()


def unpack(text: str, side: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8).reshape(-1, side, side)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def main(
    datasets: list[str],
    seeds: Annotated[str, typer.Option()] = "0,1,2",
    batches: Annotated[str, typer.Option()] = "8,28,1",
    kinds: Annotated[str, typer.Option()] = ",".join(KINDS),
    restarts: Annotated[str, typer.Option(help="Numbers of the starts.")] = "0,1",
    out: Path = OUT,
) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    known, scenes = read_lines(out), dict[tuple[str, int, float], Scene]()
    orders = (restarts.split(","), seeds.split(","), datasets, kinds.split(","), batches.split(","))
    for restart, seed, dataset, kind, batch in product(*orders):
        share = LARGE[1] if int(batch) > LARGE[0] else HELD_OUT[dataset]
        place, steps = (dataset, int(seed), share), STEPS[dataset] // (4 if kind == "update 10" else 1)
        setting = {"dataset": dataset, "seed": int(seed), "kind": kind, "batch": int(batch), "restart": int(restart)}
        setting |= {"steps": steps, "smooth": SMOOTH[dataset]}
        if any(one.items() >= setting.items() for one in known):
            continue
        if place not in scenes:
            scenes[place] = set_scene(*place)
        how = {key: setting[key] for key in ("seed", "restart", "steps", "smooth")}
        line = setting | attack(scenes[place], kind, int(batch), **how)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(*setting.values(), f"{np.mean(line['psnr']):.1f} dB, {line['seconds']} s", flush=True)


if __name__ == "__main__":
    typer.run(main)
