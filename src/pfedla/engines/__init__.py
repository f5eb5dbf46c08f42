"""Where the clients live. Engines take and give CPU tensors; the device is their own affair."""

from collections.abc import Callable

from pfedla.contracts import Algorithm, Recalibrate
from pfedla.data.federation import Federation
from pfedla.engines.choice import FLOWER, check_flower
from pfedla.engines.clients import NO_FAULTS, SimulatedClients
from pfedla.engines.threaded import ThreadedEngine
from pfedla.engines.vectorized import VectorizedEngine
from pfedla.errors import unknown
from pfedla.faults import Faults

ENGINES: dict[str, type[SimulatedClients]] = {"threaded": ThreadedEngine, "vectorized": VectorizedEngine}
ENGINE_NAMES = (*ENGINES, FLOWER)


def create_engine(
    name: str, algorithm: Algorithm, federation: Federation, *, device: str, threads: int, recalibrate: Recalibrate,
    compile: bool = False, faults: Faults = NO_FAULTS, stopping: Callable[[], bool] = lambda: False,
) -> SimulatedClients:  # fmt: skip
    if name not in ENGINE_NAMES:
        raise unknown("engine", name, ENGINE_NAMES)
    if name == FLOWER:
        check_flower(device)
        from pfedla.flower.simulation import FlowerSimulation  # an extra, and seconds to import
    kind = FlowerSimulation if name == FLOWER else ENGINES[name]
    return kind(
        algorithm, federation, device=device, threads=threads, recalibrate=recalibrate, compile=compile, faults=faults,
        stopping=stopping,
    )  # fmt: skip
