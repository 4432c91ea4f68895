"""Greedy evaluation, pass^k, result tables."""
