"""The student as the rollout sees it: what it reads, how it is asked, how its answers are read."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from actionopd_jax.chat.actions import Response, parse_response
from actionopd_jax.chat.prompt import Prompt
from actionopd_jax.chat.tokenizer import ChatTokenizer
from actionopd_jax.errors import ServiceError
from actionopd_jax.protocols import Sampler
from actionopd_jax.records import Sample, Sampling, State


class PromptSource(Protocol):
    """Turns the full history into what the student sees; raises `ContextOverflow` when nothing may be dropped."""

    def build(self, state: State) -> Prompt: ...


@dataclasses.dataclass(frozen=True)
class Student:
    """The student with everything that its answers pass through."""

    sampler: Sampler
    prompts: PromptSource
    tokenizer: ChatTokenizer
    thinking: bool

    async def respond(
        self, prompt: Prompt, sampling: Sampling, *, num: int, seed: int, policy_version: int | None
    ) -> list[tuple[Sample, Response]]:
        """`num` sampled responses, verbatim and parsed.

        Raises:
            ServiceError: the sampler failed, gave another number of responses, an empty one, no log-probabilities,
                or answered with another policy version than `policy_version` (None: any will do).
        """
        samples = await self.sampler.generate(prompt.ids, sampling, num, seed)
        _check(samples, num, policy_version)
        return [(sample, self.parse(sample, prompt.state)) for sample in samples]

    def parse(self, sample: Sample, state: State) -> Response:
        """The action of a response, and its turn for the history."""
        return parse_response(sample.ids, sample.finish, state, self.tokenizer, self.thinking)


def _check(samples: Sequence[Sample], num: int, policy_version: int | None) -> None:
    if len(samples) != num:
        raise ServiceError(f"the sampler gave {len(samples)} responses where {num} were asked for")
    for sample in samples:
        if not sample.ids or len(sample.ids) != len(sample.logprobs):
            raise ServiceError(f"the sampler gave {len(sample.ids)} ids with {len(sample.logprobs)} log-probabilities")
        if policy_version is not None and sample.policy_version != policy_version:
            raise ServiceError(
                f"the sampler answered with policy version {sample.policy_version} while version {policy_version} is "
                "being collected; publish the weights before collecting"
            )
