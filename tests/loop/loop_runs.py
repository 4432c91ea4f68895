"""Tiny runs on the service desk, and what they leave."""

import json
from pathlib import Path
from typing import Any

from actionopd_jax import environments
from actionopd_jax.config import RunConfig, build
from actionopd_jax.errors import ServiceError
from actionopd_jax.protocols import ChatRequest, Suite
from actionopd_jax.records import ChatReply, Trajectory
from actionopd_jax.rollout.store import read_trajectories

SETTINGS: dict[str, Any] = {
    "seed": 1,
    "steps": 3,
    "student": {
        "compute_dtype": "float32",
        "remat": "none",
        "max_prompt_tokens": 960,
        "max_response_tokens": 20,
        "thinking": False,
    },
    "sampler": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "slots": 2, "max_wait_ms": 5},
    "sources": [{"environment": "service_desk", "split": "train", "starts_per_step": 3}],
    "method": {"num_candidates": 2, "num_teacher_samples": 2, "max_decisions": 3},
    "update": {"learning_rate": 1e-3, "bin_tokens": 1024},
    "evaluation": {"environment": "service_desk", "split": "heldout", "num_tasks": 2, "every_steps": 1},
}
KD_SETTINGS: dict[str, Any] = {
    "seed": 0,
    "steps": 12,
    "sources": [{"environment": "service_desk", "split": "train", "starts_per_step": 4}],
    "teacher": {"settings": {"error_rate": 0, "invalid_rate": 0}},
    "method": {"name": "kd", "max_decisions": 6},
    "update": {"learning_rate": 2e-2, "adam_b2": 0.95, "weight_decay": 0.0},
    "checkpoint": {"every_steps": 6},
    "evaluation": {"num_tasks": 1, "every_steps": 0},
}


def config(student: Path, **changes: Any) -> RunConfig:
    """The tiny run on a student folder; groups of settings are merged with those of `SETTINGS`."""
    values = {**SETTINGS, **changes}
    for name, group in SETTINGS.items():
        if isinstance(group, dict):
            values[name] = {**group, **changes.get(name, {})}
    values["student"]["path"] = str(student)
    return build(RunConfig, values)


def metrics(workdir: Path) -> list[dict[str, Any]]:
    """Lines of a run's `metrics.jsonl`, without times."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.endswith("_s")} for line in lines]


def weights(workdir: Path) -> bytes:
    """The exported weights of a run."""
    return (workdir / "student" / "model.safetensors").read_bytes()


def trajectories(workdir: Path) -> list[Trajectory]:
    """All collected trajectories, in the order of step and start."""
    files = sorted((workdir / "rollouts").iterdir())
    return sorted((t for file in files for t in read_trajectories(file)), key=lambda t: (t.step, t.start))


def groups(workdir: Path) -> list[tuple[Any, ...]]:
    """What the trajectories hold, without times."""
    return [(t.step, t.start, t.task, t.groups, t.end, t.score) for t in trajectories(workdir)]


def evaluations(workdir: Path) -> dict[str, dict[str, Any]]:
    """Evaluation results by name."""
    return {path.stem: json.loads(path.read_text()) for path in (workdir / "evaluations").glob("*.json")}


def fail_at_request(monkeypatch: Any, number: int) -> list[str]:
    """The teacher's request `number` fails for good, and those after it; returns the list of states asked before."""
    load = environments.load
    asked: list[str] = []

    class Failing:
        depends_on_task = False

        def __init__(self, model: Any) -> None:
            self._model = model
            self.identity = model.identity

        async def complete(self, request: ChatRequest) -> ChatReply:
            if len(asked) >= number:
                raise ServiceError("the teacher is gone")
            asked.append(request.state.key)
            return await self._model.complete(request)

    def load_failing(name: str, settings: Any) -> Suite:
        suite: Any = load(name, settings)
        teacher = suite.scripted_teacher
        suite.scripted_teacher = lambda *arguments: Failing(teacher(*arguments))
        return suite

    monkeypatch.setattr(environments, "load", load_failing)
    return asked
