"""Choose options on validation examples: the same number of trials for every method, test examples left out.

A trial is a run in memory on the validation federation (`Federation.for_validation`).
"""

import json
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import tomli_w

from pfedla.algorithms import find, resolve_options
from pfedla.core.contracts import generator
from pfedla.core.errors import GaveUpError, PfedlaError, unknown
from pfedla.core.files import write_text
from pfedla.core.rounds import DIVERGED
from pfedla.core.search import LR_SPAN, Choice, Epochs, Range
from pfedla.data.sources import load_data
from pfedla.report.figures import draw_tuning
from pfedla.report.reading import Metric, Values, flatten, honest_part
from pfedla.runs.build import Built, build
from pfedla.runs.experiment import Experiment, overlay
from pfedla.runs.progress import Display
from pfedla.runs.run import Run
from pfedla.runs.trials import (
    Journal,
    Space,
    Trial,
    Tuned,
    nest_options,
    open_journal,
    shorten_number,
    show_options,
    suggest,
)

TUNING, TUNED, PICTURE = "tuning.json", "tuned.toml", "tuning.png"


def check_optuna() -> None:
    """Raise PfedlaError where optuna is not installed."""
    try:
        import optuna
    except ImportError:
        raise PfedlaError("tuning needs optuna: pip install 'pfedla[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def search_space(built: Built) -> Space:
    """Return the learning rate around its default, and what the method declares in `search`."""
    training, section = built.experiment.training, built.experiment.algorithm
    kind, options, lr = find(section.name), section.options, training.learning_rate
    space: dict[str, Range | Choice] = {}
    if kind.uses_lr:
        space["training.lr"] = Range(shorten_number(LR_SPAN.low * lr), shorten_number(LR_SPAN.high * lr))
    for option, search in kind.search.items():
        if option not in options:
            raise unknown(f"option in the search of {section.name}:", option, options)
        if isinstance(search, Epochs):
            if training.local_epochs - search.spare < 2:
                continue  # the budget leaves no choice
            search = search.within(training.local_epochs)
        if not isinstance(search, Choice) and not (isinstance(search, Range) and 0 < search.low < search.high):
            raise PfedlaError(f"the search of {section.name} has {option} = {search!r}: give a Range, Choice or Epochs")
        bounds = search.values if isinstance(search, Choice) else (search.low, search.high)
        for bound in bounds:
            resolve_options(section.name, {**options, option: bound})
        space[f"algorithm.{option}"] = search
    return space


def tune(
    experiments: Sequence[tuple[str, Experiment]],
    trials: int,
    folder: Path,
    *,
    space_of: Callable[[Built], Space] = search_space,
    seeds: Sequence[int] = (0,),
    build_one: Callable[[Experiment], Built] | None = None,
    display: Display | None = None,
    stopping: Callable[[], bool] = lambda: False,
    resume: bool = False,
) -> dict[str, Tuned]:
    """Run or resume `trials` trials of every labelled experiment; `tune(…)[label].overrides` is what was chosen.

    The first trial of each has the options as they are. `space_of` returns what is searched. An experiment's seed is
    replaced by each of `seeds`. `build_one` builds an experiment on its validation federation; by default it loads the
    data. Leaves trials.jsonl, tuning.json and tuning.png in the folder.
    """
    check_optuna()
    if trials < 1 or not experiments or not seeds:
        raise PfedlaError(f"{trials} trials of {len(experiments)} methods: give at least one trial, method and seed")
    build_one = build_one or _load_and_build()
    found, notes = {}, dict[str, None]()
    for label, experiment in experiments:
        built = build_one(experiment.model_copy(update={"seed": seeds[0]}))
        notes |= dict.fromkeys(built.notes)
        found[label] = _prepare(label, experiment, built, space_of(built), seeds)
    display = display or Display(sum(trials * len(seeds) * one.rounds for _, one in experiments), quiet=True)
    with open_journal(folder, resume=resume) as journal:
        for one in found.values():
            journal.recall(one, trials)
        for note in filter(None, notes):
            display.say(note)
        _Tuner(journal, build_one, display, stopping, seeds).complete(list(found.values()), trials)
    if not any(one.best for one in found.values()):
        raise GaveUpError(f"no trial has a value; {next(iter(found.values())).trials[0].reason}")
    write_text(folder / TUNING, json.dumps(describe_tuning(found, seeds), indent=2) + "\n")
    draw_tuning({label: (one.metric, [t.value for t in one.trials]) for label, one in found.items()}, folder / PICTURE)
    return found


def _prepare(label: str, experiment: Experiment, built: Built, space: Space, seeds: Sequence[int]) -> Tuned:
    if not space:
        raise PfedlaError(f"{label}: there is nothing to tune")
    settings = flatten(built.experiment.model_dump())
    asked = {key: value for key, value in experiment.identity().items() if key != "seed"}
    asked |= {"rounds": experiment.rounds, "seeds": list(seeds), "examples": built.federation.fingerprint()}
    asked["search"] = {key: list(search) for key, search in space.items()}
    metric = Metric.of({"task": built.algorithm.task.objective.describe()})
    defaults = {key: settings[key] for key in space}
    return Tuned(label, experiment, space, defaults, metric, json.loads(json.dumps(asked)))


def _load_and_build() -> Callable[[Experiment], Built]:
    load = lru_cache(maxsize=1)(load_data)
    return lambda one: build(one, load(one.data, one.task), validation=True)


@dataclass
class _Tuner:
    journal: Journal
    build_one: Callable[[Experiment], Built]
    display: Display
    stopping: Callable[[], bool]
    seeds: Sequence[int]
    rounds: int = 0  # done, of all methods

    def complete(self, found: Sequence[Tuned], trials: int) -> None:
        """Run the trials that are missing, method by method."""
        for one in found:
            self.display.metric = one.metric
            for number in range(trials):
                after = self.rounds + one.experiment.rounds * len(self.seeds)
                if number == len(one.trials):
                    self.display.begin(f"{one.label}, trial {number + 1} of {trials}", self.seeds[0])
                    self._add(one, self._run_trial(one, number))
                self.rounds = after  # a trial that gave up did not come so far
                self._show(one)

    def _show(self, one: Tuned) -> None:
        self.display.show(self.rounds, one.best.value if one.best else None)

    def _add(self, one: Tuned, trial: Trial) -> None:
        self.journal.add(trial.model_dump())
        one.trials.append(trial)
        if trial is one.best:
            score = f"validation {one.metric.label} {one.metric.show(trial.value)}"
            self.display.say(f"{one.label}, trial {trial.number + 1}: {score} with {show_options(trial.options)}")

    def _run_trial(self, one: Tuned, number: int) -> Trial:
        options, start = one.defaults, time.perf_counter()
        if number:
            draws = generator(self.seeds[0], f"tune {one.label}", round=number)
            options = suggest(one, seed=draws.initial_seed() % 2**32)
        values, reason = dict[str, float | None](), ""
        for seed in self.seeds:
            try:
                values[str(seed)] = self._measure(one, trial_experiment(one.experiment, options, seed))
            except PfedlaError as error:  # also of options that do not go together
                if not number and not isinstance(error, GaveUpError):
                    raise
                values[str(seed)], reason = None, str(error)
                break  # a mean over other seeds than those of the other trials would not compare
        known = [value for value in values.values() if value is not None]
        value = sum(known) / len(known) if len(known) == len(self.seeds) else None
        return Trial(
            method=one.label,
            number=number,
            options=options,
            value=value,
            per_seed=values,
            reason=reason,
            seconds=round(time.perf_counter() - start, 2),
        )

    def _measure(self, one: Tuned, experiment: Experiment) -> float:
        """Return the headline metric on the validation examples after the last round."""
        with Run(self.build_one(experiment), stopping=self.stopping) as run:
            for _ in run:
                self.rounds += 1
                self._show(one)
            return read_value(run)


def read_value(run: Run) -> float:
    """Return the mean score of a run that has no rounds left; GaveUpError if there is none, or a model diverged."""
    result, simulation = run.finish(), run.simulation
    assert simulation is not None
    # A client whose training diverges keeps an older model, or has no score: the mean would be too good.
    broken = ~simulation.loss.isfinite()
    if run.experiment.faults.attack != "nan":
        broken[[client for client, reasons in simulation.failures.items() if DIVERGED & reasons.keys()]] = True
    value: float | None = honest_part(result)["score"]["mean"]
    if diverged := int((broken & run.honest).sum()):
        raise GaveUpError(f"training diverged on {diverged} clients")
    if value is None:
        raise GaveUpError(f"{run.display.metric.label} is undefined for every client")
    return value


def trial_experiment(experiment: Experiment, options: Values, seed: int) -> Experiment:
    """Return the experiment with these options; tested after the last round alone, which changes no number."""
    more = {"seed": seed, "evaluate_every": experiment.rounds}
    return Experiment.parse(overlay(overlay(experiment.model_dump(), nest_options(options)), more))


def describe_tuning(found: Mapping[str, Tuned], seeds: Sequence[int]) -> Values:
    """Return what tuning.json holds."""
    methods = {}
    for label, one in found.items():
        search = {key: list(search) for key, search in one.space.items()}
        best = one.best.number if one.best else None
        methods[label] = {"metric": one.metric._asdict(), "search": search, "best": best}
    trials = [trial.model_dump() for one in found.values() for trial in one.trials]
    return {"seeds": list(seeds), "methods": methods, "trials": trials}


def tabulate_tuning(found: Mapping[str, Tuned]) -> tuple[list[list[str]], list[str]]:
    """Return a table with a line per method, and notes on trials without a value."""
    metric = next(iter(found.values())).metric
    lines, notes = [["method", f"default, {metric.description}", "best", "trial", "chosen options"]], list[str]()
    for label, one in found.items():
        best, count = one.best, len(one.trials)
        cells = [one.metric.show(one.trials[0].value), one.metric.show(best.value if best else None)]
        cells += [f"{best.number + 1} of {count}", show_options(best.options)] if best else [f"– of {count}", "–"]
        lines.append([label, *cells])
        if failed := [trial for trial in one.trials if trial.value is None]:
            notes.append(f"{label}: {len(failed)} of {count} trials have no value, the first one: {failed[0].reason}")
    return lines, notes


def write_tuned(folder: Path, found: Mapping[str, Tuned], names: Mapping[str, str], seeds: Sequence[int]) -> Path:
    """Write tuned.toml for `pfedla compare`: all settings, a section per method; `names`: the label of each.

    It names the seeds of the tuning, because their test examples were left out, not those of other seeds.
    """
    first, name_of = next(iter(found.values())), {label: name for name, label in names.items()}
    common = tomllib.loads(first.experiment.to_toml())
    del common["algorithm"], common["tuned_trials"]
    sections: Values = {}
    for label, one in found.items():
        chosen, training = one.overrides, one.experiment.training.model_dump()
        own = {key: value for key, value in training.items() if value != common["training"][key]}
        options = {**one.experiment.algorithm.options, **chosen.get("algorithm", {})}
        beside = {"tuned_trials": chosen["tuned_trials"], "training": own | chosen.get("training", {})}
        sections[name_of[label]] = options | beside
    head = (
        "# Options chosen by `pfedla tune` on a part of the training examples; no test example of the seed was used.\n"
    )
    lists = {"methods": list(names), "seeds": list(seeds)}
    write_text(folder / TUNED, head + tomli_w.dumps({**lists, **common, **sections}))
    return folder / TUNED
