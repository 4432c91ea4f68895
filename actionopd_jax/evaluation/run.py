"""Plays every task of an evaluation, several at once; what was played is kept and not played again."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from actionopd_jax.errors import RunStateError
from actionopd_jax.evaluation.result import EvaluationResult, summarise
from actionopd_jax.records import JsonObject, Task, encode
from actionopd_jax.rollout.episode import Episode
from actionopd_jax.training.workdir import append_line, complete_lines, rewrite_lines

Play = Callable[[Task, int], Awaitable[Episode]]
"""Plays a task for the given trial (0, 1, …); its seed derives from both."""

Progress = Callable[[int, int], None]
"""Called with (episodes finished, episodes in all), first with those found on disk."""


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First line of a record file: what its episodes belong to."""

    identity: JsonObject


async def evaluate(
    tasks: Sequence[Task],
    trials: int,
    play: Play,
    *,
    identity: JsonObject,
    records: Path,
    concurrency: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> EvaluationResult:
    """Plays each task `trials` times, at most `concurrency` episodes at once, and returns the figures.

    Finished episodes are appended to `records` (JSON lines). A second call with the same file and
    identity plays only what is missing, and once more the episodes whose environment failed; more
    tasks or trials may be asked for then.

    `identity` names everything that determines an episode besides task and trial: student and its
    version, suite version, decoding settings, limits, seed. `seed` is that of the bootstrap interval.

    Raises:
        RunStateError: `records` is damaged or belongs to another identity.
        EnvironmentFailure: no episode could be scored.
        ExceptionGroup: a service failed; the episodes finished by then are kept.
    """
    wanted = {(task.key, trial): task for trial in range(trials) for task in tasks}
    if len(wanted) != len(tasks) * trials or not wanted:
        raise ValueError("tasks must differ from each other, and there must be at least one task and one trial")
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, got {concurrency}")
    finished = {name: episode for name, episode in _resume(records, identity).items() if name in wanted}
    missing = [(name, task) for name, task in wanted.items() if name not in finished or finished[name].score is None]
    num_done = len(wanted) - len(missing)
    if progress is not None:
        progress(num_done, len(wanted))

    queue = iter(missing)

    async def work() -> None:
        nonlocal num_done
        for (key, trial), task in queue:
            episode = await play(task, trial)
            append_line(records, encode(episode))
            finished[key, trial] = episode
            num_done += 1
            if progress is not None:
                progress(num_done, len(wanted))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(missing))):
            group.create_task(work())
    return summarise(list(finished.values()), trials, identity, seed)


def _resume(records: Path, identity: JsonObject) -> dict[tuple[str, int], Episode]:
    """Episodes on disk by (task key, trial); leaves a file that ends with a complete line."""
    lines = complete_lines(records)
    header = encode(_Header(identity))
    if not lines:
        records.parent.mkdir(parents=True, exist_ok=True)
        rewrite_lines(records, [header])
        return {}
    try:
        stored = msgspec.json.decode(lines[0], type=_Header)
        episodes = [msgspec.json.decode(line, type=Episode) for line in lines[1:]]
    except msgspec.DecodeError as error:
        raise RunStateError(f"evaluation records {records} are damaged: {error}; delete the file") from error
    if encode(stored) != header:
        was, now = stored.identity, msgspec.json.decode(encode(identity))
        names = ", ".join(sorted(key for key in {*was, *now} if was.get(key) != now.get(key)))
        raise RunStateError(f"evaluation records {records} belong to another evaluation (other {names}); delete the file")
    rewrite_lines(records, lines)
    return {(episode.task.key, episode.trial): episode for episode in episodes}
