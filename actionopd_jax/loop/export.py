"""The trained student as a Hugging Face folder that `transformers` and inference servers load."""

import shutil
from pathlib import Path

from flax import nnx

from actionopd_jax.loop.assembly import Parts
from actionopd_jax.models import weights


def export_student(parts: Parts, params: nnx.State, folder: Path) -> None:
    """Writes weights, config and tokenizer; the folder appears under its name only when it is complete."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    parts.tokenizer.save(partial)
    weights.save(nnx.merge(parts.graphdef, params), partial, eos_token_id=parts.tokenizer.end_id)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
