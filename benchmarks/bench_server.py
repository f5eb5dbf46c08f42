"""Seconds and memory of pFedLA's server step by the number of clients, of a textbook one, and of a simulation.

A step is what the server does for one round of 10 participants: their weights, their mixes (download), the
gradient of the weights, the hypernetworks' step and the new models (aggregate). One intra-op thread. Every
size runs in a process of its own, whose peak resident memory is reported. The first step of a process warms
up and is not counted.

python benchmarks/bench_server.py
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from pfedla.algorithms import create
from pfedla.algorithms.pfedla import PFedLA
from pfedla.core.contracts import Algorithm, Cohort, Payload, ServerState
from pfedla.core.layers import take
from pfedla.core.models import build_model
from pfedla.core.settings import Training
from pfedla.core.tasks import task_of
from pfedla.data.federation import Examples, Federation
from pfedla.engines.client import keep_freed_memory
from pfedla.runs.folder import describe_environment
from pfedla.runs.run import simulate

PARTICIPANTS, STEPS, LONG = 10, 9, 10.0  # a textbook step that takes longer (seconds) is the last of its kind
RESULTS = Path(__file__).parent / "results"
PAPER, SMALL = 121_278, 10_000  # parameters: the paper's CNN with BatchNorm (7 layers); five layers of 2,000


@dataclass(frozen=True)
class Case:
    label: str
    clients: int
    parameters: int = PAPER
    options: dict[str, Any] = field(default_factory=dict)
    textbook: bool = False


COMPACT, FEW = {"hypernetwork": "compact"}, {"neighbours": 5}
KINDS = (  # label, parameters, options, sizes
    ("network", PAPER, {}, (10, 30, 100, 300, 500, 1_000)),
    ("network, 5 neighbours", PAPER, FEW, (10, 100, 500, 1_000)),
    ("compact", PAPER, COMPACT, (10, 100, 500, 1_000)),
    ("compact, 5 neighbours", PAPER, COMPACT | FEW, (10, 100, 500, 1_000)),
    ("compact, P = 10,000", SMALL, COMPACT, (10, 100, 1_000, 3_000, 10_000)),
)
TEXTBOOK = (10, 30, 100, 300, 500, 1_000)


def module_of(parameters: int) -> nn.Module:
    if parameters == PAPER:
        return build_model("cnn-bn", (3, 32, 32), 10, torch.Generator().manual_seed(0))
    return nn.Sequential(*(nn.Linear(parameters // 500 - 1, 100) for _ in range(5)))


class Watch:
    """Seconds on the wall and of this process on a core; where others are at work the second says more."""

    def __init__(self) -> None:
        self.wall = self.core = 0.0

    def __enter__(self) -> None:
        self.start = (time.perf_counter(), time.process_time())

    def __exit__(self, *error: object) -> None:
        self.wall += time.perf_counter() - self.start[0]
        self.core += time.process_time() - self.start[1]


Uploads = Callable[[Payload], Payload]  # the clients' part, which is not timed


def ours(algorithm: Algorithm, server: ServerState, cohort: Cohort, uploads: Uploads, watch: Watch) -> None:
    with watch:
        downloads = algorithm.download(server, cohort)
    answers = uploads(downloads)
    with watch:
        algorithm.aggregate(server, cohort, downloads, answers)


def textbook(algorithm: PFedLA, server: ServerState, cohort: Cohort, uploads: Uploads, watch: Watch) -> None:
    """Write the equations down: a participant's model is a sum over the stacked models that autograd knows, its update
    goes back through it into its hypernetwork, and a new state is made of copies."""
    with watch:
        models, hypernetworks = (
            {n: v.clone() for n, v in server[group].items()} for group in ("models", "hypernetworks")
        )
    network = algorithm._network(len(next(iter(models.values()))))
    for client in cohort.ids.tolist():
        with watch:
            leaves = {
                name: value.clone().requires_grad_() for name, value in take(server["hypernetworks"], client).items()
            }
            alpha = network.alpha({name: value[None] for name, value in leaves.items()})[0]
            mixed = {}
            for name, value in server["models"].items():
                weights = alpha[algorithm.task.layers.index[name]].view(-1, *[1] * (value.ndim - 1))
                mixed[name] = (weights * value).sum(0)
        trained = uploads(Payload({name: value.detach() for name, value in mixed.items()}, torch.ones(1))).tensors
        with watch:
            change = [trained[name] - value.detach() for name, value in mixed.items()]
            torch.autograd.backward(list(mixed.values()), change)
            for name, leaf in leaves.items():
                hypernetworks[name][client] = leaf.detach() + algorithm.hypernetwork_lr * leaf.grad
            for name, value in trained.items():
                models[name][client] = value
    server.update(models=models, hypernetworks=hypernetworks)


def measure(case: Case, steps: int) -> dict[str, Any]:
    """In this process, which should do nothing else."""
    torch.set_num_threads(1)  # both as in a run
    keep_freed_memory()
    training = Training(lr=0.01, local_epochs=1, batch_size=32)
    algorithm = create("pfedla", task_of(module_of(case.parameters)), training, case.options)
    server = algorithm.init_server(case.clients, 0)
    draws = torch.Generator().manual_seed(0)
    for value in server["models"].values():
        value += 0.01 * torch.randn(value.shape, generator=draws)

    def uploads(downloads: Payload) -> Payload:
        changed = {n: v + 0.001 * torch.randn(v.shape, generator=draws) for n, v in downloads.tensors.items()}
        return Payload(changed, downloads.sent)

    watches = []
    for number in range(steps + 1):
        share = min(1.0, PARTICIPANTS / case.clients)
        cohort = Cohort.sample(torch.full((case.clients,), 10), number + 1, share, 0)
        watches.append(Watch())
        (textbook if case.textbook else ours)(algorithm, server, cohort, uploads, watches[-1])
        if case.textbook and number and watches[-1].wall > LONG:
            break
    seconds = {"seconds": [watch.wall for watch in watches[1:]], "core_seconds": [watch.core for watch in watches[1:]]}
    return {**asdict(case), **seconds, "peak_bytes": peak_bytes()}


def simulated(clients: int, rounds: int = 2) -> dict[str, Any]:
    """A whole simulation with many clients of few images, in this process."""
    draws = torch.Generator().manual_seed(0)

    def examples(count: int) -> Examples:
        x = torch.randint(0, 256, (count, 3, 32, 32), generator=draws, dtype=torch.uint8)
        return Examples(x, torch.randint(0, 10, (count,), generator=draws))

    train, test = ([examples(count) for _ in range(clients)] for count in (8, 2))
    federation = Federation(train, test, tuple("0123456789"), mean=(127.5,) * 3, std=(73.9,) * 3)
    start = time.perf_counter()
    simulate(
        federation,
        module_of(PAPER),
        "pfedla",
        rounds=rounds,
        local_epochs=1,
        batch_size=8,
        progress=False,
        participation=PARTICIPANTS / clients,
        evaluate_every=rounds,
        hypernetwork="compact",
        neighbours=5,
    )
    return {"clients": clients, "rounds": rounds, "seconds": time.perf_counter() - start, "peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def apart(what: str, **values: Any) -> dict[str, Any]:
    """The same in a process of its own."""
    asked = json.dumps({"what": what, **values})
    done = subprocess.run([sys.executable, __file__, asked], check=True, capture_output=True, text=True, env=os.environ)
    return json.loads(done.stdout)


def cases(quick: bool) -> list[Case]:
    kinds = (
        [(label, parameters, options, sizes[:1]) for label, parameters, options, sizes in KINDS[::3]]
        if quick
        else KINDS
    )
    return [
        Case(label, n, parameters=parameters, options=options)
        for label, parameters, options, sizes in kinds
        for n in sizes
    ]


def run(quick: bool, console: Console) -> dict[str, Any]:
    steps = 1 if quick else STEPS
    measured = [
        apart("step", case=asdict(case), steps=steps)
        for case in track(cases(quick), "server steps", console=console, disable=quick)
    ]
    for clients in track(TEXTBOOK[:1] if quick else TEXTBOOK, "textbook", console=console, disable=quick):
        measured.append(apart("step", case=asdict(Case("textbook", clients, textbook=True)), steps=min(steps, 3)))
        if max(measured[-1]["seconds"]) > LONG:
            break
    with console.status("a whole simulation"):
        simulation = apart("simulation", clients=20 if quick else 1_000)
    return {
        "environment": describe_environment(),
        "participants": PARTICIPANTS,
        "steps": measured,
        "simulation": simulation,
    }


def table_of(report: dict[str, Any]) -> Table:
    table = Table("form", "clients", "parameters", "median ms", "fastest", "slowest", "core ms", "peak GiB")
    for one in report["steps"]:
        seconds = one["seconds"]
        times = [1e3 * f(seconds) for f in (statistics.median, min, max)] + [
            1e3 * statistics.median(one["core_seconds"])
        ]
        numbers = (f"{value:,.0f}" if value >= 10 else f"{value:.1f}" for value in times)
        table.add_row(
            one["label"], f"{one['clients']:,}", f"{one['parameters']:,}", *numbers, f"{one['peak_bytes'] / 2**30:.2f}"
        )
    return table


def draw(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for label in dict.fromkeys(one["label"] for one in report["steps"]):
        points = [one for one in report["steps"] if one["label"] == label]
        clients = [one["clients"] for one in points]
        style = {"marker": "o", "markersize": 4, "linestyle": "--" if label == "textbook" else "-"}
        left.plot(clients, [statistics.median(one["seconds"]) for one in points], label=label, **style)
        right.plot(clients, [one["peak_bytes"] / 2**30 for one in points], label=label, **style)
    for axis, what in ((left, "seconds per step (median)"), (right, "peak resident memory (GiB)")):
        axis.set(xscale="log", yscale="log", xlabel="clients", ylabel=what)
        axis.grid(which="both", alpha=0.25)
    left.legend(fontsize=8)
    figure.suptitle(f"pFedLA's server step, {report['participants']} participants, P = {PAPER:,} unless said")
    figure.savefig(path, dpi=150)


def main() -> None:
    arguments = [word for word in sys.argv[1:] if word != "--quick"]
    if arguments and arguments[0].startswith("{"):  # one measurement, in the process made for it
        asked = json.loads(arguments[0])
        if asked["what"] == "step":
            print(json.dumps(measure(Case(**asked["case"]), asked["steps"])))
        else:
            print(json.dumps(simulated(asked["clients"])))
        return
    console, quick = Console(width=None if sys.stdout.isatty() else 110), "--quick" in sys.argv
    report = run(quick, console)
    console.print(table_of(report))
    whole = report["simulation"]
    console.print(
        f"a simulation of {whole['rounds']} rounds with {whole['clients']:,} clients (compact, 5 neighbours): "
        f"{whole['seconds']:.0f} s, {whole['peak_bytes'] / 2**30:.2f} GiB"
    )
    folder = Path(arguments[0]) if arguments else RESULTS
    folder.mkdir(exist_ok=True)
    (folder / "server.json").write_text(json.dumps(report, indent=2) + "\n")
    draw(report, folder / "server.png")
    console.print(f"written to {folder}")


if __name__ == "__main__":
    main()
