"""The way back of a run that was poisoned: which round and command, and who is left out from then on."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from pfedla.core.errors import PfedlaError
from pfedla.core.rounds import Trend
from pfedla.core.settings import AUTO
from pfedla.runs.prediction import find_client


def explain_way_back(
    trend: Trend, run: Path | None, rounds: Sequence[int], names: Sequence[str], also: set[str]
) -> str:
    """Return to which round to go back, without whom, and the command. `rounds`: of the checkpoints that are kept.

    `also`: clients that are excluded later than from that round on.
    """
    who = [names[client] for client in trend.suspects]
    out = list(dict.fromkeys([*who, *sorted(also)])) or ["CLIENT"]
    text = f"; the score was last good in round {trend.good_round}, and "
    text += f"the likely cause is client {', '.join(who)}, with an unusually long update after it" if who else ""
    text += "" if who else "no unusually long update says which client (CLIENT) spoiled it"
    if run is None:
        return f"{text}. To start again without: exclude={dict.fromkeys(out, AUTO)}"
    words = " ".join(f"--exclude {shlex.quote(name)}" for name in out)
    kept = max((round for round in rounds if round <= trend.good_round), default=None)
    if kept is None:
        return f"{text}. No checkpoint from then is kept. To start again: pfedla run {shlex.quote(str(run))} {words}"
    return f"{text}. To go back: pfedla run {shlex.quote(str(run))} --resume --from {kept} {words}"


def resolve_exclusions(
    asked: Mapping[str, int | str],
    names: Sequence[str],
    *,
    before: Mapping[str, int | str] | None = None,
    round: int = 0,
    going_back: bool = False,
) -> dict[str, int]:
    """Return by name who is left out after `round` rounds, and the first round without each.

    `before` is what the run had been asked for. What came into force up to `round` stays. `going_back` drops what was
    to come into force after it, unless it is asked for anew: as if the run had been stopped there.
    """
    before = before or {}
    asked = {names[find_client(names, client)]: start for client, start in asked.items()}
    found = {name: start for name, start in before.items() if start != AUTO and int(start) <= round}
    for name, start in {**before, **asked}.items():
        if start == AUTO:
            found.setdefault(name, round + 1)
        elif start != found.get(name, start) or (name not in found and int(start) <= round):
            raise PfedlaError(f"exclude: {name} = {start} is too late after round {round}: go back before it (--from)")
        elif not (going_back and before.get(name) == start):
            found[name] = start
    if len(found) == len(names):
        raise PfedlaError("exclude: all clients are excluded, so nobody would train")
    return {name: int(found[name]) for name in sorted(found, key=names.index)}
