"""Decoder shapes and numbers, read from a Hugging Face `config.json`; what is not supported is refused by name."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from actionopd_jax.errors import StudentError

_QWEN3_ARCHITECTURES = ("Qwen3ForCausalLM",)
# Fields that change the computation when they differ from the value here; any other value is refused.
_FIXED_FIELDS = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "use_sliding_window": False,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A dense Qwen3 decoder. Field names follow Hugging Face's `config.json`."""

    vocab_size: int  # rows of the embedding; may exceed the tokenizer's ids
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    max_position_embeddings: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "tie_word_embeddings" and value <= 0:
                raise StudentError(f"model config: {field.name} must be positive, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise StudentError(
                f"model config: num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise StudentError(f"model config: head_dim must be even for rotary positions, got {self.head_dim}")

    @property
    def num_parameters(self) -> int:
        """Number of weights, a tied head counted once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_attention_heads + self.num_key_value_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size + 2 * self.head_dim
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * layer + self.hidden_size


def from_hf(values: dict[str, Any], source: str = "config.json") -> DecoderConfig:
    """Reads the fields of a Hugging Face model config.

    Raises:
        StudentError: another architecture, an unsupported value, or a missing field; names it.
    """
    if not isinstance(values, dict):
        raise StudentError(f"{source}: must be a JSON object, got {type(values).__name__}")
    architectures = values.get("architectures") or []
    if not any(name in _QWEN3_ARCHITECTURES for name in architectures):
        raise StudentError(
            f"{source}: architectures {architectures} is not supported; supported: {', '.join(_QWEN3_ARCHITECTURES)}"
        )
    for name, expected in _FIXED_FIELDS.items():
        if values.get(name, expected) != expected:
            raise StudentError(f"{source}: {name}={values[name]!r} is not supported (only {expected!r})")
    # transformers 5 moved rope_theta into rope_parameters; older files keep it at the top.
    rope = values.get("rope_parameters") or {}
    scaling = values.get("rope_scaling")
    if scaling or not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise StudentError(f"{source}: rope scaling {scaling or rope!r} is not supported")
    if any(kind != "full_attention" for kind in values.get("layer_types") or ()):
        raise StudentError(f"{source}: layer_types={values['layer_types']!r} is not supported (only 'full_attention')")
    merged = {**values, "rope_theta": rope.get("rope_theta", values.get("rope_theta"))}
    kwargs: dict[str, Any] = {}
    for field in dataclasses.fields(DecoderConfig):
        value = merged.get(field.name)
        if value is None:
            raise StudentError(f"{source}: {field.name} is missing")
        kwargs[field.name] = _typed(field, value, source)
    return DecoderConfig(**kwargs)


def _typed(field: dataclasses.Field, value: object, source: str) -> bool | int | float:
    """The value, when it has the field's type; JSON's `true` is no number, and sizes are whole."""
    if field.type is bool and isinstance(value, bool):
        return value
    if field.type is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if field.type is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    wanted = {bool: "true or false", int: "a whole number", float: "a finite number"}[field.type]
    raise StudentError(f"{source}: {field.name} must be {wanted}, got {value!r}")


def to_hf(config: DecoderConfig, eos_token_id: int) -> dict[str, Any]:
    """The `config.json` content with which `transformers` loads the same model."""
    values = dataclasses.asdict(config)
    theta = values.pop("rope_theta")
    return {
        "architectures": list(_QWEN3_ARCHITECTURES[:1]),
        "model_type": "qwen3",
        "dtype": "float32",
        "eos_token_id": eos_token_id,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        **_FIXED_FIELDS,
        **values,
    }


def load(folder: Path) -> DecoderConfig:
    """Reads `folder/config.json`."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StudentError(f"{path} does not exist: student.path must name a folder with a Hugging Face model") from None
    except ValueError as error:  # neither JSON nor UTF-8
        raise StudentError(f"{path} is not valid JSON: {error}") from None
    return from_hf(values, str(path))
