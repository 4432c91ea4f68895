"""KD: imitate successful teacher trajectories token by token (paper, B.4), also the warm start.

Every token that the teacher generated (reasoning, call, message, end token) is a target of weight 1;
prompts and observations are context. Divided by the number of active tokens, the update is the mean
negative log-likelihood.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from actionopd_jax.records import Example


@dataclasses.dataclass(frozen=True)
class TeacherTurn:
    """One assistant turn of a teacher trajectory, in the student's tokens.

    Attributes:
        prompt_ids: the state, through the student's chat template.
        reply_ids: what the teacher generated there, end token included.
        trajectory: identifies the trajectory; only successful ones belong here.
        decision: position of the turn in it.
    """

    prompt_ids: Sequence[int]
    reply_ids: Sequence[int]
    trajectory: str
    decision: int


def examples(turns: Iterable[TeacherTurn]) -> list[Example]:
    """Likelihood targets: weight 1 for each token of each reply, nothing else.

    Raises:
        ValueError: an empty prompt or reply; names the turn.
    """
    return [
        Example(
            prompt_ids=np.array(turn.prompt_ids, np.int32),
            response_ids=np.array(turn.reply_ids, np.int32),
            weights=np.ones(len(turn.reply_ids), np.float32),
            group=f"{turn.trajectory}/{turn.decision}",
            trajectory=turn.trajectory,
        )
        for turn in turns
    ]
