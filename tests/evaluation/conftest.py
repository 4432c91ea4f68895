import pytest

from actionopd_jax.records import EndReason, Score, Task
from actionopd_jax.rollout.episode import Episode


@pytest.fixture
def episode():
    """Makes an episode; `success` None: the environment failed."""

    def make(task_id, trial=0, success=True, **changes):
        values = {
            "task": Task(environment="e", split="test", task_id=task_id),
            "trial": trial,
            "score": None if success is None else Score(success=success, partial=1.0 if success else 0.25),
            "end": EndReason.ENVIRONMENT_FAILURE if success is None else EndReason.DONE,
            "end_detail": "",
            "decisions": 3,
            "invalid": False,
            "invalid_reason": "",
            "response_tokens": 30,
            "truncated": 0,
            "environment_steps": 3,
            "wall_s": 0.1,
        }
        return Episode(**{**values, **changes})

    return make
