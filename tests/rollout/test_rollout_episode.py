import asyncio
import threading

import msgspec
import pytest
from rollout_doubles import INVALID, CounterSuite, Prompts, student, task

from actionopd_jax import seeds
from actionopd_jax.errors import ServiceError
from actionopd_jax.records import EndReason, Sampling
from actionopd_jax.rollout.episode import Episode, greedy, play


def run(learner, suite, timeout_s=60.0, max_decisions=5, trial=2):
    return asyncio.run(
        play(
            task(),
            suite,
            learner,
            greedy(64),
            max_decisions=max_decisions,
            trial=trial,
            seed=9,
            environment_timeout_s=timeout_s,
        )
    )


def test_greedy_is_deterministic_decoding():
    assert greedy(64) == Sampling(temperature=0.0, top_p=1.0, top_k=0, max_tokens=64)


def test_play_until_done_scores_success():
    learner = student([1])
    episode = run(learner, CounterSuite(target=3))
    assert (episode.task, episode.trial, episode.end) == (task(), 2, EndReason.DONE)
    assert episode.score.success
    assert (episode.decisions, episode.environment_steps, episode.response_tokens) == (3, 3, 9)
    assert (episode.invalid, episode.invalid_reason, episode.truncated) == (False, "", 0)
    assert [(sampling, n) for _, sampling, n, _ in learner.sampler.calls] == [(greedy(64), 1)] * 3
    assert [seed for *_, seed in learner.sampler.calls] == [
        seeds.derive(9, "episode", "counter/train/three", 2, decision) for decision in range(3)
    ]


def test_play_invalid_response_ends_with_the_score_as_it_is():
    episode = run(student(lambda ids, n, seed: [1 if ids[0] == 2 else INVALID]), CounterSuite(target=4))
    assert episode.end is EndReason.INVALID_ACTION
    assert (episode.invalid, episode.invalid_reason) == (True, "malformed_json")
    assert (episode.decisions, episode.environment_steps, episode.truncated) == (2, 1, 1)
    assert episode.score.partial == pytest.approx(0.25)
    assert not episode.score.success


@pytest.mark.parametrize(
    ("learner", "end"),
    [(student([1]), EndReason.DECISION_LIMIT), (student([1], prompts=Prompts(budget=4)), EndReason.CONTEXT)],
)
def test_play_limits_end_the_episode(learner, end):
    episode = run(learner, CounterSuite(target=9), max_decisions=3)
    assert episode.end is end
    assert not episode.score.success


def test_play_hung_environment_has_no_score():
    gate = threading.Event()
    try:
        episode = run(student([1]), CounterSuite(faults={"step": gate.wait}), timeout_s=1.0)
    finally:
        gate.set()
    assert (episode.end, episode.score) == (EndReason.ENVIRONMENT_FAILURE, None)


def test_play_failing_sampler_raises():
    learner = student([1, 1])  # two responses where one was asked for
    with pytest.raises(ServiceError):
        run(learner, CounterSuite())


def test_episode_survives_json():
    episode = run(student([1]), CounterSuite(target=2))
    assert msgspec.json.decode(msgspec.json.encode(episode), type=Episode) == episode
