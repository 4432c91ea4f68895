"""A dense decoder in Flax NNX: RMS norms, rotary positions, grouped-query attention, SwiGLU.

One module for the Qwen3, Qwen2 and Llama families: query/key norms and attention biases exist where the
config says so. Layers are stacked along a leading axis and scanned, so that compile time does not grow
with depth. Weights are float32 unless asked otherwise; activations are computed in `dtype`. The layer's
arithmetic is written once and serves training (`hidden_states`) and the sampler (`project_qkv`,
`finish_layer`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from actionopd_jax.models import attention, rope
from actionopd_jax.models.decoder_config import DecoderConfig

LayerParams = dict[str, Array]
Remat = bool


class Decoder(nnx.Module):
    """Decoder weights and the forward pass over packed sequences.

    Args:
        config: shapes and numbers.
        rngs: source of the initial weights (normal, standard deviation 0.02; output projections
            shrunk by sqrt(2 * layers)).
        dtype: computation dtype of activations.
        attention_implementation: see `attention.attend`.
        remat: recompute each layer in the backward pass instead of keeping its activations.
        param_dtype: of the stored weights.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        attention_implementation: attention.Implementation = "blockwise",
        remat: bool = True,
        param_dtype: Any = jnp.float32,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.attention_implementation: attention.Implementation = attention_implementation
        self.remat = remat
        depth, width, ffw = config.num_hidden_layers, config.hidden_size, config.intermediate_size
        heads, kv_heads, head = config.num_attention_heads, config.num_key_value_heads, config.head_dim

        def normal(shape: tuple[int, ...], scale: float = 0.02) -> nnx.Param:
            return nnx.Param((scale * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(param_dtype))

        def ones(shape: tuple[int, ...]) -> nnx.Param:
            return nnx.Param(jnp.ones(shape, param_dtype))

        def zeros(shape: tuple[int, ...]) -> nnx.Param:
            return nnx.Param(jnp.zeros(shape, param_dtype))

        residual_scale = 0.02 / (2 * depth) ** 0.5
        self.embedding = normal((config.vocab_size, width))
        self.layers = nnx.Dict(
            attention_norm=ones((depth, width)),
            query=normal((depth, width, heads, head)),
            key=normal((depth, width, kv_heads, head)),
            value=normal((depth, width, kv_heads, head)),
            output=normal((depth, heads, head, width), residual_scale),
            mlp_norm=ones((depth, width)),
            gate=normal((depth, width, ffw)),
            up=normal((depth, width, ffw)),
            down=normal((depth, ffw, width), residual_scale),
        )
        if config.query_key_norm:
            self.layers["query_norm"] = ones((depth, head))
            self.layers["key_norm"] = ones((depth, head))
        if config.qkv_bias:
            self.layers["query_bias"] = zeros((depth, heads, head))
            self.layers["key_bias"] = zeros((depth, kv_heads, head))
            self.layers["value_bias"] = zeros((depth, kv_heads, head))
        if config.output_bias:
            self.layers["output_bias"] = zeros((depth, width))
        self.final_norm = ones((width,))
        if not config.tie_word_embeddings:
            self.head = normal((config.vocab_size, width))

    def layer_params(self) -> LayerParams:
        """Stacked weights of all layers, each `[layers, ...]`."""
        return {name: param[...] for name, param in self.layers.items()}

    def head_weight(self) -> Float[Array, "V D"]:
        """Output projection, tied or not, in the computation dtype."""
        weight = self.embedding if self.config.tie_word_embeddings else self.head
        return weight[...].astype(self.dtype)

    def embed(self, tokens: Int32[Array, "..."]) -> Float[Array, "... D"]:
        return self.embedding[...][tokens].astype(self.dtype)

    def final(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """The last norm, before the head."""
        return rms_norm(x, self.final_norm[...], self.config.rms_norm_eps)

    def hidden_states(
        self, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"], end: Int32[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Normalised last hidden states of packed sequences.

        Args:
            tokens: ids within the embedding.
            positions: rotary position of each token (its depth in its row).
            end: visibility end of each token as a key, see `attention.attend`.
        """
        rotation = rotary(positions, self.config)

        def layer(x: Array, params: LayerParams) -> tuple[Array, None]:
            q, k, v = project_qkv(x, params, rotation, self.config)
            mixed = attention.attend(q, k, v, end, self.attention_implementation)
            return finish_layer(x, mixed, params, self.config), None

        body = functools.partial(jax.checkpoint, prevent_cse=False)(layer) if self.remat else layer
        x, _ = jax.lax.scan(body, self.embed(tokens), self.layer_params())
        return self.final(x)


Rotation = tuple[Float[Array, "... C"], Float[Array, "... C"]]


def rotary(positions: Int32[Array, "..."], config: DecoderConfig) -> Rotation:
    """Cosine and sine of the rotary angles, `[..., head_dim / 2]`, in float32; larger than 1 under some scalings."""
    frequencies = rope.frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if config.rope_scaling is None:
        return cos, sin
    return cos * config.rope_scaling.amplitude, sin * config.rope_scaling.amplitude


def _rotate(x: Float[Array, "... H C"], rotation: Rotation) -> Float[Array, "... H C"]:
    cos, sin = (part[..., None, :] for part in rotation)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rms_norm(x: Float[Array, "... D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
    """`x / sqrt(mean(x^2) + eps) * scale`, the mean in float32."""
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (scale * normal).astype(x.dtype)


def project_qkv(
    x: Float[Array, "... D"], params: LayerParams, rotation: Rotation, config: DecoderConfig
) -> tuple[Array, Array, Array]:
    """Rotated queries `[..., H, C]`, rotated keys and values `[..., K, C]` of one layer."""
    y = rms_norm(x, params["attention_norm"], config.rms_norm_eps)
    q, k, v = (jnp.einsum("...d,dhc->...hc", y, params[name].astype(y.dtype)) for name in ("query", "key", "value"))
    if config.qkv_bias:
        q, k, v = (
            x + params[name].astype(y.dtype) for x, name in ((q, "query_bias"), (k, "key_bias"), (v, "value_bias"))
        )
    if config.query_key_norm:
        q = rms_norm(q, params["query_norm"], config.rms_norm_eps)
        k = rms_norm(k, params["key_norm"], config.rms_norm_eps)
    return _rotate(q, rotation), _rotate(k, rotation), v


def finish_layer(
    x: Float[Array, "... D"], mixed: Float[Array, "... H C"], params: LayerParams, config: DecoderConfig
) -> Array:
    """Output projection and MLP of one layer, with both residual additions."""
    x = x + jnp.einsum("...hc,hcd->...d", mixed, params["output"].astype(x.dtype))
    if config.output_bias:
        x = x + params["output_bias"].astype(x.dtype)
    y = rms_norm(x, params["mlp_norm"], config.rms_norm_eps)
    gated = jax.nn.silu(y @ params["gate"].astype(y.dtype)) * (y @ params["up"].astype(y.dtype))
    return x + gated @ params["down"].astype(y.dtype)
