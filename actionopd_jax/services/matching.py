"""When two actions are the same without asking a model (method: "Matching", points 2 and 4).

Pure functions over decoded JSON values. Nesting is walked with an explicit stack, so that a deeply
nested argument costs memory, never a `RecursionError`.
"""

import json
import math
import unicodedata
from collections.abc import Iterator
from typing import Any

_MISSING = object()


def canonical(value: Any) -> str:
    """The canonical text of a JSON value: two values are equal exactly when their texts are.

    Key order is ignored and integral floats equal integers (`3.0` = `3`, `-0.0` = `0`). Numbers are
    compared exactly (`2**53 + 1` ≠ `2.0**53`), booleans never equal numbers, a missing key differs
    from null, list order and multiplicity count, strings compare code point by code point.

    Raises:
        ValueError: a number that is not finite.
        TypeError: a value that JSON does not have.
    """
    # What is still to be written, last first. Punctuation is kept apart from strings by its wrapper.
    pending: list[Any] = [value]
    written: list[str] = []
    while pending:
        item = pending.pop()
        if isinstance(item, _Punctuation):
            written.append(item)
        elif isinstance(item, dict):
            pending.append(_Punctuation("}"))
            for key in sorted(item, reverse=True):
                pending += (_Punctuation(","), item[key], _Punctuation(_text(key) + ":"))
            written.append("{")
        elif isinstance(item, list | tuple):
            pending.append(_Punctuation("]"))
            for element in reversed(item):
                pending += (_Punctuation(","), element)
            written.append("[")
        else:
            written.append(_scalar(item))
    return "".join(written)


class _Punctuation(str):
    """Text that goes out as it is."""

    __slots__ = ()


def _text(value: str) -> str:
    # Without ASCII escapes: a pair of lone surrogates must not read like the character they would encode.
    return json.dumps(value, ensure_ascii=False)


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a JSON number")
        if not value.is_integer():
            return value.hex()  # exact, and never of the form that `hex` gives to integers
        value = int(value)
    if isinstance(value, int):
        return hex(value)  # decimal text is refused by Python beyond 4,300 digits
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def differing_paths(left: Any, right: Any) -> tuple[str, ...]:
    """Where two JSON values differ: `"/path: missing"`, `"/path: type"` or `"/path: value"`.

    Paths are JSON pointers (`~` and `/` in keys are written `~0` and `~1`), the root is the empty
    path. `missing`: one side alone has the key or the list position. `type`: the JSON types differ
    (integers and floats are both numbers). `value`: scalars of one type that are not equal. Empty
    exactly when the canonical texts are equal; symmetric; depth first, keys sorted.
    """
    return tuple(_differences(left, right))


def _differences(left: Any, right: Any) -> Iterator[str]:
    pending: list[tuple[str, Any, Any]] = [("", left, right)]
    while pending:
        path, a, b = pending.pop()
        if a is _MISSING or b is _MISSING:
            yield f"{path}: missing"
            continue
        kind = _json_type(a)
        if kind != _json_type(b):
            yield f"{path}: type"
        elif kind == "object":
            keys = sorted(a.keys() | b.keys(), reverse=True)
            pending += [(f"{path}/{_pointer(key)}", a.get(key, _MISSING), b.get(key, _MISSING)) for key in keys]
        elif kind == "array":
            positions = reversed(range(max(len(a), len(b))))
            pending += [(f"{path}/{index}", _at(a, index), _at(b, index)) for index in positions]
        elif a != b:  # Python compares integers with floats exactly
            yield f"{path}: value"


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for name, kinds in (("number", int | float), ("string", str), ("array", list | tuple), ("object", dict)):
        if isinstance(value, kinds):
            return name
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _at(values: Any, index: int) -> Any:
    return values[index] if index < len(values) else _MISSING


def _pointer(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def normalise_text(text: str) -> str:
    """Unicode NFKC, runs of white space folded to one blank, ends stripped, case kept."""
    return " ".join(unicodedata.normalize("NFKC", text).split())
