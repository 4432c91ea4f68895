"""SIGKILL at random moments of a run: is anything lost, or paid for twice?

    JAX_PLATFORMS=cpu python benchmarks/kill.py --kills 20

A small ActionOPD run on the service desk is killed again and again, each time at a moment drawn from a seed, and
started anew; then it is left to finish. A run with the same settings that nobody disturbed is the reference.
What must hold, or the command fails:

- every start after a kill continues, and the last one ends well;
- metrics (without times), trajectories, evaluations and the exported weights equal the reference's, bit for bit;
- teacher and judge log each request before they answer it: none that the cache held at a kill is asked again,
  and no task start that the step's file held at a kill is collected again.

Prints where the kills fell, and ends with one JSON line. About five minutes on two CPU cores with the shipped
student, nearly all of them starting JAX.
"""

import argparse
import collections
import dataclasses
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import msgspec
from watched_run import Run, logged_lines, settings, start

from actionopd_jax.config import RunConfig
from actionopd_jax.records import JsonObject, Trajectory
from actionopd_jax.rollout.store import read_trajectories

_POLL_S = 0.002
_PHASES = {"startup": 0.1, "evaluate": 0.05, "collect": 0.5, "update": 0.2, "checkpoint": 0.15}
"""Shares of the kills that are aimed at each phase."""


def _finish(run: Run, pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    if status != 0:
        sys.exit(f"a run ended with status {status}:\n{_tail(run)}")


def _durations(run: Run, began: float) -> dict[str, list[float]]:
    """How long each phase took, each time that it came."""
    found: dict[str, list[float]] = collections.defaultdict(list)
    name, since = "startup", began
    for line in logged_lines(run):
        if line[0] == "phase":
            found[name].append(float(line[2]) - since)
            name, since = line[1], float(line[2])
    return found


@dataclasses.dataclass
class Held:
    """What was on disk at a kill."""

    answers: set[tuple[str, str]]
    starts: set[tuple[int, int]]
    log_lines: int


def _held(run: Run) -> Held:
    return Held(_cached(run), {(t.step, t.start) for t in _trajectories(run)}, len(logged_lines(run)))


def _cached(run: Run) -> set[tuple[str, str]]:
    """Keys in the cache, read from a copy: opening the file itself would repair it before the run does."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cache.sqlite", "cache.sqlite-wal"):
            if (run.workdir / name).exists():
                shutil.copy(run.workdir / name, folder)
        if not Path(folder, "cache.sqlite").exists():
            return set()
        connection = sqlite3.connect(Path(folder, "cache.sqlite"))
        try:
            if not connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                return set()
            return set(connection.execute("SELECT namespace, key FROM answers"))
        finally:
            connection.close()


def _trajectories(run: Run) -> list[Trajectory]:
    files = sorted((run.workdir / "rollouts").glob("*.zst"))
    return [trajectory for file in files for trajectory in read_trajectories(file)]


def _kill(run: Run, rng: random.Random, durations: dict[str, list[float]]) -> str:
    """One life, ended at a random moment; says in which phase that was."""
    [aim] = rng.choices(list(_PHASES), list(_PHASES.values()))
    occurrence = rng.choice((1, 1, 1, 2))  # in this life: most kills come before it has saved anything
    delay = rng.random() * rng.choice(durations[aim])
    before = len(logged_lines(run))
    pid = start(run)
    while aim != "startup" and sum(line[:2] == ["phase", aim] for line in logged_lines(run)[before:]) < occurrence:
        time.sleep(_POLL_S)
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            sys.exit(f"ended with status {status} before it was killed; raise --steps:\n{_tail(run)}")
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status):
        sys.exit(f"ended with status {status} before it was killed; raise --steps:\n{_tail(run)}")
    phases = [line[1] for line in logged_lines(run)[before:] if line[0] == "phase"]
    return phases[-1] if phases else "startup"


def _tail(run: Run) -> str:
    return run.output.read_text()[-4000:]


def _repeated(run: Run, kills: list[Held]) -> tuple[int, int]:
    """Requests and task starts that came again after a kill at which they were on disk."""
    lines = logged_lines(run)
    answers = starts = 0
    for held in kills:
        later = lines[held.log_lines :]
        answers += len(held.answers & {(line[1], line[2]) for line in later if line[0] == "ask"})
        starts += len(held.starts & {(int(line[1]), int(line[2])) for line in later if line[0] == "start"})
    return answers, starts


def _results(run: Run) -> dict[str, Any]:
    """Everything that a run leaves, without times."""
    lines = [json.loads(line) for line in (run.workdir / "metrics.jsonl").read_text().splitlines()]
    timed = ("_s", "_per_s")
    trajectories = sorted(_trajectories(run), key=lambda t: (t.step, t.start))
    return {
        "metrics": [{name: value for name, value in line.items() if not name.endswith(timed)} for line in lines],
        "trajectories": [msgspec.structs.replace(trajectory, wall_s=0.0) for trajectory in trajectories],
        "evaluations": {path.name: path.read_bytes() for path in (run.workdir / "evaluations").glob("*.json")},
        "weights": (run.workdir / "student" / "model.safetensors").read_bytes(),
    }


def measure(folder: Path, config: RunConfig, kills: int, seed: int) -> JsonObject:
    """The whole experiment; ends the program with a message when anything is lost or repeated."""
    warm_up = Run(folder / "warm_up", dataclasses.replace(config, steps=3))
    _finish(warm_up, start(warm_up))  # fills the compilation cache
    reference = Run(folder / "reference", config)
    began = time.monotonic()
    _finish(reference, start(reference))
    durations = _durations(reference, began)
    if _cached(reference) != {(line[1], line[2]) for line in logged_lines(reference) if line[0] == "ask"}:
        sys.exit("the logged requests are not the cached answers: this program no longer names them as the cache does")

    victim, rng = Run(folder / "victim", config), random.Random(seed)
    phases: collections.Counter[str] = collections.Counter()
    moments: list[Held] = []
    for number in range(kills):
        phase = _kill(victim, rng, durations)
        phases[phase] += 1
        moments.append(_held(victim))
        done = len({start for start, _ in moments[-1].starts})
        held = f"{len(moments[-1].answers):>4} answers, task starts of {done} steps on disk"
        print(f"kill {number + 1:>3} in {phase:<10} {held}", file=sys.stderr)
    _finish(victim, start(victim))

    repeated_answers, repeated_starts = _repeated(victim, moments)
    ours, theirs = _results(victim), _results(reference)
    asked, undisturbed = (sum(line[0] == "ask" for line in logged_lines(run)) for run in (victim, reference))
    return {
        "kills": kills,
        "phases": {phase: phases[phase] for phase in (*_PHASES, "idle") if phases[phase]},
        "steps": config.steps,
        "updates": sum(line.get("optimizer_steps", 0) > 0 for line in theirs["metrics"]),
        "answers_asked_again": repeated_answers,
        "starts_collected_again": repeated_starts,
        "requests": asked,
        "requests_undisturbed": undisturbed,
        **{f"equal_{name}": ours[name] == theirs[name] for name in ours},
    }


def main() -> None:
    """Reads the flags, runs, prints, and fails when something was lost or repeated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=16, help="of the run; each kill may let it do one")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--student", default="builtin:service_desk", help="model folder or builtin:NAME")
    parser.add_argument("--thinking", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--response-tokens", type=int, default=96)
    parser.add_argument("--workdir", type=Path, help="kept; default: a temporary folder")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = flags.workdir or Path(temporary)
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        config = settings(flags.student, flags.steps, flags.thinking, flags.response_tokens)
        result = measure(folder, config, flags.kills, flags.seed)
    print(json.dumps(result))
    wrong = [name for name, value in result.items() if name.startswith("equal_") and not value]
    wrong += [name for name in ("answers_asked_again", "starts_collected_again") if result[name]]
    if wrong:
        sys.exit(f"failed: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
