"""A worker of Flower's simulation: it keeps no client. Each letter brings all that one client is, and takes it back.

So a cluster needs no shared file system, and all that a checkpoint saves is on the server. In a simulation payloads travel
whole, with the layers that are not sent, so that the server has what it has of a thread; traffic is counted by what is sent.
"""

import dataclasses
import os
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from pfedla.contracts import Algorithm, Answer, ClientState, Cohort, Params, Payload, Recalibrate
from pfedla.data.federation import Examples, Outline
from pfedla.engines.allocator import keep_freed_memory
from pfedla.engines.client import Client, Test
from pfedla.engines.threaded import for_one
from pfedla.flower.codec import CONFIG, EXTRAS, TENSORS, decoded, encoded

Scalar = bool | int | float | str
STATE, SENT, TRAIN, TEST, RESULT = "state", "sent", "train", "test", "result"
ERROR, TRACE = "error", "trace"
NO_LIMIT = 2**62  # a worker is no stranger but this very program


class WorkerError(Exception):
    """What a client raised in a worker, or what became of the worker."""


class Workplace(NamedTuple):
    """What all clients of a run have in common; Ray takes it to the workers, with the app."""

    run: str  # different for every run
    algorithm: Algorithm
    outline: Outline
    recalibrate: Recalibrate
    compile: bool
    longest: float  # seconds that a client may take


class Errand(NamedTuple):
    """One client, and what it is to do."""

    number: int
    round: int
    seed: int
    epochs: int
    trained: bool
    state: ClientState
    download: Payload
    train: Examples
    test: Examples

    def letter(self) -> RecordDict:
        numbers = {name: getattr(self, name) for name in ("number", "round", "seed", "epochs", "trained")}
        parts = {STATE: self.state, TRAIN: self.train._asdict(), TEST: self.test._asdict()}
        return _letter(numbers, {**parts, **_parts(self.download)})

    @classmethod
    def of(cls, letter: RecordDict) -> "Errand":
        train, test = (Examples(**_tensors(letter, part)) for part in (TRAIN, TEST))
        numbers: dict[str, Any] = dict(letter[CONFIG])
        return cls(state=_tensors(letter, STATE), download=_payload(letter), train=train, test=test, **numbers)

    def cohort(self) -> Cohort:
        """As much of it as a client needs to know."""
        return Cohort(self.round, self.seed, torch.tensor([self.number]), torch.tensor([len(self.train.y)]))


def client_app(place: Workplace) -> ClientApp:
    app = ClientApp()

    @app.query()
    def settle(message: Message, context: Context) -> Message:
        return Message(_tried(lambda: _ready(place), place.longest), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(_tried(lambda: _trained(place, Errand.of(message.content)), place.longest), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(_tried(lambda: _tested(place, Errand.of(message.content)), place.longest), reply_to=message)

    return app


def _tried(act: Callable[[], RecordDict], longest: float) -> RecordDict:
    """What came of it, or what was raised: told by ourselves, as Flower keeps only the text of it and logs it at length."""
    # A client that never ends takes its worker down. Else nobody could have the worker again, not even to end the run.
    watchdog = threading.Timer(longest, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()
    try:
        return act()
    except Exception as error:
        return _letter({ERROR: f"{type(error).__name__}: {error}", TRACE: traceback.format_exc()}, {})
    finally:
        watchdog.cancel()


def _ready(place: Workplace) -> RecordDict:
    _settled(place)
    return _letter({}, {})


def _trained(place: Workplace, errand: Errand) -> RecordDict:
    state, answer = _client(place, errand).update(errand.state, errand.download, errand.cohort(), errand.epochs)
    numbers: dict[str, Scalar] = {"accuracy": answer.accuracy, "loss": answer.loss, "finite": answer.finite}
    return _letter(numbers, {STATE: state, RESULT: {"training_loss": answer.training_loss}, **_parts(answer.upload)})


def _tested(place: Workplace, errand: Errand) -> RecordDict:
    client = _client(place, errand)
    model = client.personal(errand.state, errand.trained, errand.download, errand.cohort())
    correct, loss = client.tested(model)
    return _letter({}, {RESULT: {"correct": correct, "loss": loss}})


def training_of(letter: RecordDict) -> tuple[ClientState, Answer]:
    """A client's private state after training, and its answer; raises what it raised."""
    check(letter)
    numbers: dict[str, Any] = dict(letter[CONFIG])
    loss = _tensors(letter, RESULT)["training_loss"]
    return _tensors(letter, STATE), Answer(_payload(letter), loss, **numbers)


def test_of(letter: RecordDict) -> Test:
    check(letter)
    result = _tensors(letter, RESULT)
    return result["correct"], result["loss"]


def check(letter: RecordDict) -> None:
    """Raise what was raised in the worker."""
    told = letter[CONFIG]
    if ERROR in told:
        error = WorkerError(told[ERROR])
        error.add_note(str(told[TRACE]))
        raise error


def _client(place: Workplace, errand: Errand) -> Client:
    return Client(
        errand.number, errand.train, errand.test, place.outline, _settled(place), recalibrate=place.recalibrate
    )  # fmt: skip


_algorithms: dict[str, Algorithm] = {}  # of the run that this process works for


def _settled(place: Workplace) -> Algorithm:
    """The algorithm with its task in the form for one client at a time: made once, while the app comes with every letter."""
    if place.run not in _algorithms:
        torch.set_num_threads(1)
        keep_freed_memory()
        _algorithms.clear()
        task = for_one(place.algorithm.task, place.outline.shape, place.algorithm.training, place.compile)
        _algorithms[place.run] = dataclasses.replace(place.algorithm, task=task)
    return _algorithms[place.run]


def _letter(numbers: dict[str, Scalar], parts: dict[str, Params]) -> RecordDict:
    return RecordDict({CONFIG: ConfigRecord({**numbers}), **{name: encoded(tensors) for name, tensors in parts.items()}})


def _parts(payload: Payload) -> dict[str, Params]:
    return {TENSORS: payload.tensors, EXTRAS: payload.extras, SENT: {SENT: payload.sent}}


def _payload(letter: RecordDict) -> Payload:
    return Payload(_tensors(letter, TENSORS), _tensors(letter, SENT)[SENT], _tensors(letter, EXTRAS))


def _tensors(letter: RecordDict, part: str) -> Params:
    """Copies, not numpy's memory: small products round differently by where a number lies (see `own_row`)."""
    return {name: value.clone() for name, value in decoded(letter[part], NO_LIMIT, NO_LIMIT).items()}
