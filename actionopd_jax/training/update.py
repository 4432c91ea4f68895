"""One update from examples: pack, score, accumulate gradients of sums, divide once, step (paper, section 2.3).

The gradient is that of the mean over the active tokens of the whole optimizer minibatch, over all
devices and processes. It does not depend on how the minibatch was packed, split or spread.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float32

from actionopd_jax.config import UpdateConfig
from actionopd_jax.errors import ConfigError, NumericalError
from actionopd_jax.learning.packing import PackedBins, PackingStats, pack
from actionopd_jax.models import sharding
from actionopd_jax.records import Example
from actionopd_jax.training import hosts
from actionopd_jax.training.minibatch import make_minibatches, split_minibatches
from actionopd_jax.training.programs import MicroBatch, Objective, Programs, Sums, zero_accumulator
from actionopd_jax.training.state import TrainState

__all__ = ["Metrics", "Scores", "Updater", "split_minibatches", "zero_accumulator"]

Metrics = dict[str, float]


class Scores(NamedTuple):
    """Per loss term, on the host; anything in padding."""

    logprobs: Float32[np.ndarray, "bins terms"]
    entropy: Float32[np.ndarray, "bins terms"]


class Updater:
    """Turns examples into updates of the weights.

    On a mesh, every process calls each method with its own examples, which may be none.

    Args:
        graphdef: the decoder's, from `nnx.split(model)`.
        config: numbers of the surrogate, the optimizer and the packing.
        temperature: of the full softmax; the rollout's, or 1 for likelihood training.
        objective: "surrogate" (weights are advantages) or "likelihood" (weights of the log-likelihood).
        mesh: None: one device.
        weights: with a mesh, the decoder's weights or their shapes.

    `accumulate` and `apply` are the two compiled programs of a training step, see `Programs`.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        config: UpdateConfig,
        *,
        temperature: float,
        objective: Objective = "surrogate",
        mesh: Mesh | None = None,
        weights: nnx.State | None = None,
    ) -> None:
        if not temperature > 0:
            raise ConfigError(f"the update needs a positive temperature, got {temperature}")
        if (mesh is None) != (weights is None):
            raise ValueError("a mesh needs the weights that lie on it, and they a mesh")
        self._config = config
        self._objective: Objective = objective
        self._mesh = mesh
        self.programs = Programs(graphdef, config, temperature=temperature, objective=objective, mesh=mesh, weights=weights)
        self.accumulate, self.apply = self.programs.accumulate, self.programs.apply
        slices = 1 if mesh is None else mesh.shape["replica"] * mesh.shape["fsdp"]
        self._microbatch_bins = config.bins_per_microbatch * slices

    def create_state(self, params: nnx.State) -> TrainState:
        """The state before the first step; it takes the weights over (updates donate their buffers)."""
        if self.programs.layout is None:
            return self.programs.create_state(params)
        with self._on_mesh():
            return self.programs.create_state(sharding.place(params, self.programs.layout.params))

    def pack(self, examples: Sequence[Example]) -> PackedBins:
        """Bins of the configured size and mode, a multiple of a micro-batch."""
        return pack(examples, self._config.bin_tokens, mode=self._config.packing, bins_multiple=self._microbatch_bins)

    def score(self, params: nnx.State, bins: PackedBins) -> Scores:
        """Log-probabilities and entropies of all loss terms under some weights."""
        with self._on_mesh():
            scores = [jax.device_get(self.programs.score(params, micro)) for micro in self._micro_batches(bins)]
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
        batches = make_minibatches(examples, self._config, self._microbatch_bins)
        # With a single optimizer step the old log-probabilities are the new ones: no pass of its own.
        unchanged_weights = len(batches) == 1
        if self._objective == "surrogate" and not unchanged_weights:
            scored = [batch.bins.with_old_logprobs(self.score(state.params, batch.bins).logprobs) for batch in batches]
            batches = [dataclasses.replace(batch, bins=bins) for batch, bins in zip(batches, scored, strict=True)]
        for batch in batches:
            state, sums, grad_norm, logprobs = self.optimizer_step(state, batch.bins, unchanged_weights)
            report.add(batch.bins.stats, sums, grad_norm)
            report.add_mismatch(batch.mismatch(logprobs if unchanged_weights else batch.bins.old_logprobs))
        bad_steps = int(state.bad_steps)
        if bad_steps >= self._config.max_bad_steps:
            raise NumericalError(
                f"{bad_steps} optimizer steps had NaN or infinite gradients (update.max_bad_steps); lower "
                "update.learning_rate and continue from the last checkpoint"
            )
        return state, report.metrics(bad_steps)

    def optimizer_step(
        self, state: TrainState, bins: PackedBins, unchanged_weights: bool = False
    ) -> tuple[TrainState, Sums, float, Float32[np.ndarray, "bins terms"]]:
        """One optimizer step on one minibatch.

        Args:
            state: before the step; donated, must not be used again.
            bins: scored, unless `unchanged_weights` says that the old log-probabilities are the present ones.

        Returns:
            The state, sums over the active terms, the gradient's norm before clipping, log-probabilities before the step.
        """
        with self._on_mesh():
            total, logprobs = self.programs.zero(state.params), []
            for micro in self._micro_batches(bins):
                total, new_logprobs = self.accumulate(total, state.params, micro, unchanged_weights)
                logprobs.append(new_logprobs)
            sums = jax.device_get(total.sums)
            state, grad_norm = self.apply(state, total)
            return state, sums, float(grad_norm), np.concatenate([np.asarray(part) for part in logprobs])

    def _micro_batches(self, bins: PackedBins) -> Iterator[MicroBatch]:
        for start in range(0, bins.num_bins, self._microbatch_bins):
            arrays = [getattr(bins, name)[start : start + self._microbatch_bins] for name in MicroBatch._fields]
            mesh = self._mesh
            yield MicroBatch(*(jax.device_put(a) if mesh is None else sharding.put_batch(a, mesh) for a in arrays))

    def _on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)


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
        differences = np.concatenate(hosts.gather_rows(np.concatenate([*self._mismatch, np.zeros(0, np.float32)])))
        if len(differences):
            metrics |= {"mismatch_mean": float(differences.mean()), "mismatch_max": float(differences.max())}
        return metrics
