"""Checkpoints: round trip, refusals, and folders that a kill left half-written."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from actionopd_jax.config import UpdateConfig
from actionopd_jax.errors import RunStateError
from actionopd_jax.training.checkpoint import Checkpointer, RunProgress
from actionopd_jax.training.optimizer import apply_gradients, make_optimizer
from actionopd_jax.training.state import abstract_state, create_state


def _state(step, width=3):
    params = nnx.split(nnx.Linear(4, width, rngs=nnx.Rngs(step)))[1]
    optimizer = make_optimizer(UpdateConfig())
    state, _ = apply_gradients(optimizer, create_state(params, optimizer), jax.tree.map(jnp.ones_like, params))
    return dataclasses.replace(state, step=jnp.asarray(step, jnp.int32))


def _progress(step, digest="abc"):
    return RunProgress(
        step=step,
        config_digest=digest,
        data_state=b'{"at":[1]}\x00\xff',
        method_state={"x": [1, "y"]},
        code_version={"commit": None},
    )


def _assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_checkpoint_restored_by_another_process_equals_the_saved(tmp_path):
    state = _state(2)
    with Checkpointer(tmp_path / "c", keep=2) as checkpoints:
        assert checkpoints.latest_step() is None
        checkpoints.save(_state(1), _progress(1))
        checkpoints.save(state, _progress(2))
        shutil.copytree(tmp_path / "c", tmp_path / "killed")  # what a kill right after `save` leaves
    with Checkpointer(tmp_path / "killed", keep=2) as checkpoints:
        assert checkpoints.latest_step() == 2
        restored, progress = checkpoints.restore(abstract_state(_state(0)), "abc")
    assert progress == _progress(2)
    _assert_same(restored, state)


def test_checkpoint_keeps_the_latest_only(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(_state(step), _progress(step))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["2", "3"]


def test_checkpoint_half_written_is_ignored(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        checkpoints.save(_state(1), _progress(1))
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_step() == 1
        checkpoints.save(_state(2), _progress(2))
        restored, _ = checkpoints.restore(abstract_state(_state(0)), "abc")
    _assert_same(restored, _state(2))


def test_checkpoint_of_other_settings_is_refused(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        checkpoints.save(_state(1), _progress(1, digest="other"))
        with pytest.raises(RunStateError, match="other settings"):
            checkpoints.restore(abstract_state(_state(0)), "abc")


def test_checkpoint_of_another_student_is_refused(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        checkpoints.save(_state(1), _progress(1))
        with pytest.raises(RunStateError, match="another student"):
            checkpoints.restore(abstract_state(_state(0, width=5)), "abc")


def test_checkpoint_restore_from_an_empty_folder_is_refused(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpoints, pytest.raises(RunStateError, match="no complete checkpoint"):
        checkpoints.restore(abstract_state(_state(0)), "abc")


def test_checkpoint_damaged_progress_is_refused(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        checkpoints.save(_state(1), _progress(1))
    (tmp_path / "1" / "progress" / "metadata").write_text("{")
    with Checkpointer(tmp_path, keep=2) as checkpoints, pytest.raises(RunStateError, match="damaged"):
        checkpoints.restore(abstract_state(_state(0)), "abc")


def test_checkpoint_save_of_an_old_or_mismatched_step_is_refused(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        checkpoints.save(_state(2), _progress(2))
        with pytest.raises(RunStateError, match="already holds step 2"):
            checkpoints.save(_state(2), _progress(2))
        with pytest.raises(ValueError, match="progress says step 4"):
            checkpoints.save(_state(3), _progress(4))
