"""One implementation of a training step in a process of its own, run whenever the driver says so.

A worker is started with a folder that holds `rows.npz` (see `Rows`), `settings.json` and the weights in `student/`
as `transformers` saves them. It answers each line on standard input with one JSON line: to `step`, CPU and wall
seconds of one training step and its loss; at the end of the input, its peak resident memory. Needs NumPy only, so that
other projects' environments can run it.
"""

import dataclasses
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of one training step.

    Attributes:
        prompts, responses: token ids of each row.
        advantages: one number a row.
        old_logprobs: one number per response token.
        groups, trajectories: numbers that name them.
    """

    prompts: list[np.ndarray]
    responses: list[np.ndarray]
    advantages: np.ndarray
    old_logprobs: list[np.ndarray]
    groups: np.ndarray
    trajectories: np.ndarray

    def save(self, path: Path) -> None:
        flat = {name: np.concatenate(getattr(self, name)) for name in ("prompts", "responses", "old_logprobs")}
        lengths = {f"{name}_lengths": [len(row) for row in getattr(self, name)] for name in ("prompts", "responses")}
        numbers = {name: getattr(self, name) for name in ("advantages", "groups", "trajectories")}
        np.savez(path, **flat, **{name: np.array(values) for name, values in lengths.items()}, **numbers)

    @classmethod
    def load(cls, path: Path) -> "Rows":
        stored = np.load(path)

        def split(name: str, lengths: str) -> list[np.ndarray]:
            return np.split(stored[name], np.cumsum(stored[f"{lengths}_lengths"])[:-1])

        return cls(
            split("prompts", "prompts"),
            split("responses", "responses"),
            stored["advantages"],
            split("old_logprobs", "responses"),
            stored["groups"],
            stored["trajectories"],
        )

    def take(self, indices: np.ndarray) -> "Rows":
        """Some of the rows."""
        lists = {name: [getattr(self, name)[i] for i in indices] for name in ("prompts", "responses", "old_logprobs")}
        return Rows(**lists, **{name: getattr(self, name)[indices] for name in ("advantages", "groups", "trajectories")})


def serve(build: Callable[[Rows, dict[str, Any], Path], Callable[[], float]]) -> None:
    """Builds a step from the folder named on the command line and runs it on demand, until the input ends.

    Args:
        build: (rows, settings, folder of the weights) -> a function that runs one step to its end and returns the loss.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    folder = Path(sys.argv[1])
    step = build(Rows.load(folder / "rows.npz"), json.loads((folder / "settings.json").read_text()), folder / "student")
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step()
        figures = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall, "loss": loss}
        answers.write(json.dumps(figures) + "\n")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    answers.write(json.dumps({"peak_rss_gib": peak}) + "\n")
