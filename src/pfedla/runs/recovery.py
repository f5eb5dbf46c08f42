"""The way back of a run that was poisoned: which round and command, and who is left out from then on."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from pfedla.core.errors import PfedlaError
from pfedla.core.rounds import Trend
from pfedla.core.settings import AUTO
from pfedla.runs.prediction import find_client


def explain_way_back(
    trend: Trend,
    names: Sequence[str],
    *,
    rounds: Sequence[int],
    excluded: Mapping[str, int | str],
    run: Path | None,
    is_deployed: bool,
) -> str:
    """Return until when the score was good, who likely spoiled it, and how to go back to before it without them.

    `rounds`: of the checkpoints that are kept. `run`: the run folder, if there is one.
    """
    who = [names[client] for client in trend.suspects]
    text = f"; the score was last good in round {trend.good_round}; "
    text += f"likely cause: client {', '.join(who)}, by an unusually long update after it" if who else ""
    text += "" if who else "no update was so long that it says which client (CLIENT) spoiled it"
    last = max((round for round in rounds if round <= trend.good_round), default=0)
    out = who or ["CLIENT"]  # and those that were excluded later than `last`: they would take part again
    out += [name for name, start in excluded.items() if int(start) > last and name not in out]
    if run is None:
        return f"{text}. To start again without: exclude={dict.fromkeys(out, AUTO)}"
    text += ". To go back: " if last else ". No checkpoint from then is kept. To start again: "
    if is_deployed:
        where = f"deployment.resume=true deployment.from_round={last}" if last else "deployment.folder=…"
        return f"{text}{where} deployment.exclude='{json.dumps(out)}'"
    words = ["pfedla", "run", str(run), *(["--resume", "--from", str(last)] if last else [])]
    return text + shlex.join([*words, *(word for name in out for word in ("--exclude", name))])


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
    before, asked = (
        {names[find_client(names, client)]: start for client, start in one.items()} for one in (before or {}, asked)
    )
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
