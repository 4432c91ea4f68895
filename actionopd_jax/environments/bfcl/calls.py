"""Tool calls as literals: parsing the ground truth's Python, writing calls for the checker, comparing arguments."""

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any

from actionopd_jax.errors import ConfigError
from actionopd_jax.records import JsonObject, ToolCall, encode

_MAX_DEPTH = 16
_MAX_INTEGER_BITS = 4096


def parse_call(text: str, parameters: Mapping[str, Sequence[str]]) -> ToolCall:
    """Reads `f(1, b='x')` without evaluating it; positional arguments get their names from `parameters[f]`.

    Raises:
        ConfigError: the text is not one call of a known tool with literal arguments.
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise ValueError("not a plain call")
        names = parameters[node.func.id]
        arguments = {name: ast.literal_eval(value) for name, value in zip(names, node.args, strict=False)}
        if len(node.args) > len(names):
            raise ValueError("too many positional arguments")
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg not in names or keyword.arg in arguments:
                raise ValueError(f"argument {keyword.arg}")
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
    except (SyntaxError, ValueError, KeyError) as error:
        raise ConfigError(f"bfcl ground truth {text!r} is not a call with literal arguments: {error}") from error
    return ToolCall(name=node.func.id, arguments=arguments)


def literal_fault(value: Any, depth: int = 0) -> str | None:
    """Why a value cannot be passed on as a literal; None when it is a plain, finite JSON value of sane size."""
    match value:
        case list() | dict():
            return _container_fault(value, depth)
        case int() if value.bit_length() > _MAX_INTEGER_BITS:
            return "integer too large"
        case float() if not math.isfinite(value):
            return "number not finite"
        case None | bool() | int() | float() | str():
            return None
    return f"{type(value).__name__} is no JSON value"


def _container_fault(value: list[Any] | dict[Any, Any], depth: int) -> str | None:
    if depth >= _MAX_DEPTH:
        return "nested too deeply"
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return "object key is not a string"
    items = value.values() if isinstance(value, dict) else value
    return next((fault for item in items if (fault := literal_fault(item, depth + 1))), None)


def render_call(call: ToolCall) -> str:
    """Python text of a call whose name and argument names are known and whose values passed `literal_fault`.

    The checker rewrites every `name(` in the text, inside strings too; an escaped parenthesis keeps a
    string what the student wrote.
    """
    arguments = ",".join(f"{name}={_literal(value)}" for name, value in call.arguments.items())
    return f"{call.name}({arguments})"


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return repr(value).replace("(", "\\x28")
    if isinstance(value, list):
        return "[" + ",".join(map(_literal, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_literal(key)}:{_literal(item)}" for key, item in value.items()) + "}"
    return repr(value)


def canonical(arguments: JsonObject, defaults: Mapping[str, Any]) -> bytes:
    """Arguments with defaults filled in, as text that is equal exactly when they mean the same.

    Key order is ignored and 3.0 equals 3; booleans never equal numbers.
    """
    return encode({name: _canonical(value) for name, value in {**defaults, **arguments}.items()})


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    return value
