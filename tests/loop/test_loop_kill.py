import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "kill.py"
NUM_KILLS = 20


@pytest.mark.slow
@pytest.mark.timeout(3000)  # a limit for machines that are busy with something else
def test_train_killed_at_twenty_random_moments_loses_and_repeats_nothing(student, compiled, tmp_path):
    flags = ["--no-thinking", "--response-tokens", "20", "--steps", "16", "--seed", "0"]
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--student", student, "--kills", str(NUM_KILLS), "--workdir", tmp_path, *flags],
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": str(compiled), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert sum(result["phases"].values()) == NUM_KILLS
    in_the_step = sum(result["phases"].get(phase, 0) for phase in ("collect", "update", "checkpoint"))
    assert in_the_step > NUM_KILLS / 2
    assert result["updates"] > 5
    assert result["requests_undisturbed"] > 100
    assert result["answers_asked_again"] == result["starts_collected_again"] == 0
    for what in ("metrics", "trajectories", "evaluations", "weights"):
        assert result[f"equal_{what}"], what
