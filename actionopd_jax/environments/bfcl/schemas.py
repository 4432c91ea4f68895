"""The package's function documents as JSON schemas."""

from typing import Any

from actionopd_jax.records import JsonObject, ToolSpec, encode

_TYPES = {"dict": "object", "float": "number", "tuple": "array"}

# A ground truth calls close_ticket with a string id and expects the tool's own error. Strict types would
# make the expected action invalid for student and teacher alike.
_WIDENED: dict[tuple[str, str], list[str]] = {("close_ticket", "ticket_id"): ["integer", "string"]}


def tool_spec(doc: JsonObject) -> ToolSpec:
    """One function document as a tool; arguments that it does not name are refused."""
    parameters = json_schema(doc["parameters"])
    parameters.setdefault("properties", {})
    parameters["additionalProperties"] = False
    for (tool, parameter), types in _WIDENED.items():
        if tool == doc["name"]:
            parameters["properties"][parameter]["type"] = types
    return ToolSpec(name=doc["name"], description=doc["description"], parameters=parameters)


def json_schema(document: JsonObject) -> JsonObject:
    """Converts one node: `dict` is object, `float` number, `tuple` array, and `any` leaves the type open.

    The documents write the default `None` as the string "None", which a student would copy: it is left out.
    """
    schema: JsonObject = {}
    for key, value in document.items():
        if key == "type":
            if value != "any":
                schema["type"] = _TYPES.get(value, value)
        elif key == "properties":
            schema["properties"] = {name: json_schema(child) for name, child in value.items()}
        elif key == "items":
            schema["items"] = json_schema(value)
        elif key == "description":
            schema["description"] = value.strip()
        elif not _is_none_default(key, value):
            schema[key] = value
    return schema


def _is_none_default(key: str, value: Any) -> bool:
    return key == "default" and value in (None, "None")


def with_response(spec: ToolSpec, response: JsonObject) -> ToolSpec:
    """The tool with the schema of its result appended to its description, as the official prompts have it."""
    schema = encode(json_schema(response)).decode()
    return ToolSpec(
        name=spec.name,
        description=f"{spec.description} The response field has the following schema: {schema}",
        parameters=spec.parameters,
    )
