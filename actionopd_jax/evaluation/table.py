"""Evaluation results for people (a table) and for programs (a JSON file). Rounding happens here alone."""

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from rich.table import Table

from actionopd_jax.errors import RunStateError
from actionopd_jax.evaluation.passk import percent
from actionopd_jax.evaluation.result import EvaluationResult
from actionopd_jax.training.workdir import write_atomic

_SHARES: tuple[tuple[str, Callable[[EvaluationResult], float | None]], ...] = (
    ("success %", lambda result: result.success),
    ("pass^4 %", lambda result: result.pass_4),
    ("partial score %", lambda result: result.partial),
    ("ended by an invalid response %", lambda result: result.invalid),
)


def result_table(results: Mapping[str, EvaluationResult], title: str = "") -> Table:
    """A column for each result; two results get a third column with the second minus the first, from unrounded values."""
    table = Table(title=title or None)
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    columns = list(results.values())
    has_gain = len(columns) == 2
    if has_gain:
        table.add_column("gain", justify="right")
    for name, share in _SHARES:
        shares = [share(result) for result in columns]
        if all(value is None for value in shares):
            continue
        cells = ["-" if value is None else percent(value) for value in shares]
        table.add_row(name, *cells, *([_gain(*shares)] if has_gain else []))
        if name == "success %":
            table.add_row("  95 % interval", *(" to ".join(map(percent, result.success_interval)) for result in columns))
    table.add_row("decisions per episode", *(f"{result.decisions:.1f}" for result in columns))
    table.add_row("response tokens per episode", *(f"{result.response_tokens:.0f}" for result in columns))
    for end in sorted({end for result in columns for end in result.ends}):
        table.add_row(f"ended: {end}", *(str(result.ends.get(end, 0)) for result in columns))
    table.add_row("tasks × trials", *(f"{result.num_tasks} × {result.trials}" for result in columns))
    if any(result.num_unscored for result in columns):
        table.add_row("episodes without a score", *(str(result.num_unscored) for result in columns))
    return table


def write_result(path: Path, result: EvaluationResult) -> None:
    """Writes the unrounded figures as indented JSON, atomically; creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def read_result(path: Path) -> EvaluationResult:
    """What `write_result` wrote.

    Raises:
        RunStateError: there is no such file, or it is no evaluation result.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=EvaluationResult)
    except OSError as error:
        raise RunStateError(f"no evaluation result at {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise RunStateError(f"{path} is no evaluation result: {error}") from error


def _gain(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return "-"
    gain = percent(after - before)
    return gain if gain.startswith("-") or gain == "0.0" else f"+{gain}"
