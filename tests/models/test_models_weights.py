"""Weights to and from Hugging Face folders: exact round trips, PyTorch as the reader, and every damage by name."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from flax import nnx

from actionopd_jax.errors import StudentError
from actionopd_jax.models import weights
from actionopd_jax.models.decoder import Decoder

pytestmark = pytest.mark.usefixtures("quick_compilation")
_UNTIED = {"tie_word_embeddings": False}
_TIED = {"tie_word_embeddings": True}


@pytest.fixture(params=[_UNTIED, _TIED], ids=["untied", "tied"])
def variant(request, checkpoint):
    return checkpoint(**request.param)


@pytest.fixture
def copy(checkpoint, tmp_path):
    """A folder to damage."""
    return shutil.copytree(checkpoint(**_UNTIED).folder, tmp_path / "copy")


def _tensors(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


def _rewrite(folder, **changes):
    """Replaces tensors; None removes one."""
    tensors = {**_tensors(folder), **{name.replace("__", "."): value for name, value in changes.items()}}
    kept = {name: value for name, value in tensors.items() if value is not None}
    safetensors.numpy.save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def _shard(folder):
    """Splits the single file in two, with an index."""
    names = sorted(_tensors(folder))
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: _tensors(folder)[name] for name in names if files[name] == file}
        safetensors.numpy.save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": files}))
    return index


def _assert_same_weights(first, second):
    ours, theirs = (nnx.to_pure_dict(nnx.state(model, nnx.Param)) for model in (first, second))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def _torch_logits(model):
    with torch.no_grad():
        return model(torch.arange(20)[None] * 4).logits.numpy()


def test_save_is_read_by_transformers_with_the_same_logits(variant, tmp_path):
    weights.save(weights.load(variant.folder), tmp_path, eos_token_id=3)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert read.config.eos_token_id == 3
    np.testing.assert_array_equal(_torch_logits(read), _torch_logits(variant.torch_model))
    expected = variant.torch_model.state_dict()
    assert read.state_dict().keys() == expected.keys()
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_save_then_load_gives_the_same_weights_to_the_bit(variant, tmp_path):
    model = weights.load(variant.folder)
    weights.save(model, tmp_path, eos_token_id=3)
    read = weights.load(tmp_path)
    assert read.config == model.config
    _assert_same_weights(read, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_save_in_bfloat16_rounds_once(variant, tmp_path):
    model = weights.load(variant.folder)
    weights.save(model, tmp_path, eos_token_id=3, dtype=ml_dtypes.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in _tensors(tmp_path).values()} == {np.dtype(ml_dtypes.bfloat16)}
    exact = nnx.state(model, nnx.Param)
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32), exact)
    read = weights.load(tmp_path)
    nnx.update(model, rounded)
    _assert_same_weights(read, model)
    torch_read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch_read.dtype == torch.bfloat16


def test_save_over_an_older_save_replaces_it(checkpoint, tmp_path):
    weights.save(weights.load(checkpoint(**_TIED).folder), tmp_path, eos_token_id=3)
    model = weights.load(checkpoint(**_UNTIED).folder)
    weights.save(model, tmp_path, eos_token_id=3)
    _assert_same_weights(weights.load(tmp_path), model)


def test_save_into_a_sharded_folder_is_what_load_then_reads(copy, checkpoint):
    _shard(copy)
    model = Decoder(weights.load(copy).config, rngs=nnx.Rngs(5))
    weights.save(model, copy, eos_token_id=3)
    _assert_same_weights(weights.load(copy), model)


def test_load_of_a_sharded_folder_equals_the_single_file(copy, checkpoint):
    _shard(copy)
    _assert_same_weights(weights.load(copy), weights.load(checkpoint(**_UNTIED).folder))


def test_load_takes_settings_and_keeps_weights_in_float32(checkpoint):
    model = weights.load(checkpoint(**_UNTIED).folder, dtype=jnp.bfloat16, remat=False)
    assert model.dtype == jnp.bfloat16
    assert model.remat == "none"
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_load_of_a_tied_checkpoint_that_carries_the_head_uses_the_embedding(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint(**_TIED).folder, tmp_path / "copy")
    embedding = _tensors(folder)["model.embed_tokens.weight"]
    _rewrite(folder, lm_head__weight=embedding)
    model = weights.load(folder)
    np.testing.assert_array_equal(model.head_weight(), embedding)
    _assert_same_weights(model, weights.load(checkpoint(**_TIED).folder))


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "lm_head.weight", "model.layers.2.self_attn.k_norm.weight", "model.embed_tokens.weight"]
)
def test_load_without_a_tensor_names_it(copy, name):
    _rewrite(copy, **{name: None})
    with pytest.raises(StudentError, match=f"tensor {name} is missing"):
        weights.load(copy)


def test_load_of_a_misshapen_tensor_names_it_with_both_shapes(copy):
    name = "model.layers.1.self_attn.q_proj.weight"  # heads * head_dim is 64, hidden size 48
    _rewrite(copy, **{name: np.ascontiguousarray(_tensors(copy)[name].T)})
    with pytest.raises(StudentError, match=rf"{name} has shape \(48, 64\), config.json asks for \(64, 48\)"):
        weights.load(copy)


def test_load_with_surplus_tensors_counts_and_names_them(copy):
    _rewrite(copy, model__layers__3__input_layernorm__weight=np.ones(48, np.float32), zzz=np.ones(1, np.float32))
    with pytest.raises(StudentError, match=r"2 tensors have no place in the model, first model.layers.3.input_layernorm"):
        weights.load(copy)


@pytest.mark.parametrize("keep_bytes", [0, 5, 200, -4])
def test_load_of_a_truncated_file_names_it(copy, keep_bytes):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(StudentError, match=r"model.safetensors cannot be read"):
        weights.load(copy)


def test_load_of_something_else_than_safetensors_names_it(copy):
    (copy / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n" * 20)
    with pytest.raises(StudentError, match=r"model.safetensors cannot be read"):
        weights.load(copy)


def test_load_without_any_weights_names_both_files(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(StudentError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        weights.load(copy)


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"\xff",
        b"[]",
        b"null",
        b"{}",
        b'{"weight_map": null}',
        b'{"weight_map": ["model.norm.weight"]}',
        b'{"weight_map": {"model.norm.weight": 1}}',
    ],
)
def test_load_with_a_bad_index_names_it(copy, content):
    _shard(copy).write_bytes(content)
    with pytest.raises(StudentError, match=r"index.json is not a safetensors index"):
        weights.load(copy)


def test_load_with_a_missing_shard_names_it(copy):
    _shard(copy)
    (copy / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(StudentError, match=r"model-00002-of-00002.safetensors cannot be read"):
        weights.load(copy)


def test_load_with_an_index_that_points_to_the_wrong_shard_names_tensor_and_shard(copy):
    index = _shard(copy)
    values = json.loads(index.read_text())
    moved = values["weight_map"]
    right = moved["model.norm.weight"]
    wrong = next(file for file in moved.values() if file != right)
    moved["model.norm.weight"] = wrong
    index.write_text(json.dumps(values))
    with pytest.raises(StudentError, match=rf"{wrong} does not hold the tensor model.norm.weight"):
        weights.load(copy)


def test_load_with_an_index_without_a_tensor_names_it(copy):
    index = _shard(copy)
    values = json.loads(index.read_text())
    del values["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(values))
    with pytest.raises(StudentError, match=r"tensor model.norm.weight is missing"):
        weights.load(copy)
