"""Decoder shapes and numbers, read from a Hugging Face `config.json`; what is not supported is refused by name."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from actionopd_jax.errors import StudentError
from actionopd_jax.models import rope


class _Family(NamedTuple):
    """One `architectures` entry and what it fixes; `defaults` are what its `config.json` may leave out."""

    architecture: str
    model_type: str
    query_key_norm: bool
    qkv_bias: bool | None  # None: `attention_bias` in config.json says, for all four projections
    defaults: dict[str, Any]


_FAMILIES = (
    _Family("Qwen3ForCausalLM", "qwen3", True, None, {}),
    _Family("Qwen2ForCausalLM", "qwen2", False, True, {"tie_word_embeddings": False}),
    _Family("LlamaForCausalLM", "llama", False, None, {"tie_word_embeddings": False, "rope_theta": 10_000.0}),
)
# Fields that change the computation when they differ from the value here; any other value is refused.
_FIXED_FIELDS: dict[str, Any] = {"attention_dropout": 0.0, "hidden_act": "silu"}
_REFUSED_UNLESS: dict[str, Any] = {
    **_FIXED_FIELDS,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_mrope": False,
    "quantization_config": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attention_multiplier": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_FIRST_SLIDING_LAYER = 28  # `max_window_layers` where a config leaves it out


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A dense decoder: Qwen3, Qwen2 or Llama. Field names follow Hugging Face's `config.json` where it has them."""

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
    query_key_norm: bool = True  # an RMS norm over each head's query and key (Qwen3)
    qkv_bias: bool = False  # on the query, key and value projections
    output_bias: bool = False  # on the attention's output projection
    rope_scaling: rope.Scaling | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in (int, float) and value <= 0:
                raise StudentError(f"model config: {field.name} must be positive, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise StudentError(
                f"model config: num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise StudentError(f"model config: head_dim must be even for rotary positions, got {self.head_dim}")
        if (self.output_bias and not self.qkv_bias) or (self.query_key_norm and self.qkv_bias != self.output_bias):
            raise StudentError(
                f"model config: no supported architecture has query_key_norm {self.query_key_norm} with "
                f"qkv_bias {self.qkv_bias} and output_bias {self.output_bias}"
            )

    @property
    def architecture(self) -> str:
        """The `transformers` class that computes the same."""
        if self.query_key_norm:
            return "Qwen3ForCausalLM"
        return "Qwen2ForCausalLM" if self.qkv_bias and not self.output_bias else "LlamaForCausalLM"

    @property
    def num_parameters(self) -> int:
        """Number of weights, a tied head counted once."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layer = 2 * self.hidden_size * (queries + keys) + 3 * self.hidden_size * self.intermediate_size
        layer += 2 * self.hidden_size  # norms
        layer += 2 * self.head_dim * self.query_key_norm
        layer += (queries + 2 * keys) * self.qkv_bias + self.hidden_size * self.output_bias
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * layer + self.hidden_size


def from_hf(values: dict[str, Any], source: str = "config.json") -> DecoderConfig:
    """Reads the fields of a Hugging Face model config.

    Raises:
        StudentError: another architecture, an unsupported value, or a missing field; names it.
    """
    if not isinstance(values, dict):
        raise StudentError(f"{source}: must be a JSON object, got {type(values).__name__}")
    family = _family(values, source)
    for name, expected in _REFUSED_UNLESS.items():
        value = values.get(name)
        if value is not None and value != expected:
            raise StudentError(f"{source}: {name}={value!r} is not supported (only {expected!r})")
    _refuse_sliding_window(values, source)
    # transformers 5 writes rope_parameters with rope_theta in it; older files have rope_scaling, and rope_theta at the top.
    parameters = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise StudentError(f"{source}: rope scaling must be a JSON object, got {parameters!r}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise StudentError(f"{source}: partial_rotary_factor={parameters['partial_rotary_factor']!r} is not supported")
    merged = {**family.defaults, **{name: value for name, value in values.items() if value is not None}}
    if parameters.get("rope_theta") is not None:
        merged["rope_theta"] = parameters["rope_theta"]
    if family.model_type != "qwen3":  # there head_dim has a default of its own, and every published config states it
        _add_head_defaults(merged)
    bias = merged.get("attention_bias", False) if family.qkv_bias is None else family.qkv_bias
    if not isinstance(bias, bool):
        raise StudentError(f"{source}: attention_bias must be true or false, got {bias!r}")
    kwargs: dict[str, Any] = {}
    for field in dataclasses.fields(DecoderConfig):
        if field.default is dataclasses.MISSING:
            if field.name not in merged:
                raise StudentError(f"{source}: {field.name} is missing")
            kwargs[field.name] = _typed(field, merged[field.name], source)
    original = merged.get("original_max_position_embeddings", kwargs["max_position_embeddings"])
    return DecoderConfig(
        **kwargs,
        query_key_norm=family.query_key_norm,
        qkv_bias=bias,
        output_bias=bias and family.qkv_bias is None,
        rope_scaling=rope.scaling_from_hf(parameters, original, source),
    )


def to_hf(config: DecoderConfig, eos_token_id: int) -> dict[str, Any]:
    """The `config.json` content with which `transformers` loads the same model."""
    family = next(family for family in _FAMILIES if family.architecture == config.architecture)
    own = ("query_key_norm", "qkv_bias", "output_bias", "rope_scaling", "rope_theta")
    values = {name: value for name, value in dataclasses.asdict(config).items() if name not in own}
    scaling = rope.scaling_to_hf(config.rope_scaling)
    biases = {"attention_bias": config.qkv_bias} if family.qkv_bias is None else {}
    window = {} if family.model_type == "llama" else {"use_sliding_window": False}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "rope_theta": config.rope_theta,
        "rope_parameters": {**scaling, "rope_theta": config.rope_theta},
        **({} if config.rope_scaling is None else {"rope_scaling": scaling}),
        **_FIXED_FIELDS,
        **biases,
        **window,
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


def _family(values: dict[str, Any], source: str) -> _Family:
    architectures = values.get("architectures") or []
    for family in _FAMILIES:
        if isinstance(architectures, list) and family.architecture in architectures:
            return family
    supported = ", ".join(family.architecture for family in _FAMILIES)
    raise StudentError(f"{source}: architectures {architectures} is not supported; supported: {supported}")


def _add_head_defaults(values: dict[str, Any]) -> None:
    """What these families leave out when every head has its own keys, or heads divide the hidden size."""
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if heads is not None:
        values.setdefault("num_key_value_heads", heads)
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads == 0:
        values.setdefault("head_dim", hidden // heads)


def _refuse_sliding_window(values: dict[str, Any], source: str) -> None:
    """Configs name a window that no layer uses: only one in use is refused."""
    kinds = values.get("layer_types")
    if kinds is not None:
        if any(kind != "full_attention" for kind in kinds):
            raise StudentError(f"{source}: layer_types={kinds!r} is not supported (only 'full_attention')")
        return
    first = values.get("max_window_layers", _FIRST_SLIDING_LAYER)
    window = values.get("sliding_window", "a default number of")
    if values.get("use_sliding_window") and window and first < values.get("num_hidden_layers", 0):
        raise StudentError(
            f"{source}: use_sliding_window={values['use_sliding_window']!r} is not supported (only False): "
            f"layers from {first} on would attend to {window} tokens"
        )


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
