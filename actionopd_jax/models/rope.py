"""Frequencies of rotary positions, with the scalings that stretch a pretrained context window.

Computed once in NumPy float32, in the order of operations of the pretraining code: at far positions an
angle is a large multiple of a frequency, so that the last bit of a frequency shows in the logits.
"""

import dataclasses
import math
from typing import Any, ClassVar, TypeAlias

import numpy as np
from jaxtyping import Float32

from actionopd_jax.errors import StudentError

Frequencies: TypeAlias = Float32[np.ndarray, " half"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """Positions divided by `factor`."""

    rope_type: ClassVar[str] = "linear"
    amplitude: ClassVar[float] = 1.0
    factor: float

    def scale(self, frequencies: Frequencies, theta: float) -> Frequencies:
        del theta
        return frequencies / np.float32(self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3:
    """Long wavelengths divided by `factor`, short ones kept, those between interpolated (Llama 3.1)."""

    rope_type: ClassVar[str] = "llama3"
    amplitude: ClassVar[float] = 1.0
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise StudentError("rope scaling llama3: high_freq_factor must exceed low_freq_factor")

    def scale(self, frequencies: Frequencies, theta: float) -> Frequencies:
        del theta
        turns = np.float32(self.original_max_position_embeddings) * frequencies / np.float32(2 * math.pi)
        kept = (turns - np.float32(self.low_freq_factor)) / np.float32(self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0, 1)
        return (1 - kept) * frequencies / np.float32(self.factor) + kept * frequencies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN (arXiv 2309.00071): a ramp over dimensions from kept to divided frequencies, and a larger amplitude.

    `attention_factor`: the amplitude; by default `0.1 ln(factor) + 1`.
    """

    rope_type: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0

    def scale(self, frequencies: Frequencies, theta: float) -> Frequencies:
        width = 2 * len(frequencies)

        def dimension(turns: float) -> float:
            """The (fractional) dimension that makes so many turns within the original context."""
            wavelengths = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return width * math.log(wavelengths) / (2 * math.log(theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        span = np.float32(high - low if high != low else 0.001)
        kept = 1 - np.clip((np.arange(len(frequencies), dtype=np.float32) - np.float32(low)) / span, 0, 1)
        return frequencies / np.float32(self.factor) * (1 - kept) + frequencies * kept


Scaling: TypeAlias = Linear | Llama3 | Yarn
"""Changes the frequencies (`scale`), and multiplies cosine and sine by `amplitude`."""

_SCALINGS: dict[str, type[Scaling]] = {kind.rope_type: kind for kind in (Linear, Llama3, Yarn)}
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def frequencies(head_dim: int, theta: float, scaling: Scaling | None) -> Frequencies:
    """Radians per position of each pair of dimensions, `[head_dim / 2]`."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = np.float32(1) / np.float32(theta) ** exponents
    return plain if scaling is None else scaling.scale(plain, theta).astype(np.float32)


def scaling_from_hf(rope: dict[str, Any], original_length: int | None, source: str) -> Scaling | None:
    """Reads `rope_scaling` or `rope_parameters` of a Hugging Face config.

    Args:
        rope: the object there.
        original_length: the pretraining context, where `rope` does not say.
        source: names the file in errors.

    Raises:
        StudentError: an unknown kind or key, or a missing or wrong value; names it.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    fields = {} if kind not in _SCALINGS else {f.name: f for f in dataclasses.fields(_SCALINGS[kind])}
    if kind != "default" and not fields:
        known = ", ".join(["default", *_SCALINGS])
        raise StudentError(f"{source}: rope scaling rope_type={kind!r} is not supported; supported: {known}")
    for key, value in rope.items():
        if key not in fields and key not in _COMMON and value is not None:
            raise StudentError(f"{source}: rope scaling {kind}: {key}={value!r} is not supported")
    if kind == "default":
        return None
    given = {"original_max_position_embeddings": original_length, **rope}
    kwargs: dict[str, Any] = {}
    for name, field in fields.items():
        value = given.get(name)
        if value is None and field.default is dataclasses.MISSING:
            raise StudentError(f"{source}: rope scaling {kind}: {name} is missing")
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
        if not (isinstance(value, bool) if field.type is bool else is_number):
            raise StudentError(f"{source}: rope scaling {kind}: {name}={value!r} is out of range")
        kwargs[name] = value if field.type is bool else int(value) if field.type is int else float(value)
    return _SCALINGS[kind](**kwargs)


def scaling_to_hf(scaling: Scaling | None) -> dict[str, Any]:
    """The object that `scaling_from_hf` reads."""
    if scaling is None:
        return {"rope_type": "default"}
    given = {name: value for name, value in dataclasses.asdict(scaling).items() if value is not None}
    return {"rope_type": scaling.rope_type, **given}
