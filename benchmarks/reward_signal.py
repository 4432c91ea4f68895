"""Is it the signal that teaches? The same run with the agreement reward, and with two rewards that say nothing.

    JAX_PLATFORMS=cpu python benchmarks/reward_signal.py --workdir runs/reward_signal

Three runs of `configs/quickstart.py`, alike in seed, student, tasks and budget, that differ in `method.reward` alone:

    agreement   the paper's reward; the best candidate is executed
    constant    no candidate is preferred: no group carries signal, nothing is updated
    shuffled    the agreement rewards of each group in random order: updates of the same size, without information

The controls execute a uniform choice among the valid candidates. Prints a table and ends with one JSON line of
success rates on the held-out tasks. As long as three quickstarts, about half an hour on two CPU cores; a run that was
interrupted is continued by the same command.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from actionopd_jax import loop
from actionopd_jax.cli.settings import load
from actionopd_jax.config import RunConfig
from actionopd_jax.evaluation.passk import percent
from actionopd_jax.evaluation.table import read_result
from actionopd_jax.records import JsonObject
from actionopd_jax.training.metrics import FILE_NAME, edge_means, read_metrics

_CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.py"
_REWARDS = ("agreement", "constant", "shuffled")


def settings(reward: str, steps: int | None, tasks: int | None, seed: int | None) -> RunConfig:
    """The quickstart's, with another reward; None leaves a setting as it is there."""
    changes = {"method.reward": reward, "steps": steps, "evaluation.num_tasks": tasks, "seed": seed}
    return load(str(_CONFIG), [(name, str(value)) for name, value in changes.items() if value is not None])


def _interval(workdir: Path, step: int) -> str:
    low, high = read_result(workdir / "evaluations" / f"step_{step:06d}.json").success_interval
    return f"{percent(low)} to {percent(high)}"


def _row(reward: str, summary: JsonObject, workdir: Path, steps: int) -> list[str]:
    lines = read_metrics(workdir / FILE_NAME)
    updates = sum(int(line.get("optimizer_steps") or 0) for line in lines)
    match_rates = [rate or 0.0 for rate in edge_means(lines, "match_rate")]
    return [
        reward,
        percent(summary["success_after"]),
        _interval(workdir, steps),
        percent(summary["success_after"] - summary["success_before"]),
        " → ".join(map(percent, match_rates)),
        str(updates),
        f"{summary['train_minutes']:.1f}",
    ]


def main() -> None:
    """Reads the flags, trains three times, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="of each run; default: as the quickstart")
    parser.add_argument("--tasks", type=int, help="held-out tasks to evaluate on; default: as the quickstart")
    parser.add_argument("--seed", type=int, help="of all runs; default: as the quickstart")
    parser.add_argument("--workdir", type=Path, default=Path("runs/reward_signal"), help="one folder for each run")
    flags = parser.parse_args()

    table = Table(title="Success on held-out tasks, greedy, no teacher")
    for column in ("reward", "success %", "95 % interval", "gain", "match rate % (first, last steps)", "updates", "minutes"):
        table.add_column(column, justify="left" if column == "reward" else "right")
    results: dict[str, JsonObject] = {}
    load_average = os.getloadavg()[0]
    for reward in _REWARDS:
        config = settings(reward, flags.steps, flags.tasks, flags.seed)
        workdir = flags.workdir / reward
        results[reward] = loop.train(config, workdir)
        load_average = max(load_average, os.getloadavg()[0])
        table.add_row(*_row(reward, results[reward], workdir, config.steps))
    before = {summary["success_before"] for summary in results.values()}
    if len(before) != 1:
        sys.exit(f"the runs did not begin with the same student: success before training was {sorted(before)}")
    Console(stderr=True).print(table)
    successes = {reward: summary["success_after"] for reward, summary in results.items()}
    print(json.dumps({"success_before": before.pop(), **successes, "machine_load": load_average}))


if __name__ == "__main__":
    main()
