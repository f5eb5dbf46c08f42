"""Figures of a run, of a comparison and of a federation; and the few functions that all figures are drawn with."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfedla.core.files import write_whole
from pfedla.report import reading
from pfedla.report.methods import MethodTable
from pfedla.report.reading import Alpha, Array, Metric, Values
from pfedla.report.tables import shorten, where

Size = tuple[float, float]  # width and height in inches
FEW_CLASSES, FEW_CLIENTS = 3, 30  # whose numbers of examples are written into the figure
FORMATS = (".png", ".pdf", ".svg")


def panels(count: int, size: Size, *, most: int = 10, margin: Size = (0, 0), **options: Any) -> Any:
    """Return a figure and `count` axes of the given size, at most so many in a row."""
    from matplotlib.figure import Figure  # pyplot has global state and is not safe in threads

    rows = -(-count // most)
    columns = -(-count // rows)
    figure = Figure(layout="constrained", figsize=(size[0] * columns + margin[0], size[1] * rows + margin[1]))
    axes = figure.subplots(rows, columns, squeeze=False, **options).flat
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure, axes[:count]


def finish_curves(axis: Any, title: str, *, ylabel: str, size: int = 10) -> None:
    """Label an axis of curves over rounds."""
    from matplotlib.ticker import MaxNLocator

    axis.set(xlabel="round", ylabel=ylabel)
    axis.set_title(title, fontsize=size)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)


def escape_math(text: str) -> str:
    """Return `text` so that matplotlib shows dollar signs instead of reading mathematics between them."""
    return text.replace("$", r"\$")


def save(figure: Any, path: Path, caption: str = "") -> Path:
    """Write a figure with its caption inside, the same bytes for the same figure."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    words: Values = {"pdf": {"Subject": caption, "CreationDate": None}, "svg": {"Description": caption, "Date": None}}
    kind = path.suffix[1:].lower()
    how: Values = {"format": kind, "dpi": 150, "metadata": words.get(kind, {"Description": caption})}
    with rc_context({"svg.hashsalt": "pfedla"}):
        write_whole(path, lambda part: figure.savefig(part, **how), to_disk=False)
    return path


def _read_curve(lines: Sequence[Values], key: str, metric: Metric) -> Array:
    return metric.factor * np.array([reading.honest_part(line)["score"][key] for line in lines], float)


def _mark(rounds: Sequence[int]) -> Values:
    return {"marker": "o", "markersize": 3} if len(rounds) < 15 else {}


def draw_run(run: Path) -> list[Path]:
    """Draw all figures of one run; return their paths."""
    result, alpha = reading.read_result(run / "result.json"), reading.read_alpha(run)
    title = escape_math(f"{result['algorithm']} on {where(result)}, seed {result['seed']}")
    figures = {}
    if alpha is not None:
        names = reading.client_names(run)
        neighbours = reading.read_experiment(run)["algorithm"].get("neighbours", "all")
        figures["alpha"] = _draw_alpha(alpha, names, neighbours, title)
        above = f"Self-weight per layer: mean and range of the clients\n{title}"
        figures["self_weight"] = _draw_by_layer(alpha, alpha.own, 1, title=above, ylabel="self-weight")
        if attackers := result.get("attackers"):
            honest = [client for client in range(alpha.values.shape[1]) if client not in attackers]
            taken = alpha.values[:, honest][..., attackers].sum(-1).swapaxes(1, 2)  # [snapshots, layers, honest]
            who = ", ".join(escape_math(shorten(names[client])) for client in attackers[:10]) + (
                ", …" if len(attackers) > 10 else ""
            )
            above = f"Weight that honest clients give to the attackers ({who}): mean and range\n{title}"
            ylabel = "weight on the attackers"
            figures["attackers"] = _draw_by_layer(alpha, taken, len(attackers), title=above, ylabel=ylabel)
    # The last: where it is, all are.
    figures["learning_curve"] = _draw_learning_curve(reading.read_rounds(run), title, Metric.of(result))
    return [save(figure, run / f"{name}.png") for name, figure in figures.items()]


def _draw_learning_curve(rounds: Sequence[Values], title: str, metric: Metric) -> Any:
    figure, (axis,) = panels(1, (6, 3.6))
    x = [line["round"] for line in rounds]
    after = metric.factor * np.array([line["score_after_training"] for line in rounds], float)
    axis.plot(x, _read_curve(rounds, "mean", metric), "C0", label="personal models, mean of clients", **_mark(x))
    label = f"personal models, {metric.percentile} of clients"
    axis.plot(x, _read_curve(rounds, "p10", metric), "C0:", label=label)
    axis.plot(x, after, "C1", linewidth=1, label="after local training, mean of the cohort")
    finish_curves(axis, title, ylabel=metric.axis, size=12)
    axis.legend(fontsize=8)
    return figure


def _draw_alpha(alpha: Alpha, names: Sequence[str], neighbours: int | str, title: str) -> Any:
    """Draw one heat map per layer: rows receive, columns send."""
    from matplotlib.colors import PowerNorm

    last = alpha.values[-1]
    scale = PowerNorm(0.5, vmin=0, vmax=1)  # a square-root scale shows small weights
    figure, axes = panels(len(alpha.layers), (2.9, 2.9), most=5, margin=(0.8, 0.5))
    short = [shorten(name) for name in names]
    for layer, (axis, name) in enumerate(zip(axes, alpha.layers, strict=True)):
        image = axis.imshow(last[:, layer], norm=scale, cmap="viridis", interpolation="nearest")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("sender", fontsize=8)
        axis.set_ylabel("receiver", fontsize=8)
        _label(axis.xaxis, short, most=10)
        _label(axis.yaxis, short, most=10)
        axis.tick_params(labelsize=7)
        axis.tick_params(axis="x", rotation=0 if max(map(len, short)) <= 3 else 90)
    figure.colorbar(image, ax=figure.axes, shrink=0.8, label="weight (square-root scale)")
    cut = "" if neighbours == "all" else f"; the {neighbours} largest of a row are mixed"
    figure.suptitle(f"Weights after round {alpha.rounds[-1]}{cut}\n{title}", fontsize=10)
    return figure


def _draw_by_layer(alpha: Alpha, values: Array, senders: int, *, title: str, ylabel: str) -> Any:
    """Draw `values` [snapshots, layers, clients], and what `senders` clients get by uniform weights."""
    figure, (axis,) = panels(1, (6, 3.6))
    for layer, name in enumerate(alpha.layers):
        some = values[:, layer]
        axis.plot(alpha.rounds, some.mean(-1), label=name, color=f"C{layer}")
        axis.fill_between(alpha.rounds, some.min(-1), some.max(-1), alpha=0.1, color=f"C{layer}")
    axis.axhline(senders / alpha.values.shape[1], color="gray", linestyle=":", linewidth=1, label="uniform")
    axis.set(ylim=(0, None))
    finish_curves(axis, title, ylabel=ylabel, size=9)
    axis.legend(fontsize=8, ncols=2)
    return figure


def draw_comparison(table: MethodTable, path: Path) -> list[Path]:
    """Draw mean and standard error over seeds, in all formats; each seed of a method that gave up on one, dashed."""
    shown = [row for row in table.rows if row.folders]
    metric = shown[0].metric
    figure, (axis,) = panels(1, (6.5, 4))
    for position, row in enumerate(shown):
        colour, count = f"C{position}", len(row.folders)
        lines = [reading.read_rounds(folder) for folder in row.folders]
        curves, x = np.array([_read_curve(one, "mean", metric) for one in lines]), [line["round"] for line in lines[0]]
        if row.gave_up:
            labels = [f"{row.algorithm} ({row.outcome})", *[None] * (count - 1)]
            axis.plot(x, curves.T, label=labels, color=colour, linestyle="--", linewidth=0.8)
            continue
        mean = curves.mean(0)
        axis.plot(x, mean, label=f"{row.algorithm} ({count} seed{'s' * (count > 1)})", color=colour, **_mark(x))
        if count > 1:
            error = curves.std(0, ddof=1) / np.sqrt(count)
            axis.fill_between(x, mean - error, mean + error, alpha=0.15, color=colour)
    result = shown[0].results[0]
    clients = "honest" if "honest" in result else "all"
    band = ", band: ± standard error over seeds" if any(len(row.folders) > 1 for row in shown) else ""
    title = f"Personal models, mean of {clients} clients{band}\n{escape_math(where(result))}"
    finish_curves(axis, title, ylabel=metric.axis)
    axis.legend(fontsize=8)
    return [save(figure, path.with_suffix(ending), table.caption()) for ending in FORMATS]


def draw_federation(federation: Values, name: str, path: Path) -> Path:
    """Draw clients x classes, beside every client's number of training and test examples."""
    train, test = np.array(federation["train"]), np.array(federation["test"])
    clients, classes = train.shape
    labels = [shorten(label) for label in federation["classes"]]
    longest = max(map(len, labels))
    below = 0.5 if longest <= 3 else 0.5 + 0.075 * longest  # inches below the axis for the names of the classes
    tall, wide = np.clip(0.27 * clients, 1.6, 14) + 0.9 + below, np.clip(0.42 * classes + 2.2, 4.5, 15)
    figure, (by_class, sizes) = panels(2, ((wide + 2.4) / 2, tall), sharey=True, width_ratios=(wide, 2.2))
    _draw_classes(figure, by_class, train + test)
    _label(by_class.yaxis, [shorten(client) for client in federation["clients"]], most=60)
    _label(by_class.xaxis, labels, most=110)
    by_class.tick_params(labelsize=8)
    by_class.tick_params(axis="x", rotation=0 if longest <= 3 else 90, labelsize=8 if classes <= 60 else 6)
    what = "outcome" if federation["task"]["name"] == "survival" else "class"
    by_class.set(xlabel=f"{what} (white: none)", ylabel="client", ylim=(clients - 0.5, -0.5))
    sizes.barh(np.arange(clients), train.sum(1), color="C0", label="training")
    sizes.barh(np.arange(clients), test.sum(1), left=train.sum(1), color="C1", label="test")
    sizes.set(xlabel="examples")
    sizes.tick_params(labelsize=8)
    sizes.spines[["top", "right"]].set_visible(False)
    figure.legend(*sizes.get_legend_handles_labels(), fontsize=8, loc="outside lower right", ncols=2)
    figure.suptitle(escape_math(name), fontsize=11)
    return save(figure, path)


def _draw_classes(figure: Any, axis: Any, totals: Array) -> None:
    clients, classes = totals.shape
    some = np.where(totals, totals, np.nan)
    image = axis.imshow(some, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    figure.colorbar(image, ax=axis, shrink=0.8, pad=0.01, label="examples")
    axis.hlines(np.arange(clients - 1) + 0.5, -0.5, classes - 0.5, color="white", linewidth=0.5)
    if classes <= FEW_CLASSES and clients <= FEW_CLIENTS:
        for (client, label), count in np.ndenumerate(totals):
            colour = "white" if count > totals.max() / 2 else "black"
            axis.text(label, client, str(count), ha="center", va="center", fontsize=8, color=colour)


def _label(axis: Any, names: list[str], most: int) -> None:
    """Label at most so many ticks, evenly spread."""
    ticks = range(0, len(names), -(-len(names) // most))
    axis.set_ticks(ticks, [escape_math(names[tick]) for tick in ticks])


def draw_tuning(trials: Mapping[str, tuple[Metric, Sequence[float | None]]], path: Path) -> Path:
    """Draw the value of each trial (a cross at the edge: none) and the best so far, with a panel per method."""
    figure, axes = panels(len(trials), (3.4, 2.6), most=4)
    for axis, (label, (metric, values)) in zip(axes, trials.items(), strict=True):
        scores = metric.factor * np.array(values, float)
        x, better = np.arange(1, len(scores) + 1), np.fmax if metric.higher_is_better else np.fmin
        axis.plot(x, scores, "C0o", markersize=4, label="trial")
        axis.step(x, better.accumulate(scores), "C1", where="post", label="best so far")
        none = np.isnan(scores)
        axis.plot(x[none], np.zeros(none.sum()), "kx", transform=axis.get_xaxis_transform(), label="no value")
        finish_curves(axis, escape_math(label), ylabel=f"validation {metric.label}{metric.unit}")
        axis.set(xlabel="trial (1: the defaults)")
    axes[0].legend(fontsize=7)
    return save(figure, path)
