"""Where each weight of the decoder stands in a Hugging Face checkpoint, and how it is laid out there."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from actionopd_jax.models.decoder_config import DecoderConfig

Index = tuple[slice, ...]


class Layout(NamedTuple):
    """One stored tensor. Ours is `stored.reshape(unfolded).transpose(axes)`.

    Attributes:
        name: the stored name; within a layer, what follows `model.layers.N.`.
        shape: as stored.
        unfolded: the same with heads apart from the head dimension.
        axes: our axes, as axes of `unfolded`.
    """

    name: str
    shape: tuple[int, ...]
    unfolded: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def our_shape(self) -> tuple[int, ...]:
        return tuple(self.unfolded[axis] for axis in self.axes)

    def to_stored(self, ours: np.ndarray) -> np.ndarray:
        """Our whole tensor as it is stored."""
        return ours.transpose(np.argsort(self.axes)).reshape(self.shape)

    def part(self, read: Callable[[Index], np.ndarray], index: Index) -> np.ndarray:
        """A part of our tensor, of which no more than whole heads are read.

        Args:
            read: gives a part of the stored tensor; bounds of its slices are never None.
            index: one slice for each of our axes, bounds never None, step 1.
        """
        wanted = [index[self.axes.index(axis)] for axis in range(len(self.axes))]
        outer: list[slice] = []
        inner: list[slice] = []
        for size in self.shape:
            axis = len(inner)
            first = wanted[axis]
            if self.unfolded[axis] == size:
                outer.append(first)
                inner.append(slice(None))
            else:
                width = self.unfolded[axis + 1]
                outer.append(slice(first.start * width, first.stop * width))
                inner += [slice(None), wanted[axis + 1]]
        read_shape = [
            whole if inner[axis] != slice(None) else wanted[axis].stop - wanted[axis].start
            for axis, whole in enumerate(self.unfolded)
        ]
        return read(tuple(outer)).reshape(read_shape)[tuple(inner)].transpose(self.axes)


def _plain(name: str, *shape: int) -> Layout:
    return Layout(name, shape, shape, tuple(range(len(shape))))


def _transposed(name: str, rows: int, columns: int) -> Layout:
    return Layout(name, (rows, columns), (rows, columns), (1, 0))


def layer_layouts(config: DecoderConfig) -> dict[str, Layout]:
    """Our name in `Decoder.layers` -> layout within a layer."""
    width, ffw, head = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def projection(letter: str, n: int) -> Layout:
        return Layout(f"self_attn.{letter}_proj.weight", (n * head, width), (n, head, width), (2, 0, 1))

    def bias(letter: str, n: int) -> Layout:
        return Layout(f"self_attn.{letter}_proj.bias", (n * head,), (n, head), (0, 1))

    output = Layout("self_attn.o_proj.weight", (width, heads * head), (width, heads, head), (1, 2, 0))
    layouts = {
        "gate": _transposed("mlp.gate_proj.weight", ffw, width),
        "up": _transposed("mlp.up_proj.weight", ffw, width),
        "down": _transposed("mlp.down_proj.weight", width, ffw),
        "query": projection("q", heads),
        "output": output,
        "key": projection("k", kv_heads),
        "value": projection("v", kv_heads),
        "attention_norm": _plain("input_layernorm.weight", width),
        "mlp_norm": _plain("post_attention_layernorm.weight", width),
    }
    if config.query_key_norm:
        layouts["query_norm"] = _plain("self_attn.q_norm.weight", head)
        layouts["key_norm"] = _plain("self_attn.k_norm.weight", head)
    if config.qkv_bias:
        layouts |= {"query_bias": bias("q", heads), "key_bias": bias("k", kv_heads), "value_bias": bias("v", kv_heads)}
    if config.output_bias:
        layouts["output_bias"] = _plain("self_attn.o_proj.bias", width)
    return layouts


def top_layouts(config: DecoderConfig) -> dict[str, Layout]:
    """Our name in `Decoder` -> layout of the tensors outside the layers."""
    layouts = {
        "embedding": _plain("model.embed_tokens.weight", config.vocab_size, config.hidden_size),
        "final_norm": _plain("model.norm.weight", config.hidden_size),
    }
    if not config.tie_word_embeddings:
        layouts["head"] = _plain("lm_head.weight", config.vocab_size, config.hidden_size)
    return layouts


def in_layer(layer: int, layout: Layout) -> str:
    """The full stored name of a layer's tensor."""
    return f"model.layers.{layer}.{layout.name}"


def num_stored_elements(config: DecoderConfig) -> int:
    """Elements of all stored tensors."""
    in_layers = sum(math.prod(layout.shape) for layout in layer_layouts(config).values())
    return config.num_hidden_layers * in_layers + sum(math.prod(x.shape) for x in top_layouts(config).values())
