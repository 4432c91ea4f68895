import json
import shutil
import sys

import numpy as np
import pytest
from loop_runs import (
    KD_SETTINGS,
    config,
    evaluations,
    fail_at_request,
    groups,
    metrics,
    trajectories,
    weights,
)

from actionopd_jax import loop
from actionopd_jax.errors import ConfigError, RunStateError, ServiceError
from actionopd_jax.models import weights as hf_weights
from actionopd_jax.records import Invalid, Message, digest
from actionopd_jax.services.cache import Cache
from actionopd_jax.training.checkpoint import Checkpointer
from actionopd_jax.training.update import Updater
from actionopd_jax.training.workdir import what_matters


def copy_of(workdir, tmp_path):
    return shutil.copytree(workdir, tmp_path / "copy")


def expect_same_run(workdir, other):
    assert metrics(workdir) == metrics(other)
    assert groups(workdir) == groups(other)
    assert evaluations(workdir) == evaluations(other)
    assert weights(workdir) == weights(other)


# -- a run that nothing disturbed -----------------------------------------------------------------


def test_train_leaves_the_files_of_a_run(trained, student):
    description = json.loads((trained / "config.json").read_text())
    assert description["digest"] == digest(what_matters(config(student)))
    assert description["settings"]["method"]["num_candidates"] == 2
    assert [line["step"] for line in metrics(trained)] == [1, 2, 3]
    assert list(trained.glob("events.*"))
    assert sorted(int(path.name) for path in (trained / "checkpoints").iterdir()) == [2, 3]
    assert [path.name for path in sorted((trained / "rollouts").iterdir())] == [
        f"step_{step:06d}.jsonl.zst" for step in range(3)
    ]
    assert sorted(evaluations(trained)) == [f"step_{step:06d}" for step in range(4)]
    with Cache(trained / "cache.sqlite") as cache:
        assert set(cache.counts()) == {"teacher", "verdicts"}
    assert not list(trained.glob("*.partial"))


def test_train_collects_whole_groups_under_the_weights_in_force(trained):
    collected = trajectories(trained)
    assert [(t.step, t.start) for t in collected] == [(step, start) for step in range(3) for start in range(3)]
    updates = np.cumsum([0] + [line["optimizer_steps"] for line in metrics(trained)])
    candidates = [c for t in collected for g in t.groups for c in g.candidates]
    for trajectory in collected:
        for group in trajectory.groups:
            assert len(group.candidates) == 2
            assert group.policy_version == updates[trajectory.step]
    assert updates[-1] >= 2
    # Both kinds of outcome, or the other tests would see no update.
    assert {type(candidate.action) for candidate in candidates} >= {Invalid, Message}


def test_train_metrics_are_those_of_the_rollouts(trained):
    for step, line in enumerate(metrics(trained)):
        rewards = [
            [candidate.reward for candidate in group.candidates]
            for trajectory in trajectories(trained)
            if trajectory.step == step
            for group in trajectory.groups
        ]
        assert line["reward_mean"] == pytest.approx(np.mean(rewards), abs=1e-12)
        assert line["groups"] == len(rewards)
        assert line["groups_kept"] == sum(len(set(group)) > 1 for group in rewards)
        assert line["invalid_rate"] == np.mean(np.array(rewards) == -1)
        assert abs(line["reward_residual"]) <= 1e-9
        # The sampler's log-probabilities are the trainer's, from another program over the same weights.
        assert line.get("mismatch_max", 0.0) < 1e-4


def test_train_student_folder_is_what_transformers_loads(trained, student):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    folder = trained / "student"
    ids = np.arange(40).reshape(2, 20) * 13 % 1000
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    ours = hf_weights.load(folder, remat=False)
    positions = np.broadcast_to(np.arange(20), ids.shape)
    hidden = ours.hidden_states(ids, positions, np.full(ids.shape, 20))
    np.testing.assert_allclose(np.asarray(hidden @ ours.head_weight().T), expected, rtol=0, atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("Could you tell me the order number?")) == "Could you tell me the order number?"
    assert weights(trained) != (student / "model.safetensors").read_bytes()


def test_train_kd_lowers_the_loss(taught):
    losses = [line["loss"] for line in metrics(taught) if line["num_tokens"] > 0]
    assert len(losses) > KD_SETTINGS["steps"] / 2
    assert losses[0] == pytest.approx(np.log(1088), abs=0.1)  # a newborn student knows nothing
    assert losses[-1] < losses[0] - 2
    assert not list((taught / "rollouts").iterdir())


# -- continuing -----------------------------------------------------------------------------------


def test_train_again_only_reports(trained, student, tmp_path, monkeypatch):
    workdir = copy_of(trained, tmp_path)
    before = {
        path.relative_to(workdir): path.read_bytes() for path in workdir.rglob("*") if path.suffix in {".json", ".jsonl"}
    }

    def refuse(*_, **__):
        raise AssertionError("a finished run is trained")

    monkeypatch.setattr(Updater, "update", refuse)
    summary = loop.train(config(student), workdir)
    assert {path: (workdir / path).read_bytes() for path in before} == before
    expect_same_run(workdir, trained)
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    found = evaluations(trained)
    assert summary == {
        "success_before": found["step_000000"]["success"],
        "success_after": found["step_000003"]["success"],
        "match_rate_first": lines[0]["match_rate"],
        "match_rate_last": lines[-1]["match_rate"],
        "invalid_rate_first": lines[0]["invalid_rate"],
        "invalid_rate_last": lines[-1]["invalid_rate"],
        "train_minutes": pytest.approx(sum(line["step_s"] for line in lines) / 60),
        "workdir": str(workdir),
    }


def test_train_with_more_steps_continues(trained, student, tmp_path):
    loop.train(config(student, steps=1), tmp_path)
    assert [line["step"] for line in metrics(tmp_path)] == [1]
    loop.train(config(student), tmp_path)
    expect_same_run(tmp_path, trained)


@pytest.mark.parametrize("number", [3, 11])
def test_train_after_a_failing_teacher_goes_on_as_if_nothing_happened(trained, student, tmp_path, monkeypatch, number):
    with monkeypatch.context() as patch:
        asked = fail_at_request(patch, number)
        with pytest.raises(ServiceError, match="the teacher is gone"):
            loop.train(config(student), tmp_path)
    assert len(asked) == number
    with Cache(tmp_path / "cache.sqlite") as cache:
        assert cache.counts()["teacher"] == number
    loop.train(config(student), tmp_path)
    expect_same_run(tmp_path, trained)


def test_train_repeats_a_step_whose_checkpoint_failed(trained, student, tmp_path, monkeypatch):
    save = Checkpointer.save

    def fail_at_2(self, state, progress):
        if progress.step == 2:
            raise OSError("disk full")
        save(self, state, progress)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "save", fail_at_2)
        with pytest.raises(OSError, match="disk full"):
            loop.train(config(student), tmp_path)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]
    loop.train(config(student), tmp_path)
    expect_same_run(tmp_path, trained)


def test_train_makes_up_for_an_evaluation_that_failed(trained, student, tmp_path, monkeypatch):
    module = sys.modules["actionopd_jax.loop.train"]
    evaluate_student = module.evaluate_student

    async def fail_at_2(parts, sampler, identity, *rest):
        if identity["step"] == 2:
            raise ServiceError("no evaluation")
        return await evaluate_student(parts, sampler, identity, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(module, "evaluate_student", fail_at_2)
        with pytest.raises(ServiceError, match="no evaluation"):
            loop.train(config(student), tmp_path)
    assert "step_000002" not in evaluations(tmp_path)
    loop.train(config(student), tmp_path)
    expect_same_run(tmp_path, trained)


def test_train_with_more_evaluation_tasks_plays_the_missing_ones_with_the_starting_weights(trained, student, tmp_path):
    workdir = copy_of(trained, tmp_path)
    changed = config(student, evaluation={"num_tasks": 3})
    loop.train(changed, workdir)
    found = evaluations(workdir)
    assert [found[f"step_{step:06d}"]["num_tasks"] for step in (0, 3)] == [3, 3]
    assert len((workdir / "evaluations" / "step_000000.jsonl").read_text().splitlines()) == 1 + 3
    fresh = loop.evaluate(changed, tmp_path / "other", str(student), None)
    figures = ("success", "partial", "decisions", "response_tokens", "invalid_reasons")
    assert {name: found["step_000000"][name] for name in figures} == {name: fresh[name] for name in figures}


# -- refusals -------------------------------------------------------------------------------------


def test_train_with_other_settings_is_refused(trained, student, tmp_path):
    workdir = copy_of(trained, tmp_path)
    with pytest.raises(RunStateError, match=r"update\.learning_rate: was 0\.001, now 0\.01") as refusal:
        loop.train(config(student, update={"learning_rate": 1e-2}), workdir)
    assert "\n" not in str(refusal.value)
    expect_same_run(workdir, trained)


def test_train_with_settings_that_cannot_be_built_leaves_the_directory_free(student, tmp_path):
    source = {"environment": "service_desk", "split": "trian", "starts_per_step": 3}
    with pytest.raises(ConfigError, match=r"sources\[0\]\.split 'trian' is no split of service_desk.*train, heldout"):
        loop.train(config(student, sources=[source]), tmp_path)
    assert not list(tmp_path.iterdir())


def test_train_with_impossible_teacher_settings_leaves_no_directory(student, tmp_path):
    with pytest.raises(ConfigError, match=r"lapse_rate"):
        loop.train(config(student, teacher={"settings": {"lapse_rate": 2.0}}), tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_train_with_more_tasks_than_there_are_is_refused(student, tmp_path):
    with pytest.raises(ConfigError, match=r"evaluation\.num_tasks 501: service_desk/heldout has 500 tasks"):
        loop.train(config(student, evaluation={"num_tasks": 501}), tmp_path)


@pytest.mark.parametrize("damage", ["overwritten", "one byte"])
def test_train_with_damaged_rollouts_says_so_in_one_line(trained, student, tmp_path, damage):
    workdir = copy_of(trained, tmp_path)
    shutil.rmtree(workdir / "checkpoints" / "3")  # so that step 2 is collected again, from its file
    file = workdir / "rollouts" / "step_000002.jsonl.zst"
    content = bytearray(file.read_bytes())
    if damage == "overwritten":
        content[:] = b"not a frame at all"
    else:
        content[len(content) // 2] ^= 0x40
    file.write_bytes(content)
    with pytest.raises(RunStateError, match=r"step_000002\.jsonl\.zst.*move the file away") as refusal:
        loop.train(config(student), workdir)
    assert "\n" not in str(refusal.value)
    assert file.read_bytes() == content
    assert metrics(workdir) == metrics(trained)[:2]


# -- controls -------------------------------------------------------------------------------------


def test_train_on_a_constant_reward_changes_no_weight(student, tmp_path):
    loop.train(config(student, steps=1, method={"reward": "constant"}, evaluation={"num_tasks": 1}), tmp_path)
    assert weights(tmp_path) == (student / "model.safetensors").read_bytes()
    [line] = metrics(tmp_path)
    assert (line["groups_kept"], line["optimizer_steps"], line["num_tokens"]) == (0, 0, 0)
    assert line["groups_equal"] == line["groups"] > 0


def test_train_on_a_shuffled_reward_changes_weights(student, tmp_path):
    loop.train(config(student, steps=4, method={"reward": "shuffled"}, evaluation={"every_steps": 0}), tmp_path)
    lines = metrics(tmp_path)
    assert sum(line["optimizer_steps"] for line in lines) > 0
    assert all("reward_residual" not in line for line in lines)
    assert weights(tmp_path) != (student / "model.safetensors").read_bytes()
