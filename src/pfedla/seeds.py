"""Every random draw comes from (seed, purpose, round, client), so it does not depend on who draws first or where."""

import hashlib

import numpy as np
import torch


def derived_seed(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    digest = hashlib.sha256(f"{seed}/{purpose}/{round}/{client}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # torch takes 63 bits


def generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> torch.Generator:
    """A fresh stream of its own for one purpose of one client in one round."""
    return torch.Generator().manual_seed(derived_seed(seed, purpose, round, client))


def numpy_generator(seed: int, purpose: str) -> np.random.Generator:
    return np.random.default_rng(derived_seed(seed, purpose))
