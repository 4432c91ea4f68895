"""Updating: optimizer state, the update step, checkpoints, metrics, the task mixture."""
