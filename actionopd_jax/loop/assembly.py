"""Builds the parts of a run from its settings."""

import asyncio
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh

from actionopd_jax import environments
from actionopd_jax.chat.prompt import ContextOverflow, PromptBuilder
from actionopd_jax.chat.tokenizer import ChatTokenizer
from actionopd_jax.config import EvaluationConfig, RunConfig, SourceConfig
from actionopd_jax.errors import ConfigError, EnvironmentFailure
from actionopd_jax.methods.actionopd import ActionOPD
from actionopd_jax.methods.base import Method
from actionopd_jax.methods.kd import KD
from actionopd_jax.models import sharding
from actionopd_jax.models.decoder import Decoder
from actionopd_jax.models.sampler import EmbeddedSampler
from actionopd_jax.models.student_files import load_student, resolve
from actionopd_jax.protocols import Suite
from actionopd_jax.records import State, Task, digest
from actionopd_jax.rollout.collector import Collector, Progress
from actionopd_jax.rollout.group import Source
from actionopd_jax.rollout.interaction import History
from actionopd_jax.rollout.settings import GroupRules
from actionopd_jax.rollout.student import Student
from actionopd_jax.rollout.workers import EnvironmentWorker
from actionopd_jax.services.cache import Cache
from actionopd_jax.services.matcher import SemanticMatcher
from actionopd_jax.services.teacher import MultisetTeacher
from actionopd_jax.training.mixture import TaskMixture
from actionopd_jax.training.programs import Objective
from actionopd_jax.training.update import Updater
from actionopd_jax.training.workdir import what_matters

_PREFIX_PROBES = 4  # first prompts compared to find what prompts of a source begin with
_SHORTEST_PREFIX = 128


class Parts:
    """The parts of a run that live as long as it does.

    Attributes:
        model: the student as it was loaded; training takes its weights over.
        mesh: of the settings; None: one device.
        sources: with `tasks`, one for each entry of `config.sources`.
    """

    def __init__(self, config: RunConfig, student_path: str | None = None) -> None:
        self.config = config
        self.folder = resolve(student_path or config.student.path)
        self.tokenizer = ChatTokenizer.load(self.folder)
        self.prompts = PromptBuilder(self.tokenizer, config.student.max_prompt_tokens, config.student.thinking)
        self.evaluation_suite = environments.load(config.evaluation.environment, config.evaluation.settings)
        self.evaluation_tasks = _tasks(self.evaluation_suite, config.evaluation, "evaluation")
        self.mesh: Mesh | None = None
        if config.mesh.num_devices > 1:
            if jax.process_count() > 1 and config.sampler.kind == "embedded":
                raise ConfigError("sampler.kind embedded samples on the devices of one process only: mesh must fit them")
            self.mesh = sharding.make_mesh(config.mesh)
        is_random = config.student.weights == "random" and student_path is None
        self.model: Decoder = load_student(
            self.folder,
            self.tokenizer.vocab_size,
            config.student.compute_dtype,
            config.student.remat,
            config.seed if is_random else None,
            attention=config.student.attention,
            shardings=None if self.mesh is None else functools.partial(sharding.weight_shardings, mesh=self.mesh),
        )
        self.graphdef = nnx.split(self.model)[0]

    def updater(self, *, temperature: float, objective: Objective = "surrogate") -> Updater:
        weights = None if self.mesh is None else nnx.split(self.model)[1]
        return Updater(
            self.graphdef,
            self.config.update,
            temperature=temperature,
            objective=objective,
            mesh=self.mesh,
            weights=weights,
        )

    def sampler(self, prefixes: Sequence[Sequence[int]]) -> EmbeddedSampler:
        return EmbeddedSampler(
            self.model,
            end_id=self.tokenizer.end_id,
            num_valid_ids=self.tokenizer.vocab_size,
            slots=self.config.sampler.slots,
            max_wait_ms=self.config.sampler.max_wait_ms,
            prefixes=prefixes,
            mesh=self.mesh,
        )

    def student(self, sampler: EmbeddedSampler) -> Student:
        return Student(sampler, self.prompts, self.tokenizer, self.config.student.thinking)

    def shared_prefix(self, suite: Suite, tasks: Sequence[Task]) -> list[tuple[int, ...]]:
        """What the first prompts of a source's tasks begin with, if it is worth keeping: at most one sequence."""
        prompts: list[tuple[int, ...]] = []
        for task in tasks[:_PREFIX_PROBES]:
            try:
                state = asyncio.run(_first_state(suite, task, self.config.rollout.environment_timeout_s))
                prompts.append(self.prompts.build(state).ids)
            except (ContextOverflow, EnvironmentFailure):
                continue  # that ends the episode when the task is played, not the run
        columns = zip(*prompts, strict=False)  # to the end of the shortest
        common = tuple(column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
        return [common] if len(common) >= _SHORTEST_PREFIX and len(prompts) > 1 else []


class Sources:
    """The training task mixture with the teacher and matcher of each of its environments."""

    def __init__(self, config: RunConfig, cache: Cache) -> None:
        self.suites = [environments.load(source.environment, source.settings) for source in config.sources]
        self.tasks = [
            _tasks(suite, source, f"sources[{i}]")
            for i, (suite, source) in enumerate(zip(self.suites, config.sources, strict=True))
        ]
        self.teachers = [
            MultisetTeacher(
                suite.scripted_teacher(config.seed, config.teacher.settings),
                config.teacher.retries,
                config.rollout.concurrent_teacher_requests,
                cache,
            )
            for suite in self.suites
        ]
        self.matchers = [SemanticMatcher(suite.judge(), suite.promises_evidence, cache) for suite in self.suites]
        sources = [Source(*each) for each in zip(self.suites, self.teachers, self.matchers, strict=True)]
        self.by_start = [s for s, c in zip(sources, config.sources, strict=True) for _ in range(c.starts_per_step)]
        starts = [source.starts_per_step for source in config.sources]
        self.mixture = TaskMixture(list(zip(self.tasks, starts, strict=True)), config.seed)


def group_rules(config: RunConfig) -> GroupRules:
    """The numbers of the method, as the rollout needs them."""
    return GroupRules(
        num_candidates=config.method.num_candidates,
        num_teacher_samples=config.method.num_teacher_samples,
        frequency_bonus=config.method.frequency_bonus,
        reward=config.method.reward,
        commit=config.method.commit,
        max_decisions=config.method.max_decisions,
        sampling=config.rollout_sampling,
    )


def build_method(parts: Parts, student: Student, rollouts: Path, progress: Progress) -> Method:
    """The method that `method.name` names."""
    config = parts.config
    if config.method.name == "kd":
        return KD(
            prompts=parts.prompts,
            tokenizer=parts.tokenizer,
            thinking=config.student.thinking,
            max_decisions=config.method.max_decisions,
            concurrent_tasks=config.rollout.concurrent_tasks,
            environment_timeout_s=config.rollout.environment_timeout_s,
        )
    collector = Collector(
        rules=group_rules(config),
        student=student,
        run_seed=config.seed,
        folder=rollouts,
        config_digest=digest(what_matters(config)),
        concurrent_tasks=config.rollout.concurrent_tasks,
        environment_timeout_s=config.rollout.environment_timeout_s,
        progress=progress,
    )
    return ActionOPD(collector, config.update.advantage_epsilon)


async def _first_state(suite: Suite, task: Task, timeout_s: float) -> State:
    history = History(suite.name)
    async with EnvironmentWorker(suite, task, timeout_s) as environment:
        history.observe(await environment.reset())
    return history.state()


def _tasks(suite: Suite, config: SourceConfig | EvaluationConfig, name: str) -> list[Task]:
    if config.split not in suite.splits():
        raise ConfigError(
            f"{name}.split {config.split!r} is no split of {suite.name}; there are: {', '.join(suite.splits())}"
        )
    tasks = list(suite.tasks(config.split))
    if config.num_tasks > len(tasks):
        raise ConfigError(f"{name}.num_tasks {config.num_tasks}: {suite.name}/{config.split} has {len(tasks)} tasks")
    return tasks[: config.num_tasks or None]
