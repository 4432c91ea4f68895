"""The compiled programs of training: score loss terms, accumulate gradients of sums, divide once and step.

On a mesh all inputs and outputs have explicit shardings: weights, moments and gradients as
`models.sharding` says, bins over `replica` and `fsdp`, what the host reads whole everywhere.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from actionopd_jax.config import UpdateConfig
from actionopd_jax.learning.surrogate import SurrogateSums, dual_clipped_surrogate, likelihood
from actionopd_jax.models import sharding
from actionopd_jax.models.logprobs import TokenScores, token_logprobs
from actionopd_jax.training.optimizer import apply_gradients, make_optimizer
from actionopd_jax.training.state import TrainState, create_state, state_shardings

Objective = Literal["surrogate", "likelihood"]


class MicroBatch(NamedTuple):
    """Some bins on the device; the fields of `PackedBins`."""

    tokens: Int32[Array, "bins tokens"]
    positions: Int32[Array, "bins tokens"]
    end: Int32[Array, "bins tokens"]
    source: Int32[Array, "bins terms"]
    target: Int32[Array, "bins terms"]
    weight: Float[Array, "bins terms"]
    old_logprobs: Float[Array, "bins terms"]
    active: Bool[Array, "bins terms"]


class Sums(NamedTuple):
    """Sums over the active tokens of micro-batches."""

    surrogate: SurrogateSums
    entropy: Float[Array, ""]
    num_greedy: Float[Array, ""]

    def merge(self, other: "Sums") -> "Sums":
        """The sums of both."""
        return Sums(self.surrogate.merge(other.surrogate), self.entropy + other.entropy, self.num_greedy + other.num_greedy)


class Accumulator(NamedTuple):
    """Gradient of the summed loss (shaped like the weights, float32 at least), and the sums."""

    grads: Any
    sums: Sums


def zero_accumulator(params: nnx.State) -> Accumulator:
    """Nothing accumulated yet; gradients lie where the weights lie."""
    grads = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.promote_types(p.dtype, jnp.float32)), params)
    dtype = jnp.result_type(float)
    # Separate buffers: each is donated.
    surrogate = SurrogateSums(*(jnp.zeros((), dtype) for _ in SurrogateSums._fields))
    return Accumulator(grads, Sums(surrogate, jnp.zeros((), dtype), jnp.zeros((), dtype)))


class Programs:
    """Jitted functions, compiled once for each shape of bins; they may be lowered without data.

    On a mesh they must be called, and lowered, under `jax.set_mesh(mesh)`.

    Attributes:
        score: (weights, micro-batch) -> TokenScores.
        accumulate: (accumulator, weights, micro-batch, unchanged_weights) -> (accumulator, log-probabilities); the
            accumulator is donated; `unchanged_weights` is static and says that the old log-probabilities are the new ones.
        apply: (state, accumulator) -> (state, gradient norm); the state is donated.
        create_state: (weights) -> the state before the first step; the weights are donated.
        zero: (weights) -> an empty accumulator.
        layout: on a mesh, the sharding of each leaf of the state.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        config: UpdateConfig,
        *,
        temperature: float,
        objective: Objective,
        mesh: Mesh | None = None,
        weights: nnx.State | None = None,
    ) -> None:
        self._graphdef = graphdef
        self._config = config
        self._temperature = temperature
        self._objective: Objective = objective
        self._optimizer: optax.GradientTransformation = make_optimizer(config)
        create = functools.partial(create_state, optimizer=self._optimizer)
        self.layout: TrainState | None = None
        if mesh is None or weights is None:
            self.create_state, self.zero = create, zero_accumulator
            self.score = jax.jit(self._score)
            self.accumulate = jax.jit(self._accumulate, donate_argnums=0, static_argnums=3)
            self.apply = jax.jit(self._apply, donate_argnums=0)
            return
        self.layout = state = state_shardings(weights, self._optimizer, mesh)
        whole = NamedSharding(mesh, PartitionSpec())
        bins = NamedSharding(mesh, PartitionSpec(sharding.MESH_RULES["batch"]))
        total = Accumulator(state.params, jax.tree.map(lambda _: whole, jax.eval_shape(zero_accumulator, weights).sums))
        self.create_state = jax.jit(create, donate_argnums=0, in_shardings=(state.params,), out_shardings=state)
        self.zero = jax.jit(zero_accumulator, in_shardings=(state.params,), out_shardings=total)
        self.score = jax.jit(self._score, in_shardings=(state.params, bins), out_shardings=whole)
        self.accumulate = jax.jit(
            self._accumulate,
            donate_argnums=0,
            static_argnums=3,
            in_shardings=(total, state.params, bins),
            out_shardings=(total, whole),
        )
        self.apply = jax.jit(self._apply, donate_argnums=0, in_shardings=(state, total), out_shardings=(state, whole))

    def _score(self, params: nnx.State, micro: MicroBatch) -> TokenScores:
        model: Any = nnx.merge(self._graphdef, params)
        hidden = model.hidden_states(micro.tokens, micro.positions, micro.end)
        return token_logprobs(hidden, model.head_weight(), micro.source, micro.target, self._temperature)

    def _accumulate(
        self, total: Accumulator, params: nnx.State, micro: MicroBatch, unchanged_weights: bool
    ) -> tuple[Accumulator, Float[Array, "bins terms"]]:
        loss = functools.partial(self._summed_loss, micro=micro, unchanged_weights=unchanged_weights)
        grads, (sums, logprobs) = jax.grad(loss, has_aux=True)(params)
        grads = jax.tree.map(lambda whole, part: whole + part.astype(whole.dtype), total.grads, grads)
        return Accumulator(grads, total.sums.merge(sums)), logprobs

    def _summed_loss(
        self, params: nnx.State, micro: MicroBatch, unchanged_weights: bool
    ) -> tuple[Float[Array, ""], tuple[Sums, Float[Array, "bins terms"]]]:
        scores = self._score(params, micro)
        if self._objective == "likelihood":
            terms = likelihood(scores.logprobs, micro.weight, micro.active)
        else:
            old = jax.lax.stop_gradient(scores.logprobs) if unchanged_weights else micro.old_logprobs
            terms = dual_clipped_surrogate(
                scores.logprobs, old, micro.weight, micro.active, self._config.clip_eta, self._config.dual_clip
            )
        entropy = jnp.where(micro.active, scores.entropy, 0).sum()
        num_greedy = (scores.is_argmax & micro.active).sum(dtype=jnp.int32).astype(entropy.dtype)
        return -terms.objective, (Sums(terms, entropy, num_greedy), scores.logprobs)

    def _apply(self, state: TrainState, total: Accumulator) -> tuple[TrainState, Float[Array, ""]]:
        num_active = jnp.maximum(total.sums.surrogate.num_active, 1)
        grads = jax.tree.map(lambda g, p: (g / num_active).astype(p.dtype), total.grads, state.params)
        return apply_gradients(self._optimizer, state, grads)
