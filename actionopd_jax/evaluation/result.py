"""What an evaluation comes to: figures of a set of episodes."""

import collections
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from actionopd_jax.errors import EnvironmentFailure
from actionopd_jax.evaluation.passk import bootstrap_interval, mean_pass_hat_k
from actionopd_jax.records import JsonObject, Score
from actionopd_jax.rollout.episode import Episode


class EvaluationResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Figures of an evaluation, unrounded.

    Episodes whose environment failed have no score: they count in `num_unscored` and `ends`, and in
    no other figure. A task without any scored episode counts in `num_unscored_tasks` alone.

    Attributes:
        identity: what was evaluated (student, suite version, decoding settings, …).
        num_tasks: tasks with at least one scored episode.
        success: share of scored episodes that succeed, averaged per task (equals pass^1).
        success_interval: 95 % bootstrap interval of `success`, tasks resampled.
        pass_4: mean over the tasks with at least 4 scored trials; None when there are none.
        partial: mean partial score, averaged per task.
        invalid: share of scored episodes that an invalid response ended; `invalid_reasons` counts them.
        decisions, response_tokens: means per scored episode.
        ends: how often each end reason occurred.
    """

    identity: JsonObject
    trials: int
    num_tasks: int
    num_episodes: int
    num_unscored: int
    num_unscored_tasks: int
    success: float
    success_interval: tuple[float, float]
    pass_1: float
    pass_4: float | None
    partial: float
    invalid: float
    decisions: float
    response_tokens: float
    ends: dict[str, int]
    invalid_reasons: dict[str, int]


def summarise(episodes: Sequence[Episode], trials: int, identity: JsonObject, seed: int = 0) -> EvaluationResult:
    """Figures of `episodes`; their order does not matter. `seed` is that of the bootstrap.

    Raises:
        EnvironmentFailure: no episode could be scored.
    """
    scored = [(episode, episode.score) for episode in sorted(episodes, key=_name) if episode.score is not None]
    if not scored:
        details = sorted({episode.end_detail for episode in episodes if episode.end_detail})
        raise EnvironmentFailure(f"none of {len(episodes)} episodes could be scored{': ' + details[0] if details else ''}")
    by_task: dict[str, list[Score]] = collections.defaultdict(list)
    for episode, score in scored:
        by_task[episode.task.key].append(score)
    counts = [(sum(score.success for score in scores), len(scores)) for scores in by_task.values()]
    enough_for_4 = [(successes, n) for successes, n in counts if n >= 4]
    success = mean_pass_hat_k(counts, 1)
    return EvaluationResult(
        identity=identity,
        trials=trials,
        num_tasks=len(by_task),
        num_episodes=len(episodes),
        num_unscored=len(episodes) - len(scored),
        num_unscored_tasks=len({episode.task.key for episode in episodes} - by_task.keys()),
        success=success,
        success_interval=bootstrap_interval(np.array([successes / n for successes, n in counts]), seed),
        pass_1=success,
        pass_4=mean_pass_hat_k(enough_for_4, 4) if enough_for_4 else None,
        partial=float(np.mean([np.mean([score.partial for score in scores]) for scores in by_task.values()])),
        invalid=float(np.mean([episode.invalid for episode, _ in scored])),
        decisions=float(np.mean([episode.decisions for episode, _ in scored])),
        response_tokens=float(np.mean([episode.response_tokens for episode, _ in scored])),
        ends=_counts(episode.end.value for episode in episodes),
        invalid_reasons=_counts(episode.invalid_reason for episode, _ in scored if episode.invalid),
    )


def _name(episode: Episode) -> tuple[str, int]:
    return episode.task.key, episode.trial


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(collections.Counter(names).items()))
