"""Playing a task without a teacher: what evaluation measures (paper, B.3)."""

import time

import msgspec

from actionopd_jax import seeds
from actionopd_jax.chat.prompt import Prompt
from actionopd_jax.protocols import Suite
from actionopd_jax.records import End, EndReason, Finish, Invalid, Sampling, Score, Task
from actionopd_jax.rollout.interaction import Chosen, interact
from actionopd_jax.rollout.student import Student
from actionopd_jax.rollout.workers import EnvironmentWorker


class Episode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One played task.

    Attributes:
        score: as the environment gives it, also after an invalid response; None when the environment failed.
        decisions: responses sampled, the last invalid one included.
        invalid: whether an invalid response ended the episode; `invalid_reason` says which kind.
        response_tokens: of all responses together; `truncated` of them were cut at the length limit.
    """

    task: Task
    trial: int
    score: Score | None
    end: EndReason
    end_detail: str
    decisions: int
    invalid: bool
    invalid_reason: str
    response_tokens: int
    truncated: int
    environment_steps: int
    wall_s: float


def greedy(max_tokens: int) -> Sampling:
    """Greedy decoding, as evaluation uses it."""
    return Sampling(temperature=0.0, top_p=1.0, top_k=0, max_tokens=max_tokens)


async def play(
    task: Task,
    suite: Suite,
    student: Student,
    sampling: Sampling,
    *,
    max_decisions: int,
    trial: int,
    seed: int,
    environment_timeout_s: float,
) -> Episode:
    """Plays a task once with one response at each decision. An invalid response ends the episode.

    Raises:
        ServiceError: the sampler failed. A failing environment ends its own episode instead.
    """
    began = time.monotonic()
    lengths: list[int] = []
    truncated = 0
    invalid_reason = ""

    async def decide(environment: EnvironmentWorker, prompt: Prompt, decision: int) -> Chosen | End:
        nonlocal truncated, invalid_reason
        draw = seeds.derive(seed, "episode", task.key, trial, decision)
        [(sample, response)] = await student.respond(prompt, sampling, num=1, seed=draw, policy_version=None)
        lengths.append(len(sample.ids))
        truncated += sample.finish is Finish.LENGTH
        if isinstance(response.action, Invalid):
            invalid_reason = response.action.reason.value
            return End(EndReason.INVALID_ACTION, f"{invalid_reason}: {response.action.detail}")
        return Chosen.of(response) or End(EndReason.INVALID_ACTION)

    outcome = await interact(suite, task, student.prompts, max_decisions, environment_timeout_s, decide)
    return Episode(
        task=task,
        trial=trial,
        score=outcome.score,
        end=outcome.end,
        end_detail=outcome.detail,
        decisions=len(lengths),
        invalid=invalid_reason != "",
        invalid_reason=invalid_reason,
        response_tokens=sum(lengths),
        truncated=truncated,
        environment_steps=outcome.environment_steps,
        wall_s=time.monotonic() - began,
    )
