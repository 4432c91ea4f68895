"""Examples as fixed-shape bins: the packed batch of the update.

A bin holds one or more prefix trees (`prefix_tree`), then padding. Loss terms are gathered: the term
of response token t of a row reads the hidden state at its source, the place of the row's token
P + t - 1 (P prompt tokens), and scores the target id at P + t. Rows that add no token to a tree (equal
rows, prefixes of others) keep their own terms.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float32, Int32

from actionopd_jax.errors import PackingError
from actionopd_jax.learning.binning import BinPlan, plan_bins
from actionopd_jax.learning.prefix_tree import SortedRows, lay_out, sort_rows
from actionopd_jax.records import Example

PackingMode = Literal["tree", "rows"]

_SMALLEST_TERMS = 128  # loss-term lists are padded to this times a power of two


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackingStats:
    """What packing saved and wasted.

    Attributes:
        row_tokens: prompt and response tokens of all rows, row by row.
        packed_tokens: tokens laid out, padding not counted.
        repeated_tokens: of these, how many only because trees were cut.
        slots: tokens computed, padding included.
        num_terms: loss terms (response tokens).
    """

    row_tokens: int
    packed_tokens: int
    repeated_tokens: int
    slots: int
    num_terms: int

    @property
    def token_ratio(self) -> float:
        """How many times fewer tokens than row by row."""
        return self.row_tokens / self.packed_tokens

    @property
    def padding_fraction(self) -> float:
        return 1.0 - self.packed_tokens / self.slots


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedBins:
    """Bins of one shape. Token i of a bin sees token j exactly when `j <= i < end[j]`.

    Attributes:
        tokens: ids; 0 in padding.
        positions: depth in the tree; 0 in padding.
        end: see above; a padding token sees itself only.
        source: where in the bin a term reads its hidden state.
        target: the id it scores.
        weight: its weight.
        old_logprobs: log-probabilities before the update; 0 until scored.
        active: False in the padding of the term list.
        row: index of the example; -1 in padding.
        offset: which response token of the example; -1 in padding.
        stats: sizes.
    """

    tokens: Int32[np.ndarray, "bins tokens"]
    positions: Int32[np.ndarray, "bins tokens"]
    end: Int32[np.ndarray, "bins tokens"]
    source: Int32[np.ndarray, "bins terms"]
    target: Int32[np.ndarray, "bins terms"]
    weight: Float32[np.ndarray, "bins terms"]
    old_logprobs: Float32[np.ndarray, "bins terms"]
    active: Bool[np.ndarray, "bins terms"]
    row: Int32[np.ndarray, "bins terms"]
    offset: Int32[np.ndarray, "bins terms"]
    stats: PackingStats

    @property
    def num_bins(self) -> int:
        return self.tokens.shape[0]

    def with_old_logprobs(self, old_logprobs: Float32[np.ndarray, "bins terms"]) -> "PackedBins":
        """The same bins with scored terms; padding stays 0."""
        return dataclasses.replace(self, old_logprobs=np.where(self.active, old_logprobs, 0).astype(np.float32))

    def gather(self, values: Sequence[Float32[np.ndarray, " response"]]) -> Float32[np.ndarray, "bins terms"]:
        """One value per response token of each example, arranged like the terms; 0 in padding."""
        arranged = np.zeros(self.active.shape, np.float32)
        starts = np.concatenate([[0], np.cumsum([len(row) for row in values])])
        flat = np.concatenate([np.asarray(row, np.float32) for row in values])
        arranged[self.active] = flat[starts[self.row[self.active]] + self.offset[self.active]]
        return arranged


def pack(
    examples: Sequence[Example],
    bin_tokens: int,
    *,
    mode: PackingMode = "tree",
    bins_multiple: int = 1,
    bucketed: bool = True,
) -> PackedBins:
    """Packs examples into bins; the result depends on their order only through `row`.

    Args:
        examples: at least one.
        bin_tokens: tokens of a bin; rows are never cut, so the longest row must fit.
        mode: "tree" shares prefixes; "rows" gives every row a tree of its own (the reference).
        bins_multiple: the number of bins is a multiple of this (the bins of one micro-batch).
        bucketed: a small batch may use bins of half the size, a quarter, and so on.

    Raises:
        PackingError: a row that is longer than a bin.
        ValueError: no examples.
    """
    if not examples:
        raise ValueError("nothing to pack: no examples")
    rows = [np.concatenate([example.prompt_ids, example.response_ids]).astype(np.int32) for example in examples]
    for example, row in zip(examples, rows, strict=True):
        if len(row) > bin_tokens:
            raise PackingError(
                f"a row of {len(row)} tokens does not fit a bin of {bin_tokens} (group {example.group}, "
                f"trajectory {example.trajectory}): raise update.bin_tokens or lower the student's token limits"
            )
    ordered = sort_rows(rows, share=mode == "tree")
    plan = plan_bins(ordered, bin_tokens, multiple=bins_multiple, bucketed=bucketed)
    return _fill(examples, rows, ordered, plan)


def _fill(examples: Sequence[Example], rows: list[np.ndarray], ordered: SortedRows, plan: BinPlan) -> PackedBins:
    members = [[ordered.order[place] for span in spans for place in range(*span)] for spans in plan.bins]
    num_terms = [sum(len(examples[index].response_ids) for index in indices) for indices in members]
    shape = (len(plan.bins), plan.bin_tokens)
    terms = (len(plan.bins), term_slots(max(num_terms)))
    tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    end = np.broadcast_to(np.arange(1, plan.bin_tokens + 1, dtype=np.int32), shape).copy()
    source, target = np.zeros(terms, np.int32), np.zeros(terms, np.int32)
    weight, active = np.zeros(terms, np.float32), np.zeros(terms, bool)
    row, offset = np.full(terms, -1, np.int32), np.full(terms, -1, np.int32)
    packed_tokens = 0
    for b, spans in enumerate(plan.bins):
        start, term = 0, 0
        for first, last in spans:
            indices = ordered.order[first:last]
            prompts = [len(examples[index].prompt_ids) for index in indices]
            tree = lay_out([rows[index] for index in indices], ordered.shared[first:last].tolist(), [p - 1 for p in prompts])
            stop = start + len(tree.tokens)
            tokens[b, start:stop] = tree.tokens
            positions[b, start:stop] = tree.positions
            end[b, start:stop] = tree.end + start
            for index, path in zip(indices, tree.paths, strict=True):
                example, length = examples[index], len(examples[index].response_ids)
                here = slice(term, term + length)
                source[b, here] = path[:-1] + start
                target[b, here] = example.response_ids
                weight[b, here] = example.weights
                active[b, here] = True
                row[b, here] = index
                offset[b, here] = np.arange(length)
                term += length
            start = stop
        packed_tokens += start
    stats = PackingStats(
        row_tokens=ordered.num_row_tokens,
        packed_tokens=packed_tokens,
        repeated_tokens=plan.repeated_tokens,
        slots=plan.num_slots,
        num_terms=sum(num_terms),
    )
    return PackedBins(
        tokens=tokens,
        positions=positions,
        end=end,
        source=source,
        target=target,
        weight=weight,
        old_logprobs=np.zeros(terms, np.float32),
        active=active,
        row=row,
        offset=offset,
        stats=stats,
    )


def term_slots(num_terms: int) -> int:
    """Length of the padded term list of a bin with that many loss terms."""
    slots = _SMALLEST_TERMS
    while slots < num_terms:
        slots *= 2
    return slots
