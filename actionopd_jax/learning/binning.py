"""Which consecutive sorted rows form a tree, and which trees share a bin.

A cut before row r repeats the `shared[r]` tokens that r has in common with its predecessor. Cutting
at cheap places gives smaller trees that fill bins better; several such plans are compared.
"""

import dataclasses
import itertools

import numpy as np
from jaxtyping import Int64

from actionopd_jax.learning.prefix_tree import SortedRows

Span = tuple[int, int]
"""Rows `start` to `stop - 1` of the sorted order: one tree."""

_BLOCK = 256  # smaller bins stay whole attention blocks
_CHEAP_CUT_FRACTIONS = (512, 64, 16)  # plans also cut wherever a cut repeats at most bin_tokens / this
_SLACK = 1.1  # a larger bin is preferred while it costs at most this much more: fewer compiled shapes


@dataclasses.dataclass(frozen=True, slots=True)
class BinPlan:
    """Bins of `bin_tokens`, each a list of trees; bins may be empty (to fill a multiple)."""

    bin_tokens: int
    bins: tuple[tuple[Span, ...], ...]
    repeated_tokens: int

    @property
    def num_slots(self) -> int:
        """Tokens computed, padding included."""
        return self.bin_tokens * len(self.bins)


def bin_lengths(bin_tokens: int, longest_row: int) -> tuple[int, ...]:
    """`bin_tokens` and its halvings that still hold the longest row, longest first."""
    lengths = [bin_tokens]
    while (half := lengths[-1] // 2) >= max(_BLOCK, longest_row) and lengths[-1] % (2 * _BLOCK) == 0:
        lengths.append(half)
    return tuple(lengths)


def plan_bins(rows: SortedRows, bin_tokens: int, *, multiple: int = 1, bucketed: bool = True) -> BinPlan:
    """A plan with few computed tokens; deterministic.

    Args:
        rows: at least one row, none longer than `bin_tokens`.
        bin_tokens: the largest bin.
        multiple: the number of bins is rounded up to a multiple of this.
        bucketed: also consider halvings of `bin_tokens`.
    """
    lengths = bin_lengths(bin_tokens, int(rows.lengths.max())) if bucketed else (bin_tokens,)
    plans = [_plan_for_length(rows, length, multiple) for length in lengths]
    best = min(plan.num_slots for plan in plans)
    return next(plan for plan in plans if plan.num_slots <= best * _SLACK)


def _plan_for_length(rows: SortedRows, bin_tokens: int, multiple: int) -> BinPlan:
    # -1: cut only where a bin is full; 0: cut wherever it is free; then wherever it is cheap.
    thresholds = sorted({-1, 0, *(bin_tokens // fraction for fraction in _CHEAP_CUT_FRACTIONS)})
    plans = []
    for threshold in thresholds:
        spans = _cut(rows, bin_tokens, threshold)
        bins = _first_fit(spans, [tree_size(rows, span) for span in spans], bin_tokens)
        bins += [()] * (-len(bins) % multiple)
        plans.append(BinPlan(bin_tokens, tuple(bins), int(sum(rows.shared[start] for start, _ in spans))))
    return min(plans, key=lambda plan: (plan.num_slots, plan.repeated_tokens))


def tree_size(rows: SortedRows, span: Span) -> int:
    """Tokens of the tree of some consecutive rows."""
    start, stop = span
    return int(rows.shared[start] + (rows.lengths[start:stop] - rows.shared[start:stop]).sum())


def _cut(rows: SortedRows, bin_tokens: int, threshold: int) -> list[Span]:
    forced = [0, *(place for place in range(1, len(rows.shared)) if rows.shared[place] <= threshold), len(rows.shared)]
    spans: list[Span] = []
    for start, stop in itertools.pairwise(forced):
        cuts = _cheapest_cuts(rows.lengths[start:stop], rows.shared[start:stop], bin_tokens)
        spans += [(start + first, start + last) for first, last in cuts]
    return spans


def _cheapest_cuts(lengths: Int64[np.ndarray, " rows"], shared: Int64[np.ndarray, " rows"], bin_tokens: int) -> list[Span]:
    """Trees of at most `bin_tokens` that repeat as few tokens as possible (dynamic programming).

    `cost[j]`: fewest repeated tokens for rows before j. A tree of rows i..j-1 holds
    `shared[i] + written[j] - written[i]` tokens, which never grows with i.
    """
    count = len(lengths)
    written = np.concatenate([[0], np.cumsum(lengths - shared)])
    cost = np.zeros(count + 1, np.int64)
    came_from = np.zeros(count + 1, np.int64)
    repeats = np.concatenate([[0], shared[1:]])
    earliest = 0
    for stop in range(1, count + 1):
        while shared[earliest] + written[stop] - written[earliest] > bin_tokens:
            earliest += 1
        choices = cost[earliest:stop] + repeats[earliest:stop]
        came_from[stop] = earliest + int(choices.argmin())
        cost[stop] = choices.min()
    spans: list[Span] = []
    stop = count
    while stop > 0:
        start = int(came_from[stop])
        spans.append((start, stop))
        stop = start
    return spans[::-1]


def _first_fit(spans: list[Span], sizes: list[int], bin_tokens: int) -> list[tuple[Span, ...]]:
    """First-fit decreasing: the largest trees are placed first, each in the first bin with room."""
    free: list[int] = []
    bins: list[list[Span]] = []
    for index in sorted(range(len(spans)), key=lambda index: (-sizes[index], index)):
        place = next((place for place, room in enumerate(free) if room >= sizes[index]), len(bins))
        if place == len(bins):
            free.append(bin_tokens)
            bins.append([])
        free[place] -= sizes[index]
        bins[place].append(spans[index])
    return [tuple(sorted(members)) for members in bins]
