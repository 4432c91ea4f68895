"""What processes tell each other: every process calls these functions in the same order, with whatever it has.

With one process they return at once what they were given.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from actionopd_jax.errors import RunStateError, UserError


def gather_rows(values: np.ndarray) -> list[np.ndarray]:
    """Each process's array, in process order; they may differ in length along the first dimension, and be empty."""
    if jax.process_count() == 1:
        return [values]
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(values)))).reshape(-1)
    padded = np.zeros((int(lengths.max()), *values.shape[1:]), values.dtype)
    if padded.size == 0:
        return [padded[:0] for _ in lengths]
    padded[: len(values)] = values
    everyone = np.asarray(multihost_utils.process_allgather(padded))
    return [rows[:length] for rows, length in zip(everyone, lengths, strict=True)]


def gather_numbers(values: Sequence[int]) -> np.ndarray:
    """Whole numbers of each process, `[processes, len(values)]`; every process gives as many, below 2**31."""
    return np.stack(gather_rows(np.asarray([values], np.int32)))[:, 0]


def fail_together(error: UserError | None) -> None:
    """Raises on every process when one of them has an error, so that none waits for another for ever.

    Raises:
        UserError: this process's own error.
        RunStateError: another process has one.
    """
    failed = gather_numbers([error is not None])[:, 0]
    if error is not None:
        raise error
    if failed.any():
        raise RunStateError(f"process {int(failed.argmax())} of this run stopped with an error; its own output says which")
