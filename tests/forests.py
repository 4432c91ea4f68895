"""Hypothesis strategy for rows that share prefixes in every way that they can."""

import numpy as np
from hypothesis import strategies as st

from actionopd_jax.records import Example

MAX_ROWS, MAX_TOKENS = 13, 100


def make_example(prompt, response, weights=None, group="g", trajectory="t"):
    weights = np.ones(len(response)) if weights is None else weights
    return Example(
        np.array(prompt, np.int32), np.array(response, np.int32), np.array(weights, np.float32), group, trajectory
    )


@st.composite
def forests(draw):
    """Rows grown from one another: branches, duplicates, prefixes of others, prompts of one token."""
    alphabet = draw(st.integers(1, 3))
    ids = st.lists(st.integers(0, alphabet), min_size=1, max_size=40)
    rows = [draw(st.lists(st.integers(0, alphabet), min_size=2, max_size=60))]
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.sampled_from(rows))
        keep = draw(st.integers(1, len(parent)))
        rows.append((parent[:keep] + draw(st.just([]) | ids))[:100] if keep > 1 else parent[:1] + draw(ids))
    rows = draw(st.permutations(rows))
    return [make_example(row[:cut], row[cut:]) for row in rows for cut in [draw(st.integers(1, len(row) - 1))]]
