"""Tensors of a folder of safetensors files, read one at a time, or a part of one."""

import json
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which the reader returns)
import numpy as np
import safetensors

from actionopd_jax.errors import StudentError
from actionopd_jax.models.hf_layout import Index

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOATS = ("F32", "BF16", "F16")


class SafetensorsFolder:
    """`model.safetensors`, or several files with an index.

    Attributes:
        folder: where they are.
        names: of all tensors.

    Raises:
        StudentError: neither is there, or the index or a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / SINGLE_FILE).exists():  # before an index, as `transformers` does
            with self._open(folder / SINGLE_FILE) as file:
                self._files = dict.fromkeys(file.keys(), SINGLE_FILE)
        elif (folder / INDEX_FILE).exists():
            self._files = _weight_map(folder / INDEX_FILE)
            for name in sorted(set(self._files.values())):
                self._open(folder / name)
        else:
            raise StudentError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
        self.names = frozenset(self._files)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuses a tensor that is missing, of another shape, or no floating-point tensor."""
        if name not in self._files:
            raise StudentError(f"{self.folder}: tensor {name} is missing")
        path = self.folder / self._files[name]
        with self._open(path) as file:
            try:
                view = file.get_slice(name)
            except safetensors.SafetensorError as error:
                raise StudentError(
                    f"{path} does not hold the tensor {name} that {INDEX_FILE} places there: {error}"
                ) from error
            stored, dtype = tuple(view.get_shape()), view.get_dtype()
        if stored != shape:
            raise StudentError(f"{self.folder}: tensor {name} has shape {stored}, config.json asks for {shape}")
        if dtype not in _FLOATS:
            raise StudentError(f"{self.folder}: tensor {name} is stored as {dtype}; supported: {', '.join(_FLOATS)}")

    def read(self, name: str, index: Index) -> np.ndarray:
        """A part of a checked tensor, in the stored dtype."""
        # Opened anew each time: closing unmaps the file, so that what was read does not stay in memory.
        with self._open(self.folder / self._files[name]) as file:
            return file.get_slice(name)[index]

    @staticmethod
    def _open(path: Path) -> "safetensors.safe_open":
        try:
            return safetensors.safe_open(path, framework="numpy")
        except (safetensors.SafetensorError, OSError) as error:
            raise StudentError(f"{path} cannot be read (missing, truncated or not safetensors): {error}") from error


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:  # ValueError: neither JSON nor UTF-8
        raise StudentError(f"{index} is not a safetensors index: {error!r}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise StudentError(f"{index} is not a safetensors index: weight_map must map tensor names to file names")
    return weight_map
