"""Tables and figures of real sites from results.json: does federation pay at a hospital, who borrows from whom?"""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from pfedla.core.files import write_text
from pfedla.report.figures import FORMATS, escape_math, panels, save
from pfedla.report.methods import MethodTable, show_difference, show_interval
from pfedla.report.reading import Metric
from pfedla.report.rows import Row, show_estimate
from pfedla.report.significance import LEVEL, TESTED, Difference, Scores, compare_all, standard_error
from pfedla.report.tables import latex_table, markdown_table
from pfedla.reproduction.paper_figures import collect_weights, count_seeds
from pfedla.reproduction.summaries import Summary, collect_rows

LOCAL = "Local"
ASKED = ("FedAvg", "FedAvg + fine-tuning", "FedRep", "pFedLA", "pFedLA held-out")  # against Local, site by site
METRICS_NOTE = (
    "Mean of the sites where a metric is defined, ± standard error over the seeds. Bold: the best, and those not "
    "significantly worse at 5 %."
)
SITES_NOTE = (
    "Difference to Local at each site, in the units of its column, with a 95 % interval over the seeds. Bold: p below "
    "5 % by Wilcoxon's test over the seeds, Holm-corrected over the methods of a site."
)


class Site(NamedTuple):
    """One site of a data set: the scores of each method there, and the differences to training alone."""

    name: str
    test_examples: int
    scores: dict[str, Scores]  # by method; the seeds on which its metric is defined
    differences: dict[str, Difference]

    def decide(self, metric: Metric) -> str:
        """Return in words whether federation pays at this site."""
        if not self.scores[LOCAL]:
            return "undefined"
        gains = {name: metric.sign * one.mean for name, one in self.differences.items() if one.is_significant}
        better = [name for name, gain in gains.items() if gain > 0]
        worse = [name for name, gain in gains.items() if gain < 0]
        found = [f"gain: {', '.join(better)}"] * bool(better) + [f"loss: {', '.join(worse)}"] * bool(worse)
        return "; ".join(found) or "no difference shown"


def collect_sites(rows: Mapping[str, Row]) -> list[Site]:
    """Return the sites of a column, in the order of its data."""
    metric, found, local = rows[LOCAL].metric, [], rows[LOCAL].results[0]
    scores = {name: rows[name].read_scores(metric.name) for name in (LOCAL, *ASKED) if rows[name].results}
    for position, (name, count) in enumerate(zip(local["clients"], local["test_examples"], strict=True)):
        own: dict[str, Scores] = {}
        for method, known in scores.items():
            own[method] = {seed: [v[position]] for seed, v in known.items() if v[position] is not None}
        found.append(Site(name, count, own, compare_all(own, LOCAL)))
    return found


def tabulate_sites(rows: Mapping[str, Row]) -> list[list[str]]:
    """Return a line per site: the score of training alone, the differences to it, and what they say."""
    metric, sites = rows[LOCAL].metric, collect_sites(rows)
    asked = [name for name in ASKED if rows[name].results]
    lines = [["site", "test examples", f"{LOCAL}: {metric.heading}", *asked, "federation against Local"]]
    for site in sites:
        cells = [_show_site(site, metric), *(_show_gain(site, name, metric) for name in asked)]
        lines.append([site.name, str(site.test_examples), *cells, site.decide(metric)])
    return lines


def _show_site(site: Site, metric: Metric) -> str:
    values = [metric.factor * one for (one,) in site.scores[LOCAL].values() if one is not None]
    if not values:
        return "undefined"
    return show_estimate(float(np.mean(values)), standard_error(values), metric)


def _show_gain(site: Site, name: str, metric: Metric) -> str:
    one = site.differences.get(name)
    if one is None:
        return "–"
    shown = f"{show_difference(one, metric)} {show_interval(one, metric)}"
    return f"**{shown}**" if one.is_significant else shown


def tabulate_metrics(rows: Mapping[str, Row]) -> list[list[str]]:
    """Return a line per method: every metric, mean ± standard error over the seeds; last the best constant answer."""
    table = MethodTable(list(rows.values()))
    lines = [["", *(metric.heading for metric in table.analyses)]]
    for name, row in rows.items():
        cells = []
        for metric, analysis in table.analyses.items():
            found = analysis.summaries.get(name)
            error = metric.factor * found.se if found and found.se is not None else None
            shown = show_estimate(metric.factor * found.mean, error, metric) if found else "–"
            cells.append(f"**{shown}**" if name in analysis.bold else shown)
        lines += [[name, *cells]] if row.results else []
    baselines = [cell["baseline"] for cell in table.results if cell.get("baseline")]
    if baselines:
        means = [[one["metrics"][metric.name]["mean"] for one in baselines] for metric in table.analyses]
        known = [[value for value in some if value is not None] for some in means]
        cells = [
            metric.show_number(metric.factor * float(np.mean(some))) if some else "–"
            for metric, some in zip(table.analyses, known, strict=True)
        ]
        lines.append([baselines[0]["name"], *cells])
    return lines


def describe_column(rows: Mapping[str, Row]) -> str:
    """Return what was run: data, sites, seeds, budget, trials."""
    table = MethodTable(list(rows.values()))
    first, experiment = table.results[0], table.results[0]["experiment"]
    seeds = len({cell["seed"] for cell in table.results})
    parts = [f"{experiment['data']['dataset']}, {len(first['clients'])} sites, model {experiment['model']}"]
    budget = f"{first['rounds']} rounds of {experiment['training']['local_epochs']} local epochs"
    parts += [budget, count_seeds(seeds)]
    parts += [tuning] if (tuning := table.describe_tuning()) else []
    return f"{'; '.join(parts)}; {sum(cell['seconds'] for cell in table.results) / 60:.0f} minutes of runs."


def known_columns(summary: Summary) -> dict[str, dict[str, Row]]:
    """Return the columns in which Local was run."""
    return {column: rows for column, rows in collect_rows(summary).items() if rows[LOCAL].results}


def to_markdown(summary: Summary) -> str:
    parts = []
    for column, rows in known_columns(summary).items():
        table = MethodTable(list(rows.values()), against=LOCAL)
        parts += [f"### {column}", describe_column(rows), markdown_table(tabulate_metrics(rows)), METRICS_NOTE]
        parts += [f"{table.metric.label}, all methods against Local:", markdown_table(table.tabulate_differences())]
        parts += [markdown_table(tabulate_sites(rows)), SITES_NOTE]
        parts += ["\n".join(f"- {name}: {row.outcome}" for name, row in rows.items() if row.gave_up)]
    return "\n\n".join(filter(None, parts)) + "\n"


def to_csv(summary: Summary) -> str:
    """Return a line per column, method and metric, as the file of a comparison."""
    text, is_first = io.StringIO(), True
    writer = csv.writer(text, lineterminator="\n")
    for column, rows in known_columns(summary).items():
        header, *lines = csv.reader(MethodTable(list(rows.values()), against=LOCAL).to_csv().splitlines())
        writer.writerows([["column", *header]] * is_first)
        writer.writerows([column, *line] for line in lines)
        is_first = False
    return text.getvalue()


def to_latex(summary: Summary) -> str:
    tables = []
    for rows in known_columns(summary).values():
        tables += [latex_table(tabulate_metrics(rows)), latex_table(tabulate_sites(rows))]
    return "\n\n".join(tables) + "\n"


def write_site_tables(summary: Summary, folder: Path) -> list[Path]:
    made = {"table.md": to_markdown, "table.csv": to_csv, "table.tex": to_latex}
    for name, make in made.items():
        write_text(folder / name, make(summary))
    return [folder / name for name in made]


def list_tables(summary: Summary) -> list[tuple[list[list[str]], str, list[str]]]:
    """Return what a terminal shows: lines, title and notes of each column."""
    columns = known_columns(summary)
    return [(tabulate_metrics(rows), name, [describe_column(rows), METRICS_NOTE]) for name, rows in columns.items()]


def draw_sites(summary: Summary) -> Any:
    """Draw every site's score by method: mean and 95 % interval over the seeds."""
    columns = known_columns(summary)
    figure, axes = panels(len(columns), (5.2, 3.6), most=2)
    for axis, (column, rows) in zip(axes, columns.items(), strict=True):
        metric, sites = rows[LOCAL].metric, collect_sites(rows)
        for number, name in enumerate((LOCAL, *ASKED)):  # a method has its place and colour in every panel
            if not rows[name].results:
                continue
            offset = 0.7 * (number / len(ASKED) - 0.5)
            known = {at: np.array([*site.scores[name].values()], float).reshape(-1) for at, site in enumerate(sites)}
            values = {at: metric.factor * found for at, found in known.items() if len(found)}
            means = [found.mean() for found in values.values()]
            wide = [
                stats.sem(v) * stats.t.ppf(1 - LEVEL / 2, len(v) - 1) if len(v) >= TESTED else 0
                for v in values.values()
            ]
            style = {"color": "black" if name == LOCAL else f"C{number - 1}", "markersize": 4, "linewidth": 1.2}
            axis.errorbar([at + offset for at in values], means, wide, fmt="o", capsize=2, label=name, **style)
        for at in [at for at, site in enumerate(sites) if not site.scores[LOCAL]]:
            style = {"transform": axis.get_xaxis_transform(), "ha": "center", "color": "0.4", "fontsize": 8}
            axis.text(at, 0.5, "undefined", **style)
        axis.set_xticks(range(len(sites)), [escape_math(f"{one.name}\n({one.test_examples})") for one in sites])
        axis.tick_params(axis="x", labelsize=7, rotation=0 if len(sites) < 8 else 90)
        axis.set(title=column, ylabel=metric.axis, xlim=(-0.5, len(sites) - 0.5))
        for border in range(1, len(sites)):
            axis.axvline(border - 0.5, color="0.9", linewidth=0.8)
        axis.grid(alpha=0.3, axis="y")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
    return figure


def draw_borrowing(summary: Summary) -> Any:
    """Draw who borrows from whom: alpha after the last round, mean over layers and seeds."""
    found = [panel for panel in collect_weights(summary) if panel.cells[0]["row"] in ASKED]
    figure, axes = panels(len(found), (3.4, 3.2), most=4)
    for axis, panel in zip(axes, found, strict=True):
        clients = panel.cells[0]["clients"]
        weights = panel.alpha[-1].mean(1)  # over the layers
        axis.imshow(weights, cmap="YlGnBu", vmin=0, vmax=1, interpolation="nearest")
        for receiver, row in enumerate(weights if len(clients) <= 6 else []):
            for sender, weight in enumerate(row):
                colour = "white" if weight > 0.5 else "black"
                axis.text(sender, receiver, f"{weight:.2f}", ha="center", va="center", color=colour, fontsize=7)
        names = [escape_math(name) for name in clients]
        axis.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        axis.set_yticks(range(len(names)), names, fontsize=7)
        axis.set_title(panel.title, fontsize=8)
        axis.set_xlabel("sender", fontsize=8)
        axis.set_ylabel("receiver", fontsize=8)
    return figure


def write_site_figures(summary: Summary, folder: Path) -> list[Path]:
    drawn = {"figure": draw_sites}
    if any(cell.get("alpha") for cell in summary["cells"]):
        drawn["borrowing"] = draw_borrowing
    caption = ". ".join([summary["title"], *(describe_column(rows) for rows in known_columns(summary).values())])
    return [save(draw(summary), folder / f"{name}{end}", caption) for name, draw in drawn.items() for end in FORMATS]
