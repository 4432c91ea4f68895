"""Validation of a call's arguments against its tool's JSON schema."""

import functools
import re

import jsonschema
import jsonschema.exceptions
import msgspec
import referencing.exceptions

from actionopd_jax.errors import EnvironmentFailure
from actionopd_jax.records import JsonObject, ToolSpec, encode

_MAX_DETAIL = 200


def argument_error(tool: ToolSpec, arguments: JsonObject) -> str | None:
    """Why `arguments` do not conform to the tool's schema (Draft 2020-12), or None.

    Arguments that the schema does not mention are refused unless it admits them expressly
    (`additionalProperties`). Booleans are no numbers; `1.0` is an integer.

    Raises:
        EnvironmentFailure: the schema itself is not valid.
    """
    try:
        validator = _validator(encode(tool.parameters))
        error = jsonschema.exceptions.best_match(validator.iter_errors(arguments))
    except (jsonschema.SchemaError, referencing.exceptions.Unresolvable, re.error, RecursionError) as error:
        reason = error.message if isinstance(error, jsonschema.SchemaError) else f"{type(error).__name__}: {error}"
        raise EnvironmentFailure(f"tool {tool.name} has no valid JSON schema: {reason[:_MAX_DETAIL]}") from error
    if error is None:
        return None
    message = error.message if len(error.message) <= _MAX_DETAIL else error.message[: _MAX_DETAIL - 1] + "…"
    return f"{error.json_path}: {message}"


@functools.lru_cache(maxsize=4096)
def _validator(encoded_schema: bytes) -> jsonschema.Draft202012Validator:
    schema = msgspec.json.decode(encoded_schema)
    if isinstance(schema, dict) and schema.keys().isdisjoint(("additionalProperties", "unevaluatedProperties")):
        schema["unevaluatedProperties"] = False
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)
