"""One GRPO-style training step, row by row: this package against google-tunix and plain PyTorch.

    make bench-step                                   # installs tunix 0.1.7 into an environment of its own
    python benchmarks/step.py --vs tunix --vs torch

The same rows, weights, loss and optimizer for all: 16 rows = 4 groups of 4 candidates, 512 + 32 tokens, no prefix
shared between rows; once with 8 layers of width 512 and a vocabulary of 8,192, once with 4 layers and Qwen3's
vocabulary of 151,936. Prints a table for each and ends with one JSON line: `time_ratio_NAME` (their CPU seconds by
ours, medians) and `memory_ratio_NAME` (peak resident memory), the large vocabulary's with the suffix `_large_vocabulary`.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import contestants
import numpy as np
from rich.console import Console

from actionopd_jax.models.decoder_config import DecoderConfig

_SHAPES = {"": (8, 8192), "_large_vocabulary": (4, 151_936)}  # suffix -> layers, vocabulary
_OPPONENTS = {
    "tunix": (contestants.TUNIX_PYTHON, "tunix_step.py"),
    "torch": (Path(sys.executable), "torch_step.py"),
}


def _config(layers: int, vocabulary: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocabulary,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )


def main() -> None:
    """Reads the flags, runs both shapes, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vs", choices=_OPPONENTS, action="append", default=[], help="may be given several times")
    parser.add_argument(
        "--repeats", type=contestants.at_least_one, default=5, help="measured steps of each, after one that compiles"
    )
    flags = parser.parse_args()
    if "tunix" in flags.vs and not contestants.TUNIX_PYTHON.is_file():
        sys.exit(f"{contestants.TUNIX_PYTHON} is missing: run make bench-step, or set TUNIX_PYTHON to tunix's interpreter")
    result: dict[str, float] = {}
    load = os.getloadavg()[0]
    for suffix, (layers, vocabulary) in _SHAPES.items():
        with tempfile.TemporaryDirectory() as name:
            folder, config = Path(name), _config(layers, vocabulary)
            rows = contestants.random_rows(np.random.default_rng(0), 4, 4, 512, 32, vocabulary)
            contestants.write_contest(folder, config, rows)
            contestants.write_settings(folder, config, packing="rows", bin_tokens=2176, remat="none")
            entered = {"actionopd_jax": (Path(sys.executable), "actionopd_step.py", folder)}
            entered |= {name: (*_OPPONENTS[name], folder) for name in flags.vs}
            title = f"{layers} layers, vocabulary {vocabulary}"
            measured = contestants.compete(entered, flags.repeats, title, list(entered))
        Console(stderr=True).print(contestants.table(title, measured, "actionopd_jax"))
        ours = measured["actionopd_jax"]
        result[f"cpu_s{suffix}"] = round(ours.median_cpu_s, 3)
        for opponent in flags.vs:
            theirs = measured[opponent]
            result[f"time_ratio_{opponent}{suffix}"] = round(theirs.median_cpu_s / ours.median_cpu_s, 2)
            result[f"memory_ratio_{opponent}{suffix}"] = round(theirs.peak_rss_gib / ours.peak_rss_gib, 2)
    print(json.dumps({**result, "machine_load": round(load, 2)}))


if __name__ == "__main__":
    main()
