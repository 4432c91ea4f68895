"""This package's training step; `packing` in the settings says whether prefixes are shared."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from protocol import Rows, serve

from actionopd_jax.config import UpdateConfig
from actionopd_jax.models import weights
from actionopd_jax.records import Example
from actionopd_jax.training.update import Updater


def build(rows: Rows, settings: dict[str, Any], folder: Path) -> Any:
    """One update with given old log-probabilities, packing included."""
    model = weights.load(folder, remat=settings["remat"])
    config = UpdateConfig(
        **settings["optimizer"],
        clip_eta=settings["clip_eta"],
        dual_clip=settings["dual_clip"],
        packing=settings["packing"],
        bin_tokens=settings["bin_tokens"],
        minibatch_candidates=len(rows.prompts),
    )
    graphdef, params = nnx.split(model)
    updater = Updater(graphdef, config, temperature=1.0)
    state = updater.create_state(params)
    del model, params
    old = [np.asarray(row, np.float32) for row in rows.old_logprobs]
    examples = [
        Example(
            prompt_ids=prompt.astype(np.int32),
            response_ids=response.astype(np.int32),
            weights=np.full(len(response), advantage, np.float32),
            group=str(group),
            trajectory=str(trajectory),
        )
        for prompt, response, advantage, group, trajectory in zip(
            rows.prompts, rows.responses, rows.advantages, rows.groups, rows.trajectories, strict=True
        )
    ]

    def step() -> float:
        nonlocal state
        bins = updater.pack(examples)
        state, sums, _, _ = updater.optimizer_step(state, bins.with_old_logprobs(bins.gather(old)))
        jax.block_until_ready(state)
        return -float(sums.surrogate.objective / sums.surrogate.num_active)

    return step


if __name__ == "__main__":
    serve(build)
