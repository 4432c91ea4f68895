"""Running tool calls on an environment's own instances, and the official checker, without evaluating student text.

The package keeps state in its modules (the checker's instances, extensions that tools write into, the
precision of `mpmath`), so tools and checker run one at a time in a process.
"""

import copy
import functools
import inspect
import json
import textwrap
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actionopd_jax.environments.bfcl import data
from actionopd_jax.environments.bfcl.calls import literal_fault, render_call
from actionopd_jax.records import JsonObject, ToolCall

_LOCK = threading.Lock()
_MAX_DIGITS = 1000
_MAX_POWER_BITS = 8192

# What the package's own tools raise on odd arguments; the official executor reports these to the model too.
_TOOL_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def load_instances(entry: data.Entry) -> dict[str, Any]:
    """Fresh instances of the task's classes in the task's initial state."""
    stateless: Sequence[str] = data.import_part("constants.executable_backend_config").STATELESS_CLASSES
    instances: dict[str, Any] = {}
    with _LOCK:
        for name in entry.classes:
            instance = data.tool_classes()[name]()
            if name not in stateless:
                instance._load_scenario(
                    copy.deepcopy(entry.raw["initial_config"].get(name, {})), long_context=entry.long_context
                )
            instances[name] = instance
    return instances


def complete_call(entry: data.Entry, call: ToolCall) -> ToolCall | str:
    """The call with every argument spelled out, or why it cannot be made.

    Spelled-out defaults matter: some tools mutate their default lists, which all instances share.
    """
    tool = entry.tools.get(call.name)
    if tool is None:
        return f"unknown tool {call.name!r}"
    for name in call.arguments:
        if name not in tool.parameters:
            return f"{call.name} has no argument {name!r}"
    arguments = copy.deepcopy({**tool.defaults, **call.arguments})
    for name in tool.parameters:
        if name not in arguments:
            return f"{call.name} needs the argument {name!r}"
        if fault := literal_fault(arguments[name]):
            return f"argument {name!r} of {call.name}: {fault}"
    return _too_costly(call.name, arguments) or ToolCall(name=call.name, arguments=arguments)


def _too_costly(name: str, arguments: Mapping[str, Any]) -> str | None:
    """Calls whose exact arithmetic would take minutes or gigabytes."""
    for digits in ("precision", "decimal_places"):
        value = arguments.get(digits)
        if isinstance(value, int | float) and abs(value) > _MAX_DIGITS:
            return f"{digits} of {name} must be at most {_MAX_DIGITS}"
    base, exponent = arguments.get("base"), arguments.get("exponent")
    match base, exponent:
        case int(), int() if name == "power" and base.bit_length() * abs(exponent) > _MAX_POWER_BITS:
            return "the result of power is too large"
    return None


def run_tool(instances: Mapping[str, Any], entry: data.Entry, call: ToolCall) -> str:
    """Result text of a call that `complete_call` returned."""
    tool = entry.tools[call.name]
    with _LOCK:
        try:
            return _text(tool.function(instances[tool.class_name], **copy.deepcopy(call.arguments)))
        except _TOOL_ERRORS as error:
            return error_text(str(error))


def error_text(reason: str) -> str:
    """What a model sees of a call that failed."""
    return f"Error during execution: {reason}"


def _text(result: Any) -> str:
    if isinstance(result, str):
        return result
    return json.dumps(result, separators=(",", ":"), ensure_ascii=False, default=str)


def source(entry: data.Entry, tool_name: str) -> str | None:
    """Source of the method behind a tool."""
    tool = entry.tools.get(tool_name)
    return None if tool is None else _source(tool.function)


@functools.cache  # parsing a whole module for one method is slow, and every match asks
def _source(function: Callable[..., Any]) -> str:
    return textwrap.dedent(inspect.getsource(function))


def check(entry: data.Entry, turns: Sequence[Sequence[ToolCall]]) -> JsonObject:
    """The official verdict on the first `len(turns)` turns: `valid`, and `error_type` when it is not.

    Every turn's calls must have come from `complete_call`. Leaves nothing behind in the package.
    """
    checker = data.import_part("eval_checker.multi_turn_eval.multi_turn_checker")
    executor = data.import_part("eval_checker.multi_turn_eval.multi_turn_utils")
    model_name = f"actionopd_{uuid.uuid4().hex}"
    decoded = [[[render_call(call)] for call in turn] for turn in turns]
    answers = [list(turn) for turn in entry.answers[: len(turns)]]
    with _LOCK:
        try:
            verdict = checker.multi_turn_checker(decoded, answers, entry.raw, f"multi_turn_{entry.category}", model_name)
        except RecursionError:
            # A student can move a directory into itself; such a state equals no ground truth.
            return {"valid": False, "error_type": "state_not_comparable"}
        finally:
            names = vars(executor)
            for name in [name for name in names if name.startswith(model_name)]:
                del names[name]
    return {key: verdict[key] for key in ("valid", "error_type") if key in verdict}
