import dataclasses
import json
import multiprocessing
import os
import signal

import pytest

from actionopd_jax.config import (
    CheckpointConfig,
    EvaluationConfig,
    RolloutConfig,
    RunConfig,
    SourceConfig,
    StudentConfig,
    UpdateConfig,
)
from actionopd_jax.errors import RunStateError
from actionopd_jax.training.workdir import append_line, complete_lines, lock, open_workdir, rewrite_lines, write_atomic


@pytest.fixture
def config():
    return RunConfig(
        steps=3,
        seed=1,
        student=StudentConfig(path="builtin:tiny"),
        sources=(
            SourceConfig(environment="e", split="train", starts_per_step=2),
            SourceConfig(environment="f", split="train", starts_per_step=1),
        ),
        evaluation=EvaluationConfig(environment="e", split="test"),
    )


def test_open_workdir_new_writes_resolved_settings_first(tmp_path, config):
    with open_workdir(tmp_path / "a" / "run", config) as workdir:
        written = json.loads((workdir.path / "config.json").read_text())
        assert workdir.is_new
        assert workdir.checkpoints.is_dir()
        assert workdir.rollouts.is_dir()
        assert workdir.evaluations.is_dir()
    assert written["settings"]["update"]["learning_rate"] == UpdateConfig().learning_rate
    assert written["settings"]["sources"][1]["environment"] == "f"
    assert len(written["digest"]) == 64
    assert written["code"]["version"]


def test_open_workdir_same_settings_continues(tmp_path, config):
    with open_workdir(tmp_path, config):
        pass
    with open_workdir(tmp_path, config) as workdir:
        assert not workdir.is_new


def test_workdir_discard_keeps_what_was_found_and_a_cache_set_aside(tmp_path, config):
    (tmp_path / "cache.sqlite").write_bytes(b"paid for")
    (tmp_path / "notes.txt").write_text("mine")
    with open_workdir(tmp_path, config) as workdir:
        (tmp_path / "cache.sqlite").rename(tmp_path / "cache.sqlite.damaged-1")
        (tmp_path / "cache.sqlite").write_bytes(b"")
        workdir.discard()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cache.sqlite", "cache.sqlite.damaged-1", "notes.txt"]


def test_workdir_discard_of_a_continued_run_changes_nothing(tmp_path, config):
    with open_workdir(tmp_path, config):
        pass
    before = sorted(tmp_path.iterdir())
    with open_workdir(tmp_path, config) as workdir:
        workdir.discard()
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 9},
        {"rollout": RolloutConfig(concurrent_tasks=2)},
        {"checkpoint": CheckpointConfig(keep=5)},
        {"evaluation": EvaluationConfig(environment="g", split="dev", trials=4)},
    ],
)
def test_open_workdir_free_setting_changed_continues_and_records_it(tmp_path, config, change):
    with open_workdir(tmp_path, config):
        before = json.loads((tmp_path / "config.json").read_text())
    with open_workdir(tmp_path, dataclasses.replace(config, **change)) as workdir:
        assert not workdir.is_new
    after = json.loads((tmp_path / "config.json").read_text())
    assert after["digest"] == before["digest"]
    assert after["settings"] != before["settings"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 2}, "seed: was 1, now 2"),
        ({"update": UpdateConfig(learning_rate=2e-6)}, "update.learning_rate: was 1e-06, now 2e-06"),
        ({"student": StudentConfig(path="builtin:tiny", thinking=False)}, "student.thinking: was True, now False"),
    ],
)
def test_open_workdir_other_setting_refuses_naming_the_key(tmp_path, config, change, named):
    with open_workdir(tmp_path, config):
        pass
    before = (tmp_path / "config.json").read_bytes()
    with (
        pytest.raises(RunStateError, match="other settings") as caught,
        open_workdir(tmp_path, dataclasses.replace(config, **change)),
    ):
        pass
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "config.json").read_bytes() == before


def test_open_workdir_other_source_names_its_position(tmp_path, config):
    with open_workdir(tmp_path, config):
        pass
    sources = (config.sources[0], dataclasses.replace(config.sources[1], starts_per_step=7))
    with (
        pytest.raises(RunStateError, match=r"sources\[1\]\.starts_per_step: was 1, now 7"),
        open_workdir(tmp_path, dataclasses.replace(config, sources=sources)),
    ):
        pass


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"settings": 3}', b'{"settings": {"seed": 1}}'])
def test_open_workdir_damaged_config_refuses(tmp_path, config, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(RunStateError, match="damaged"), open_workdir(tmp_path, config):
        pass


def test_open_workdir_path_is_a_file_refuses(tmp_path, config):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunStateError, match="cannot be used"), open_workdir(tmp_path / "file", config):
        pass


def test_lock_held_refuses_naming_the_holder(tmp_path):
    with lock(tmp_path), pytest.raises(RunStateError, match=f"in use by process {os.getpid()}"), lock(tmp_path):
        pass
    with lock(tmp_path):
        pass


def _hold(path, held):
    with lock(path):
        held.set()
        signal.pause()


def test_lock_holder_killed_is_free_again(tmp_path):
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    process = context.Process(target=_hold, args=(tmp_path, held))
    process.start()
    assert held.wait(60)
    with pytest.raises(RunStateError, match=f"process {process.pid}"), lock(tmp_path):
        pass
    process.kill()
    process.join()
    with lock(tmp_path):
        pass


def test_write_atomic_failure_keeps_old_content_and_no_rest(tmp_path, monkeypatch):
    file = tmp_path / "x"
    write_atomic(file, b"old")

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(file, b"new")
    assert file.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_complete_lines_cut_last_line_is_dropped(tmp_path):
    file = tmp_path / "lines"
    assert complete_lines(file) == []
    append_line(file, b"one")
    append_line(file, b"two")
    with file.open("ab") as handle:
        handle.write(b"thr")
    assert complete_lines(file) == [b"one", b"two"]
    rewrite_lines(file, complete_lines(file))
    append_line(file, b"three")
    assert file.read_bytes() == b"one\ntwo\nthree\n"


def test_append_line_with_line_break_refuses(tmp_path):
    with pytest.raises(ValueError, match="line break"):
        append_line(tmp_path / "lines", b"a\nb")
