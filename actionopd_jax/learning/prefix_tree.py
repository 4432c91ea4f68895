"""Rows that share prefixes, laid out as one sequence.

Rows sorted lexicographically visit their trie in preorder: each row adds only the tokens after its
longest common prefix with the row before, so the layout is the concatenation of these suffixes. One
integer per token is the whole attention mask: token j is visible to token i exactly when
`j <= i < end[j]`, where `end[j]` closes the subtree of j.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32, Int64


@dataclasses.dataclass(frozen=True, slots=True)
class SortedRows:
    """The order in which rows are laid out.

    Attributes:
        order: index of each row, first to last.
        lengths: tokens of each row, in this order.
        shared: tokens that each row has in common with the row before it (0 for the first).
    """

    order: tuple[int, ...]
    lengths: Int64[np.ndarray, " rows"]
    shared: Int64[np.ndarray, " rows"]

    @property
    def num_row_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_tree_tokens(self) -> int:
        """Nodes of the trie: what one uncut tree would hold."""
        return int((self.lengths - self.shared).sum())


def sort_rows(rows: Sequence[Int32[np.ndarray, " length"]], share: bool = True) -> SortedRows:
    """Sorts rows so that common prefixes are neighbours; equal rows keep their given order.

    Args:
        rows: token ids; any mixture of lengths.
        share: False pretends that no two rows have anything in common (the row-wise reference).
    """
    # Big-endian bytes compare like the (non-negative) ids, and a prefix sorts before its extensions.
    keys = [np.asarray(row, ">i4").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=lambda index: keys[index])
    lengths = np.array([len(rows[index]) for index in order], np.int64)
    shared = np.zeros(len(order), np.int64)
    if share:
        for place in range(1, len(order)):
            shared[place] = common_prefix(rows[order[place - 1]], rows[order[place]])
    return SortedRows(tuple(order), lengths, shared)


def common_prefix(first: Int32[np.ndarray, " m"], second: Int32[np.ndarray, " n"]) -> int:
    """How many leading tokens two rows have in common."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixTree:
    """A laid-out tree; indices are relative to its first token.

    Attributes:
        tokens: ids in preorder.
        positions: depth of each token.
        end: token j is visible to i exactly when `j <= i < end[j]`.
        paths: for each row, where its tokens from the asked depth on lie.
    """

    tokens: Int32[np.ndarray, " nodes"]
    positions: Int32[np.ndarray, " nodes"]
    end: Int32[np.ndarray, " nodes"]
    paths: tuple[Int32[np.ndarray, " tail"], ...]


def lay_out(rows: Sequence[Int32[np.ndarray, " length"]], shared: Sequence[int], path_from: Sequence[int]) -> PrefixTree:
    """Lays out consecutive sorted rows as one tree, in time linear in their tokens.

    Args:
        rows: rows in sorted order.
        shared: tokens each has in common with its predecessor; the first entry is ignored.
        path_from: the depth from which on a row's `paths` entry is wanted.
    """
    kept = [0, *(int(count) for count in shared[1:])]
    sizes = [len(row) - keep for row, keep in zip(rows, kept, strict=True)]
    total = sum(sizes)
    tokens = np.empty(total, np.int32)
    positions = np.empty(total, np.int32)
    end = np.full(total, total, np.int32)
    path = np.empty(max((len(row) for row in rows), default=0), np.int32)  # open node at each depth
    paths = []
    start, depth = 0, 0
    for row, keep, size, first in zip(rows, kept, sizes, path_from, strict=True):
        end[path[keep:depth]] = start  # what this row leaves is closed just before its first token
        depth = len(row)
        stop = start + size
        tokens[start:stop] = row[keep:]
        positions[start:stop] = np.arange(keep, depth)
        path[keep:depth] = np.arange(start, stop)
        paths.append(path[first:depth].copy())
        start = stop
    return PrefixTree(tokens, positions, end, tuple(paths))
