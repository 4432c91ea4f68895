"""Runs implementations of one training step in turn, each in a process of its own, and compares them.

All start from the same folder of rows and weights and must report the same first loss. They take turns (A B C A B C):
what else the machine does meets all of them alike. CPU seconds are compared, medians; the first step compiles and is
left out. Memory is the peak resident memory of each process.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from workers.protocol import Rows

from actionopd_jax.models import decoder_config, weights
from actionopd_jax.models.decoder import Decoder

WORKERS = Path(__file__).parent / "workers"
TUNIX_PYTHON = Path(os.environ.get("TUNIX_PYTHON", Path(__file__).parents[1] / ".venv-tunix" / "bin" / "python"))
_LOSS_TOLERANCE = 1e-4  # relative, or absolute for losses near 0
OPTIMIZER = {"learning_rate": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0}
SURROGATE = {"clip_eta": 0.2, "dual_clip": 3.0}


def at_least_one(text: str) -> int:
    """A flag's positive whole number."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


@dataclasses.dataclass
class Measured:
    """Figures of one implementation.

    Attributes:
        losses: of every step, the first included.
        cpu_s, wall_s: of every step after the first.
        peak_rss_gib: of the process.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    cpu_s: list[float] = dataclasses.field(default_factory=list)
    wall_s: list[float] = dataclasses.field(default_factory=list)
    peak_rss_gib: float = 0.0

    @property
    def median_cpu_s(self) -> float:
        return statistics.median(self.cpu_s)


class Worker:
    """A process that holds one implementation."""

    def __init__(self, name: str, python: Path, script: str, folder: Path) -> None:
        self.name = name
        self.measured = Measured()
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            [python, WORKERS / script, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if not os.environ.get("BENCHMARK_VERBOSE") else None,
            text=True,
            env=environment,
        )

    def step(self, is_first: bool) -> None:
        figures = self._ask("step\n")
        self.measured.losses.append(figures["loss"])
        if not is_first:
            self.measured.cpu_s.append(figures["cpu_s"])
            self.measured.wall_s.append(figures["wall_s"])

    def finish(self) -> None:
        self.measured.peak_rss_gib = self._ask(None)["peak_rss_gib"]
        self._process.wait()

    def _ask(self, line: str | None) -> dict[str, float]:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the process has no pipes")
        if line is None:
            stdin.close()
        else:
            stdin.write(line)
            stdin.flush()
        answer = stdout.readline()
        if not answer:
            complaint = self._process.stderr.read() if self._process.stderr else ""
            sys.exit(f"{self.name} ended with status {self._process.wait()}:\n{complaint[-3000:]}")
        return json.loads(answer)


def write_contest(folder: Path, config: decoder_config.DecoderConfig, rows: Rows) -> None:
    """Rows, and random weights as `transformers` saves them."""
    model = Decoder(config, rngs=nnx.Rngs(0))
    weights.save(model, folder / "student", eos_token_id=1)
    rows.save(folder / "rows.npz")


def compete(
    contestants: Mapping[str, tuple[Path, str, Path]], repeats: int, title: str, expect_equal_loss: Sequence[str]
) -> dict[str, Measured]:
    """Runs all of them in turn: one step that compiles, then `repeats`.

    Args:
        contestants: name -> (Python interpreter, script, folder of rows, settings and weights).
        expect_equal_loss: names whose first losses must agree.
    """
    workers = [Worker(name, *contestant) for name, contestant in contestants.items()]
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=len(workers) * (repeats + 1))
        for turn in range(repeats + 1):
            for worker in workers:
                worker.step(is_first=turn == 0)
                progress.advance(task)
    for worker in workers:
        worker.finish()
    measured = {worker.name: worker.measured for worker in workers}
    losses = {name: measured[name].losses[0] for name in expect_equal_loss if name in measured}
    first = next(iter(losses.values()))
    if any(abs(loss - first) > _LOSS_TOLERANCE * max(1.0, abs(first)) for loss in losses.values()):
        sys.exit(f"the first losses differ, so these are not the same step: {losses}")
    return measured


def table(title: str, measured: Mapping[str, Measured], reference: str) -> Table:
    """CPU time, wall time, memory and the ratios to a reference."""
    shown = Table(title=title)
    for column in ("", "CPU s", "spread", "wall s", "peak GiB", "time ratio", "memory ratio", "first loss"):
        shown.add_column(column, justify="right" if column else "left")
    ours = measured[reference]
    for name, figures in measured.items():
        shown.add_row(
            name,
            f"{figures.median_cpu_s:.2f}",
            f"{min(figures.cpu_s):.2f} to {max(figures.cpu_s):.2f}",
            f"{statistics.median(figures.wall_s):.2f}",
            f"{figures.peak_rss_gib:.2f}",
            f"{figures.median_cpu_s / ours.median_cpu_s:.2f}",
            f"{figures.peak_rss_gib / ours.peak_rss_gib:.2f}",
            f"{figures.losses[0]:.6f}",
        )
    return shown


def write_settings(folder: Path, config: decoder_config.DecoderConfig, **more: Any) -> None:
    settings = {"model": dataclasses.asdict(config), "optimizer": OPTIMIZER, **SURROGATE, **more}
    (folder / "settings.json").write_text(json.dumps(settings))


def random_rows(rng: np.random.Generator, groups: int, candidates: int, prompt: int, response: int, vocabulary: int) -> Rows:
    """`groups` prompts with `candidates` responses each; ids 0 and 1 are left to padding and end tokens."""
    prompts = [rng.integers(2, vocabulary, prompt) for _ in range(groups)]
    count = groups * candidates
    return Rows(
        prompts=[prompts[row // candidates] for row in range(count)],
        responses=[rng.integers(2, vocabulary, response) for _ in range(count)],
        advantages=rng.standard_normal(count).astype(np.float32),
        old_logprobs=[(-np.log(vocabulary) + 0.05 * rng.standard_normal(response)).astype(np.float32) for _ in range(count)],
        groups=np.arange(count) // candidates,
        trajectories=np.arange(count) // candidates,
    )
