"""JSON as a tool call must be written: one value, nothing repaired, nothing guessed."""

import json
import math
import re
from typing import Any, NoReturn

MAX_DEPTH = 32
_SURROGATE = re.compile("[\ud800-\udfff]")


class StrictJSONError(ValueError):
    """The text is not strict JSON; the message says why."""


class LoneSurrogateError(StrictJSONError):
    """A string holds half of a surrogate pair, which no UTF-8 text can carry."""


def decode_value(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at `start` (blanks skipped), and the position after it.

    Refused beyond what JSON itself refuses: duplicate keys, NaN and infinities, numbers beyond
    the range of a double, lone surrogates, more than `MAX_DEPTH` levels of nesting.

    Raises:
        StrictJSONError: any of these.
    """
    while start < len(text) and text[start] in " \t\n\r":
        start += 1
    try:
        value, end = _DECODER.raw_decode(text, start)
    except StrictJSONError:
        raise
    except RecursionError as error:
        raise StrictJSONError("nested too deeply") from error
    except ValueError as error:  # also an integer of more digits than Python converts
        raise StrictJSONError(str(error)) from error
    _check(value)
    return value, end


def _check(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str):
                check_text(item)
            elif isinstance(item, dict):
                inner.extend(item.keys())
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        level = inner
    raise StrictJSONError(f"nested more than {MAX_DEPTH} levels deep")


def check_text(text: str) -> None:
    """Raises `LoneSurrogateError` where the text cannot be written as UTF-8."""
    if _SURROGATE.search(text):
        raise LoneSurrogateError("a string holds a lone surrogate")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise StrictJSONError("an object repeats a key")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise StrictJSONError(f"{name} is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise StrictJSONError("a number overflows")
    return value


def _int(text: str) -> int:
    value = int(text)
    try:
        float(value)
    except OverflowError as error:
        raise StrictJSONError("a number overflows") from error
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_float, parse_int=_int, strict=True
)
