"""One update from examples: pack, score, accumulate gradients of sums, divide once, step (paper, section 2.3).

The gradient is that of the mean over the active tokens of the whole optimizer minibatch. It does not
depend on how the minibatch was packed or split into micro-batches.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from actionopd_jax.config import UpdateConfig
from actionopd_jax.errors import ConfigError, NumericalError
from actionopd_jax.learning.packing import PackedBins, PackingStats, pack
from actionopd_jax.learning.surrogate import SurrogateSums, dual_clipped_surrogate, likelihood
from actionopd_jax.models.logprobs import TokenScores, token_logprobs
from actionopd_jax.records import Example
from actionopd_jax.training.optimizer import apply_gradients, make_optimizer
from actionopd_jax.training.state import TrainState, create_state

Objective = Literal["surrogate", "likelihood"]
Metrics = dict[str, float]


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


class Scores(NamedTuple):
    """Per loss term, on the host; anything in padding."""

    logprobs: Float32[np.ndarray, "bins terms"]
    entropy: Float32[np.ndarray, "bins terms"]


class Updater:
    """Turns examples into updates of the weights.

    Args:
        graphdef: the decoder's, from `nnx.split(model)`.
        config: numbers of the surrogate, the optimizer and the packing.
        temperature: of the full softmax; the rollout's, or 1 for likelihood training.
        objective: "surrogate" (weights are advantages) or "likelihood" (weights of the log-likelihood).
        batch_sharding: where micro-batches go; None: the default device.

    `accumulate` and `apply` are the two compiled programs of a training step (compiled once for each
    shape of bins); they may be lowered without data.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        config: UpdateConfig,
        *,
        temperature: float,
        objective: Objective = "surrogate",
        batch_sharding: jax.sharding.Sharding | None = None,
    ) -> None:
        if not temperature > 0:
            raise ConfigError(f"the update needs a positive temperature, got {temperature}")
        self._graphdef = graphdef
        self._config = config
        self._temperature = temperature
        self._objective: Objective = objective
        self._batch_sharding = batch_sharding
        self._optimizer = make_optimizer(config)
        self._forward = jax.jit(self._token_scores)
        self.accumulate = jax.jit(self._accumulate, donate_argnums=0, static_argnames="unchanged_weights")
        self.apply = jax.jit(self._apply, donate_argnums=0)

    def create_state(self, params: nnx.State) -> TrainState:
        """The state before the first step; it takes the weights over (updates donate their buffers)."""
        return create_state(params, self._optimizer)

    def pack(self, examples: Sequence[Example]) -> PackedBins:
        """Bins of the configured size and mode, a multiple of a micro-batch."""
        return pack(
            examples, self._config.bin_tokens, mode=self._config.packing, bins_multiple=self._config.bins_per_microbatch
        )

    def score(self, params: nnx.State, bins: PackedBins) -> Scores:
        """Log-probabilities and entropies of all loss terms under some weights."""
        scores = [jax.device_get(self._forward(params, micro)) for micro in self._micro_batches(bins)]
        return Scores(np.concatenate([s.logprobs for s in scores]), np.concatenate([s.entropy for s in scores]))

    def update(
        self,
        state: TrainState,
        examples: Sequence[Example],
    ) -> tuple[TrainState, Metrics]:
        """One pass over a step's examples; `state` is donated and must not be used again.

        Args:
            state: before the step.
            examples: of the kept groups; without any, only `step` counts.

        Raises:
            NumericalError: `max_bad_steps` optimizer steps have had NaN or infinite gradients.
            PackingError: a row that no bin can hold.
        """
        state = dataclasses.replace(state, step=state.step + 1)
        report = _Report()
        batches = []
        for indices in split_minibatches(examples, self._config.minibatch_candidates):
            minibatch = [examples[index] for index in indices]
            bins = self.pack(minibatch)
            behaviour = [example.behaviour_logprobs for example in minibatch if example.behaviour_logprobs is not None]
            batches.append((bins, bins.gather(behaviour) if len(behaviour) == len(minibatch) else None))
        # With a single optimizer step the old log-probabilities are the new ones: no pass of its own.
        unchanged_weights = len(batches) == 1
        if self._objective == "surrogate" and not unchanged_weights:
            batches = [(bins.with_old_logprobs(self.score(state.params, bins).logprobs), b) for bins, b in batches]
        for bins, behaviour in batches:
            state, sums, grad_norm, logprobs = self._optimizer_step(state, bins, unchanged_weights)
            report.add(bins.stats, sums, grad_norm)
            if behaviour is not None:
                old = logprobs if unchanged_weights else bins.old_logprobs
                report.add_mismatch(np.abs(old - behaviour)[bins.active])
        bad_steps = int(state.bad_steps)
        if bad_steps >= self._config.max_bad_steps:
            raise NumericalError(
                f"{bad_steps} optimizer steps had NaN or infinite gradients (update.max_bad_steps); lower "
                "update.learning_rate and continue from the last checkpoint"
            )
        return state, report.metrics(bad_steps)

    def _optimizer_step(
        self, state: TrainState, bins: PackedBins, unchanged_weights: bool
    ) -> tuple[TrainState, Sums, float, Float32[np.ndarray, "bins terms"]]:
        total, logprobs = zero_accumulator(state.params), []
        for micro in self._micro_batches(bins):
            total, new_logprobs = self.accumulate(total, state.params, micro, unchanged_weights=unchanged_weights)
            logprobs.append(new_logprobs)
        sums = jax.device_get(total.sums)
        state, grad_norm = self.apply(state, total)
        return state, sums, float(grad_norm), np.concatenate([np.asarray(part) for part in logprobs])

    def _micro_batches(self, bins: PackedBins) -> Iterator[MicroBatch]:
        size = self._config.bins_per_microbatch
        for start in range(0, bins.num_bins, size):
            arrays = MicroBatch(*(getattr(bins, name)[start : start + size] for name in MicroBatch._fields))
            yield jax.device_put(arrays, self._batch_sharding)

    def _token_scores(self, params: nnx.State, micro: MicroBatch) -> TokenScores:
        model: Any = nnx.merge(self._graphdef, params)
        hidden = model.hidden_states(micro.tokens, micro.positions, micro.end)
        return token_logprobs(hidden, model.head_weight(), micro.source, micro.target, self._temperature)

    def _accumulate(
        self, total: Accumulator, params: nnx.State, micro: MicroBatch, *, unchanged_weights: bool
    ) -> tuple[Accumulator, Float[Array, "bins terms"]]:
        loss = functools.partial(self._summed_loss, micro=micro, unchanged_weights=unchanged_weights)
        grads, (sums, logprobs) = jax.grad(loss, has_aux=True)(params)
        grads = jax.tree.map(lambda whole, part: whole + part.astype(whole.dtype), total.grads, grads)
        return Accumulator(grads, total.sums.merge(sums)), logprobs

    def _summed_loss(
        self, params: nnx.State, micro: MicroBatch, unchanged_weights: bool
    ) -> tuple[Float[Array, ""], tuple[Sums, Float[Array, "bins terms"]]]:
        scores = self._token_scores(params, micro)
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


def zero_accumulator(params: nnx.State) -> Accumulator:
    """Nothing accumulated yet; gradients lie where the weights lie."""
    grads = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.promote_types(p.dtype, jnp.float32)), params)
    dtype = jnp.result_type(float)
    # Separate buffers: each is donated.
    surrogate = SurrogateSums(*(jnp.zeros((), dtype) for _ in SurrogateSums._fields))
    return Accumulator(grads, Sums(surrogate, jnp.zeros((), dtype), jnp.zeros((), dtype)))


def split_minibatches(examples: Sequence[Example], limit: int) -> list[list[int]]:
    """Indices of examples, in minibatches of at most `limit` that keep groups whole, in order of first appearance.

    Raises:
        ConfigError: a group that is larger than a minibatch.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for index, example in enumerate(examples):
        groups.setdefault((example.trajectory, example.group), []).append(index)
    minibatches: list[list[int]] = []
    for (trajectory, group), indices in groups.items():
        if len(indices) > limit:
            raise ConfigError(
                f"group {group} of trajectory {trajectory} has {len(indices)} rows, more than "
                f"update.minibatch_candidates {limit}; raise it"
            )
        if not minibatches or len(minibatches[-1]) + len(indices) > limit:
            minibatches.append([])
        minibatches[-1] += indices
    return minibatches


class _Report:
    """Collects the figures of an update's optimizer steps."""

    def __init__(self) -> None:
        self._sums: list[Sums] = []
        self._stats: list[PackingStats] = []
        self._grad_norms: list[float] = []
        self._mismatch: list[np.ndarray] = []

    def add(self, stats: PackingStats, sums: Sums, grad_norm: float) -> None:
        self._stats.append(stats)
        self._sums.append(sums)
        self._grad_norms.append(grad_norm)

    def add_mismatch(self, differences: Float32[np.ndarray, " terms"]) -> None:
        self._mismatch.append(differences)

    def metrics(self, bad_steps: int) -> Metrics:
        """Means over active tokens; all 0 for an update without examples."""
        terms = [sums.surrogate for sums in self._sums]
        num_tokens = float(sum(t.num_active for t in terms))

        def per_token(values: list[Any]) -> float:
            return float(sum(values)) / max(num_tokens, 1.0)

        slots = sum(stats.slots for stats in self._stats)
        packed = sum(stats.packed_tokens for stats in self._stats)
        metrics = {
            "loss": -per_token([t.objective for t in terms]),
            "grad_norm": float(np.mean(self._grad_norms)) if self._grad_norms else 0.0,
            "clip_fraction": per_token([t.clipped for t in terms]),
            "dual_clip_fraction": per_token([t.dual_clipped for t in terms]),
            "ratio_mean": per_token([t.ratio for t in terms]),
            "ratio_max": float(max((t.ratio_max for t in terms), default=0.0)),
            "approx_kl": per_token([t.approx_kl for t in terms]),
            "entropy": per_token([sums.entropy for sums in self._sums]),
            "greedy_fraction": per_token([sums.num_greedy for sums in self._sums]),
            "num_tokens": num_tokens,
            "optimizer_steps": float(len(self._sums)),
            "token_ratio": sum(stats.row_tokens for stats in self._stats) / max(packed, 1),
            "padding": 1.0 - packed / slots if slots else 0.0,
            "bad_steps": float(bad_steps),
        }
        if self._mismatch:
            differences = np.concatenate(self._mismatch)
            metrics |= {"mismatch_mean": float(differences.mean()), "mismatch_max": float(differences.max())}
        return metrics
