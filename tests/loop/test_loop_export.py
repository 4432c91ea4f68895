"""`actionopd export` of a saved training state, read back by `transformers`."""

import dataclasses
import json
import shutil
from pathlib import Path

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from actionopd_jax import cli
from actionopd_jax.cli.settings import load
from actionopd_jax.models import student_files, weights
from actionopd_jax.records import digest
from actionopd_jax.training.checkpoint import Checkpointer, RunProgress
from actionopd_jax.training.optimizer import make_optimizer
from actionopd_jax.training.state import create_state
from actionopd_jax.training.workdir import what_matters

CONFIG = """
from ml_collections import ConfigDict

def get_config():
    source = dict(environment="service_desk", split="train", starts_per_step=1)
    return ConfigDict(dict(
        steps=3, seed=0,
        student=dict(path="STUDENT", weights="random", max_prompt_tokens=256, max_response_tokens=64),
        update=dict(bin_tokens=512),
        sources=[source],
        evaluation=dict(environment="service_desk", split="heldout"),
    ))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A work directory with checkpoints of steps 1 and 3, and the weights of each."""
    folder = tmp_path_factory.mktemp("run")
    student = shutil.copytree(student_files.resolve("builtin:service_desk"), folder / "student")
    shapes = json.loads((student / "config.json").read_text())
    shapes |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    (student / "config.json").write_text(json.dumps(shapes))
    (folder / "config.py").write_text(CONFIG.replace("STUDENT", str(student)))
    config = load(str(folder / "config.py"), [])
    saved = {}
    with Checkpointer(folder / "w" / "checkpoints", keep=2) as checkpoints:
        for step in (1, 3):
            params = nnx.split(student_files.load_student(student, 1000, "float32", False, random_seed=step))[1]
            state = dataclasses.replace(create_state(params, make_optimizer(config.update)), step=jnp.int32(step))
            checkpoints.save(state, RunProgress(step=step, config_digest=digest(what_matters(config))))
            saved[step] = params
    return folder, saved


def _export(run: Path, output: Path, *flags: str) -> int:
    return cli.main(
        ["export", "--config", str(run / "config.py"), "--workdir", str(run / "w"), "--output", str(output), *flags]
    )


def _flat(params) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in flax.traverse_util.flatten_dict(nnx.to_pure_dict(params), sep="/").items()}


def test_export_of_the_latest_checkpoint_gives_its_weights_and_tokenizer(run, tmp_path, capsys):
    folder, saved = run
    assert _export(folder, tmp_path / "new" / "student") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["step"], summary["dtype"]) == (3, "float32")
    assert not (tmp_path / "new" / "student.partial").exists()
    loaded = nnx.split(weights.load(tmp_path / "new" / "student"))[1]
    expected = _flat(saved[3])
    assert summary["num_parameters"] == sum(x.size for x in expected.values())
    for name, value in _flat(loaded).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_export_in_shards_of_a_step_reloads_in_transformers_to_the_same_logits(run, tmp_path, capsys):
    folder, saved = run
    output = tmp_path / "student"
    assert _export(folder, output, "--step", "1", "--dtype", "bfloat16", "--max-shard-gb", "0.00005") == 0
    summary = json.loads(capsys.readouterr().out)
    assert "model.safetensors.index.json" in summary["files"]
    assert len([name for name in summary["files"] if name.startswith("model-")]) >= 2
    torch_model = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    row = np.asarray(tokenizer("Reset my password, please.")["input_ids"], np.int32)
    with torch.no_grad():
        expected = torch_model(torch.tensor(row)[None].long()).logits[0].numpy()
    graphdef, _ = nnx.split(weights.load(output))
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), saved[1])
    model = nnx.merge(graphdef, rounded)
    hidden = model.hidden_states(row[None], np.arange(len(row))[None], np.full((1, len(row)), len(row)))
    actual = np.asarray(hidden[0] @ model.head_weight().T)
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step", "2"], "no checkpoint of step 2; there are: 1, 3"),
        (["--config.seed", "5"], "saved with other settings"),
        (["--max-shard-gb", "0"], "--max-shard-gb must be positive"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_export_that_cannot_be_done_ends_with_one_line(run, tmp_path, capsys, flags, message):
    assert _export(run[0], tmp_path / "student", *flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_export_into_a_used_folder_is_refused(run, tmp_path, capsys):
    (tmp_path / "mine").write_text("")
    assert _export(run[0], tmp_path) == 2
    assert "exists already" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_export_from_what_is_no_run_is_refused(run, tmp_path, capsys):
    (tmp_path / "w").mkdir()
    config = ["--config", str(run[0] / "config.py"), "--output", str(tmp_path / "out")]
    assert cli.main(["export", *config, "--workdir", str(tmp_path / "nothing")]) == 2
    assert "not a folder" in capsys.readouterr().err
    assert cli.main(["export", *config, "--workdir", str(tmp_path / "w")]) == 2
    assert "no checkpoint yet" in capsys.readouterr().err
