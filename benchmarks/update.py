"""One update with shared prefixes: this package's prefix trees against its own rows and google-tunix.

    make bench-update                                   # installs tunix 0.1.7 into an environment of its own
    python benchmarks/update.py --vs tunix
    python benchmarks/update.py --workload c            # needs TAU2_PYTHON and ACTIONOPD_QWEN3_TOKENIZER, see the Makefile

Workloads:

    a   one level: 4 groups of 4 candidates, 512 + 32 tokens; 8 layers of width 512, vocabulary 8,192
    b   conversations like Tau-bench's: two trajectories of 20 decisions, 4 candidates each; 2,000 tokens of system
        prompt and tools, observations of 150, responses of 120, of which the template drops the reasoning (80) of
        earlier user turns; four user turns; 4 layers of width 256
    c   two gold replays of Tau-bench retail, rendered by Qwen3's own template and tokenizer at their full lengths, with
        4 candidates a decision; 2 layers of width 256, the vocabulary is the token ids that occur

tunix takes the same rows padded to a rectangle; in b it gets a random sample of them, whose CPU seconds are scaled to
all rows; in c it has no part. Prints a table each and ends with one JSON line: per workload `token_ratio` (row tokens by
tree tokens, cuts included), `time_ratio_rows`, `time_ratio_tunix` (their CPU seconds by those of the trees, medians),
`memory_ratio_rows` and `attention_share` (key blocks that the attention visits, by those that hold a visible key: 1 is
perfect).
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import contestants
import numpy as np
import trajectories
from rich.console import Console
from workers.protocol import Rows

from actionopd_jax.config import UpdateConfig
from actionopd_jax.learning.packing import PackedBins, pack
from actionopd_jax.models.attention_blockwise import BLOCK
from actionopd_jax.models.decoder_config import DecoderConfig
from actionopd_jax.records import Example

_ROWS_OF_TUNIX = 8  # of workload b


def _config(layers: int, width: int, heads: int, vocabulary: int = 8192) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        max_position_embeddings=16_384,
    )


def _packed(rows: Rows, bin_tokens: int) -> PackedBins:
    examples = [
        Example(
            prompt_ids=prompt.astype(np.int32),
            response_ids=response.astype(np.int32),
            weights=np.ones(len(response), np.float32),
            group=str(group),
            trajectory=str(trajectory),
        )
        for prompt, response, group, trajectory in zip(
            rows.prompts, rows.responses, rows.groups, rows.trajectories, strict=True
        )
    ]
    return pack(examples, bin_tokens, mode=UpdateConfig().packing)


def attention_share(end: np.ndarray, block: int = BLOCK) -> float:
    """Blocks of queries and keys that the attention computes, by those that hold something visible.

    The attention skips a key block when no key of it is visible beyond the start of the query block.
    """
    visited = needed = 0
    for ends in end:
        count = -(-len(ends) // block)
        index = np.arange(len(ends))
        for key in range(count):
            last = ends[key * block : (key + 1) * block]
            for query in range(key, count):
                start = query * block
                visited += bool(last.max() > start)
                queries, keys = index[start : start + block], index[key * block : (key + 1) * block]
                seen = (keys[None] <= queries[:, None]) & (queries[:, None] < last[None])
                needed += bool(seen.any())
    return visited / needed


def main() -> None:
    """Reads the flags, runs the workloads, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vs", choices=["tunix"], action="append", default=[])
    parser.add_argument(
        "--repeats", type=contestants.at_least_one, default=3, help="measured steps of each, after one that compiles"
    )
    parser.add_argument("--workload", choices=["a", "b", "c"], action="append", help="default: all")
    flags = parser.parse_args()
    if flags.vs and not contestants.TUNIX_PYTHON.is_file():
        sys.exit(f"{contestants.TUNIX_PYTHON} is missing: run make bench-update, or set TUNIX_PYTHON to tunix's interpreter")
    rng = np.random.default_rng(0)
    workloads: dict[str, Callable[[], tuple[DecoderConfig, Rows, int, int]]] = {
        "a": lambda: (_config(8, 512, 8), contestants.random_rows(rng, 4, 4, 512, 32, 8192), 3072, 2176),
        "b": lambda: (_config(4, 256, 4), trajectories.synthetic(rng, 2, 8192), 17_408, 17_408),
        "c": lambda: _retail(rng),
    }
    load = os.getloadavg()[0]
    result: dict[str, dict[str, float]] = {}
    for name in flags.workload or workloads:
        config, rows, tree_bin, row_bin = workloads[name]()
        result[name] = _compare(name, config, rows, tree_bin, row_bin, flags)
    print(json.dumps({**result, "machine_load": round(load, 2)}))


def _retail(rng: np.random.Generator) -> tuple[DecoderConfig, Rows, int, int]:
    rows, vocabulary = trajectories.retail(rng, 2)
    return _config(2, 256, 4, vocabulary), rows, 23_552, 23_552


def _compare(
    name: str, config: DecoderConfig, rows: Rows, tree_bin: int, row_bin: int, flags: argparse.Namespace
) -> dict[str, float]:
    count = len(rows.prompts)
    with tempfile.TemporaryDirectory() as temporary:
        folders = {part: Path(temporary) / part for part in ("trees", "rows", "tunix")}
        sampled = np.sort(
            np.random.default_rng(1).choice(count, min(count, _ROWS_OF_TUNIX if name == "b" else count), False)
        )
        for part, folder in folders.items():
            folder.mkdir()
            contestants.write_contest(folder, config, rows.take(sampled) if part == "tunix" else rows)
        contestants.write_settings(folders["trees"], config, packing="tree", bin_tokens=tree_bin, remat="none")
        contestants.write_settings(folders["rows"], config, packing="rows", bin_tokens=row_bin, remat="none")
        contestants.write_settings(folders["tunix"], config)
        ours = Path(sys.executable), "actionopd_step.py"
        entered: dict[str, tuple[Path, str, Path]] = {part: (*ours, folders[part]) for part in ("trees", "rows")}
        if flags.vs and name != "c":
            entered["tunix"] = (contestants.TUNIX_PYTHON, "tunix_step.py", folders["tunix"])
        equal = list(entered) if len(sampled) == count else ["trees", "rows"]
        measured = contestants.compete(entered, flags.repeats, f"workload {name}", equal)
    if "tunix" in measured:
        figures = measured["tunix"]
        figures.cpu_s = [seconds * count / len(sampled) for seconds in figures.cpu_s]
    Console(stderr=True).print(contestants.table(f"workload {name}: {count} rows", measured, "trees"))
    bins, trees = _packed(rows, tree_bin), measured["trees"]
    result = {
        "token_ratio": round(bins.stats.row_tokens / bins.stats.packed_tokens, 2),
        "time_ratio_rows": round(measured["rows"].median_cpu_s / trees.median_cpu_s, 2),
        "memory_ratio_rows": round(measured["rows"].peak_rss_gib / trees.peak_rss_gib, 2),
        "attention_share": round(attention_share(bins.end), 4),
    }
    if "tunix" in measured:
        result["time_ratio_tunix"] = round(measured["tunix"].median_cpu_s / trees.median_cpu_s, 2)
    return result


if __name__ == "__main__":
    main()
