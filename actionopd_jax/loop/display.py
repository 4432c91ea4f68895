"""What a person sees of a run: bars while it works, a line per step, a table at the end."""

import contextlib
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from actionopd_jax.records import JsonObject, Trajectory
from actionopd_jax.training.metrics import Line, edge_means, edge_steps


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


class EpisodeProgress:
    """A bar over the episodes of an evaluation; a context manager, called with (finished, total)."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._bars = _bars(console)
        self._bar = self._bars.add_task(title, total=None, note="")

    def __enter__(self) -> "EpisodeProgress":
        if not self._console.is_terminal:
            self._console.print(f"{self._title} ...")
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def __call__(self, done: int, total: int) -> None:
        self._bars.update(self._bar, completed=done, total=total)


class TrainingProgress:
    """Bars over steps and over the task starts of the current one, and a printed line per step."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._bars = _bars(console)
        self._total = self._bars.add_task("steps", total=steps, note="")
        self._tasks = self._bars.add_task("tasks", total=None, note="")

    @contextlib.contextmanager
    def shown(self, done: int) -> Iterator[None]:
        """Shows the bars, `done` steps being finished already."""
        self._bars.update(self._total, completed=done)
        with self._bars:
            yield

    def collected(self, done: int, total: int, trajectory: Trajectory) -> None:
        """Reports that a task start is finished."""
        self._bars.update(self._tasks, completed=done, total=total, note="collecting")

    def updating(self) -> None:
        self._bars.update(self._tasks, note="updating")

    def step_done(self, step: int, line: Mapping[str, object]) -> None:
        """Prints the step's figures."""
        self._bars.update(self._total, completed=step)
        shown = [f"step {step:>{len(str(self._steps))}}/{self._steps}"]
        shown += [f"{label} {_show(line[name])}" for name, label in _LINE.items() if line.get(name) is not None]
        self._console.print("  ".join(shown), highlight=False)


_LINE = {
    "match_rate": "match",
    "invalid_rate": "invalid",
    "reward_mean": "reward",
    "success_rate": "task success",
    "teacher_success_rate": "teacher success",
    "loss": "loss",
    "groups_kept": "groups kept",
    "entropy": "entropy",
    "step_s": "seconds",
}


def _show(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def summary_table(summary: JsonObject, lines: list[Line]) -> Table:
    """First and last steps side by side, and the evaluation before and after."""
    table = Table(title="Summary")
    for column in ("", "first", "last"):
        table.add_column(column, justify="left" if not column else "right")
    before, after = summary["success_before"], summary["success_after"]
    table.add_row("success on held-out tasks (before, after)", f"{before:.1%}", f"{after:.1%}")
    for name, label in (("match_rate", "match rate"), ("invalid_rate", "invalid rate"), ("reward_mean", "mean reward")):
        first, last = edge_means(lines, name)
        if first is not None and last is not None:
            table.add_row(f"{label} (mean of {edge_steps(lines)} steps)", f"{first:.3f}", f"{last:.3f}")
    return table
