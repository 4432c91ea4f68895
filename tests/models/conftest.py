"""Tiny Qwen3 models made by PyTorch: the oracle of the decoder, its weights and its sampler."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
import torch
import transformers
from sampler_requests import NO_END

from actionopd_jax.models import weights
from actionopd_jax.models.sampler import EmbeddedSampler

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The same weights as a PyTorch module and as a folder."""

    torch_model: transformers.Qwen3ForCausalLM
    folder: Path


def random_qwen3(**changes) -> transformers.Qwen3ForCausalLM:
    """Three layers, head_dim * heads != hidden; weights large enough for peaked distributions, norms not all 1."""
    rope_theta = changes.pop("rope_theta", 1e6)
    seed = changes.pop("seed", 0)
    values = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "initializer_range": 0.15,
        "attn_implementation": "eager",
    }
    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**values, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """Makes (once for each set of changes) a saved random model."""
    made: dict[tuple, Checkpoint] = {}

    def make(**changes) -> Checkpoint:
        key = tuple(sorted(changes.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("qwen3")
            model = random_qwen3(**changes)
            model.save_pretrained(folder)
            made[key] = Checkpoint(model, folder)
        return made[key]

    return make


@pytest.fixture(scope="module")
def quick_compilation():
    """For modules whose time is XLA's optimiser at work on programs that run once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def sampler_checkpoint(checkpoint):
    return checkpoint(tie_word_embeddings=True)


@pytest.fixture(scope="module")
def model(sampler_checkpoint):
    return weights.load(sampler_checkpoint.folder)


@pytest.fixture
def sampler(model):
    """Makes samplers and closes them."""
    open_samplers = []

    def make(**changes):
        settings = {"end_id": NO_END, "num_valid_ids": 96, "slots": 3, "max_wait_ms": 20.0, **changes}
        open_samplers.append(EmbeddedSampler(model, **settings))
        return open_samplers[-1]

    yield make
    for each in open_samplers:
        each.close()
