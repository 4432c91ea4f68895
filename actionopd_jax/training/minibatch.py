"""Optimizer minibatches of all processes: one split into whole trajectories, one set of bins, the same everywhere.

Each process packs what it collected itself; bins are then exchanged, so that every process holds all of
them and computes the share of its devices. A process without examples takes part with no bins.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float32

from actionopd_jax.config import UpdateConfig
from actionopd_jax.errors import ConfigError, PackingError, UserError
from actionopd_jax.learning.packing import PackedBins, PackingStats, pack
from actionopd_jax.records import Example
from actionopd_jax.training import hosts

_BIN_FIELDS = ("tokens", "positions", "end")
_TERM_FIELDS = ("source", "target", "weight", "old_logprobs", "active", "row", "offset")


@dataclasses.dataclass(frozen=True)
class Minibatch:
    """Bins of one optimizer step, and where this process's own are among them.

    Attributes:
        bins: of all processes; `row` counts the examples of each process anew.
        behaviour: the sampler's log-probabilities arranged like this process's terms; None without.
        own: rows and columns of `bins` that `behaviour` belongs to.
    """

    bins: PackedBins
    behaviour: Float32[np.ndarray, "own_bins own_terms"] | None
    own: tuple[slice, slice]

    def mismatch(self, logprobs: Float32[np.ndarray, "bins terms"]) -> Float32[np.ndarray, " own_active"]:
        """Absolute difference from the sampler, for this process's terms."""
        if self.behaviour is None:
            return np.zeros(0, np.float32)
        return np.abs(logprobs[self.own] - self.behaviour)[self.bins.active[self.own]]


def make_minibatches(examples: Sequence[Example], config: UpdateConfig, bins_multiple: int) -> list[Minibatch]:
    """Packs this process's examples and everybody else's.

    Args:
        examples: of this process.
        bins_multiple: the number of bins of a minibatch is a multiple of this.

    Raises:
        ConfigError: a group that is larger than a minibatch.
        PackingError: a row that no bin can hold.
        RunStateError: another process has met one of these.
    """
    units, error = [], None
    try:
        units = _units(examples, config)
        _check_lengths(examples, config)
    except UserError as caught:
        error = caught
    hosts.fail_together(error)
    sizes = hosts.gather_rows(np.array([len(unit) for unit in units], np.int32))
    first = sum(len(rows) for rows in sizes[: jax.process_index()])
    minibatches = []
    for members in _fill([int(size) for rows in sizes for size in rows], config.minibatch_candidates):
        own = [index - first for index in members if 0 <= index - first < len(units)]
        minibatches.append(_pack([examples[row] for unit in own for row in units[unit]], config, bins_multiple))
    return minibatches


def split_minibatches(examples: Sequence[Example], config: UpdateConfig) -> list[list[int]]:
    """Indices of examples, in minibatches that keep groups whole (trajectories where they fit), in order of appearance.

    Raises:
        ConfigError: a group that is larger than a minibatch.
    """
    units = _units(examples, config)
    filled = _fill([len(unit) for unit in units], config.minibatch_candidates)
    return [[row for unit in members for row in units[unit]] for members in filled]


def _units(examples: Sequence[Example], config: UpdateConfig) -> list[list[int]]:
    """Rows that stay together: a group, or a whole trajectory unless it is larger than a minibatch."""
    limit = config.minibatch_candidates
    groups: dict[tuple[str, str], list[int]] = {}
    for index, example in enumerate(examples):
        groups.setdefault((example.trajectory, example.group), []).append(index)
    trajectories: dict[str, list[list[int]]] = {}
    for (trajectory, group), rows in groups.items():
        if len(rows) > limit:
            raise ConfigError(
                f"group {group} of trajectory {trajectory} has {len(rows)} rows, more than "
                f"update.minibatch_candidates {limit}; raise it"
            )
        trajectories.setdefault(trajectory, []).append(rows)
    if config.minibatch_by == "groups":
        return list(groups.values())
    units: list[list[int]] = []
    for parts in trajectories.values():
        whole = [row for rows in parts for row in rows]
        units.extend([whole] if len(whole) <= limit else parts)
    return units


def _check_lengths(examples: Sequence[Example], config: UpdateConfig) -> None:
    for example in examples:
        length = len(example.prompt_ids) + len(example.response_ids)
        if length > config.bin_tokens:
            raise PackingError(
                f"a row of {length} tokens does not fit a bin of {config.bin_tokens} (group {example.group}, "
                f"trajectory {example.trajectory}): raise update.bin_tokens or lower the student's token limits"
            )


def _fill(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Consecutive units, as many as fit."""
    minibatches: list[list[int]] = []
    rows = limit
    for index, size in enumerate(sizes):
        if rows + size > limit:
            minibatches.append([])
            rows = 0
        minibatches[-1].append(index)
        rows += size
    return minibatches


def _pack(examples: Sequence[Example], config: UpdateConfig, bins_multiple: int) -> Minibatch:
    alone = jax.process_count() == 1
    bin_tokens, multiple = config.bin_tokens, bins_multiple if alone else 1
    bins = pack(examples, config.bin_tokens, mode=config.packing, bins_multiple=multiple) if examples else None
    if not alone:
        bin_tokens = int(hosts.gather_numbers([0 if bins is None else bins.tokens.shape[1]]).max())
        if bins is not None and bins.tokens.shape[1] < bin_tokens:
            bins = pack(examples, bin_tokens, mode=config.packing, bucketed=False)
    given = [example.behaviour_logprobs for example in examples if example.behaviour_logprobs is not None]
    behaviour = bins.gather(given) if bins is not None and len(given) == len(examples) else None
    if alone:
        if bins is None:
            raise ValueError("nothing to pack: no examples")
        return Minibatch(bins, behaviour, (slice(None), slice(None)))
    return _exchange(bins, bin_tokens, behaviour, bins_multiple)


def _exchange(
    own: PackedBins | None, bin_tokens: int, behaviour: Float32[np.ndarray, "bins terms"] | None, multiple: int
) -> Minibatch:
    num_bins, num_terms = (0, 0) if own is None else own.active.shape
    sizes = hosts.gather_numbers([num_bins, num_terms])
    total, terms = int(sizes[:, 0].sum()), int(sizes[:, 1].max())
    start = int(sizes[: jax.process_index(), 0].sum())
    padding = -total % multiple
    arrays: dict[str, np.ndarray] = {}
    empty = _empty_bins(bin_tokens, terms)
    for name in (*_BIN_FIELDS, *_TERM_FIELDS):
        mine = np.repeat(empty[name], num_bins, axis=0)
        if own is not None:
            part = getattr(own, name)
            mine[:, : part.shape[1]] = part
        everyone = hosts.gather_rows(mine)
        arrays[name] = np.concatenate([*everyone, np.repeat(empty[name], padding, axis=0)])
    stats = (0, 0, 0, 0, 0) if own is None else dataclasses.astuple(own.stats)
    sums = hosts.gather_numbers(stats).sum(axis=0, dtype=np.int64).tolist()
    names = [field.name for field in dataclasses.fields(PackingStats)]
    figures = {**dict(zip(names, sums, strict=True)), "slots": (total + padding) * bin_tokens}
    bins = PackedBins(**arrays, stats=PackingStats(**figures))
    return Minibatch(bins, behaviour, (slice(start, start + num_bins), slice(0, num_terms)))


def _empty_bins(bin_tokens: int, terms: int) -> dict[str, np.ndarray]:
    """One bin of padding."""
    tokens, row = np.zeros((1, bin_tokens), np.int32), np.zeros((1, terms), np.int32)
    return {
        "tokens": tokens,
        "positions": tokens,
        "end": np.arange(1, bin_tokens + 1, dtype=np.int32)[None],
        "source": row,
        "target": row,
        "weight": row.astype(np.float32),
        "old_logprobs": row.astype(np.float32),
        "active": row.astype(bool),
        "row": row - 1,
        "offset": row - 1,
    }
