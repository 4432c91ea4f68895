"""Many task starts at once, with one behaviour snapshot, and none asked twice."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from actionopd_jax.errors import RunStateError
from actionopd_jax.records import Trajectory
from actionopd_jax.rollout.concurrency import together
from actionopd_jax.rollout.settings import GroupRules
from actionopd_jax.rollout.store import TrajectoryStore, step_path
from actionopd_jax.rollout.student import Student
from actionopd_jax.rollout.trajectory import TaskStart, collect_trajectory

Progress = Callable[[int, int, Trajectory], None]
"""Called with (finished, total, the trajectory that just finished)."""


def _silent(done: int, total: int, trajectory: Trajectory) -> None:
    """No report."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collector:
    """Collects the trajectories of a step.

    Attributes:
        folder: where the records of every step go.
        config_digest: digest of the settings that the records depend on.
        concurrent_tasks: how many environments are open at once.
        environment_timeout_s: deadline of each environment call.
    """

    rules: GroupRules
    student: Student
    run_seed: int
    folder: Path
    config_digest: str
    concurrent_tasks: int
    environment_timeout_s: float
    progress: Progress = _silent

    def __post_init__(self) -> None:
        if self.concurrent_tasks < 1:
            raise ValueError(f"concurrent_tasks must be at least 1, got {self.concurrent_tasks}")

    async def collect(self, starts: Sequence[TaskStart], step: int, policy_version: int) -> list[Trajectory]:
        """The trajectories of a step, in order of their start.

        Task starts that the step's file already holds are taken from there. Each other one is appended as
        soon as it is finished, so that an error or a cancellation loses only what was under way.

        Raises:
            ServiceError: a service failed for good; call again to go on with what is missing.
            RunStateError: the step's file belongs to another run, or names other tasks.
        """
        if len({begin.start for begin in starts}) != len(starts):
            raise ValueError("task starts of one step must differ in their position")
        path = step_path(self.folder, step)
        with TrajectoryStore(path, step=step, policy_version=policy_version, config_digest=self.config_digest) as store:
            _check_tasks(store, starts)
            for done, trajectory in enumerate(list(store.finished.values()), start=1):
                self.progress(done, len(starts), trajectory)
            slots = asyncio.Semaphore(self.concurrent_tasks)

            async def run(begin: TaskStart) -> None:
                async with slots:
                    trajectory = await collect_trajectory(
                        begin,
                        run_seed=self.run_seed,
                        step=step,
                        policy_version=policy_version,
                        rules=self.rules,
                        student=self.student,
                        environment_timeout_s=self.environment_timeout_s,
                    )
                    store.append(trajectory)
                    self.progress(len(store.finished), len(starts), trajectory)

            await together([run(begin) for begin in starts if begin.start not in store.finished])
            return [store.finished[start] for start in sorted(store.finished)]


def _check_tasks(store: TrajectoryStore, starts: Sequence[TaskStart]) -> None:
    planned = {begin.start: begin.task for begin in starts}
    for start, trajectory in store.finished.items():
        if planned.get(start) != trajectory.task:
            raise RunStateError(
                f"{store.path} holds {trajectory.task.key} at start {start}, where this run plans "
                f"{planned[start].key if start in planned else 'nothing'}; move the file away"
            )
