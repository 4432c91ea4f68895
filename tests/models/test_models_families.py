"""Each model family against `transformers` with the same random weights: values, loss, all gradients, one AdamW step."""

import dataclasses
import os
from pathlib import Path

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from actionopd_jax.config import UpdateConfig
from actionopd_jax.learning.surrogate import dual_clipped_surrogate
from actionopd_jax.models import weights
from actionopd_jax.models.logprobs import token_logprobs
from actionopd_jax.training.optimizer import apply_gradients, decayed, make_optimizer
from actionopd_jax.training.state import create_state

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

_SHAPES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "attn_implementation": "eager",
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_FAMILIES = {
    "qwen3-theta-1e6": ("Qwen3", {"rope_theta": 1e6, "head_dim": 16, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}),
    "qwen3-theta-5e6-tied": ("Qwen3", {"rope_theta": 5e6, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen2-biases": ("Qwen2", {"rope_theta": 1e6, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama": ("Llama", {"rope_theta": 1e5, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
}
_VARIANTS = {
    **_FAMILIES,
    "qwen3-biases": ("Qwen3", {"rope_theta": 1e6, "head_dim": 16, "attention_bias": True}),
    "qwen2-yarn": ("Qwen2", {"rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}),
    "llama-biases-linear": ("Llama", {"attention_bias": True, "rope": {"rope_type": "linear", "factor": 3.0}}),
    "llama-llama3": ("Llama", {"rope": {**_LLAMA3, "original_max_position_embeddings": 128}, "rope_theta": 5e5}),
}
_TEMPERATURE, _ETA, _DUAL_CLIP = 0.6, 0.2, 3.0
_UPDATE = UpdateConfig(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5, adam_eps=1e-8)


@dataclasses.dataclass(frozen=True)
class Model:
    torch_model: transformers.PreTrainedModel
    folder: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Makes, once each, a saved random model; norms and biases are not at their trivial values."""
    made: dict[str, Model] = {}

    def make(name: str) -> Model:
        if name not in made:
            family, changes = _VARIANTS[name]
            changes = dict(changes)
            rope = {"rope_type": "default", **changes.pop("rope", {}), "rope_theta": changes.pop("rope_theta", 1e4)}
            config = getattr(transformers, f"{family}Config")(**{**_SHAPES, "rope_parameters": rope, **changes})
            torch.manual_seed(3)
            model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if "norm" in key:
                        parameter.uniform_(0.5, 1.5)
                    elif key.endswith("bias"):
                        parameter.normal_(0, 0.5)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            made[name] = Model(model, folder)
        return made[name]

    return make


class Batch:
    """Two rows of 32 places, one padded on the left and one on the right, in both programs' terms."""

    def __init__(self, lengths=(21, 26), places=32, seed=0):
        rng = np.random.default_rng(seed)
        self.tokens = rng.integers(0, 97, (2, places)).astype(np.int32)
        self.mask = np.zeros((2, places), bool)
        self.mask[0, places - lengths[0] :] = True
        self.mask[1, : lengths[1]] = True
        self.positions = np.maximum(np.cumsum(self.mask, axis=1) - 1, 0).astype(np.int32)
        alone = np.arange(places) + 1  # padding sees itself
        last = places - np.argmax(self.mask[:, ::-1], axis=1)
        self.end = np.where(self.mask, last[:, None], alone).astype(np.int32)
        # Terms: every real token after the first five of its row; padding terms hold whatever.
        self.source = np.tile(np.arange(places - 1, dtype=np.int32), (2, 1))
        self.target = self.tokens[:, 1:]
        self.active = self.mask[:, :-1] & self.mask[:, 1:] & (self.positions[:, :-1] >= 5)
        self.advantage = np.where(self.active, rng.normal(size=self.active.shape), np.nan).astype(np.float32)
        self.shift = rng.normal(scale=0.8, size=self.active.shape).astype(np.float32)  # reaches every clip

    def torch_logits(self, model) -> torch.Tensor:
        return model(
            torch.tensor(self.tokens).long(),
            attention_mask=torch.tensor(self.mask).long(),
            position_ids=torch.tensor(self.positions).long(),
        ).logits


def _torch_logprobs(batch: Batch, model) -> torch.Tensor:
    """Each row by itself, without any padding."""
    logprobs = torch.zeros(batch.target.shape, dtype=torch.float64)
    for row, mask in enumerate(batch.mask):
        (places,) = np.nonzero(mask)
        ids = torch.tensor(batch.tokens[row, places]).long()
        scores = torch.log_softmax(model(ids[None]).logits[0, :-1] / _TEMPERATURE, dim=-1)
        logprobs[row, places[:-1]] = scores.gather(-1, ids[1:, None])[:, 0]
    return logprobs


def _torch_loss(batch: Batch, logprobs: torch.Tensor, old: np.ndarray) -> torch.Tensor:
    """`-mean h_dual` over active tokens, straight from the formulas."""
    active = torch.tensor(batch.active)
    advantage = torch.tensor(batch.advantage)[active].double()
    ratio = torch.exp(logprobs - torch.tensor(old))[active]
    h = torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - _ETA, 1 + _ETA) * advantage)
    h = torch.where(advantage < 0, torch.maximum(h, _DUAL_CLIP * advantage), h)
    return -h.mean()


def _scores(model, batch: Batch):
    hidden = model.hidden_states(batch.tokens, batch.positions, batch.end)
    return hidden, token_logprobs(hidden, model.head_weight(), batch.source, batch.target, _TEMPERATURE).logprobs


@jax.jit
def _forward(model, batch_arrays):
    hidden = model.hidden_states(*batch_arrays)
    return jnp.einsum("btd,vd->btv", hidden, model.head_weight(), preferred_element_type=jnp.float32)


def _logits(model, batch: Batch) -> np.ndarray:
    return np.asarray(_forward(model, (batch.tokens, batch.positions, batch.end)))


def _flat(tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in flax.traverse_util.flatten_dict(nnx.to_pure_dict(tree), sep="/").items()}


def _relative(actual, expected) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", _VARIANTS)
def test_logits_of_padded_rows_equal_pytorch(models, name):
    made, batch = models(name), Batch()
    with torch.no_grad():
        expected = batch.torch_logits(made.torch_model).numpy()[batch.mask]
    actual = _logits(weights.load(made.folder), batch)
    assert expected.std() > 0.5  # the comparison says something
    assert np.isfinite(actual).all()
    error = _relative(actual[batch.mask], expected)
    print(f"{name}: logits {error:.1e}")
    assert error < 1e-5


@pytest.mark.parametrize("name", ["qwen3-theta-1e6", "qwen3-theta-5e6-tied", "qwen2-yarn", "llama-llama3"])
def test_logits_at_far_positions_equal_pytorch(models, name):
    """Far along, angles are large: a wrong base or scaling of the frequencies shows."""
    made, batch = models(name), Batch()
    batch.positions = batch.positions * 13 + 500
    with torch.no_grad():
        expected = batch.torch_logits(made.torch_model).numpy()[batch.mask]
    assert _relative(_logits(weights.load(made.folder), batch)[batch.mask], expected) < 1e-4


@pytest.mark.parametrize("name", ["qwen3-theta-1e6", "qwen2-biases", "llama"])
def test_loss_gradients_and_adamw_step_equal_pytorch(models, name, tmp_path):
    """PyTorch in float64 is exact here. Its own float32 misses by up to 9e-5: the first Adam step divides each gradient
    by its own size, and so makes much of rounding errors in the tiniest."""
    made, batch = models(name), Batch(seed=1)
    reference = type(made.torch_model)(made.torch_model.config).eval()
    reference.load_state_dict(made.torch_model.state_dict())
    reference = reference.double()
    logprobs = _torch_logprobs(batch, reference)
    old = (logprobs.detach().numpy() - batch.shift).astype(np.float32)
    expected_loss = _torch_loss(batch, logprobs, old)
    expected_loss.backward()
    expected_grad_params = _in_our_layout(reference, {n: p.grad for n, p in reference.named_parameters()}, tmp_path / "g")
    expected_grads = _flat(expected_grad_params)

    graphdef, params = nnx.split(weights.load(made.folder))

    @jax.jit
    def loss(params):
        _, new = _scores(nnx.merge(graphdef, params), batch)
        sums = dual_clipped_surrogate(new, jnp.asarray(old), batch.advantage, batch.active, _ETA, _DUAL_CLIP)
        return -sums.objective / sums.num_active, (new, sums)

    (value, (new, sums)), grads = jax.value_and_grad(loss, has_aux=True)(params)
    assert min(float(sums.clipped), float(sums.dual_clipped)) > 0  # every branch is in it
    errors = {
        "log-probs": _relative(np.asarray(new)[batch.active], logprobs.detach().numpy()[batch.active]),
        "loss": abs(float(value) / float(expected_loss.detach()) - 1),
    }
    actual_grads = _flat(grads)
    assert actual_grads.keys() == expected_grads.keys()
    errors["gradients"] = max(_relative(g, expected_grads[n]) for n, g in actual_grads.items())
    assert all(np.abs(g).max() > 1e-6 for g in expected_grads.values())

    norm = _torch_adamw_step(reference)
    assert norm > _UPDATE.max_grad_norm  # the clipping is in it
    expected_after = _flat(_in_our_layout(reference, dict(reference.named_parameters()), tmp_path / "after"))
    optimizer = make_optimizer(_UPDATE)
    step = jax.jit(lambda params, grads: apply_gradients(optimizer, create_state(params, optimizer), grads))
    state, actual_norm = step(params, grads)
    after = _flat(state.params)
    errors["gradient norm"] = abs(float(actual_norm) / norm - 1)
    errors["updated weights"] = max(_relative(after[n], expected_after[n]) for n in after)
    alone = _flat(step(params, expected_grad_params)[0].params)  # the optimizer by itself
    from_same = max(_relative(alone[n], expected_after[n]) for n in alone)
    errors_text = ", ".join(f"{what} {error:.1e}" for what, error in errors.items())
    print(f"{name}: {errors_text}, from the same gradients {from_same:.1e}")
    assert max(errors.values()) < 1e-4
    assert from_same < 1e-6


def _in_our_layout(model, tensors: dict[str, torch.Tensor], folder: Path):
    model.save_pretrained(folder, state_dict={name: tensor.detach().float().clone() for name, tensor in tensors.items()})
    return nnx.split(weights.load(folder))[1]


def _torch_adamw_step(model) -> float:
    """One step of torch's own optimizer; which weights decay is the project's rule. Returns the norm before clipping."""
    biases_decay = decayed({"layers": {"query_bias": jnp.zeros((2, 4, 12))}})["layers"]["query_bias"]
    groups: dict[bool, list] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[biases_decay if name.endswith("bias") else "norm" not in name].append(parameter)
    norm = torch.nn.utils.clip_grad_norm_(list(model.parameters()), _UPDATE.max_grad_norm)
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": _UPDATE.weight_decay * decays} for decays, group in groups.items()],
        lr=_UPDATE.learning_rate,
        betas=(_UPDATE.adam_b1, _UPDATE.adam_b2),
        eps=_UPDATE.adam_eps,
    )
    optimizer.step()
    return float(norm)


@pytest.mark.parametrize("name", ["qwen3-theta-5e6-tied", "qwen2-biases", "llama"])
def test_bfloat16_stays_as_near_to_float32_as_pytorch_does(models, name):
    """One rounding to bfloat16 moves a value by up to 0.4 %; the bound is what PyTorch's own bfloat16 loses, times 1.5."""
    made, batch = models(name), Batch(seed=2)
    with torch.no_grad():
        exact = batch.torch_logits(made.torch_model).numpy()[batch.mask]
        torch_low = type(made.torch_model)(made.torch_model.config).eval()
        torch_low.load_state_dict(made.torch_model.state_dict())
        theirs = _relative(batch.torch_logits(torch_low.bfloat16()).float().numpy()[batch.mask], exact)
    model = weights.load(made.folder, dtype=jnp.bfloat16)
    assert model.embedding[...].dtype == jnp.float32
    ours = _relative(_logits(model, batch)[batch.mask], exact)
    print(f"{name}: bfloat16 logits {ours:.4f}, PyTorch's own {theirs:.4f}")
    assert ours < min(1.5 * theirs, 0.03)


@pytest.mark.skipif("ACTIONOPD_SMOLLM2" not in os.environ, reason="ACTIONOPD_SMOLLM2 names no SmolLM2 folder")
def test_logits_of_smollm2_equal_pytorch():
    folder = Path(os.environ["ACTIONOPD_SMOLLM2"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nThe capital of France is"
    row = np.asarray(tokenizer(text)["input_ids"], np.int32)
    with torch.no_grad():
        torch_model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        expected = torch_model(torch.tensor(row)[None].long()).logits[0].numpy()
    del torch_model
    length = len(row)
    batch = (row[None], np.arange(length, dtype=np.int32)[None], np.full((1, length), length, np.int32))
    actual = np.asarray(_forward(weights.load(folder), batch))[0]
    print(f"SmolLM2-135M-Instruct: logits {_relative(actual, expected):.1e}")
    assert tokenizer.decode(int(actual[-1].argmax())).strip() == "Paris"
    assert _relative(actual, expected) < 1e-4
