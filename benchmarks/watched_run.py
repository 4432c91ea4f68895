"""A small ActionOPD run in a process of its own that logs what it asks, what it collects, and in which phase it is.

Lines of the log: `ask NAMESPACE KEY` before teacher or judge answer (the key under which the cache will hold the
answer), `start STEP START` before a task start is collected, `phase NAME SECONDS` when a phase begins.
"""

import dataclasses
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from actionopd_jax import environments, loop
from actionopd_jax.config import RunConfig, build
from actionopd_jax.protocols import ChatModel, ChatRequest, Judge, JudgeQuestion, Suite
from actionopd_jax.records import ChatReply, JsonObject, Trajectory, Verdict, digest
from actionopd_jax.rollout import collector
from actionopd_jax.training.checkpoint import Checkpointer
from actionopd_jax.training.update import Updater


@dataclasses.dataclass(frozen=True)
class Run:
    """A run on disk: its work directory, what it logged, and what its processes printed."""

    folder: Path
    config: RunConfig

    @property
    def workdir(self) -> Path:
        return self.folder / "run"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def output(self) -> Path:
        return self.folder / "output"


def settings(student: str, steps: int, thinking: bool, response_tokens: int) -> RunConfig:
    """A run that is small, and still has several tasks at once, kept and dropped groups, and an evaluation between."""
    bin_tokens = -(-(960 + response_tokens) // 128) * 128
    return build(
        RunConfig,
        {
            "seed": 1,
            "steps": steps,
            "student": {
                "path": student,
                "compute_dtype": "float32",
                "remat": "none",
                "max_prompt_tokens": 960,
                "max_response_tokens": response_tokens,
                "thinking": thinking,
            },
            "sampler": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "slots": 2, "max_wait_ms": 5},
            "sources": [{"environment": "service_desk", "split": "train", "starts_per_step": 3}],
            "method": {"num_candidates": 2, "num_teacher_samples": 2, "max_decisions": 3},
            "update": {"learning_rate": 1e-3, "bin_tokens": bin_tokens},
            "evaluation": {"environment": "service_desk", "split": "heldout", "num_tasks": 2, "every_steps": 4},
        },
    )


class _Log:
    """Lines that are in the kernel's hands before anything else happens."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())

    def phase(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with a line when it begins and one when it ends."""

        def logged(*arguments: Any, **named: Any) -> Any:
            self("phase", name, time.monotonic())
            try:
                return function(*arguments, **named)
            finally:
                self("phase", "idle", time.monotonic())

        return logged

    def phase_async(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        async def logged(*arguments: Any, **named: Any) -> Any:
            self("phase", name, time.monotonic())
            try:
                return await function(*arguments, **named)
            finally:
                self("phase", "idle", time.monotonic())

        return logged


class _LoggedTeacher:
    def __init__(self, model: ChatModel, log: _Log) -> None:
        self._model, self._log = model, log
        self.identity, self.depends_on_task = model.identity, model.depends_on_task

    async def complete(self, request: ChatRequest) -> ChatReply:
        task = request.task.key if self.depends_on_task else None
        self._log("ask", "teacher", digest([request.state.key, task, self.identity, request.draw]))
        return await self._model.complete(request)


class _LoggedJudge:
    def __init__(self, judge: Judge, log: _Log) -> None:
        self._judge, self._log = judge, log
        self.identity = judge.identity

    async def judge(self, question: JudgeQuestion) -> Verdict:
        pair = [question.action, question.teacher_action, question.evidence]
        self._log("ask", "verdicts", digest(["match-1", self.identity, question.state.key, *pair]))
        return await self._judge.judge(question)


def _watch(log: _Log) -> None:
    """Makes this process log its requests, task starts and phases."""
    load, collect = environments.load, collector.collect_trajectory

    def load_logged(name: str, values: JsonObject) -> Suite:
        suite: Any = load(name, values)
        teacher, judge = suite.scripted_teacher, suite.judge
        suite.scripted_teacher = lambda seed, chosen: _LoggedTeacher(teacher(seed, chosen), log)
        suite.judge = lambda: _LoggedJudge(judge(), log)
        return suite

    async def collect_logged(begin: Any, **named: Any) -> Trajectory:
        log("start", named["step"], begin.start)
        return await collect(begin, **named)

    environments.load = load_logged
    collector.collect_trajectory = collect_logged
    train: Any = sys.modules["actionopd_jax.loop.train"]
    train.evaluate_student = log.phase_async("evaluate", train.evaluate_student)
    for owner, name, phase in ((Updater, "update", "update"), (Checkpointer, "save", "checkpoint")):
        setattr(owner, name, log.phase(phase, getattr(owner, name)))
    collector.Collector.collect = log.phase_async("collect", collector.Collector.collect)


def _live(run: Run) -> NoReturn:
    """The life of a forked process: one call of `train`."""
    code = 1
    try:
        output = os.open(run.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        _watch(_Log(run.log))
        loop.train(run.config, run.workdir)
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start(run: Run) -> int:
    """A fresh process that runs, or continues; modules are imported already, JAX is not started."""
    run.folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid == 0:
        _live(run)
    return pid


def logged_lines(run: Run) -> list[list[str]]:
    """The words of each line so far."""
    if not run.log.exists():
        return []
    return [line.split() for line in run.log.read_text().splitlines()]
