"""Hugging Face files of each family both ways: sharded files, parts for devices, refusals by name."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import transformers
from flax import nnx

from actionopd_jax.errors import StudentError
from actionopd_jax.models import decoder_config, rope, safetensors_writer, student_files, weights
from actionopd_jax.models.decoder import Decoder
from actionopd_jax.models.decoder_config import DecoderConfig
from actionopd_jax.models.hf_layout import layer_layouts

_SHAPES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e6,
    "max_position_embeddings": 64,
}
_YARN = rope.Yarn(factor=2.0, original_max_position_embeddings=32, attention_factor=1.2)
_CONFIGS = {
    "qwen3": DecoderConfig(**_SHAPES, tie_word_embeddings=False),
    "qwen3-biases": DecoderConfig(**_SHAPES, tie_word_embeddings=True, qkv_bias=True, output_bias=True),
    "qwen2": DecoderConfig(**_SHAPES, tie_word_embeddings=True, query_key_norm=False, qkv_bias=True, rope_scaling=_YARN),
    "llama": DecoderConfig(**_SHAPES, tie_word_embeddings=False, query_key_norm=False),
}


def _random(config: DecoderConfig) -> Decoder:
    """Every weight random, norms and biases too."""
    model = Decoder(config, rngs=nnx.Rngs(0), remat=False)
    rng = np.random.default_rng(1)
    graphdef, params = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape).astype(np.float32)), params))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of each config's random model, in several files."""
    folder = tmp_path_factory.mktemp("saved")
    for name, config in _CONFIGS.items():
        weights.save(_random(config), folder / name, eos_token_id=3, max_shard_gb=9000 / 2**30)
    return folder


def _assert_same(actual: Decoder, expected: Decoder) -> None:
    jax.tree.map(np.testing.assert_array_equal, nnx.split(actual)[1], nnx.split(expected)[1])


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def _rewrite(folder: Path, name: str, change) -> None:
    """Changes one tensor of a sharded folder; `change` gives None to remove it."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"].get(name, _files(folder)[0].name)
    tensors = safetensors.numpy.load_file(file)
    tensors[name] = change(tensors.get(name))
    index["weight_map"][name] = file.name
    if tensors[name] is None:
        del tensors[name], index["weight_map"][name]
    safetensors.numpy.save_file(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# -- both ways --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", _CONFIGS)
def test_saved_shards_load_to_the_same_weights_and_config(saved, name):
    files = _files(saved / name)
    assert len(files) > 2
    assert all(file.stat().st_size < 9000 + 4000 for file in files)  # tensors, and a header
    loaded = weights.load(saved / name)
    _assert_same(loaded, _random(_CONFIGS[name]))
    assert loaded.config == _CONFIGS[name]


@pytest.mark.parametrize("name", _CONFIGS)
def test_saved_shards_reload_in_transformers_with_nothing_missing_or_left_over(saved, name):
    torch_model, report = transformers.AutoModelForCausalLM.from_pretrained(saved / name, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    config = _CONFIGS[name]
    assert type(torch_model).__name__ == config.architecture
    assert sum(parameter.numel() for parameter in torch_model.parameters()) == config.num_parameters
    assert torch_model.config.rope_parameters["rope_theta"] == 5e6
    assert torch_model.config.eos_token_id == 3
    query = torch_model.model.layers[1].self_attn.q_proj.weight.detach().numpy()
    ours = np.asarray(weights.load(saved / name).layers["query"][...])[1]
    np.testing.assert_array_equal(query, np.moveaxis(ours, 0, -1).reshape(24, 24))


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_what_transformers_saves_in_shards_loads(name, saved, tmp_path):
    torch_model = transformers.AutoModelForCausalLM.from_pretrained(saved / name)
    torch_model.save_pretrained(tmp_path, max_shard_size="9KB")
    assert len(_files(tmp_path)) > 2
    _assert_same(weights.load(tmp_path), _random(_CONFIGS[name]))


def test_save_in_bfloat16_rounds_and_says_so(tmp_path):
    model = _random(_CONFIGS["llama"])
    weights.save(model, tmp_path, 3, ml_dtypes.bfloat16)
    assert [file.name for file in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), nnx.split(model)[1])
    jax.tree.map(np.testing.assert_array_equal, nnx.split(weights.load(tmp_path))[1], rounded)
    small = weights.load(tmp_path, param_dtype=jnp.bfloat16)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(nnx.split(small)[1]))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x.astype(jnp.float32), y), nnx.split(small)[1], rounded)


def test_save_over_another_number_of_files_leaves_none_behind(tmp_path):
    model = _random(_CONFIGS["llama"])
    weights.save(model, tmp_path, 3, max_shard_gb=9000 / 2**30)
    weights.save(model, tmp_path, 3)
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]
    weights.save(model, tmp_path, 3, max_shard_gb=9000 / 2**30)
    assert not (tmp_path / "model.safetensors").exists()
    _assert_same(weights.load(tmp_path), model)


def test_written_file_is_what_the_library_reads(tmp_path):
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float32(7).reshape(1), "c": np.ones((0, 2))}
    specs = [safetensors_writer.Tensor(name, x.shape) for name, x in tensors.items()]
    safetensors_writer.write(tmp_path, specs, iter(tensors.values()), np.dtype(np.float16), 1 << 20)
    read = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert read[name].dtype == np.float16
        np.testing.assert_array_equal(read[name], value)


# -- parts for devices ------------------------------------------------------------------------------


@hypothesis.given(data=st.data())
@hypothesis.settings(deadline=None, max_examples=60)
def test_part_of_a_layout_equals_the_part_of_the_whole(data):
    layout = data.draw(st.sampled_from(list(layer_layouts(_CONFIGS["qwen3-biases"]).values())))
    stored = np.random.default_rng(0).normal(size=layout.shape)
    whole = stored.reshape(layout.unfolded).transpose(layout.axes)
    index = []
    for size in layout.our_shape:
        start = data.draw(st.integers(0, size - 1))
        index.append(slice(start, data.draw(st.integers(start + 1, size))))
    read = []

    def reader(outer):
        read.append(stored[outer].size)
        return stored[outer]

    np.testing.assert_array_equal(layout.part(reader, tuple(index)), whole[tuple(index)])
    np.testing.assert_array_equal(layout.to_stored(whole), stored)
    if len(layout.unfolded) > len(layout.shape):  # a head is read whole
        index[layout.axes.index(layout.unfolded.index(6))] = slice(None)
    assert read == [whole[tuple(index)].size]


_ON_A_MESH = """
import sys, jax, numpy as np
from pathlib import Path
from flax import nnx
from actionopd_jax.config import MeshConfig
from actionopd_jax.models import sharding, weights
assert jax.device_count() == 8
plain = nnx.split(weights.load(Path(sys.argv[1])))[1]
mesh = sharding.make_mesh(MeshConfig(replica=2, fsdp=2, tensor=2))
model = weights.load(Path(sys.argv[1]), shardings=lambda shapes: sharding.weight_shardings(shapes, mesh))
split = nnx.split(model)[1]
jax.tree.map(np.testing.assert_array_equal, split, plain)
query = model.layers["query"][...]
assert {shard.data.shape for shard in query.addressable_shards} == {(3, 12, 2, 6)}, query.sharding
weights.save(model, Path(sys.argv[2]), 3)
jax.tree.map(np.testing.assert_array_equal, nnx.split(weights.load(Path(sys.argv[2])))[1], plain)
print("equal")
"""


def test_load_onto_a_mesh_gives_each_device_its_part(saved, tmp_path):
    """In a process of its own, with eight virtual devices."""
    done = subprocess.run(
        [sys.executable, "-c", _ON_A_MESH, str(saved / "qwen2"), str(tmp_path)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.stdout == "equal\n", done.stderr[-2000:]


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "tensor", "change", "message"),
    [
        ("qwen2", "model.layers.1.self_attn.k_proj.bias", lambda _: None, "k_proj.bias is missing"),
        ("qwen3", "model.layers.2.self_attn.q_norm.weight", lambda _: None, "2.self_attn.q_norm.weight is missing"),
        ("qwen3", "lm_head.weight", lambda _: None, "lm_head.weight is missing"),
        ("llama", "model.layers.0.self_attn.q_proj.bias", lambda _: np.zeros(24, np.float32), "q_proj.bias"),
        ("llama", "model.layers.0.mlp.up_proj.weight", lambda x: x[:-1], r"up_proj.weight has shape \(19, 24\)"),
        ("llama", "model.norm.weight", lambda x: x.astype(np.int8), "model.norm.weight is stored as I8"),
    ],
)
def test_load_names_the_tensor_that_does_not_fit(saved, tmp_path, family, tensor, change, message):
    folder = shutil.copytree(saved / family, tmp_path / "copy")
    _rewrite(folder, tensor, change)
    with pytest.raises(StudentError, match=message) as raised:
        weights.load(folder)
    assert "\n" not in str(raised.value)


def test_load_ignores_stored_rotary_frequencies(saved, tmp_path):
    folder = shutil.copytree(saved / "llama", tmp_path / "copy")
    _rewrite(folder, "model.layers.0.self_attn.rotary_emb.inv_freq", lambda _: np.zeros(3, np.float32))
    _assert_same(weights.load(folder), _random(_CONFIGS["llama"]))


@pytest.mark.parametrize("damage", ["truncated", "removed"])
def test_load_names_the_damaged_file_before_reading_any_weight(saved, tmp_path, damage):
    folder = shutil.copytree(saved / "qwen2", tmp_path / "copy")
    last = _files(folder)[-1]
    if damage == "truncated":
        last.write_bytes(last.read_bytes()[:-10])
    else:
        last.unlink()
    with pytest.raises(StudentError, match=rf"{last.name} cannot be read"):
        weights.load(folder)


_HF = {
    "qwen3": decoder_config.to_hf(_CONFIGS["qwen3"], 3),
    "qwen2": decoder_config.to_hf(_CONFIGS["qwen2"], 3),
    "llama": decoder_config.to_hf(_CONFIGS["llama"], 3),
}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM.*supported: Qwen3ForCausalLM, Qwen2"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved=True"),
        ("llama", {"attention_bias": 1}, "attention_bias must be true or false"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, "use_sliding_window=True"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("qwen3", {"head_dim": None}, "head_dim is missing"),
        ("qwen3", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'.*supported: default, linear"),
        ("qwen3", {"rope_scaling": {"type": "linear"}}, "linear: factor is missing"),
        ("qwen3", {"rope_scaling": {"type": "linear", "factor": -1}}, "factor=-1"),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 2, "mscale": 1.0}}, "yarn: mscale=1.0"),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ],
)
def test_from_hf_refuses_by_name(family, changes, message):
    with pytest.raises(StudentError, match=message) as raised:
        decoder_config.from_hf({**_HF[family], **changes})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {"head_dim": None, "num_key_value_heads": None}, {"head_dim": 6, "num_key_value_heads": 4}),
        ("llama", {"rope_parameters": None, "rope_theta": None}, {"rope_theta": 1e4}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_scaling": rope.Linear(factor=2.0)}),
        ("qwen2", {"head_dim": None, "tie_word_embeddings": None}, {"head_dim": 6, "tie_word_embeddings": False}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, {}),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e6}}, {"rope_theta": 1e6}),
        (
            "qwen3",
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            {"rope_scaling": rope.Yarn(factor=4.0, original_max_position_embeddings=64)},
        ),
    ],
)
def test_from_hf_reads_what_a_family_may_leave_out(family, changes, expected):
    config = decoder_config.from_hf({**_HF[family], **changes})
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("flags", [{"output_bias": True}, {"query_key_norm": True, "qkv_bias": True}])
def test_decoder_config_without_an_architecture_is_refused(flags):
    with pytest.raises(StudentError, match="no supported architecture"):
        DecoderConfig(**_SHAPES, tie_word_embeddings=True, **{"query_key_norm": False, **flags})


# -- where a student comes from ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "name", "revision"),
    [
        ("hf://Qwen/Qwen3-4B", "Qwen/Qwen3-4B", None),
        ("hf://Qwen/Qwen3-4B@v1.0", "Qwen/Qwen3-4B", "v1.0"),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", None),
    ],
)
def test_resolve_of_a_hub_id_fetches_it(monkeypatch, tmp_path, path, name, revision):
    asked = []

    def fetch(*arguments, **options):
        asked.append((arguments, options["revision"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert student_files.resolve(path) == tmp_path
    assert asked == [((name,), revision)]


def test_resolve_of_a_hub_id_without_network_says_so_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(StudentError, match="nobody/nothing is not a folder, and cannot be fetched from the hub") as raised:
        student_files.resolve("nobody/nothing")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("path", ["hf://", "hf://only-a-name", "a/b/c", "/nothing/here", "../x"])
def test_resolve_of_no_folder_and_no_hub_id_asks_nobody(monkeypatch, path):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(StudentError, match="is not a folder; give a folder"):
        student_files.resolve(path)
