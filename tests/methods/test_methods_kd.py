import numpy as np
import pytest

from actionopd_jax.methods.kd import TeacherTurn, examples


def test_examples_weigh_every_teacher_token_one():
    turns = [TeacherTurn([1, 2], [5, 6, 7], "t0", 0), TeacherTurn([1, 2, 5, 6, 7, 3], [8], "t0", 1)]
    first, second = examples(turns)
    assert first.prompt_ids.tolist() == [1, 2]
    assert first.response_ids.tolist() == [5, 6, 7]
    assert first.weights.tolist() == [1.0, 1.0, 1.0]
    assert first.weights.dtype == np.float32
    assert second.weights.tolist() == [1.0]
    assert (first.trajectory, second.trajectory) == ("t0", "t0")
    assert first.group != second.group


def test_examples_empty_reply_is_refused_by_name():
    with pytest.raises(ValueError, match="t4/2"):
        examples([TeacherTurn([1], [], "t4", 2)])


def test_examples_of_nothing_are_nothing():
    assert examples([]) == []
