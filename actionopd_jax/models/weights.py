"""Hugging Face safetensors to and from the decoder: one table of names, tensor by tensor."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from actionopd_jax.errors import StudentError
from actionopd_jax.models import decoder_config
from actionopd_jax.models.decoder import Decoder
from actionopd_jax.models.decoder_config import DecoderConfig

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class _Entry(NamedTuple):
    """One Hugging Face tensor: its shape there, and both directions of the layout change."""

    shape: tuple[int, ...]
    to_ours: Callable[[np.ndarray], np.ndarray]
    to_hf: Callable[[np.ndarray], np.ndarray]


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _layer_entries(config: DecoderConfig) -> dict[str, tuple[str, _Entry]]:
    """Our name in `Decoder.layers` -> (Hugging Face name within a layer, entry)."""
    width, ffw, head = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def projection(n: int) -> _Entry:
        return _Entry((n * head, width), lambda x: x.T.reshape(width, n, head), lambda x: x.reshape(width, n * head).T)

    def matrix(rows: int, columns: int) -> _Entry:
        return _Entry((rows, columns), lambda x: x.T, lambda x: x.T)

    def vector(n: int) -> _Entry:
        return _Entry((n,), _same, _same)

    output = _Entry(
        (width, heads * head), lambda x: x.T.reshape(heads, head, width), lambda x: x.reshape(heads * head, width).T
    )
    return {
        "attention_norm": ("input_layernorm.weight", vector(width)),
        "query": ("self_attn.q_proj.weight", projection(heads)),
        "key": ("self_attn.k_proj.weight", projection(kv_heads)),
        "value": ("self_attn.v_proj.weight", projection(kv_heads)),
        "query_norm": ("self_attn.q_norm.weight", vector(head)),
        "key_norm": ("self_attn.k_norm.weight", vector(head)),
        "output": ("self_attn.o_proj.weight", output),
        "mlp_norm": ("post_attention_layernorm.weight", vector(width)),
        "gate": ("mlp.gate_proj.weight", matrix(ffw, width)),
        "up": ("mlp.up_proj.weight", matrix(ffw, width)),
        "down": ("mlp.down_proj.weight", matrix(width, ffw)),
    }


def _top_entries(config: DecoderConfig) -> dict[str, tuple[str, _Entry]]:
    matrix = _Entry((config.vocab_size, config.hidden_size), _same, _same)
    entries = {
        "embedding": ("model.embed_tokens.weight", matrix),
        "final_norm": ("model.norm.weight", _Entry((config.hidden_size,), _same, _same)),
    }
    if not config.tie_word_embeddings:
        entries["head"] = ("lm_head.weight", matrix)
    return entries


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, of a sharded checkpoint."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:  # ValueError: neither JSON nor UTF-8
        raise StudentError(f"{index} is not a safetensors index: {error!r}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise StudentError(f"{index} is not a safetensors index: weight_map must map tensor names to file names")
    return weight_map


class _Checkpoint:
    """The safetensors files of a folder, read one tensor at a time."""

    def __init__(self, folder: Path) -> None:
        if (folder / _FILE).exists():  # before an index, as `transformers` does
            with self._open(folder / _FILE) as file:
                self._files = dict.fromkeys(file.keys(), _FILE)
        elif (folder / _INDEX).exists():
            self._files = _weight_map(folder / _INDEX)
        else:
            raise StudentError(f"{folder} has neither {_FILE} nor {_INDEX}")
        self._folder = folder
        self.unread = set(self._files)

    @staticmethod
    def _open(path: Path) -> "safetensors.safe_open":
        try:
            return safetensors.safe_open(path, framework="flax")
        except (safetensors.SafetensorError, OSError) as error:
            raise StudentError(f"{path} cannot be read (missing, truncated or not safetensors): {error}") from error

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """One tensor as float32."""
        if name not in self._files:
            raise StudentError(f"{self._folder}: tensor {name} is missing")
        path = self._folder / self._files[name]
        with self._open(path) as file:
            try:
                tensor = file.get_tensor(name)
            except safetensors.SafetensorError as error:
                raise StudentError(f"{path} does not hold the tensor {name} that {_INDEX} places there: {error}") from error
        if tensor.shape != shape:
            raise StudentError(
                f"{self._folder}: tensor {name} has shape {tuple(tensor.shape)}, config.json asks for {shape}"
            )
        self.unread.discard(name)
        return np.asarray(tensor.astype(jnp.float32))


def load(folder: Path, *, dtype: jnp.dtype | type = jnp.float32, remat: bool = True) -> Decoder:
    """A decoder with the weights of a Hugging Face folder (`config.json` and safetensors).

    Args:
        folder: holds one safetensors file, or several with an index.
        dtype: computation dtype; the weights themselves become float32.
        remat: see `Decoder`.

    Raises:
        StudentError: names the missing, misshapen or surplus tensor, or the damaged file.
    """
    config = decoder_config.load(folder)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype, remat=remat))
    checkpoint = _Checkpoint(folder)
    for name, (hf_name, entry) in _top_entries(config).items():
        getattr(model, name).set_value(jnp.asarray(entry.to_ours(checkpoint.read(hf_name, entry.shape))))
    for name, (hf_name, entry) in _layer_entries(config).items():
        layers = range(config.num_hidden_layers)
        stacked = [entry.to_ours(checkpoint.read(f"model.layers.{i}.{hf_name}", entry.shape)) for i in layers]
        model.layers[name].set_value(jnp.asarray(np.stack(stacked)))
    # Some published checkpoints of tied models carry the head a second time.
    unread = checkpoint.unread - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    if unread:
        raise StudentError(f"{folder}: {len(unread)} tensors have no place in the model, first {sorted(unread)[0]}")
    return model


def save(model: Decoder, folder: Path, eos_token_id: int, dtype: np.dtype | type = np.float32) -> None:
    """Writes `config.json` and `model.safetensors` such that `transformers` loads the same model.

    Args:
        model: what to write.
        folder: created if missing.
        eos_token_id: the end-of-turn token, for `config.json`.
        dtype: of the stored tensors (float32, or `ml_dtypes.bfloat16`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for name, (hf_name, entry) in _top_entries(model.config).items():
        tensors[hf_name] = np.ascontiguousarray(entry.to_hf(np.asarray(getattr(model, name)[...])).astype(dtype))
    for name, (hf_name, entry) in _layer_entries(model.config).items():
        stacked = np.asarray(model.layers[name][...])
        for i in range(model.config.num_hidden_layers):
            tensors[f"model.layers.{i}.{hf_name}"] = np.ascontiguousarray(entry.to_hf(stacked[i]).astype(dtype))
    values = decoder_config.to_hf(model.config, eos_token_id)
    values["dtype"] = np.dtype(dtype).name
    partial = folder / (_FILE + ".partial")
    safetensors.numpy.save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, folder / _FILE)
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
