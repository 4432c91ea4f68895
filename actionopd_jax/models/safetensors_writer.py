"""Writes safetensors files tensor by tensor: no more than one tensor is in memory."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from actionopd_jax.models.safetensors_reader import INDEX_FILE, SINGLE_FILE

_DTYPE_NAMES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16"}
_ALIGNMENT = 8


class Tensor(NamedTuple):
    """What a file's header says of one tensor."""

    name: str
    shape: tuple[int, ...]


def write(
    folder: Path, tensors: Sequence[Tensor], values: Iterator[np.ndarray], dtype: np.dtype, max_file_bytes: int
) -> list[str]:
    """Writes `model.safetensors`, or several files with an index where one would be too large.

    A file appears under its name only when it is complete.

    Args:
        folder: exists.
        tensors: in the order of the files.
        values: the tensors themselves, in the same order, of any floating dtype; taken one at a time.
        dtype: that is stored: float32, float16 or bfloat16.
        max_file_bytes: a larger tensor gets a file of its own.

    Returns:
        Names of the files written.
    """
    groups = _groups(tensors, dtype.itemsize, max_file_bytes)
    if len(groups) == 1:
        names = [SINGLE_FILE]
    else:
        names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    for name, group in zip(names, groups, strict=True):
        partial = folder / f"{name}.partial"
        with partial.open("wb") as file:
            file.write(_header(group, dtype))
            for tensor in group:
                value = next(values)
                if value.shape != tensor.shape:
                    raise ValueError(f"{tensor.name}: got shape {value.shape}, promised {tensor.shape}")
                file.write(np.ascontiguousarray(value.astype(dtype, copy=False)).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / name)
    if len(groups) == 1:
        return names
    total = sum(_num_bytes(tensor, dtype.itemsize) for tensor in tensors)
    places = {tensor.name: name for name, group in zip(names, groups, strict=True) for tensor in group}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*names, INDEX_FILE]


def _num_bytes(tensor: Tensor, itemsize: int) -> int:
    return itemsize * int(np.prod(tensor.shape, dtype=np.int64))


def _groups(tensors: Sequence[Tensor], itemsize: int, max_bytes: int) -> list[list[Tensor]]:
    groups: list[list[Tensor]] = [[]]
    room = max_bytes
    for tensor in tensors:
        size = _num_bytes(tensor, itemsize)
        if groups[-1] and size > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensor)
        room -= size
    return groups


def _header(tensors: Sequence[Tensor], dtype: np.dtype) -> bytes:
    """Eight bytes of length, then JSON: dtype, shape and place of each tensor; padded so that the data is aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + _num_bytes(tensor, dtype.itemsize)
        entries[tensor.name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    content = json.dumps(entries, separators=(",", ":")).encode()
    content += b" " * (-len(content) % _ALIGNMENT)
    return len(content).to_bytes(8, "little") + content
