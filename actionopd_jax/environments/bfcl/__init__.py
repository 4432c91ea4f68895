"""BFCL v4 multi-turn: 800 scripted conversations over eight small Python APIs, with the official tools and checker."""

from actionopd_jax.environments.bfcl.suite import BfclSuite

__all__ = ["BfclSuite"]
