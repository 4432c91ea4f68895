"""Greedy evaluation of a student on the configured tasks."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec
from flax import nnx
from rich.console import Console

from actionopd_jax.config import RunConfig
from actionopd_jax.errors import RunStateError
from actionopd_jax.evaluation.result import EvaluationResult
from actionopd_jax.evaluation.run import evaluate as play_all
from actionopd_jax.evaluation.table import result_table, write_result
from actionopd_jax.loop.assembly import Parts
from actionopd_jax.loop.display import EpisodeProgress
from actionopd_jax.models.sampler import EmbeddedSampler
from actionopd_jax.records import JsonObject, Task, digest
from actionopd_jax.rollout.episode import Episode, greedy, play
from actionopd_jax.training.checkpoint import Checkpointer
from actionopd_jax.training.state import abstract_state
from actionopd_jax.training.workdir import Workdir, lock, what_matters


async def evaluate_student(
    parts: Parts, sampler: EmbeddedSampler, student: JsonObject, records: Path, progress: Callable[[int, int], None]
) -> EvaluationResult:
    """Plays the evaluation tasks greedily, without a teacher; episodes already in `records` are not played again.

    Args:
        student: names the weights that the sampler holds.
    """
    config = parts.config
    sampling = greedy(config.student.max_response_tokens)
    suite, answers = parts.evaluation_suite, parts.student(sampler)
    identity: JsonObject = {
        "student": student,
        "environment": suite.name,
        "split": config.evaluation.split,
        "suite_version": suite.version,
        "sampling": msgspec.to_builtins(sampling),
        "max_prompt_tokens": config.student.max_prompt_tokens,
        "max_decisions": config.method.max_decisions,
        "thinking": config.student.thinking,
        "seed": config.seed,
    }

    async def one(task: Task, trial: int) -> Episode:
        return await play(
            task, suite, answers, sampling,
            max_decisions=config.method.max_decisions,
            trial=trial,
            seed=config.seed,
            environment_timeout_s=config.rollout.environment_timeout_s,
        )  # fmt: skip

    return await play_all(
        parts.evaluation_tasks,
        config.evaluation.trials,
        one,
        identity=identity,
        records=records,
        concurrency=config.rollout.concurrent_tasks,
        seed=config.seed,
        progress=progress,
    )


def evaluate(config: RunConfig, workdir: Path, student: str | None, output: Path | None) -> JsonObject:
    """Evaluates the last checkpoint of a work directory, or another student; prints a table.

    Args:
        student: a model folder or `builtin:NAME`; None: the last checkpoint in `workdir`.
        output: where the result goes as JSON; default `workdir/evaluations/NAME.json`.

    Returns:
        The figures, as the JSON file has them.

    Raises:
        UserError: no checkpoint, a student that does not load, or records of another evaluation in the way.
    """
    console = Console(stderr=True)
    if student is None and not Workdir(workdir, is_new=False).checkpoints.is_dir():
        raise RunStateError(f"{workdir} holds no checkpoint to evaluate; train first, or name a student with --student")
    with lock(workdir):
        parts = Parts(config, student)
        sampler = parts.sampler(parts.shared_prefix(parts.evaluation_suite, parts.evaluation_tasks))
        if student is None:
            step = _restore(parts, sampler, workdir)
            name, identity = f"step_{step:06d}", {"run": digest(what_matters(config)), "step": step}
        else:
            identity = {"path": str(parts.folder.resolve()), "files": _files_digest(parts.folder)}
            name = f"student_{digest(identity)[:12]}"
        folder = Workdir(workdir, is_new=False).evaluations
        records = folder / f"{name}.jsonl"
        with EpisodeProgress(console, "evaluating") as progress:
            result = asyncio.run(evaluate_student(parts, sampler, identity, records, progress))
        sampler.close()
        path = output or folder / f"{name}.json"
        write_result(path, result)
    console.print(
        result_table({student or name: result}, title=f"{config.evaluation.environment}/{config.evaluation.split}")
    )
    return {"success": result.success, "output": str(path), **msgspec.to_builtins(result)}


def _restore(parts: Parts, sampler: EmbeddedSampler, workdir: Path) -> int:
    """Puts the weights of the last checkpoint into the sampler; returns its step."""
    folder = Workdir(workdir, is_new=False).checkpoints
    updater = parts.updater(temperature=1.0)
    abstract = abstract_state(updater.create_state(nnx.split(parts.model)[1]))
    with Checkpointer(folder, keep=parts.config.checkpoint.keep) as checkpoints:
        state, progress = checkpoints.restore(abstract, digest(what_matters(parts.config)))
    sampler.set_weights(state.params, int(state.policy_version))
    return progress.step


def _files_digest(folder: Path) -> str:
    """Of the contents: other weights under the same path are another student."""
    files = sorted(path for path in folder.iterdir() if path.suffix in {".safetensors", ".json", ".jinja"})
    found: dict[str, str] = {}
    for path in files:
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digest(found)
