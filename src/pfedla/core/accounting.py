"""What private training costs: the noise that keeps an epsilon, and the epsilon that has been spent.

Opacus' RDP accountant composes the subsampled Gaussian mechanism over all steps. Only it is used of Opacus.
"""

import logging
import math
import warnings
from functools import cache
from typing import NamedTuple

from pfedla.core.errors import PfedlaError
from pfedla.core.privacy import Mechanism
from pfedla.core.settings import AUTO, Privacy
from pfedla.core.training import batch_bounds

TOLERANCE = 0.01  # of the epsilon for which the noise is sought: what is found is below it by at most so much


class Release(NamedTuple):
    """Steps of one kind."""

    noise: float  # multiplier
    rate: float
    steps: int


def design(privacy: Privacy, num_examples: int, batch_size: int, epochs: int) -> Mechanism:
    """Return how a client of so many examples is protected, so that all its planned `epochs` keep the epsilon."""
    if not num_examples:  # a client of a deployment that has not joined
        return Mechanism(privacy.max_grad_norm, 0.0, rate=0.0, steps=0, delta=0.0)
    delta = 0.1 / num_examples if privacy.delta == AUTO else privacy.delta
    if delta * num_examples >= 1:
        raise PfedlaError(
            f"privacy.delta = {delta:g}, but a client has {num_examples} training examples; take less than 1 / "
            f'{num_examples}, or "auto"'
        )
    steps, rate = len(list(batch_bounds(num_examples, batch_size))), min(1.0, batch_size / num_examples)
    noise = privacy.noise_multiplier
    if noise == "off":
        assert privacy.epsilon != "off"
        noise = find_noise(privacy.epsilon, rate, steps * epochs, delta)
    return Mechanism(privacy.max_grad_norm, noise, rate=rate, steps=steps, delta=delta)


@cache
def find_noise(epsilon: float, rate: float, steps: int, delta: float) -> float:
    """Return a noise multiplier with which so many steps cost at most epsilon, and hardly less."""
    if not steps:
        return 0.0
    from opacus.accountants.utils import get_noise_multiplier

    known = {"target_epsilon": epsilon, "target_delta": delta, "sample_rate": rate, "steps": steps}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an order at the end of the list: the bound is only less tight
            tolerance = min(TOLERANCE, TOLERANCE * epsilon)
            return float(get_noise_multiplier(**known, accountant="rdp", epsilon_tolerance=tolerance))
    except ValueError as error:
        raise PfedlaError(
            f"privacy.epsilon = {epsilon:g} cannot be kept over {steps} steps with delta = {delta:g} ({error}); "
            "use a larger epsilon, fewer rounds or fewer epochs"
        ) from None


@cache
def measure_epsilon(delta: float, *releases: Release) -> float:
    """Return the epsilon of all steps together."""
    history = [one for one in releases if one.steps]
    if not history or not all(one.noise for one in history):
        return math.inf if history else 0.0
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [tuple(one) for one in history]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta=delta))


def release(mechanism: Mechanism, epochs: int) -> Release:
    """Return what so many epochs release."""
    return Release(mechanism.noise_multiplier, mechanism.rate, epochs * mechanism.steps)


def spent(mechanism: Mechanism, epochs: int) -> float:
    """Return the epsilon of so many epochs under a mechanism."""
    return measure_epsilon(mechanism.delta, release(mechanism, epochs))


def check_installed() -> None:
    """Refuse privacy without the accountant."""
    try:
        logging.getLogger("opacus").setLevel(logging.ERROR)
        import opacus.accountants  # noqa: F401
    except ImportError as error:
        raise PfedlaError(f"[privacy] needs its accountant ({error}): pip install 'pfedla[privacy]'") from None
