"""pass^k: the chance that k independent trials of a task all succeed, and how percentages are shown."""

import math
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal

import numpy as np
from jaxtyping import Float64

from actionopd_jax import seeds


def pass_hat_k(num_successes: int, num_trials: int, k: int) -> float:
    """Unbiased estimate of one task's pass^k (paper, B.3):

        pass^k = C(c, k) / C(n, k)        c successes in n trials

    so that pass^1 = c / n.

    Raises:
        ValueError: k is not in 1..n, or c not in 0..n.
    """
    if not 1 <= k <= num_trials:
        raise ValueError(f"pass^{k} of {num_trials} trials is undefined: k must be between 1 and the number of trials")
    if not 0 <= num_successes <= num_trials:
        raise ValueError(f"{num_successes} successes in {num_trials} trials")
    return math.comb(num_successes, k) / math.comb(num_trials, k)


def mean_pass_hat_k(counts: Sequence[tuple[int, int]], k: int) -> float:
    """Mean of `pass_hat_k` over tasks, each (successes, trials)."""
    if not counts:
        raise ValueError("no tasks to average over")
    return math.fsum(pass_hat_k(successes, trials, k) for successes, trials in counts) / len(counts)


def bootstrap_interval(
    task_means: Float64[np.ndarray, " tasks"], seed: int, level: float = 0.95, num_resamples: int = 10_000
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over tasks.

    Tasks are resampled, never trials: trials of one task are not independent observations of the domain.
    """
    random = seeds.numpy_random("bootstrap", seed)
    # One resample at a time: tasks × resamples would not fit for a large benchmark.
    means = np.array([random.choice(task_means, size=len(task_means)).mean() for _ in range(num_resamples)])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def percent(fraction: float) -> str:
    """A fraction in per cent with one decimal, halves rounded away from zero; for display only.

    The shortest decimal that stands for the float is rounded, so that 0.1235 gives 12.4 although the
    binary number is a little smaller.
    """
    return f"{(Decimal(repr(float(fraction))) * 100).quantize(Decimal('0.1'), ROUND_HALF_UP) + Decimal(0)}"
