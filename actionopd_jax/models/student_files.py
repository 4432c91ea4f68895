"""Where a student's files are: a folder, one that ships with the package, or a model on the Hugging Face hub."""

import re
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
from flax import nnx

import actionopd_jax
from actionopd_jax import seeds
from actionopd_jax.errors import StudentError
from actionopd_jax.models import decoder_config, weights
from actionopd_jax.models.attention import Implementation
from actionopd_jax.models.decoder import Decoder, Remat
from actionopd_jax.models.decoder_config import DecoderConfig

_BUILTIN = "builtin:"
_HUB = "hf://"
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]
_ASSETS = Path(actionopd_jax.__file__).parent / "assets"
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def resolve(path: str) -> Path:
    """The folder that `path` names; a hub model is fetched, once.

    Args:
        path: a folder, `builtin:NAME`, or a hub id: `hf://ORGANISATION/NAME`, `hf://ORGANISATION/NAME@REVISION`, or
            `ORGANISATION/NAME` where no such folder exists.

    Raises:
        StudentError: there is none; names what there is.
    """
    if path.startswith(_BUILTIN):
        known = {_BUILTIN + entry.name: entry for entry in _ASSETS.iterdir() if entry.is_dir()}
        if path not in known:
            raise StudentError(f"student {path} does not ship with this package; there are: {', '.join(sorted(known))}")
        return known[path]
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    name, _, revision = path.removeprefix(_HUB).partition("@")
    if not _HUB_NAME.fullmatch(name) or folder.exists():
        raise StudentError(
            f"student {path} is not a folder; give a folder with a Hugging Face model, or builtin:NAME, "
            "or hf://ORGANISATION/NAME"
        )
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=_HUB_FILES))
    except (OSError, ValueError) as error:  # of every kind: offline, no such model or revision, no permission, full disk
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StudentError(
            f"student {path} is not a folder, and cannot be fetched from the hub as {name}: {reason.rstrip('.')}; "
            "give a folder, or fetch it on a machine with network access and set HF_HOME to that cache"
        ) from error


def student_config(folder: Path, tokenizer_size: int) -> DecoderConfig:
    """The decoder's shapes; refuses a tokenizer that has more ids than the embedding has rows."""
    config = decoder_config.load(folder)
    if tokenizer_size > config.vocab_size:
        raise StudentError(f"{folder}: the tokenizer has {tokenizer_size} ids, the embedding only {config.vocab_size} rows")
    return config


def load_student(
    folder: Path,
    tokenizer_size: int,
    compute_dtype: str,
    remat: bool | Remat,
    random_seed: int | None,
    *,
    attention: Implementation = "auto",
    shardings: Any = None,
    param_dtype: str = "float32",
) -> Decoder:
    """The decoder of a folder.

    Args:
        folder: Hugging Face files.
        tokenizer_size: ids of the tokenizer that it will be used with; more than the embedding has are refused.
        compute_dtype: "float32" or "bfloat16".
        remat: see `Decoder`.
        random_seed: None reads the weights; a seed draws them (then the folder needs `config.json` alone).
        attention: see `attention.attend`; "auto": pallas on a TPU, else blockwise.
        shardings: see `weights.load`; ignored where weights are drawn.
        param_dtype: of the weights, "float32" or "bfloat16".
    """
    config = student_config(folder, tokenizer_size)
    dtypes = {"dtype": _DTYPES[compute_dtype], "param_dtype": _DTYPES[param_dtype]}
    if random_seed is None:
        model = weights.load(folder, remat=remat, shardings=shardings, **dtypes)
    else:
        key_seed = seeds.derive(random_seed, "student weights") & 0x7FFFFFFF
        model = Decoder(config, rngs=nnx.Rngs(key_seed), remat=remat, **dtypes)
    if attention == "auto":  # decided here, so that programs hold one implementation only
        attention = "pallas" if jax.default_backend() == "tpu" else "blockwise"
    model.attention_implementation = attention
    return model
