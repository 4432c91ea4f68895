"""Host memory that importing a checkpoint takes beyond the model's own size.

    python benchmarks/import_memory.py                 # shaped like Qwen3-4B: 8 GB of disk, about 12 GB of memory
    python benchmarks/import_memory.py --layers 4      # the same layers, fewer

Writes a random bfloat16 checkpoint in several files, imports it in a fresh process with bfloat16 weights,
and compares the peak resident memory of that process with the size of the weights. Interpreter and
libraries count as excess. Last line: JSON with `model_gib`, `peak_rss_gib`, `excess_gib`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from actionopd_jax.models import decoder_config, safetensors_writer
from actionopd_jax.models.decoder_config import DecoderConfig
from actionopd_jax.models.hf_layout import in_layer, layer_layouts, top_layouts

_GIB = 1 << 30
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=36, help="of the checkpoint; Qwen3-4B has 36")
    parser.add_argument("--folder", type=Path, help="where to put the checkpoint; default: a temporary folder")
    parser.add_argument("--import-from", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.import_from is not None:
        _import(flags.import_from)
        return
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        _write(Path(folder), flags.layers)
        command = [sys.executable, __file__, "--import-from", folder]
        subprocess.run(command, check=True)


def _config(layers: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=5e6,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
    )


def _write(folder: Path, layers: int) -> None:
    config = _config(layers)
    in_order = [(layout.name, layout.shape) for layout in top_layouts(config).values()]
    in_order += [(in_layer(i, x), x.shape) for i in range(layers) for x in layer_layouts(config).values()]
    tensors = [safetensors_writer.Tensor(*each) for each in in_order]
    safetensors_writer.write(folder, tensors, _random(tensors), _BFLOAT16, 2 * _GIB)
    (folder / "config.json").write_text(json.dumps(decoder_config.to_hf(config, eos_token_id=0)))


def _random(tensors: list[safetensors_writer.Tensor]) -> Iterator[np.ndarray]:
    """Random values of one block, again and again: only sizes matter here."""
    block = (0.02 * np.random.default_rng(0).standard_normal(1 << 20)).astype(_BFLOAT16)
    for tensor in tensors:
        yield np.resize(block, tensor.shape)


def _import(folder: Path) -> None:
    import jax
    from flax import nnx

    from actionopd_jax.models import weights

    start = time.perf_counter()
    model = weights.load(folder, dtype=jax.numpy.bfloat16, param_dtype=jax.numpy.bfloat16)
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    jax.block_until_ready(leaves)
    seconds = time.perf_counter() - start
    model_gib = sum(leaf.nbytes for leaf in leaves) / _GIB
    peak_gib = _peak_resident_bytes() / _GIB
    print(f"{sum(leaf.size for leaf in leaves):,} weights imported in {seconds:.1f} s")
    figures = {"model_gib": model_gib, "peak_rss_gib": peak_gib, "excess_gib": peak_gib - model_gib}
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


def _peak_resident_bytes() -> int:
    """Of this program alone: `getrusage` would count what the parent had when it started this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status has no VmHWM: this benchmark needs Linux")


if __name__ == "__main__":
    main()
