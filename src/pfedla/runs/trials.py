"""The trials of a tuning: what they are worth, which options come next, the file that keeps them.

Each finished trial is a line of trials.jsonl. The next options depend on these lines alone, and a trial that was not
finished leaves none, so a tuning that is killed and resumed ends as any other.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pfedla.core.errors import PfedlaError
from pfedla.core.files import parse_json, write_text
from pfedla.core.search import Choice, Range
from pfedla.core.settings import Section
from pfedla.report.reading import Metric, Values, split_lines
from pfedla.runs.experiment import Experiment
from pfedla.runs.folder import differences, new_folder

JOURNAL = "trials.jsonl"
STARTUP = 5  # trials at random, the defaults among them, before their values guide the search
Space = Mapping[str, Range | Choice]  # by setting: training.lr, algorithm.penalty


class Trial(Section):
    """One choice of options and what it is worth. A trial that diverges or gives up has no value, and counts."""

    method: str
    number: int
    options: Values
    value: float | None  # mean over the seeds
    per_seed: dict[str, float | None]
    reason: str  # why there is no value
    seconds: float


@dataclass
class Tuned:
    """A method's trials so far, and the best of them."""

    label: str
    experiment: Experiment  # what was asked for
    space: Space
    defaults: Values  # by setting, of the first trial
    metric: Metric
    asked: Values  # what a resumed tuning must have in common with it
    trials: list[Trial] = field(default_factory=list)

    @property
    def best(self) -> Trial | None:
        """The trial with the best value, the first one of equals; None if no trial has a value."""
        valued = [trial for trial in self.trials if trial.value is not None]
        return max(valued, key=lambda trial: self.metric.sign * (trial.value or 0.0), default=None)

    @property
    def overrides(self) -> Values:
        """What the experiment is overlaid with: the best trial's options, and the number of trials."""
        return nest_options(self.best.options if self.best else {}) | {"tuned_trials": len(self.trials)}


def suggest(one: Tuned, seed: int) -> Values:
    """Return the options of the next trial, by the values of those before: the TPE sampler of optuna, made anew."""
    from optuna import create_study, create_trial
    from optuna.samplers import TPESampler
    from optuna.trial import TrialState

    sampler = TPESampler(seed=seed, n_startup_trials=STARTUP, multivariate=False, constant_liar=False)
    study = create_study(sampler=sampler, direction="maximize" if one.metric.higher_is_better else "minimize")
    spread = {key: _distribution(search) for key, search in one.space.items()}
    for trial in one.trials:
        inside = [key for key, search in one.space.items() if _is_inside(trial.options[key], search)]  # not "auto"
        params, known = {key: trial.options[key] for key in inside}, {key: spread[key] for key in inside}
        state = TrialState.PRUNED if trial.value is None else TrialState.COMPLETE  # pruned: worse than all others
        study.add_trial(create_trial(params=params, distributions=known, value=trial.value, state=state))
    drawn = study.ask(spread).params
    return {key: shorten_number(value) if isinstance(value, float) else value for key, value in drawn.items()}


def _distribution(search: Range | Choice) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(search, Choice):
        return CategoricalDistribution(search.values)
    if search.whole:
        return IntDistribution(int(search.low), int(search.high))
    return FloatDistribution(search.low, search.high, log=True)


def _is_inside(value: Any, search: Range | Choice) -> bool:
    if isinstance(search, Choice):
        return value in search.values
    return not isinstance(value, str) and bool(search.low <= value <= search.high)


def shorten_number(value: float) -> float:
    """Return the number with four digits: a file of chosen options is read by people."""
    return float(f"{value:.4g}")


def nest_options(options: Mapping[str, Any]) -> Values:
    """Return {"training.lr": 0.1} as {"training": {"lr": 0.1}}."""
    nested: Values = {}
    for place, value in options.items():
        section, key = place.split(".")
        nested.setdefault(section, {})[key] = value
    return nested


def show_options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{place.partition('.')[2]} {value}" for place, value in options.items())


class Journal:
    """trials.jsonl: what was asked for of each method, and its finished trials. A line that was cut off is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        whole = split_lines(path)
        try:
            self.lines: list[Values] = [parse_json(line) for line in whole]
            self.asked = {line["method"]: line["asked"] for line in self.lines if "asked" in line}
            self.trials = [Trial.model_validate(line) for line in self.lines if "asked" not in line]
        except (ValueError, KeyError, TypeError) as error:  # also pydantic's ValidationError
            raise PfedlaError(f"{path} is damaged: {str(error).splitlines()[0]}") from None
        if path.exists() and sum(map(len, whole)) + len(whole) < path.stat().st_size:
            write_text(path, "".join(f"{line.decode()}\n" for line in whole))

    def add(self, line: Values) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def recall(self, one: Tuned, trials: int) -> None:
        """Give a method its finished trials; refuse those of other settings."""
        before = self.asked.get(one.label)
        if before is None:
            self.add({"method": one.label, "asked": one.asked})
        elif changed := "; ".join(differences(before, one.asked)):
            where = f"Cannot resume {self.path.parent}: it is another tuning of {one.label} ({changed})"
            raise PfedlaError(f"{where}. Use the original settings, or another --out")
        own = [trial for trial in self.trials if trial.method == one.label]
        if [trial.number for trial in own] != list(range(len(own))):
            raise PfedlaError(f"{self.path} is damaged: trials of {one.label} are missing")
        one.trials = own[:trials]


@contextmanager
def open_journal(folder: Path, *, resume: bool) -> Iterator[Journal]:
    """Make the folder of a tuning, or reopen it; one process may write to it."""
    if not (resume and folder.is_dir()):
        new_folder(folder)
    elif any(folder.glob("[!.]*")) and not (folder / JOURNAL).exists():
        raise PfedlaError(f"{folder} is not a tuning: it has no {JOURNAL}; choose another folder with --out")
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield Journal(folder / JOURNAL)
    except Timeout:
        raise PfedlaError(f"{folder} is in use by another process; wait, or choose another folder") from None
