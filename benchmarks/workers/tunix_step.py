"""google-tunix's GRPO step on the same rows and weights; runs in tunix's environment."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from protocol import Rows, serve
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl import common, function_registry, trainer
from tunix.rl.grpo import grpo_learner
from tunix.sft import peft_trainer

_PAD, _END = 0, 1  # ids that no row contains


def build(rows: Rows, settings: dict[str, Any], folder: Path) -> Any:
    """Prompts padded on the left, responses on the right, as tunix's own learner does."""
    shape = SimpleNamespace(**settings["model"])
    config = qwen3.ModelConfig(
        num_layers=shape.num_hidden_layers,
        vocab_size=shape.vocab_size,
        embed_dim=shape.hidden_size,
        hidden_dim=shape.intermediate_size,
        num_heads=shape.num_attention_heads,
        head_dim=shape.head_dim,
        num_kv_heads=shape.num_key_value_heads,
        rope_theta=int(shape.rope_theta),
        norm_eps=shape.rms_norm_eps,
        use_tied_embedding=True,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    )
    model = qwen3_params.create_model_from_safe_tensors(str(folder), config, dtype=jnp.float32)
    algorithm = grpo_learner.GRPOConfig(
        num_generations=2, beta=0.0, epsilon=settings["clip_eta"], loss_agg_mode="token-mean"
    )
    algorithm.temperature, algorithm.epsilon_high, algorithm.epsilon_c = 1.0, settings["clip_eta"], settings["dual_clip"]
    grpo = function_registry.get_policy_loss_fn("grpo")
    numbers = settings["optimizer"]
    optimizer = optax.chain(
        optax.clip_by_global_norm(numbers["max_grad_norm"]),
        optax.adamw(numbers["learning_rate"], weight_decay=numbers["weight_decay"]),
    )
    learner = trainer.Trainer(
        model,
        optimizer,
        peft_trainer.TrainingConfig(eval_every_n_steps=10**9, max_steps=10**6),
        custom_checkpoint_metadata_fn=dict,
    )
    learner.with_loss_fn(
        lambda model, train_example, algo_config: grpo(
            model, train_example, algo_config=algorithm, pad_id=_PAD, eos_id=_END
        ),
        has_aux=True,
    )
    learner.with_gen_model_input_fn(lambda example: {"train_example": example, "algo_config": None})
    run, _ = learner.jit_train_and_eval_step()

    def step() -> float:
        loss = run(_example(rows))[0]
        jax.block_until_ready(nnx.state(learner.model))
        return float(loss)

    return step


def _example(rows: Rows) -> common.TrainExample:
    prompts, prompt_mask = _padded(rows.prompts, left=True)
    responses, response_mask = _padded(rows.responses, left=False)
    old, _ = _padded(rows.old_logprobs, left=False)
    return common.TrainExample(
        prompt_ids=jnp.asarray(prompts, jnp.int32),
        prompt_mask=jnp.asarray(prompt_mask),
        completion_ids=jnp.asarray(responses, jnp.int32),
        completion_mask=jnp.asarray(response_mask, jnp.int32),
        advantages=jnp.asarray(rows.advantages, jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=jnp.asarray(old, jnp.float32),
    )


def _padded(rows: list[np.ndarray], left: bool) -> tuple[np.ndarray, np.ndarray]:
    longest = max(len(row) for row in rows)
    values = np.zeros((len(rows), longest), rows[0].dtype)
    mask = np.zeros(values.shape, bool)
    for i, row in enumerate(rows):
        where = slice(longest - len(row), None) if left else slice(len(row))
        values[i, where], mask[i, where] = row, True
    return values, mask


if __name__ == "__main__":
    serve(build)
