"""The trained student as a Hugging Face folder that `transformers` and inference servers load."""

import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from actionopd_jax.chat.tokenizer import ChatTokenizer
from actionopd_jax.config import RunConfig
from actionopd_jax.errors import ConfigError
from actionopd_jax.loop.assembly import Parts
from actionopd_jax.loop.student_checkpoint import restore_weights
from actionopd_jax.models import weights
from actionopd_jax.models.decoder import Decoder
from actionopd_jax.models.student_files import resolve, student_config
from actionopd_jax.records import JsonObject, digest
from actionopd_jax.training.workdir import Workdir, what_matters

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def export(
    config: RunConfig,
    workdir: Path,
    output: Path,
    *,
    step: int | None = None,
    dtype: str = "float32",
    max_shard_gb: float = 5.0,
) -> JsonObject:
    """Writes the student of a checkpoint: weights, config and tokenizer.

    Args:
        workdir: of the run.
        output: a folder that does not exist yet, or is empty.
        step: of the checkpoint; None: the latest.
        dtype: of the stored weights, "float32" or "bfloat16".
        max_shard_gb: size of a weight file in GiB.

    Returns:
        `output`, `step`, `num_parameters`, `dtype`, and `files`, the names in the folder.

    Raises:
        UserError: the folder is in use, there is no such checkpoint, or the student's files do not fit.
    """
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"--output {output} is not empty; name a new folder")
    folder = resolve(config.student.path)
    tokenizer = ChatTokenizer.load(folder)
    shapes = student_config(folder, tokenizer.vocab_size)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(shapes, rngs=nnx.Rngs(0))))
    checkpoints = Workdir(workdir, is_new=False).checkpoints
    params, step = restore_weights(checkpoints, params, digest(what_matters(config)), step)
    _write(tokenizer, nnx.merge(graphdef, params), output, _DTYPES[dtype], max_shard_gb)
    return {
        "output": str(output),
        "step": step,
        "num_parameters": shapes.num_parameters,
        "dtype": dtype,
        "files": sorted(file.name for file in output.iterdir()),
    }


def export_student(parts: Parts, params: nnx.State, folder: Path) -> None:
    """Writes the student of a run that is in memory; replaces what is there."""
    _write(parts.tokenizer, nnx.merge(parts.graphdef, params), folder, _DTYPES["float32"])


def _write(tokenizer: ChatTokenizer, model: Decoder, folder: Path, dtype: np.dtype, max_shard_gb: float = 5.0) -> None:
    """The folder appears under its name only when it is complete."""
    partial = folder.with_name(folder.name + ".partial")
    is_writer = jax.process_index() == 0
    if is_writer:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        tokenizer.save(partial)
    weights.save(model, partial, tokenizer.end_id, dtype, max_shard_gb)
    if is_writer:
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
