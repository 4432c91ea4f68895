"""Where a student's files are: a folder, or one that ships with the package."""

from pathlib import Path

import jax.numpy as jnp
from flax import nnx

import actionopd_jax
from actionopd_jax import seeds
from actionopd_jax.errors import StudentError
from actionopd_jax.models import decoder_config, weights
from actionopd_jax.models.decoder import Decoder

_BUILTIN = "builtin:"
_ASSETS = Path(actionopd_jax.__file__).parent / "assets"
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def resolve(path: str) -> Path:
    """The folder that `path` names.

    Raises:
        StudentError: there is none; names what there is.
    """
    if not path.startswith(_BUILTIN):
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise StudentError(f"student {path} is not a folder; give a folder with a Hugging Face model, or builtin:NAME")
        return folder
    known = {_BUILTIN + entry.name: entry for entry in _ASSETS.iterdir() if entry.is_dir()}
    if path not in known:
        raise StudentError(f"student {path} does not ship with this package; there are: {', '.join(sorted(known))}")
    return known[path]


def load_student(folder: Path, tokenizer_size: int, compute_dtype: str, remat: bool, random_seed: int | None) -> Decoder:
    """The decoder of a folder.

    Args:
        folder: Hugging Face files.
        tokenizer_size: ids of the tokenizer that it will be used with; more than the embedding has are refused.
        compute_dtype: "float32" or "bfloat16".
        remat: see `Decoder`.
        random_seed: None reads the weights; a seed draws them (then the folder needs `config.json` alone).
    """
    config = decoder_config.load(folder)
    if tokenizer_size > config.vocab_size:
        raise StudentError(f"{folder}: the tokenizer has {tokenizer_size} ids, the embedding only {config.vocab_size} rows")
    if random_seed is None:
        return weights.load(folder, dtype=_DTYPES[compute_dtype], remat=remat)
    key_seed = seeds.derive(random_seed, "student weights") & 0x7FFFFFFF
    return Decoder(config, rngs=nnx.Rngs(key_seed), dtype=_DTYPES[compute_dtype], remat=remat)
