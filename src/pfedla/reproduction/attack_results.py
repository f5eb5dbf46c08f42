"""Tables and figures of attacks from results.json: what honest clients keep, and what weight they give to attackers."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pfedla.core.files import write_text
from pfedla.report.figures import FORMATS, finish_curves, panels, save
from pfedla.report.rows import Row
from pfedla.report.significance import Difference, compare, summarise
from pfedla.report.significance import Summary as Scored
from pfedla.report.tables import latex_table, markdown_table
from pfedla.reproduction.paper_figures import count_seeds
from pfedla.reproduction.summaries import Summary, collect_rows

ATTACKED = re.compile(r"(.*), ([^,]*), ([\d.]+) %")  # a column with an attack: its data, the attack, the share
DRAWN = 0.2  # the share of attackers whose weights are drawn
NOTE = (
    "Honest clients in the last round: mean (worst client), then the difference of the mean to the same clients "
    "without an attack, paired over the seeds. All are means over the seeds that were run."
)


class Attacked(NamedTuple):
    """A method under one attack: the honest clients' scores, and the same clients' without the attack."""

    data: str  # the column without attack
    attack: str  # empty: none
    share: float  # of attackers
    row: Row
    clean: Row

    @property
    def honest(self) -> Scored | None:
        return summarise(scores, self.row.metric.sign) if (scores := self.row.headline_scores) else None

    @property
    def difference(self) -> Difference | None:
        return compare(self.row.headline_scores, self.clean.headline_scores) if self.attack else None

    def show(self) -> str:
        if (found := self.honest) is None:
            return self.row.outcome
        metric, apart = self.row.metric, self.difference
        shown = [metric.show_number(metric.factor * one) for one in (found.mean, found.worst)]
        gap = f" {metric.factor * apart.mean:+.{metric.digits(1)}f}" if apart else ""
        return f"{shown[0]} ({shown[1]}){gap}"


def split_column(name: str) -> tuple[str, str, float]:
    """Return the data, the attack and the share of attackers of a column (see Grid.attack)."""
    found = ATTACKED.fullmatch(name)
    return (found[1], found[2], float(found[3]) / 100) if found else (name, "", 0.0)


def collect_attacks(summary: Summary) -> dict[str, dict[tuple[str, float], dict[str, Attacked]]]:
    """Return the cells by data set, then by attack and share, then by method; only what was run."""
    columns, found = collect_rows(summary), dict[str, dict[tuple[str, float], dict[str, Attacked]]]()
    for column, rows in columns.items():
        data, attack, share = split_column(column)
        clean = columns.get(data, {})
        cells = {
            name: Attacked(data, attack, share, row, clean[name])
            for name, row in rows.items()
            if name in clean and (row.results or row.gave_up)
        }
        if cells:
            found.setdefault(data, {})[attack, share] = cells
    return found


def tabulate_attacks(
    attacks: Mapping[tuple[str, float], Mapping[str, Attacked]], names: Sequence[str], share_only: float = 0.0
) -> list[list[str]]:
    """Return a line per attack and share of attackers, a column per method; `share_only` where it was run."""
    lines = [["attack", "attackers", *names, "seeds"]]
    for (attack, share), cells in attacks.items():
        if share_only and share != share_only and (attack, share_only) in attacks:
            continue
        shown = [cells[name].show() if name in cells else "–" for name in names]
        seeds = sorted({len(one.row.results) for one in cells.values()})
        place = [attack or "none", f"{100 * share:g} %" if attack else "–"]
        lines.append([*place, *shown, " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))])
    return lines


def describe_data(attacks: Mapping[tuple[str, float], Mapping[str, Attacked]]) -> str:
    """Return what was run: data, model, budget, seeds."""
    results = [result for cells in attacks.values() for one in cells.values() for result in one.row.results]
    first, seeds = results[0], len({result["seed"] for result in results})
    experiment = first["experiment"]
    data, training = experiment["data"], experiment["training"]
    many = f"{data['samples_per_client']} images a client, " if data["samples_per_client"] != "auto" else ""
    what = f"{data['dataset']}, {len(first['score']['per_client'])} clients, {many}{data['partition']}"
    budget = f"{first['rounds']} rounds of {training['local_epochs']} local epochs, learning rate {training['lr']:g}"
    spent = f"{sum(result['seconds'] for result in results) / 60:.0f} minutes of runs"
    return f"{what}, model {experiment['model']}; {budget}; {count_seeds(seeds)}; {spent}."


def to_markdown(summary: Summary) -> str:
    parts = []
    for data, attacks in collect_attacks(summary).items():
        parts += [f"### {data}", describe_data(attacks), markdown_table(tabulate_attacks(attacks, summary["rows"]))]
    return "\n\n".join([*parts, NOTE]) + "\n"


def to_csv(summary: Summary) -> str:
    """Return a line per data set, attack, share and method; scores as they are stored, accuracies from 0 to 1."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heads = ["data", "attack", "attackers", "method", "seeds", "mean", "worst", "difference", "low", "high", "outcome"]
    writer.writerow(heads)
    found = [cells for attacks in collect_attacks(summary).values() for cells in attacks.values()]
    for one in [one for cells in found for one in cells.values()]:
        honest, gap = one.honest, one.difference
        numbers: list[float | None] = [honest.mean, honest.worst] if honest else [None, None]
        numbers += [gap.mean, gap.low, gap.high] if gap else [None] * 3
        shown = ["" if number is None else f"{number:.4f}" for number in numbers]
        place = [one.data, one.attack or "none", one.share, one.row.algorithm, len(one.row.results)]
        writer.writerow([*place, *shown, one.row.outcome])
    return text.getvalue()


def to_latex(summary: Summary) -> str:
    found = collect_attacks(summary).values()
    return "\n\n".join(latex_table(tabulate_attacks(attacks, summary["rows"])) for attacks in found) + "\n"


def write_attack_tables(summary: Summary, folder: Path) -> list[Path]:
    made = {"table.md": to_markdown, "table.csv": to_csv, "table.tex": to_latex}
    for name, make in made.items():
        write_text(folder / name, make(summary))
    return [folder / name for name in made]


def list_tables(summary: Summary) -> list[tuple[list[list[str]], str, list[str]]]:
    """Return what a terminal shows: lines, title and notes of each data set."""
    found = collect_attacks(summary).items()
    return [(tabulate_attacks(one, summary["rows"]), data, [describe_data(one), NOTE]) for data, one in found]


def draw_weights(summary: Summary) -> Any:
    """Draw the weight that honest clients give to attackers, over the rounds: mean over clients, layers and seeds."""
    by_panel: dict[tuple[str, str], dict[str, list[Any]]] = {}
    known = list(dict.fromkeys(split_column(column)[1] for column in summary["columns"]))  # a colour each
    for data, attacks in collect_attacks(summary).items():
        for (attack, share), cells in attacks.items():
            for name, one in cells.items() if share == DRAWN else ():
                kept = [result["weights"] for result in one.row.results if "weights" in result]
                if kept:
                    by_panel.setdefault((data, name), {})[attack] = kept
    figure, axes = panels(len(by_panel), (4.2, 3.0), most=2)
    for axis, ((data, name), attacks_drawn) in zip(axes, by_panel.items(), strict=True):
        for attack, kept in attacks_drawn.items():
            values = np.mean([np.mean(one["values"], axis=-1) for one in kept], axis=0)
            axis.plot(kept[0]["rounds"], values, label=attack, color=f"C{known.index(attack)}", linewidth=1.2)
        axis.axhline(DRAWN, color="0.5", linestyle=":", linewidth=1, label="uniform")
        axis.set(ylim=(0, None))
        finish_curves(axis, f"{data}, {name}", ylabel="weight on attackers", size=9)
    fullest = max(axes, key=lambda axis: len(axis.lines))
    figure.legend(*fullest.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def write_attack_figures(summary: Summary, folder: Path) -> list[Path]:
    cells = [cell for cell in summary["cells"] if "weights" in cell and split_column(cell["column"])[2] == DRAWN]
    if not cells:
        return []
    caption = ". ".join([summary["title"], *map(describe_data, collect_attacks(summary).values())])
    return [save(draw_weights(summary), folder / f"figure{end}", caption) for end in FORMATS]
