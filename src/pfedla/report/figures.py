"""Pictures of a run folder, and of several."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from pfedla.report.tables import counted, where

Array = npt.NDArray[Any]
DPI = 150


def read_rounds(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]


def read_result(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "result.json").read_text(encoding="utf-8"))
    return content


def read_alpha(run: Path) -> tuple[Array, list[str], list[int]] | None:
    """alpha [snapshots, clients, layers, clients], layer names, rounds; None if the run has none."""
    path = run / "alpha.safetensors"
    if not path.exists():
        return None
    with safe_open(path, framework="numpy") as file:
        return file.get_tensor("alpha"), json.loads(file.metadata()["layers"]), file.get_tensor("rounds").tolist()


def draw_run(run: Path) -> list[Path]:
    """All pictures of one run; returns their paths."""
    drawn = [draw_learning_curve(run)]
    if (found := read_alpha(run)) is not None:
        alpha, layers, rounds = found
        drawn += [draw_alpha(run, alpha[-1], layers, rounds[-1]), draw_self_weight(run, alpha, layers, rounds)]
        if attackers := read_result(run).get("attackers"):
            drawn.append(draw_attackers(run, alpha, layers, rounds, attackers))
    return drawn


def subplots(*args: Any, figsize: tuple[float, float], **kwargs: Any) -> Any:
    import matplotlib.figure

    # No pyplot: nothing global, so it works in any thread and leaves no window behind.
    figure = matplotlib.figure.Figure(layout="constrained", figsize=figsize)
    return figure, figure.subplots(*args, squeeze=False, **kwargs)


def draw_learning_curve(run: Path) -> Path:
    rounds = read_rounds(run)
    figure, axes = subplots(figsize=(6, 3.6))
    axis = axes[0, 0]
    x = [line["round"] for line in rounds]
    mean = 100 * np.array([counted(line)["accuracy"]["mean"] for line in rounds], float)
    p10 = 100 * np.array([counted(line)["accuracy"]["p10"] for line in rounds], float)
    after = [np.nan if (v := line["accuracy_after_training"]) is None else 100 * v for line in rounds]
    marker = "o" if len(x) < 15 else None
    axis.plot(x, mean, color="C0", marker=marker, markersize=3, label="personal models, mean of clients")
    axis.plot(x, p10, color="C0", linestyle=":", label="personal models, lowest tenth of clients")
    axis.plot(x, after, color="C1", linewidth=1, label="after local training, mean of the cohort")
    axis.set(xlabel="round", ylabel="test accuracy (%)", title=_title(run))
    finish(axis)
    axis.legend(fontsize=8)
    return save(figure, run / "learning_curve.png")


def _title(run: Path) -> str:
    result = read_result(run)
    return plain(f"{result['algorithm']} on {where(result)}, seed {result['seed']}")


def draw_alpha(run: Path, alpha: Array, layers: list[str], after_round: int) -> Path:
    """One heat map per layer: rows receive, columns send."""
    from matplotlib.colors import PowerNorm

    rows = -(-len(layers) // 5)
    columns = -(-len(layers) // rows)
    scale = PowerNorm(0.5, vmin=0, vmax=1)  # small weights matter: a square-root scale lets them be seen
    figure, axes = subplots(rows, columns, figsize=(2.9 * columns + 0.8, 2.9 * rows + 0.5))
    for axis in axes.flat[len(layers) :]:
        axis.set_axis_off()
    for layer, name in enumerate(layers):
        axis = axes.flat[layer]
        picture = axis.imshow(alpha[:, layer], norm=scale, cmap="viridis", interpolation="nearest")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("sender", fontsize=8)
        axis.set_ylabel("receiver", fontsize=8)
        ticks = np.arange(0, len(alpha), -(-len(alpha) // 10))
        axis.set_xticks(ticks)
        axis.set_yticks(ticks)
        axis.tick_params(labelsize=7)
    figure.colorbar(picture, ax=axes, shrink=0.8, label="weight (square-root scale)")
    neighbours = tomllib.loads((run / "experiment.toml").read_text(encoding="utf-8"))["algorithm"].get("neighbours", "all")
    cut = "" if neighbours == "all" else f"; the {neighbours} largest of a row are mixed"
    figure.suptitle(f"Who borrows which layer from whom, after round {after_round}{cut}\n{_title(run)}", fontsize=10)
    return save(figure, run / "alpha.png")


def draw_self_weight(run: Path, alpha: Array, layers: list[str], rounds: list[int]) -> Path:
    """How much of each layer the clients keep of their own, over the rounds."""
    figure, axes = subplots(figsize=(6, 3.6))
    axis = axes[0, 0]
    own = np.diagonal(alpha, axis1=1, axis2=3)  # [snapshots, layers, clients]
    for layer, name in enumerate(layers):
        values = own[:, layer]
        axis.plot(rounds, values.mean(-1), label=name, color=f"C{layer}")
        axis.fill_between(rounds, values.min(-1), values.max(-1), alpha=0.1, color=f"C{layer}")
    axis.axhline(1 / alpha.shape[1], color="gray", linestyle=":", linewidth=1, label="uniform")
    axis.set(xlabel="round", ylabel="self-weight", ylim=(0, 1.02))
    axis.set_title(f"Self-weight per layer: mean and range of the clients\n{_title(run)}", fontsize=10)
    finish(axis)
    axis.legend(fontsize=8, ncols=2)
    return save(figure, run / "self_weight.png")


def draw_attackers(run: Path, alpha: Array, layers: list[str], rounds: list[int], attackers: list[int]) -> Path:
    """How much of each layer the honest clients take from the attackers together, over the rounds."""
    figure, axes = subplots(figsize=(6, 3.6))
    axis = axes[0, 0]
    honest = [client for client in range(alpha.shape[1]) if client not in attackers]
    taken = alpha[:, honest][..., attackers].sum(-1)  # [snapshots, honest clients, layers]
    for layer, name in enumerate(layers):
        axis.plot(rounds, taken[..., layer].mean(-1), label=name, color=f"C{layer}")
        axis.fill_between(rounds, taken[..., layer].min(-1), taken[..., layer].max(-1), alpha=0.1, color=f"C{layer}")
    axis.axhline(len(attackers) / alpha.shape[1], color="gray", linestyle=":", linewidth=1, label="uniform")
    axis.set(xlabel="round", ylabel="weight on the attackers", ylim=(0, None))
    who = ", ".join(map(str, attackers[:10])) + (", …" if len(attackers) > 10 else "")
    title = f"Weight that honest clients give to the attackers ({who}), per layer: mean and range"
    axis.set_title(f"{title}\n{_title(run)}", fontsize=9)
    finish(axis)
    axis.legend(fontsize=8, ncols=2)
    return save(figure, run / "attackers.png")


def draw_comparison(runs: Mapping[str, list[Path]], path: Path) -> Path:
    """Learning curves of several algorithms: the mean over seeds, and their standard deviation."""
    figure, axes = subplots(figsize=(6.5, 4))
    axis = axes[0, 0]
    for position, (name, folders) in enumerate(runs.items()):
        lines = [read_rounds(folder) for folder in folders]
        curves = 100 * np.array([[counted(line)["accuracy"]["mean"] for line in one] for one in lines], float)
        x = [line["round"] for line in lines[0]]
        axis.plot(x, curves.mean(0), label=name, color=f"C{position}", marker="o" if len(x) < 15 else None, markersize=3)
        if len(curves) > 1:
            spread = curves.std(0, ddof=1)
            axis.fill_between(x, curves.mean(0) - spread, curves.mean(0) + spread, alpha=0.15, color=f"C{position}")
    seeds = "1 seed" if len(folders) == 1 else f"{len(folders)} seeds, band: ± standard deviation"
    axis.set(xlabel="round", ylabel="test accuracy (%)")
    whose = "the honest" if "honest" in read_result(folders[0]) else "all"
    axis.set_title(f"Personal models, mean of {whose} clients\n{plain(where(read_result(folders[0])))}, {seeds}", fontsize=10)
    finish(axis)
    axis.legend(fontsize=8)
    return save(figure, path)


def finish(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)


def plain(text: str) -> str:
    """Names are shown as they are: matplotlib would take what stands between two dollar signs for mathematics."""
    return text.replace("$", r"\$")


def save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    return path
