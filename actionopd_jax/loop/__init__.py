"""The loop: the only place that knows collecting and updating (paper, Algorithm 1)."""

from actionopd_jax.loop.evaluate import evaluate
from actionopd_jax.loop.export import export
from actionopd_jax.loop.train import train

__all__ = ["evaluate", "export", "train"]
