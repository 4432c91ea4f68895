"""Figures of a run, one JSON line per step, and the same for TensorBoard.

A line names its step and nothing that depends on the clock unless the caller puts it there, so that
a run that was killed and continued leaves the same file as one that was not.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from tensorboardX import SummaryWriter

from actionopd_jax.errors import RunStateError
from actionopd_jax.training.workdir import append_line, complete_lines, rewrite_lines

Metric = float | int | bool | str | None | np.number
Line = dict[str, float | int | bool | str | None]

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends to `metrics.jsonl` and writes TensorBoard events in a work directory.

    Write the line of a step before saving its checkpoint: a kill in between then repeats the step and
    its line, and loses neither.

    Args:
        workdir: an existing directory.
        restored_step: the step restored from a checkpoint; later lines are dropped. None: nothing was
            restored, the file starts afresh.
    """

    def __init__(self, workdir: Path, restored_step: int | None = None) -> None:
        self._path = workdir / FILE_NAME
        kept: list[bytes] = []
        if restored_step is not None:
            kept = [line for line, values in _parsed(self._path) if _step(values) <= restored_step]
        rewrite_lines(self._path, kept)
        self._last_step = max((_step(msgspec.json.decode(line)) for line in kept), default=-1)
        purge_step = None if restored_step is None else restored_step + 1  # TensorBoard hides older events from there on
        self._events = SummaryWriter(logdir=str(workdir), purge_step=purge_step, flush_secs=10)

    def write(self, step: int, values: Mapping[str, Metric]) -> None:
        """Appends the one line of `step`; on return it is on disk. NaN and infinite values become null.

        Raises:
            ValueError: `step` does not exceed the last one, or `values` has a key `step`.
        """
        if step <= self._last_step:
            raise ValueError(f"metrics of step {step} after those of step {self._last_step}")
        if "step" in values:
            raise ValueError("metrics must not be named 'step'")
        plain = {name: _plain(value) for name, value in values.items()}
        append_line(self._path, msgspec.json.encode({"step": step, **plain}))
        self._last_step = step
        for name, value in plain.items():
            if isinstance(value, int | float):
                self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        """Closes the event file; may be called twice."""
        self._events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[Line]:
    """Lines of a `metrics.jsonl`, in order; a last one cut short by a kill is left out.

    Raises:
        RunStateError: there is no such file, or a line before the last is damaged (it is named).
    """
    if not path.exists():
        raise RunStateError(f"no metrics at {path}; is this the work directory of a run?")
    return [values for _, values in _parsed(path)]


def edge_steps(lines: Sequence[Line]) -> int:
    """How many steps `edge_means` takes at each end: a fifth of them, at least one."""
    return max(1, len(lines) // 5)


def edge_means(lines: Sequence[Line], name: str) -> tuple[float | None, float | None]:
    """A figure's mean over the first and over the last steps: one step of few tasks says little.

    Args:
        lines: of all steps, in order.
        name: of the figure; steps without it are left out, None where none has it.
    """
    count = edge_steps(lines)

    def mean(part: Sequence[Line]) -> float | None:
        values = [float(value) for line in part if isinstance(value := line.get(name), int | float)]
        return sum(values) / len(values) if values else None

    return mean(lines[:count]), mean(lines[-count:])


def _parsed(path: Path) -> list[tuple[bytes, Line]]:
    parsed = []
    for number, line in enumerate(complete_lines(path), start=1):
        try:
            values = msgspec.json.decode(line, type=Line)
            _step(values)
        except (msgspec.DecodeError, TypeError) as error:
            raise RunStateError(
                f"{path} line {number} is damaged: {error}; delete it, or choose another --workdir"
            ) from error
        parsed.append((line, values))
    return parsed


def _step(values: Line) -> int:
    step = values.get("step")
    if not isinstance(step, int):
        raise TypeError("it names no step")
    return step


def _plain(value: Metric) -> float | int | bool | str | None:
    item = value.item() if isinstance(value, np.generic) else value
    if isinstance(item, float) and not math.isfinite(item):
        return None
    if item is None or isinstance(item, bool | int | float | str):
        return item
    raise TypeError(f"a metric must be a number, text or None, got {type(value).__name__}")
