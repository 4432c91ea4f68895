"""Where students come from: folders, shipped ones, random weights; and what is refused."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from actionopd_jax.errors import StudentError
from actionopd_jax.models import decoder_config, student_files, weights

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_resolve_a_folder_gives_it(tmp_path):
    assert student_files.resolve(str(tmp_path)) == tmp_path


def test_resolve_expands_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "student").mkdir()
    assert student_files.resolve("~/student") == tmp_path / "student"


@pytest.mark.parametrize("made", [False, True])
def test_resolve_what_is_no_folder_says_what_to_give(tmp_path, made):
    path = tmp_path / "thing"
    if made:
        path.write_text("a file")
    with pytest.raises(StudentError, match=r"is not a folder; give a folder with a Hugging Face model, or builtin:NAME"):
        student_files.resolve(str(path))


def test_resolve_a_builtin_gives_a_model_config():
    folder = student_files.resolve("builtin:service_desk")
    assert decoder_config.load(folder).vocab_size > 0


@pytest.mark.parametrize("path", ["builtin:", "builtin:nothing", "builtin:../chat", "builtin:service_desk/", "builtin:."])
def test_resolve_an_unknown_builtin_lists_what_ships(path):
    with pytest.raises(StudentError, match=r"does not ship with this package; there are: .*builtin:service_desk"):
        student_files.resolve(path)


def test_load_student_reads_the_weights(checkpoint):
    folder = checkpoint(tie_word_embeddings=False).folder
    model = student_files.load_student(folder, 97, "bfloat16", True, None)
    assert model.dtype == jnp.bfloat16
    assert model.remat == "full"
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(m, nnx.Param) for m in (model, weights.load(folder))))


def test_load_student_with_a_seed_needs_the_config_alone(checkpoint, tmp_path):
    shutil.copy(checkpoint(tie_word_embeddings=True).folder / "config.json", tmp_path)
    first, again, other = (student_files.load_student(tmp_path, 90, "float32", False, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.embedding[...], again.embedding[...])
    assert not np.allclose(first.embedding[...], other.embedding[...])
    assert first.remat == "none"


def test_load_student_with_more_ids_than_rows_gives_both_numbers(checkpoint):
    with pytest.raises(StudentError, match=r"the tokenizer has 98 ids, the embedding only 97 rows"):
        student_files.load_student(checkpoint(tie_word_embeddings=True).folder, 98, "float32", True, None)
