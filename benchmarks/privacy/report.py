"""Print the tables of the attacks as Markdown, and draw what the server reconstructed.

python benchmarks/privacy/report.py            # tables
python benchmarks/privacy/report.py --pictures docs/pictures
"""

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import inversion
import membership
import numpy as np
import typer
from matplotlib.figure import Figure

from pfedla.report.tables import markdown_table

Line = dict[str, Any]
LABELS = {
    "exact": "held-out gradient, exact",
    "sketch 1024": "sketch of 1,024 numbers a layer",
    "sketch 256": "sketch of 256 (default)",
    "sketch 64": "sketch of 64",
    "update 1": "update after 1 local step",
    "update 10": "update after 10 local epochs",
    "noise 0.1": "clipped, noise 0.1",
    "noise 1": "clipped, noise 1",
    "random": "control: random numbers",
}
TITLES = {
    "digits": "digits, 8x8 images, small CNN",
    "fashion-mnist": "Fashion-MNIST, 28x28 images, the paper's CNN",
    "heart-disease": "heart-disease, records of a hospital, MLP",
}
SIDES = {"digits": 8, "fashion-mnist": 28}


def collect_cells(lines: list[Line]) -> dict[tuple[str, int, str], list[Line]]:
    """Return by data set, batch and kind the best restart of each seed."""
    best: dict[tuple[str, int, str, int], Line] = {}
    for line in lines:
        key = line["dataset"], line["batch"], line["kind"], line["seed"]
        if key not in best or statistics.mean(line["psnr"]) > statistics.mean(best[key]["psnr"]):
            best[key] = line
    cells: dict[tuple[str, int, str], list[Line]] = {}
    for (*key, _), line in sorted(best.items()):
        cells.setdefault(tuple(key), []).append(line)  # type: ignore[arg-type]
    return cells


def is_found(line: Line) -> list[bool]:
    """Return for each image whether it is reconstructed closer than any image of another client is to it."""
    return [value > nearest for value, nearest in zip(line["psnr"], line["nearest"], strict=True)]


def show_cell(lines: list[Line]) -> str:
    """Return mean PSNR / that of the best image / share of images that are found."""
    values, found = [line["psnr"] for line in lines], [is_found(line) for line in lines]
    best = statistics.mean(max(one) for one in values)
    share = f"{sum(map(sum, found))} of {sum(map(len, found))}"
    return f"{mean_of(values):.1f} / {best:.1f} / {share}"


def mean_of(parts: Iterable[list[float]]) -> float:
    return statistics.mean(statistics.mean(one) for one in parts)


def inversion_table(lines: list[Line], dataset: str) -> str:
    cells = collect_cells([line for line in lines if line["dataset"] == dataset])
    batches = sorted({batch for _, batch, _ in cells})
    table = [["message", *(f"{batch} example{'s' * (batch > 1)}" for batch in batches)]]
    for kind, label in LABELS.items():
        found = [cells.get((dataset, batch, kind)) for batch in batches]
        name, _, number = kind.partition(" ")
        if name == "noise":
            label += f" (ε = {show_epsilon(float(number))})"
        table.append([label, *(show_cell(one) if one else "not run" for one in found)])
    baselines: dict[str, Callable[[Line], list[float]]] = {
        "the mean example": lambda line: line["mean_image"],
        "the nearest example of another client": lambda line: line["nearest"],
    }
    for label, values in baselines.items():
        row = []
        for batch in batches:
            per_seed = {line["seed"]: line for key, some in cells.items() if key[1] == batch for line in some}
            row.append(f"{mean_of(map(values, per_seed.values())):.1f}")
        table.append([f"*{label}*", *row])
    return markdown_table(table)


def show_epsilon(multiplier: float) -> str:
    value = inversion.epsilon(multiplier, inversion.LEARNING_ROUNDS)
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def membership_table(lines: list[Line], dataset: str) -> str:
    table = [
        ["model", "accuracy %", *(f"{attack}: {what}" for attack in ("loss", "ratio") for what in ("AUC", "TPR %"))]
    ]
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        if line["dataset"] == dataset:
            label = " ".join([f"`{line['method']}`", *(f"`{one}`" for one in line["set"])])
            groups.setdefault((label, line["model"]), []).append(line)
    for (label, model), some in sorted(groups.items(), key=lambda one: one[0][1]):
        row = [f"{label}, {model}", show_spread([100 * line["accuracy"] for line in some], 1)]
        for attack in ("loss", "ratio"):
            known = [line[attack] for line in some if attack in line]
            row.append(show_spread([one["auc"] for one in known], 3))
            row.append(show_spread([100 * one["tpr"] for one in known], 1))
        table.append(row)
    return markdown_table(table)


def show_spread(values: list[float], digits: int) -> str:
    """Return mean ± standard error."""
    if not values:
        return "–"
    error = f" ± {np.std(values, ddof=1) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{error}"


def draw_reconstructions(lines: list[Line], dataset: str, path: Path) -> None:
    """Draw the first images of one client as they are, and as reconstructed from each kind of message."""
    shown = {(line["kind"], line["batch"]): line for line in lines if "images" in line and line["dataset"] == dataset}
    batches = [batch for batch in (1, 8, 28) if ("exact", batch) in shown]
    kinds = [kind for kind in LABELS if any((kind, batch) in shown for batch in batches)]
    side, gap = SIDES[dataset], 1 if dataset == "digits" else 3
    widths = [min(batch, inversion.SHOWN) for batch in batches]
    figure = Figure(figsize=(9.5, 0.52 * (len(kinds) + 1) + 0.4), dpi=110)
    axes = figure.subplots(len(kinds) + 1, len(batches), width_ratios=widths, squeeze=False)
    for column, (batch, width) in enumerate(zip(batches, widths, strict=True)):
        for row, kind in enumerate(["true", *kinds]):
            line, axis = shown.get(("exact" if kind == "true" else kind, batch)), axes[row, column]
            axis.set_xticks([])
            axis.set_yticks([])
            for spine in axis.spines.values():
                spine.set_visible(False)
            if line is not None:
                images = inversion.unpack(line["true" if kind == "true" else "images"], side)
                strip = np.full((side, width * (side + gap) - gap), 255, np.uint8)
                for place, image in enumerate(images[:width]):
                    strip[:, place * (side + gap) : place * (side + gap) + side] = image
                axis.imshow(strip, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            if not column:
                label = "true" if kind == "true" else LABELS[kind]
                axis.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
        title = "1 example" if batch == 1 else f"{batch} examples" + (f" (first {width})" if width < batch else "")
        axes[0, column].set_title(title, fontsize=8)
    figure.subplots_adjust(left=0.24, right=0.99, top=0.93, bottom=0.01, hspace=0.12, wspace=0.06)
    figure.savefig(path)


def inversion_tables(lines: list[Line]) -> str:
    return "\n\n".join(f"**{title}**\n\n{inversion_table(lines, dataset)}" for dataset, title in TITLES.items())


def membership_tables(lines: list[Line]) -> str:
    known = [dataset for dataset in TITLES if any(line["dataset"] == dataset for line in lines)]
    return "\n\n".join(f"**{TITLES[dataset]}**\n\n{membership_table(lines, dataset)}" for dataset in known)


TABLES = {"inversion": inversion_tables, "membership": membership_tables}


def main(
    pictures: Annotated[Path | None, typer.Option(help="Folder for the pictures.")] = None,
    inversions: Path = inversion.OUT,
    memberships: Path = membership.OUT,
) -> None:
    for name, path in (("inversion", inversions), ("membership", memberships)):
        print(f"\n## {name}\n\n{TABLES[name](inversion.read_lines(path))}")
    for dataset in SIDES if pictures else ():
        draw_reconstructions(inversion.read_lines(inversions), dataset, pictures / f"inversion_{dataset}.png")


if __name__ == "__main__":
    typer.run(main)
