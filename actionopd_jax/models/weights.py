"""Hugging Face safetensors to and from the decoder, tensor by tensor, straight into (sharded) arrays."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from actionopd_jax.errors import StudentError
from actionopd_jax.models import decoder_config, safetensors_writer
from actionopd_jax.models.decoder import Decoder, Remat
from actionopd_jax.models.decoder_config import DecoderConfig
from actionopd_jax.models.hf_layout import Index, Layout, in_layer, layer_layouts, top_layouts
from actionopd_jax.models.safetensors_reader import SafetensorsFolder

_IGNORED_SUFFIX = ".rotary_emb.inv_freq"  # old checkpoints carry what config.json determines
_GIB = 1 << 30


def load(
    folder: Path,
    *,
    dtype: jnp.dtype | type = jnp.float32,
    remat: bool | Remat = True,
    shardings: Any = None,
    param_dtype: jnp.dtype | type = jnp.float32,
) -> Decoder:
    """A decoder with the weights of a Hugging Face folder (`config.json` and safetensors).

    Every process reads only what its devices hold. Beside the weights themselves the host holds, at any
    time, one device's part of one weight (of all its layers).

    Args:
        folder: holds one safetensors file, or several with an index.
        dtype: computation dtype.
        remat: see `Decoder`.
        shardings: where each weight goes: a pytree of `jax.sharding.Sharding` shaped like the weights
            (`nnx.split(model)[1]`), or a function that makes it from their shapes. None: the default device.
        param_dtype: of the weights themselves.

    Raises:
        StudentError: names the missing, misshapen or surplus tensor, or the damaged file.
    """
    config = decoder_config.load(folder)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype, remat=remat, param_dtype=param_dtype))
    stored = SafetensorsFolder(folder)
    top, layers = top_layouts(config), layer_layouts(config)
    names = {name: [layout.name] for name, layout in top.items()}
    names |= {name: [in_layer(i, layout) for i in range(config.num_hidden_layers)] for name, layout in layers.items()}
    _check_names(stored, names, {**top, **layers}, config.tie_word_embeddings)
    where = _by_name(shardings(nnx.split(model)[1]) if callable(shardings) else shardings)
    for name, layout in top.items():
        array = _place(stored, layout, names[name], where(name), np.dtype(param_dtype), stacked=False)
        getattr(model, name).set_value(array)
    for name, layout in layers.items():
        array = _place(stored, layout, names[name], where(name), np.dtype(param_dtype), stacked=True)
        model.layers[name].set_value(array)
    return model


def _check_names(stored: SafetensorsFolder, names: dict[str, list[str]], layouts: dict[str, Layout], is_tied: bool) -> None:
    """Everything is refused before the first weight is read."""
    for name, stored_names in names.items():
        for stored_name in stored_names:
            stored.check(stored_name, layouts[name].shape)
    # Some published checkpoints of tied models carry the head a second time.
    known = {name for each in names.values() for name in each} | ({"lm_head.weight"} if is_tied else set())
    surplus = sorted(name for name in stored.names - known if not name.endswith(_IGNORED_SUFFIX))
    if surplus:
        raise StudentError(f"{stored.folder}: {len(surplus)} tensors have no place in the model, first {surplus[0]}")


def _by_name(shardings: Any) -> Callable[[str], jax.sharding.Sharding]:
    """The sharding of a weight, by the last name of its path."""
    if shardings is None:
        return lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaves = jax.tree_util.tree_flatten_with_path(shardings, is_leaf=lambda x: isinstance(x, jax.sharding.Sharding))[0]
    named = {[str(key.key) for key in path if hasattr(key, "key")][-1]: leaf for path, leaf in leaves}
    return named.__getitem__


def _place(
    stored: SafetensorsFolder,
    layout: Layout,
    names: list[str],
    sharding: jax.sharding.Sharding,
    dtype: np.dtype,
    *,
    stacked: bool,
) -> jax.Array:
    """One weight, of all layers if `stacked`, on its devices."""
    shape = (len(names), *layout.our_shape) if stacked else layout.our_shape
    copies: dict[tuple[tuple[int, int], ...], list[Any]] = {}  # bounds of a part -> devices that hold it
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = [part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True)]
        copies.setdefault(tuple(bounds), []).append(device)
    arrays = []
    for bounds, devices in copies.items():
        part = _read(stored, layout, names, [slice(*each) for each in bounds], dtype, stacked=stacked)
        placed = [jax.device_put(part, device) for device in devices]
        arrays += jax.block_until_ready(placed)  # before the next part takes host memory
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _read(
    stored: SafetensorsFolder, layout: Layout, names: list[str], index: list[slice], dtype: np.dtype, *, stacked: bool
) -> np.ndarray:
    def part(name: str, within: Index) -> np.ndarray:
        return layout.part(lambda outer: stored.read(name, outer), within)

    if not stacked:
        return np.ascontiguousarray(part(names[0], tuple(index)).astype(dtype, copy=False))
    layers, *within = index
    out = np.empty([each.stop - each.start for each in index], dtype)
    for row, name in enumerate(names[layers]):
        out[row] = part(name, tuple(within))
    return out


def save(
    model: Decoder,
    folder: Path,
    eos_token_id: int,
    dtype: np.dtype | type = np.float32,
    max_shard_gb: float = 5.0,
) -> None:
    """Writes `config.json` and safetensors such that `transformers` loads the same model.

    In a run of several processes all of them call this, and the first one writes.

    Args:
        model: what to write.
        folder: created if missing; weights that are there already are replaced.
        eos_token_id: the end-of-turn token, for `config.json`.
        dtype: of the stored tensors (float32, or `ml_dtypes.bfloat16`).
        max_shard_gb: size of a file in GiB; a larger model becomes several files with an index.
    """
    order = list(_stored_order(model.config))
    tensors = [safetensors_writer.Tensor(stored.name, stored.layout.shape) for stored in order]
    values = (stored.layout.to_stored(_on_host(_weight(model, stored))) for stored in order)
    if jax.process_index() != 0:
        for _ in values:
            pass  # takes part in gathering
        return
    folder.mkdir(parents=True, exist_ok=True)
    written = safetensors_writer.write(folder, tensors, values, np.dtype(dtype), int(max_shard_gb * _GIB))
    for stale in [*folder.glob("model*.safetensors"), *folder.glob("model*.safetensors.index.json")]:
        if stale.name not in written:
            stale.unlink()
    values_of_config = {**decoder_config.to_hf(model.config, eos_token_id), "dtype": np.dtype(dtype).name}
    (folder / "config.json").write_text(json.dumps(values_of_config, indent=2) + "\n", encoding="utf-8")


class _Stored(NamedTuple):
    """A stored tensor and the weight of ours that it is; `layer`: None outside the layers."""

    name: str
    layout: Layout
    ours: str
    layer: int | None


def _stored_order(config: DecoderConfig) -> Iterator[_Stored]:
    """Embedding, layers, last norm, head."""
    top = top_layouts(config)
    yield _Stored(top["embedding"].name, top["embedding"], "embedding", None)
    for i in range(config.num_hidden_layers):
        for name, layout in layer_layouts(config).items():
            yield _Stored(in_layer(i, layout), layout, name, i)
    for name in ("final_norm", "head"):
        if name in top:
            yield _Stored(top[name].name, top[name], name, None)


def _weight(model: Decoder, stored: _Stored) -> jax.Array:
    if stored.layer is None:
        return getattr(model, stored.ours)[...]
    return model.layers[stored.ours][...][stored.layer]


def _on_host(weight: jax.Array) -> np.ndarray:
    if weight.is_fully_addressable:
        return np.asarray(weight)
    return np.asarray(multihost_utils.process_allgather(weight, tiled=True))
