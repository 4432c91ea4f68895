import json
import shutil

import pytest
from loop_runs import config, evaluations

from actionopd_jax import loop
from actionopd_jax.errors import RunStateError, StudentError
from actionopd_jax.rollout import episode

FIGURES = ("success", "partial", "invalid", "decisions", "response_tokens", "ends", "invalid_reasons", "num_tasks")


def figures(result):
    return {name: result[name] for name in FIGURES}


def test_evaluate_last_checkpoint_takes_the_episodes_that_training_played(trained, student, tmp_path, monkeypatch):
    workdir = shutil.copytree(trained, tmp_path / "copy")

    async def refuse(*_, **__):
        raise AssertionError("an episode is played again")

    monkeypatch.setattr(episode, "interact", refuse)
    result = loop.evaluate(config(student), workdir, None, tmp_path / "result.json")
    assert result["identity"]["student"]["step"] == 3
    assert figures(result) == figures(evaluations(trained)["step_000003"])
    assert figures(json.loads((tmp_path / "result.json").read_text())) == figures(result)
    assert result["output"] == str(tmp_path / "result.json")


def test_evaluate_checkpoint_and_exported_student_agree(trained, student, tmp_path):
    workdir = shutil.copytree(trained, tmp_path / "copy")
    shutil.rmtree(workdir / "evaluations")
    of_checkpoint = loop.evaluate(config(student), workdir, None, None)
    of_folder = loop.evaluate(config(student), tmp_path / "elsewhere", str(trained / "student"), None)
    assert figures(of_checkpoint) == figures(of_folder) == figures(evaluations(trained)["step_000003"])
    assert of_checkpoint["output"] == str(workdir / "evaluations" / "step_000003.json")


def test_evaluate_other_weights_under_the_same_path_are_another_student(trained, student, tmp_path):
    folder = shutil.copytree(trained / "student", tmp_path / "student")
    one = loop.evaluate(config(student), tmp_path / "runs", str(folder), None)
    shutil.copy(student / "model.safetensors", folder)
    two = loop.evaluate(config(student), tmp_path / "runs", str(folder), None)
    assert one["output"] != two["output"]
    assert figures(two) == figures(evaluations(trained)["step_000000"])


def test_evaluate_without_a_checkpoint_is_refused_and_makes_nothing(student, tmp_path):
    with pytest.raises(RunStateError, match=r"holds no checkpoint to evaluate; train first, or name a student") as refusal:
        loop.evaluate(config(student), tmp_path / "nothing", None, None)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "nothing").exists()


def test_evaluate_before_the_first_checkpoint_is_refused(student, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(RunStateError, match="holds no complete checkpoint"):
        loop.evaluate(config(student), tmp_path, None, None)


def test_evaluate_checkpoint_of_other_settings_is_refused(trained, student, tmp_path):
    workdir = shutil.copytree(trained, tmp_path / "copy")
    with pytest.raises(RunStateError, match="was saved with other settings"):
        loop.evaluate(config(student, method={"max_decisions": 4}), workdir, None, None)


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere", "is not a folder"), ("builtin:nobody", "does not ship.*builtin:service_desk")]
)
def test_evaluate_student_that_is_not_there_is_refused(student, tmp_path, name, message):
    with pytest.raises(StudentError, match=message):
        loop.evaluate(config(student), tmp_path, name, None)
