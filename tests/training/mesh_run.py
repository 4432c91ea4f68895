"""Two updates of a small decoder on a mesh of virtual CPU devices, in one process or several; run as a program.

    python mesh_run.py MESH PROCESS NUM_PROCESSES ADDRESS OUTPUT

MESH is a JSON object of `MeshConfig` fields. Each process takes its share of the examples; the first writes gradients,
weights and figures to OUTPUT (npz).
"""

import json
import sys

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from actionopd_jax.config import MeshConfig, UpdateConfig
from actionopd_jax.models import sharding
from actionopd_jax.models.decoder import Decoder
from actionopd_jax.models.decoder_config import DecoderConfig
from actionopd_jax.records import Example
from actionopd_jax.training.update import Updater

VOCAB = 48
DECODER = DecoderConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    tie_word_embeddings=True,
    max_position_embeddings=512,
)
# A large epsilon keeps Adam's step proportional to the gradient, so that weights can be compared; two optimizer steps.
CONFIG = UpdateConfig(
    bin_tokens=256, learning_rate=0.3, adam_eps=1.0, weight_decay=0.1, max_grad_norm=1e9, minibatch_candidates=12
)
GROUPS, CANDIDATES = 6, 4


def examples():
    """Two trajectories of three groups; candidates of a group share a prompt, and lengths differ much."""
    rng = np.random.default_rng(0)
    made = []
    for group in range(GROUPS):
        prompt = rng.integers(0, VOCAB, rng.integers(5, 90))
        for _ in range(CANDIDATES):
            response = rng.integers(0, VOCAB, rng.integers(1, 50))
            ids = (np.asarray(part, np.int32) for part in (prompt, response))
            made.append(Example(*ids, rng.normal(size=len(response)).astype(np.float32), f"g{group}", f"t{group // 3}"))
    return made


def main(mesh_config, process, num_processes, address, output):
    if num_processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, num_processes, process)
    model = Decoder(DECODER, rngs=nnx.Rngs(0), remat="full")
    graphdef, params = nnx.split(model)
    # Larger weights than at the start of training: flat distributions would hide mistakes.
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * (1.0 if "norm" in jax.tree_util.keystr(path) else 8.0), params
    )
    mesh = sharding.make_mesh(mesh_config) if mesh_config.num_devices > 1 else None
    updater = Updater(graphdef, CONFIG, temperature=0.6, mesh=mesh, weights=None if mesh is None else params)
    state = updater.create_state(params)
    everything = examples()
    share = len(everything) // num_processes
    figures = {}
    for update in range(2):
        state, metrics = updater.update(state, everything[process * share : (process + 1) * share])
        figures |= {f"{name}/{update}": value for name, value in metrics.items()}

    def host(leaf):
        whole = leaf if leaf.is_fully_addressable else multihost_utils.process_allgather(leaf, tiled=True)
        return np.asarray(whole)

    named = jax.tree_util.tree_leaves_with_path({"params": state.params, "moments": state.opt_state})
    arrays = {jax.tree_util.keystr(path): host(leaf) for path, leaf in named}
    if process == 0:
        np.savez(output, figures=json.dumps(figures), **arrays)


if __name__ == "__main__":
    mesh, process, num_processes, address, output = sys.argv[1:]
    main(MeshConfig(**json.loads(mesh)), int(process), int(num_processes), address, output)
