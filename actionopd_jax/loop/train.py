"""Training: freeze, collect, update, publish; again until the last step, across restarts."""

import asyncio
import contextlib
import time
from pathlib import Path

from flax import nnx
from rich.console import Console

from actionopd_jax.config import RunConfig
from actionopd_jax.errors import UserError
from actionopd_jax.evaluation.result import EvaluationResult
from actionopd_jax.evaluation.table import result_table, write_result
from actionopd_jax.loop.assembly import Parts, Sources, build_method
from actionopd_jax.loop.display import EpisodeProgress, TrainingProgress, summary_table
from actionopd_jax.loop.evaluate import evaluate_student
from actionopd_jax.loop.export import export_student
from actionopd_jax.methods.base import Method
from actionopd_jax.records import JsonObject, digest
from actionopd_jax.rollout.trajectory import TaskStart
from actionopd_jax.services.cache import Cache
from actionopd_jax.training.checkpoint import Checkpointer, RunProgress
from actionopd_jax.training.metrics import FILE_NAME, MetricsWriter, edge_means, read_metrics
from actionopd_jax.training.state import TrainState, abstract_state
from actionopd_jax.training.update import Metrics
from actionopd_jax.training.workdir import CACHE, Workdir, code_version, open_workdir, what_matters


def train(config: RunConfig, workdir: Path) -> JsonObject:
    """Runs, or continues, the run that a work directory holds; a finished one is only reported again.

    Returns:
        `success_before` and `success_after` on the evaluation tasks, `match_rate_first`, `_last`,
        `invalid_rate_first`, `_last` (means over the first and the last fifth of the steps; None where the method has
        no such figure), `train_minutes`, `workdir`.

    Raises:
        UserError: settings, student files or work directory that do not fit; nothing was changed.
        ServiceError: a service failed for good; the same call continues the run.
    """
    console = Console(stderr=True)
    with open_workdir(workdir, config) as folders, contextlib.ExitStack() as stack:
        try:
            cache = stack.enter_context(Cache(folders.path / CACHE))
            run = _Run(config, folders, cache, console)
        except UserError:
            stack.close()
            folders.discard()  # nothing was computed: mended settings may use the directory
            raise
        return asyncio.run(run.run())


class _Run:
    def __init__(self, config: RunConfig, folders: Workdir, cache: Cache, console: Console) -> None:
        self._config = config
        self._folders = folders
        self._console = console
        self._digest = digest(what_matters(config))
        self._sources = sources = Sources(config, cache)  # cheap, so its errors come before the student is loaded
        self._parts = parts = Parts(config)
        probes = [*zip(sources.suites, sources.tasks, strict=True), (parts.evaluation_suite, parts.evaluation_tasks)]
        self._sampler = parts.sampler(sorted({prefix for probe in probes for prefix in parts.shared_prefix(*probe)}))
        self._progress = TrainingProgress(console, config.steps)
        self._method: Method = build_method(parts, parts.student(self._sampler), folders.rollouts, self._progress.collected)
        self._updater = parts.updater(temperature=self._method.temperature, objective=self._method.objective)

    async def run(self) -> JsonObject:
        """Algorithm 1, from wherever the work directory stands."""
        config = self._config
        with Checkpointer(self._folders.checkpoints, keep=config.checkpoint.keep) as checkpoints:
            before = await self._evaluate(0)  # the sampler holds the weights that the run began with
            state = self._restore(checkpoints)
            first = int(state.step)
            with MetricsWriter(self._folders.path, first or None) as metrics, self._progress.shown(first):
                for step in range(first, config.steps):
                    if step > 0 and config.evaluation.every_steps and step % config.evaluation.every_steps == 0:
                        await self._evaluate(step)
                    state, line = await self._step(state, step)
                    metrics.write(step + 1, line)
                    self._progress.step_done(step + 1, line)
                    if (step + 1) % config.checkpoint.every_steps == 0 or step + 1 == config.steps:
                        self._save(checkpoints, state)
            after = await self._evaluate(int(state.step))
        self._sampler.close()
        export_student(self._parts, state.params, self._folders.path / "student")
        return self._report(before, after)

    def _restore(self, checkpoints: Checkpointer) -> TrainState:
        """The state to go on from, with the mixture and the sampler set to it."""
        state = self._updater.create_state(nnx.split(self._parts.model)[1])
        if checkpoints.latest_step() is not None:
            state, progress = checkpoints.restore(abstract_state(state), self._digest)
            self._sources.mixture.restore(progress.data_state)
        self._publish(state)
        return state

    async def _step(self, state: TrainState, step: int) -> tuple[TrainState, Metrics]:
        """Collects under the current weights, updates them, publishes the new ones."""
        began, tokens_before = time.monotonic(), self._sampler.counters.generated_tokens
        tasks = self._sources.mixture.next_step()
        starts = [TaskStart(i, *pair) for i, pair in enumerate(zip(tasks, self._sources.by_start, strict=True))]
        collected = await self._method.collect(starts, step, int(state.policy_version))
        collect_s = time.monotonic() - began
        self._progress.updating()
        state, figures = self._updater.update(state, collected.examples)
        self._publish(state)
        step_s = time.monotonic() - began
        speed = {
            "collect_s": collect_s,
            "update_s": step_s - collect_s,
            "step_s": step_s,
            "generated_tokens_per_s": (self._sampler.counters.generated_tokens - tokens_before) / collect_s,
            "environment_steps_per_s": collected.figures.get("environment_steps", 0.0) / collect_s,
        }
        return state, {**collected.figures, **figures, **speed}

    def _publish(self, state: TrainState) -> None:
        self._sampler.set_weights(state.params, int(state.policy_version))

    def _save(self, checkpoints: Checkpointer, state: TrainState) -> None:
        progress = RunProgress(
            step=int(state.step),
            config_digest=self._digest,
            data_state=self._sources.mixture.state(),
            code_version=code_version(),
        )
        checkpoints.save(state, progress)

    async def _evaluate(self, step: int) -> EvaluationResult:
        """Evaluates the weights that the sampler holds as those of `step`; episodes on disk are not played again."""
        path = self._folders.evaluations / f"step_{step:06d}.json"
        identity: JsonObject = {"run": self._digest, "step": step}
        with EpisodeProgress(self._console, f"evaluating step {step}") as progress:
            result = await evaluate_student(self._parts, self._sampler, identity, path.with_suffix(".jsonl"), progress)
        write_result(path, result)
        return result

    def _report(self, before: EvaluationResult, after: EvaluationResult) -> JsonObject:
        lines = read_metrics(self._folders.path / FILE_NAME)
        summary: JsonObject = {
            "success_before": before.success,
            "success_after": after.success,
            **{
                f"{name}_{when}": value
                for name in ("match_rate", "invalid_rate")
                for when, value in zip(("first", "last"), edge_means(lines, name), strict=True)
            },
            "train_minutes": sum(float(line["step_s"] or 0) for line in lines) / 60,
            "workdir": str(self._folders.path),
        }
        self._console.print(result_table({"before": before, "after": after}, title="Held-out tasks, greedy, no teacher"))
        self._console.print(summary_table(summary, lines))
        self._console.print(f"Look into {self._folders.path}: metrics.jsonl, evaluations/, rollouts/, student/")
        return summary
