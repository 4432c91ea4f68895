"""configs/bfcl.py: its variants are valid runs over tasks that exist."""

import importlib.util
from pathlib import Path

import pytest

from actionopd_jax import environments
from actionopd_jax.config import RunConfig, build

pytest.importorskip("bfcl_eval")

_PATH = Path(__file__).parents[2] / "configs" / "bfcl.py"


def get_config(variant):
    spec = importlib.util.spec_from_file_location("configs_bfcl", _PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(variant)


@pytest.mark.parametrize(("variant", "num_train", "num_heldout"), [("debug", 15, 5), ("default", 150, 50)])
def test_variant_builds_a_run_over_existing_tasks(variant, num_train, num_heldout):
    config = build(RunConfig, get_config(variant).to_dict())
    source = config.sources[0]
    assert len(environments.load(source.environment, source.settings).tasks(source.split)) == num_train
    evaluation = config.evaluation
    assert len(environments.load(evaluation.environment, evaluation.settings).tasks(evaluation.split)) == num_heldout


def test_default_variant_has_the_papers_numbers():
    config = build(RunConfig, get_config("default").to_dict())
    assert (config.method.num_candidates, config.method.num_teacher_samples, config.method.frequency_bonus) == (4, 3, 0.5)
    assert (config.update.clip_eta, config.update.dual_clip) == (0.2, 3.0)
    assert (config.steps, config.sources[0].starts_per_step, config.method.max_decisions) == (50, 24, 20)


def test_unknown_variant_names_the_known_ones():
    with pytest.raises(ValueError, match="default, debug"):
        get_config("large")
