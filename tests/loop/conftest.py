"""Runs that many tests look at, made once, also where several processes test."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import jax
import loop_runs
import pytest
from flax import nnx

from actionopd_jax import loop
from actionopd_jax.chat.tokenizer import ChatTokenizer
from actionopd_jax.models import student_files, weights
from actionopd_jax.models.decoder import Decoder
from actionopd_jax.models.decoder_config import DecoderConfig


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this test session have in common."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once(shared: Path, name: str, build: Callable[[Path], object]) -> Path:
    """The folder that `build` fills, by whichever process comes first."""
    folder, done = shared / name, shared / f"{name}.done"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            build(folder)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def compiled(shared: Path) -> Path:
    """Keeps what was compiled: almost all of the time of a tiny run is XLA's, for the same programs again and again."""
    folder = shared / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()  # it may have decided before that there is none
    return folder


def _save_newborn(folder: Path) -> None:
    tokenizer = ChatTokenizer.load(student_files.resolve("builtin:service_desk"))
    tokenizer.save(folder)
    config = DecoderConfig(
        vocab_size=-(-tokenizer.vocab_size // 64) * 64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    weights.save(Decoder(config, rngs=nnx.Rngs(0), dtype="float32", remat=False), folder, tokenizer.end_id)


@pytest.fixture(scope="session")
def newborn(shared: Path) -> Path:
    """A student of two narrow layers with random weights and the shipped tokenizer."""
    return once(shared, "newborn", _save_newborn)


@pytest.fixture(scope="session")
def taught(compiled: Path, newborn: Path, shared: Path) -> Path:
    """Work directory of a KD run: its student writes some valid messages, and many responses that are no action."""
    settings = loop_runs.config(newborn, **loop_runs.KD_SETTINGS)
    return once(shared, "taught", lambda workdir: loop.train(settings, workdir))


@pytest.fixture(scope="session")
def student(taught: Path) -> Path:
    """A student whose responses differ in reward."""
    return taught / "student"


@pytest.fixture(scope="session")
def trained(student: Path, shared: Path) -> Path:
    """Work directory of an ActionOPD run that nothing disturbed; not to be changed."""
    return once(shared, "trained", lambda workdir: loop.train(loop_runs.config(student), workdir))
