"""Each client in a worker of Flower's simulation, on this machine or on a Ray cluster. Bit-identical to the threaded engine.

Everybody's private state stays here, so runs are saved, go on and fail on purpose as with threads.
"""

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from pfedla.contracts import Algorithm, Cohort, Payload, Task
from pfedla.data.federation import Federation, Outline
from pfedla.engines.client import Test
from pfedla.engines.clients import UNKNOWN, Outcome, SimulatedClients, attempt
from pfedla.engines.threaded import for_one
from pfedla.errors import PfedlaError, Stopped
from pfedla.flower.worker import Errand, WorkerError, Workplace, check, client_app, test_of, training_of

R = TypeVar("R")
LONGEST = 7200.0  # seconds that a client may take
PATIENCE = 2 * LONGEST  # seconds without any reply: a message that is lost is not sent again
STARTING = 60.0  # seconds in which workers should be ready
GLANCE = 0.02  # seconds between two looks for replies
# Flower's nodes are letter boxes here, one letter in each at a time: that bounds the copies in memory. Flower empties each
# ten times a second, so these pass 640 clients a second.
MOST_NODES = 64
# A worker that dies, say for lack of memory, is started again. Its task is not: Ray would do so also at the end, and print it.
WORKER = {"num_cpus": 1, "num_gpus": 0.0, "max_restarts": -1}


class FlowerSimulation(SimulatedClients):
    def __init__(self, algorithm: Algorithm, federation: Federation, **how: Any) -> None:
        super().__init__(algorithm, federation, **how)
        outline = Outline(federation.shape, federation.classes, federation.num_examples, federation.mean, federation.std)
        self._place = Workplace(uuid.uuid4().hex, algorithm, outline, self.recalibrate, self.compile, LONGEST)
        self._ending = threading.Event()
        self._grid: Grid | None = None
        self._nodes: list[int] = []
        self._error: BaseException | None = None

    def _task(self, algorithm: Algorithm, shape: tuple[int, ...]) -> Task:
        return for_one(super()._task(algorithm, shape), shape, algorithm.training, self.compile)

    def _train(self, cohort: Cohort, downloads: Payload) -> list[Outcome]:
        return self._map(training_of, MessageType.TRAIN, cohort, downloads)

    def _evaluate(self, cohort: Cohort, downloads: Payload) -> list[Test]:
        tests = self._map(test_of, MessageType.EVALUATE, cohort, downloads)
        return [UNKNOWN if isinstance(test, Exception) else test for test in tests]

    def _map(self, read: Callable[[RecordDict], R], kind: str, cohort: Cohort, downloads: Payload) -> list[R | Exception]:
        """What came of each client's errand, in the order of the cohort."""

        def write(row: int) -> RecordDict:
            if kind == MessageType.TRAIN and self.stopping():
                raise Stopped
            return self._errand(cohort, row, downloads).letter()

        replies = self._exchanged(write, len(cohort.ids), kind)
        for row, reply in enumerate(replies):
            if isinstance(reply, WorkerError):  # its worker died, or had died before and was not up again: once more, alone
                self._await_workers()
                (replies[row],) = self._exchanged(lambda _, row=row: write(row), 1, kind)  # type: ignore[misc]
        return [reply if isinstance(reply, Exception) else attempt(read, reply) for reply in replies]

    def _exchanged(self, write: Callable[[int], RecordDict], count: int, kind: str) -> list[RecordDict | Exception]:
        """The reply to each letter; each is written when there is a letter box for it."""
        grid, free, waiting = self._running(), list(self._nodes), list(reversed(range(count)))
        outcomes: list[RecordDict | Exception] = [TimeoutError(f"there was no reply for {PATIENCE:.0f} s")] * count
        under_way: dict[str, tuple[int, int]] = {}  # the letter's id -> its row, its node
        last = time.monotonic()
        while waiting or under_way:
            while waiting and free:
                row, node = waiting.pop(), free.pop()
                (sent,) = grid.push_messages([Message(write(row), node, kind)])
                under_way[sent] = row, node
            replies = list(grid.pull_messages(under_way))
            for reply in replies:
                # Not by who sent it: an error may come from Flower itself.
                row, node = under_way.pop(reply.metadata.reply_to_message_id)
                free.append(node)
                outcomes[row] = WorkerError(reply.error.reason) if reply.has_error() else reply.content
            if replies:
                last = time.monotonic()
            elif time.monotonic() - last > PATIENCE:
                break
            else:
                self._running()
                time.sleep(GLANCE)
        return outcomes

    def _await_workers(self) -> None:
        deadline = time.monotonic() + STARTING
        while True:
            replies = self._exchanged(lambda _: RecordDict(), len(self._nodes), MessageType.QUERY)
            tried = [reply if isinstance(reply, Exception) else attempt(check, reply) for reply in replies]
            errors = [error for error in tried if isinstance(error, Exception)]
            if not errors:
                return
            if time.monotonic() > deadline:
                raise PfedlaError(f"Flower's workers do not begin: {errors[0]}") from errors[0]
            time.sleep(1)

    def _errand(self, cohort: Cohort, row: int, downloads: Payload) -> Errand:
        number = int(cohort.ids[row])
        return Errand(
            number, cohort.round, cohort.seed, self._epochs(cohort, number), bool(self._trained[number]),
            self._clients[number], downloads.rows(row), self.federation.train[number], self.federation.test[number],
        )  # fmt: skip

    def _running(self) -> Grid:
        if self._error is not None or self._grid is None or not self._thread.is_alive():
            raise PfedlaError(f"Flower's simulation has ended: {self._error or 'it was not asked to begin'}") from self._error
        return self._grid

    def __enter__(self) -> Self:
        super().__enter__()
        self._outer_path = os.environ.get("PYTHONPATH")
        self._outer_level = logging.getLogger("flwr").level
        # All that goes wrong comes back as a reply or ends the simulation; Flower would print it in between.
        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        self._thread = threading.Thread(target=self._simulate, name="flower")
        self._thread.start()
        try:
            count = min(len(self.federation), MOST_NODES)
            while len(self._nodes) < count and self._error is None:
                time.sleep(GLANCE)
                self._nodes = list(self._grid.get_node_ids()) if self._grid else []
            self._await_workers()  # what it takes to start is not the first round's, and what is wrong is said now
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ending.set()
        self._thread.join()
        logging.getLogger("flwr").setLevel(self._outer_level)
        if self._outer_path is None:  # Flower adds to it for its workers
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = self._outer_path
        super().__exit__(kind, error, trace)

    def _simulate(self) -> None:
        """Flower's simulation from its beginning to its end, in a thread: its server app does nothing but lend us its grid."""
        server_app = ServerApp()

        @server_app.main()
        def main(grid: Grid, context: Context) -> None:
            self._grid = grid
            self._ending.wait()

        start: dict[str, Any] = {"logging_level": logging.CRITICAL, "log_to_driver": False}
        if not os.environ.get("RAY_ADDRESS"):  # a cluster that is there has as many as it has
            start["num_cpus"] = self.threads
        backend: dict[str, dict[str, Any]] = {"client_resources": dict(WORKER), "init_args": start}
        try:
            run_simulation(server_app, client_app(self._place), min(len(self.federation), MOST_NODES), backend_config=backend)
        except BaseException as error:  # also Flower's SystemExit: it ends this thread alone, and nobody would hear of it
            self._error = error
        finally:
            self._ending.set()
