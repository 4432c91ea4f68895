"""Collecting: one state group, one trajectory, many at once, and the durable record of them."""
