"""Figures of a run folder, and of several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfedla.report.reading import Alpha, Array, read_alpha, read_experiment, read_result, read_rounds
from pfedla.report.tables import Row, accuracies, where

DPI = 150


def draw_run(run: Path) -> list[Path]:
    """Draw all figures of one run; return their paths."""
    result = read_result(run / "result.json")
    title = escape_math(f"{result['algorithm']} on {where(result)}, seed {result['seed']}")
    paths = [_draw_learning_curve(run, title)]
    if (alpha := read_alpha(run)) is not None:
        paths += [_draw_alpha(run, alpha, title), _draw_self_weight(run, alpha, title)]
        if attackers := result.get("attackers"):
            paths.append(_draw_attackers(run, alpha, attackers, title))
    return paths


def subplots(*args: Any, figsize: tuple[float, float], **kwargs: Any) -> Any:
    """Return a figure and its axes without pyplot, which has global state and is not safe in threads."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(layout="constrained", figsize=figsize)
    return figure, figure.subplots(*args, squeeze=False, **kwargs)


def _draw_learning_curve(run: Path, title: str) -> Path:
    rounds = read_rounds(run)
    figure, axes = subplots(figsize=(6, 3.6))
    axis = axes[0, 0]
    x = [line["round"] for line in rounds]
    curves = {
        key: 100 * np.array([accuracies(line)["accuracy"][key] for line in rounds], float) for key in ("mean", "p10")
    }
    after = 100 * np.array([line["accuracy_after_training"] for line in rounds], float)
    axis.plot(x, curves["mean"], label="personal models, mean of clients", color="C0", **_marker(x))
    axis.plot(x, curves["p10"], color="C0", linestyle=":", label="personal models, 10th percentile of clients")
    axis.plot(x, after, color="C1", linewidth=1, label="after local training, mean of the cohort")
    axis.set(xlabel="round", ylabel="test accuracy (%)", title=title)
    style_axis(axis)
    axis.legend(fontsize=8)
    return save(figure, run / "learning_curve.png")


def _marker(x: Sequence[int]) -> dict[str, Any]:
    return {"marker": "o", "markersize": 3} if len(x) < 15 else {}


def _draw_alpha(run: Path, alpha: Alpha, title: str) -> Path:
    """Draw one heat map per layer: rows receive, columns send."""
    from matplotlib.colors import PowerNorm

    last, layers = alpha.values[-1], alpha.layers
    rows = -(-len(layers) // 5)
    columns = -(-len(layers) // rows)
    scale = PowerNorm(0.5, vmin=0, vmax=1)  # a square-root scale shows small weights
    figure, axes = subplots(rows, columns, figsize=(2.9 * columns + 0.8, 2.9 * rows + 0.5))
    for axis in axes.flat[len(layers) :]:
        axis.set_axis_off()
    ticks = np.arange(0, len(last), -(-len(last) // 10))
    for layer, name in enumerate(layers):
        axis = axes.flat[layer]
        image = axis.imshow(last[:, layer], norm=scale, cmap="viridis", interpolation="nearest")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("sender", fontsize=8)
        axis.set_ylabel("receiver", fontsize=8)
        axis.set(xticks=ticks, yticks=ticks)
        axis.tick_params(labelsize=7)
    figure.colorbar(image, ax=axes, shrink=0.8, label="weight (square-root scale)")
    neighbours = read_experiment(run)["algorithm"].get("neighbours", "all")
    cut = "" if neighbours == "all" else f"; the {neighbours} largest of a row are mixed"
    figure.suptitle(f"Weights after round {alpha.rounds[-1]}{cut}\n{title}", fontsize=10)
    return save(figure, run / "alpha.png")


def _draw_self_weight(run: Path, alpha: Alpha, title: str) -> Path:
    """Draw how much of each layer the clients take from themselves, over the rounds."""
    own = np.diagonal(alpha.values, axis1=1, axis2=3)  # [snapshots, layers, clients]
    title = f"Self-weight per layer: mean and range of the clients\n{title}"
    return _draw_by_layer(own, alpha, 1, title=title, ylabel="self-weight", path=run / "self_weight.png")


def _draw_attackers(run: Path, alpha: Alpha, attackers: list[int], title: str) -> Path:
    """Draw how much of each layer the honest clients take from all attackers, over the rounds."""
    honest = [client for client in range(alpha.values.shape[1]) if client not in attackers]
    taken = alpha.values[:, honest][..., attackers].sum(-1).swapaxes(1, 2)  # [snapshots, layers, honest clients]
    who = ", ".join(map(str, attackers[:10])) + (", …" if len(attackers) > 10 else "")
    title = f"Weight that honest clients give to the attackers ({who}): mean and range\n{title}"
    path = run / "attackers.png"
    return _draw_by_layer(taken, alpha, len(attackers), title=title, ylabel="weight on the attackers", path=path)


def _draw_by_layer(values: Array, alpha: Alpha, senders: int, *, title: str, ylabel: str, path: Path) -> Path:
    """Draw `values` [snapshots, layers, clients], and what `senders` clients get by uniform weights."""
    figure, axes = subplots(figsize=(6, 3.6))
    axis = axes[0, 0]
    for layer, name in enumerate(alpha.layers):
        some = values[:, layer]
        axis.plot(alpha.rounds, some.mean(-1), label=name, color=f"C{layer}")
        axis.fill_between(alpha.rounds, some.min(-1), some.max(-1), alpha=0.1, color=f"C{layer}")
    uniform = senders / alpha.values.shape[1]
    axis.axhline(uniform, color="gray", linestyle=":", linewidth=1, label="uniform")
    axis.set(xlabel="round", ylabel=ylabel, ylim=(0, None))
    axis.set_title(title, fontsize=9)
    style_axis(axis)
    axis.legend(fontsize=8, ncols=2)
    return save(figure, path)


def draw_comparison(rows: Sequence[Row], path: Path) -> Path:
    """Draw the learning curves of several methods: mean and standard deviation over seeds.

    A method that gave up on a seed has no mean: its other seeds are drawn one by one, as dashed lines.
    """
    shown = [row for row in rows if row.folders]
    figure, axes = subplots(figsize=(6.5, 4))
    axis = axes[0, 0]
    for position, row in enumerate(shown):
        colour, count = f"C{position}", len(row.folders)
        lines = [read_rounds(folder) for folder in row.folders]
        curves = [100 * np.array([accuracies(line)["accuracy"]["mean"] for line in one], float) for one in lines]
        x = [line["round"] for line in lines[0]]
        if row.gave_up:
            for curve in curves:
                label = f"{row.algorithm} ({row.outcome})" if curve is curves[0] else None
                axis.plot(x, curve, label=label, color=colour, linestyle="--", linewidth=0.8)
            continue
        mean = np.mean(curves, axis=0)
        label = f"{row.algorithm} ({count} seed{'s' * (count > 1)})"
        axis.plot(x, mean, label=label, color=colour, **_marker(x))
        if count > 1:
            spread = np.std(curves, axis=0, ddof=1)
            axis.fill_between(x, mean - spread, mean + spread, alpha=0.15, color=colour)
    result = shown[0].results[0]
    clients = "honest" if "honest" in result else "all"
    band = ", band: ± standard deviation over seeds" if any(len(row.folders) > 1 for row in shown) else ""
    axis.set(xlabel="round", ylabel="test accuracy (%)")
    title = f"Personal models, mean of {clients} clients{band}\n{escape_math(where(result))}"
    axis.set_title(title, fontsize=10)
    style_axis(axis)
    axis.legend(fontsize=8)
    return save(figure, path)


def style_axis(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)


def escape_math(text: str) -> str:
    """Return `text` so that matplotlib shows dollar signs instead of reading mathematics between them."""
    return text.replace("$", r"\$")


def save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    return path
