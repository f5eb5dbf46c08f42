"""Where the clients live. Engines take and give CPU tensors; the device is their own affair."""

from collections.abc import Callable

from pfedla.contracts import Algorithm, Recalibrate
from pfedla.data.federation import Federation
from pfedla.engines.clients import NO_FAULTS, SimulatedClients
from pfedla.engines.threaded import ThreadedEngine
from pfedla.engines.vectorized import VectorizedEngine
from pfedla.errors import unknown
from pfedla.faults import Faults

ENGINES: dict[str, type[SimulatedClients]] = {"threaded": ThreadedEngine, "vectorized": VectorizedEngine}


def create_engine(
    name: str, algorithm: Algorithm, federation: Federation, *, device: str, threads: int, recalibrate: Recalibrate,
    compile: bool = False, faults: Faults = NO_FAULTS, stopping: Callable[[], bool] = lambda: False,
) -> SimulatedClients:  # fmt: skip
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    return ENGINES[name](
        algorithm, federation, device=device, threads=threads, recalibrate=recalibrate, compile=compile, faults=faults,
        stopping=stopping,
    )  # fmt: skip
