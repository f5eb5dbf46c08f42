"""Accuracy against MiB: what a codec costs each method, compared with the same method's plain messages."""

import statistics
from typing import Any

from pfedla.report.figures import panels
from pfedla.report.methods import MethodTable, show_difference, show_interval, show_p
from pfedla.report.reading import Metric
from pfedla.report.rows import Row
from pfedla.report.significance import standard_error
from pfedla.reproduction.summaries import Summary, collect_rows

Families = dict[str, dict[str, Row]]  # by method: its rows by codec, "none" for plain messages
FRONTIER_NOTE = (
    "MiB in both directions, mean of the seeds, and its share of the same method's with plain messages. Difference of "
    "the score to these, in points: paired over the seeds that both have, with an interval over the seeds (number of "
    "seeds). p: paired t-test, from six seeds on Wilcoxon's, Holm-corrected over the codecs of the method."
)


def group_rows(rows: dict[str, Row]) -> Families:
    """Return the rows "method" and "method, codec" by method."""
    found: Families = {}
    for name, row in rows.items():
        method, _, codec = name.partition(", ")
        found.setdefault(method, {})[codec or "none"] = row
    return found


def tabulate_frontier(summary: Summary) -> list[list[str]]:
    """Return the MiB of every row, and its paired difference to the same method with plain messages."""
    lines, entries = [[""], *([row] for row in summary["rows"])], collect_rows(summary)
    for column, rows in entries.items() if summary["form"] == "frontier" else []:
        lines[0] += [f"{column}: MiB", "share", "difference"]
        cells: dict[str, list[str]] = {}
        for method, family in group_rows(rows).items():
            table = MethodTable(list(family.values()), against=method)
            plain = family["none"].mib if "none" in family else None
            for row in family.values():
                share = f"{100 * row.mib / plain:.1f} %" if row.mib and plain else "–"
                shown = "–" if row.mib is None else f"{row.mib:.1f}"
                cells[row.algorithm] = [shown, share, show_cost(table, row.algorithm)]
        for line in lines[1:]:
            line += cells[line[0]]
    return lines if len(lines[0]) > 1 else []


def show_cost(table: MethodTable, row: str) -> str:
    """Return the difference of a row to the reference of its table, its interval, p and number of seeds."""
    one = table.analysis.differences.get(row)
    if one is None:
        return "–"
    tested = f" {show_interval(one, table.metric)}, p {show_p(one.p_corrected)}" if one.p is not None else ""
    return f"{show_difference(one, table.metric)}{tested} ({one.seeds})"


def draw_frontier(summary: Summary, paper: object) -> Any:
    """Draw the score of each row by its MiB: a line per method, from its plain messages down to the fewest bytes."""
    entries = collect_rows(summary)
    figure, axes = panels(len(entries), (4.6, 3.4))
    for axis, (column, rows) in zip(axes, entries.items(), strict=True):
        metric = next((row.metric for row in rows.values() if row.results), Metric())
        for position, (method, family) in enumerate(group_rows(rows).items()):
            points = sorted((row.mib, codec, list(row.scores.values())) for codec, row in family.items() if row.scores)
            if not points:
                continue
            style = {"color": f"C{position}", "marker": "o", "capsize": 3, "label": method}
            means, errors = [statistics.mean(one) for *_, one in points], [standard_error(one) for *_, one in points]
            axis.errorbar([mib for mib, *_ in points], means, [error or 0 for error in errors], **style)
            for (mib, codec, _), mean in zip(points, means, strict=True):
                near = {"xytext": (3, 4), "textcoords": "offset points", "fontsize": 6, "color": f"C{position}"}
                axis.annotate(codec, (mib, mean), **near)
        axis.set(title=column, xlabel="MiB sent, both directions", ylabel=metric.axis, xscale="log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    return figure
