"""Randomness that derives from names, never from arrival order.

Every random draw of a run takes its seed from *what it is for* (run seed, step, task, decision, …),
so that concurrency, restarts and the number of hosts cannot change it.
"""

import hashlib
import random

import numpy as np

_BITS = 63  # fits a signed 64-bit integer, which SQLite and JAX keys both hold


def derive(*names: int | str) -> int:
    """A 63-bit seed from a path of names; equal paths give equal seeds on every machine."""
    digest = hashlib.blake2b(digest_size=8)
    for name in names:
        encoded = f"{type(name).__name__}:{name}".encode()
        digest.update(len(encoded).to_bytes(4, "big"))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "big") >> (64 - _BITS)


def python_random(*names: int | str) -> random.Random:
    """A `random.Random` seeded by `derive(*names)`."""
    return random.Random(derive(*names))


def numpy_random(*names: int | str) -> np.random.Generator:
    """A NumPy generator seeded by `derive(*names)`."""
    return np.random.default_rng(derive(*names))
