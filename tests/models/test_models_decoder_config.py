"""Model configs: what is read, what is written, and every refusal by name."""

import json

import pytest
import transformers

from actionopd_jax.errors import StudentError
from actionopd_jax.models import decoder_config

# A published Qwen3 0.6B config.json, as transformers 4 wrote it.
_PUBLISHED = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_from_hf_reads_a_published_config():
    config = decoder_config.from_hf(_PUBLISHED)
    assert config == decoder_config.DecoderConfig(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
    )
    assert isinstance(config.rope_theta, float)
    assert config.num_parameters == 596_049_920  # the published "0.6B"


def test_from_hf_reads_the_rotary_base_where_transformers_5_puts_it():
    values = {**_PUBLISHED, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
    del values["rope_theta"]
    assert decoder_config.from_hf(values).rope_theta == 5e6


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "tie_word_embeddings",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("absent", ["missing", "null"])
def test_from_hf_without_a_field_names_it(name, absent):
    values = {**_PUBLISHED, name: None}
    if absent == "missing":
        del values[name]
    with pytest.raises(StudentError, match=rf"^some/config.json: {name} is missing$"):
        decoder_config.from_hf(values, "some/config.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("architectures", ["Qwen3MoeForCausalLM"]),
        ("architectures", []),
        ("architectures", "Qwen3ForCausalLM"),
        ("attention_bias", 1),
        ("attention_dropout", 0.1),
        ("hidden_act", "gelu"),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e6}),
        ("rope_parameters", [1e6]),
        ("hidden_size", "1024"),
        ("hidden_size", True),
        ("hidden_size", 1024.5),
        ("hidden_size", [1024]),
        ("hidden_size", 0),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", False),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", 0),
        ("rope_theta", float("inf")),
        ("rope_theta", True),
        ("rope_theta", "1e6"),
        ("tie_word_embeddings", "false"),
        ("tie_word_embeddings", 1),
        ("num_key_value_heads", 3),
        ("head_dim", 127),
    ],
)
def test_from_hf_refuses_an_unsupported_value_and_names_the_field(name, value):
    asked = {"rope_parameters": "rope scaling", "rope_scaling": "rope scaling"}.get(name, name)
    with pytest.raises(StudentError, match=asked) as raised:
        decoder_config.from_hf({**_PUBLISHED, name: value})
    assert "\n" not in str(raised.value)


def test_from_hf_refuses_a_sliding_window_that_a_layer_uses():
    window = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 27}
    with pytest.raises(StudentError, match="use_sliding_window"):
        decoder_config.from_hf({**_PUBLISHED, **window})
    assert decoder_config.from_hf({**_PUBLISHED, **window, "max_window_layers": 28}) == decoder_config.from_hf(_PUBLISHED)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
    ],
)
def test_load_of_a_damaged_file_names_it(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(StudentError, match=message) as raised:
        decoder_config.load(tmp_path)
    assert str(tmp_path / "config.json") in str(raised.value)


def test_load_without_a_file_says_what_the_folder_should_be(tmp_path):
    with pytest.raises(StudentError, match=r"config.json does not exist: student.path must name a folder"):
        decoder_config.load(tmp_path)


def test_to_hf_and_back_gives_the_same_config(tmp_path):
    config = decoder_config.from_hf(_PUBLISHED)
    (tmp_path / "config.json").write_text(json.dumps(decoder_config.to_hf(config, eos_token_id=7)))
    assert decoder_config.load(tmp_path) == config
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert isinstance(read, transformers.Qwen3Config)
    assert read.eos_token_id == 7
    assert read.rope_parameters["rope_theta"] == 1e6
    assert read.num_key_value_heads == 8
