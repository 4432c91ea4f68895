"""Prompts and settings that the sampler's tests share, and how they ask."""

import asyncio

import numpy as np

from actionopd_jax.models.sampler import _SMALLEST_SUFFIX
from actionopd_jax.records import Sampling

NO_END = 96  # beyond `num_valid_ids`: never drawn
RANDOM = Sampling(temperature=0.6, top_p=0.95, top_k=20, max_tokens=10)
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_tokens=10)
_RNG = np.random.default_rng(0)
SHARED = tuple(int(x) for x in _RNG.integers(0, 90, 70))  # a registered prefix; 64 of them are used
PROMPTS = [tuple(int(x) for x in _RNG.integers(0, 90, length)) for length in (1, 5, 63, 127, 128)]
LONG = tuple(int(x) for x in _RNG.integers(0, 90, _SMALLEST_SUFFIX + 12))  # of another shape
PREFIXED = [SHARED + prompt for prompt in PROMPTS[:3]]


def generate(sampler, prompts, sampling=RANDOM, n=4, seeds=None):
    """All prompts at the same time, in this order."""

    async def run():
        asked = zip(prompts, seeds or [seed_of(prompt) for prompt in prompts], strict=True)
        return await asyncio.gather(*(sampler.generate(prompt, sampling, n, seed) for prompt, seed in asked))

    return asyncio.run(run())


def seed_of(prompt):
    """A seed of more than 32 bits that belongs to the prompt."""
    return sum((i + 1) * token for i, token in enumerate(prompt)) * 1_000_003**2
