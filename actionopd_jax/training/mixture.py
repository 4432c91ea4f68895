"""Which tasks a step starts from: a fixed number from each source, shuffled anew every epoch.

Grain does the work: the order depends on the seed alone, and the position is the whole state.
"""

from collections.abc import Sequence

import grain
import msgspec

from actionopd_jax import seeds
from actionopd_jax.errors import ConfigError, RunStateError
from actionopd_jax.records import Task, digest

_GRAIN_SEED_BITS = 32


class _State(msgspec.Struct, frozen=True):
    """Positions of all sources; `tasks`: digest of what they are positions in."""

    tasks: str
    positions: list[dict[str, int]]


class TaskMixture:
    """An endless sequence of steps, each a list of tasks.

    Every source is shuffled per epoch without replacement; its epochs run on across steps, so that a
    task comes back only after all others of its source have been used.

    Args:
        sources: (tasks, starts per step) each; tasks of a step come in the order of the sources.
        seed: seed of the run.
    """

    def __init__(self, sources: Sequence[tuple[Sequence[Task], int]], seed: int) -> None:
        for i, (tasks, starts) in enumerate(sources):
            if not tasks:
                raise ConfigError(f"sources[{i}] has no tasks; check its environment and split")
            if starts < 1:
                raise ConfigError(f"sources[{i}].starts_per_step must be at least 1, got {starts}")
        self._starts = [starts for _, starts in sources]
        self._tasks_digest = digest({"seed": seed, "sources": [[[task.key for task in tasks], n] for tasks, n in sources]})
        # No prefetching: tasks are in memory, and the position then says exactly what was handed out.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._iterators = [
            iter(
                grain.MapDataset.source(list(tasks))
                .seed(seeds.derive("mixture", seed, i) >> (63 - _GRAIN_SEED_BITS))
                .shuffle()
                .repeat()
                .to_iter_dataset(options)
            )
            for i, (tasks, _) in enumerate(sources)
        ]

    @property
    def starts_per_step(self) -> int:
        return sum(self._starts)

    def next_step(self) -> list[Task]:
        """The tasks of the next step."""
        return [next(tasks) for tasks, starts in zip(self._iterators, self._starts, strict=True) for _ in range(starts)]

    def state(self) -> bytes:
        """Where the mixture stands: for a checkpoint."""
        return msgspec.json.encode(_State(self._tasks_digest, [iterator.get_state() for iterator in self._iterators]))

    def restore(self, state: bytes) -> None:
        """Continues exactly after the step at which `state` was taken.

        Raises:
            RunStateError: it is damaged, or was taken with other tasks, sources or another seed.
        """
        try:
            decoded = msgspec.json.decode(state, type=_State)
        except msgspec.DecodeError as error:
            raise RunStateError(f"the task sampler's state in the checkpoint is damaged: {error}") from error
        if decoded.tasks != self._tasks_digest:
            raise RunStateError(
                "the checkpoint was taken with other tasks, sources or another seed; use the data it was started with, "
                "or choose another --workdir"
            )
        for iterator, position in zip(self._iterators, decoded.positions, strict=True):
            iterator.set_state(position)
