"""A dense decoder in Flax NNX: RMS norms, rotary positions, grouped-query attention, SwiGLU.

One module for the Qwen3, Qwen2 and Llama families: query/key norms and attention biases exist where the
config says so. Layers are stacked along a leading axis and scanned, so that compile time does not grow
with depth. Weights are float32 unless asked otherwise; activations are computed in `dtype`. The layer's
arithmetic is written once and serves training (`hidden_states`) and the sampler (`project_qkv`,
`finish_layer`).
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from actionopd_jax.models import attention, rope, sharding
from actionopd_jax.models.decoder_config import DecoderConfig

LayerParams = dict[str, Array]
Remat = Literal["none", "dots", "full"]
"""What the backward pass computes again: nothing; all but the results of matrix products; whole layers (least memory)."""


class Decoder(nnx.Module):
    """Decoder weights and the forward pass over packed sequences.

    Args:
        config: shapes and numbers.
        rngs: source of the initial weights (normal, standard deviation 0.02; output projections
            shrunk by sqrt(2 * layers)).
        dtype: computation dtype of activations.
        attention_implementation: see `attention.attend`.
        remat: what the backward pass computes again; True is "full", False "none".
        param_dtype: of the stored weights.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        attention_implementation: attention.Implementation = "blockwise",
        remat: bool | Remat = True,
        param_dtype: Any = jnp.float32,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.attention_implementation: attention.Implementation = attention_implementation
        self.remat: Remat = ("full" if remat else "none") if isinstance(remat, bool) else remat
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
        name = "embedding" if self.config.tie_word_embeddings else "head"
        return sharding.gathered(name, getattr(self, name)[...].astype(self.dtype))

    def embed(self, tokens: Int32[Array, "..."]) -> Float[Array, "... D"]:
        return sharding.gathered("embedding", self.embedding[...])[tokens].astype(self.dtype)

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

        axes = ("batch", "length")

        def layer(x: Array, params: LayerParams) -> tuple[Array, None]:
            params = sharding.gathered_layer(params, self.dtype)
            q, k, v = project_qkv(x, params, rotation, self.config, axes)
            mixed = attention.attend(q, k, v, end, self.attention_implementation)
            x = finish_layer(x, mixed, params, self.config, axes)
            return sharding.constrain(x, "batch", "length_between_layers", None), None

        x = sharding.constrain(self.embed(tokens), "batch", "length_between_layers", None)
        x, _ = jax.lax.scan(rematerialised(layer, self.remat), x, self.layer_params())
        return self.final(x)


def rematerialised(layer: Callable, remat: Remat) -> Callable:
    """The body of a scan over layers, with a remat policy."""
    if remat == "none":
        return layer
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
    return jax.checkpoint(layer, prevent_cse=False, policy=policy)


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
    x: Float[Array, "... D"],
    params: LayerParams,
    rotation: Rotation,
    config: DecoderConfig,
    axes: tuple[str, ...] = (),
) -> tuple[Array, Array, Array]:
    """Rotated queries `[..., H, C]`, rotated keys and values `[..., K, C]` of one layer.

    `axes` names the leading dimensions of x for a mesh, see `sharding.constrain`; without, nothing is said about them.
    """
    y = _split(rms_norm(x, params["attention_norm"], config.rms_norm_eps), axes)
    q, k, v = (jnp.einsum("...d,dhc->...hc", y, params[name].astype(y.dtype)) for name in ("query", "key", "value"))
    if config.qkv_bias:
        q, k, v = (x + params[name].astype(y.dtype) for x, name in ((q, "query_bias"), (k, "key_bias"), (v, "value_bias")))
    if config.query_key_norm:
        q = rms_norm(q, params["query_norm"], config.rms_norm_eps)
        k = rms_norm(k, params["key_norm"], config.rms_norm_eps)
    return _rotate(q, rotation), _rotate(k, rotation), v


def finish_layer(
    x: Float[Array, "... D"],
    mixed: Float[Array, "... H C"],
    params: LayerParams,
    config: DecoderConfig,
    axes: tuple[str, ...] = (),
) -> Array:
    """Output projection and MLP of one layer, with both residual additions. `axes`: see `project_qkv`."""
    x = x + jnp.einsum("...hc,hcd->...d", mixed, params["output"].astype(x.dtype))
    if config.output_bias:
        x = x + params["output_bias"].astype(x.dtype)
    y = _split(rms_norm(x, params["mlp_norm"], config.rms_norm_eps), axes)
    gated = jax.nn.silu(y @ params["gate"].astype(y.dtype)) * (y @ params["up"].astype(y.dtype))
    return x + gated @ params["down"].astype(y.dtype)


def _split(y: Float[Array, "... D"], axes: tuple[str, ...]) -> Float[Array, "... D"]:
    return sharding.constrain(y, *axes, None) if axes else y
