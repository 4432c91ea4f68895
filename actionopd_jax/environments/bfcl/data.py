"""The installed `bfcl-eval` package: its tasks, ground truths and tools, read once per process."""

import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import pathlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from actionopd_jax.environments.bfcl.calls import parse_call
from actionopd_jax.environments.bfcl.schemas import tool_spec
from actionopd_jax.errors import ConfigError, MissingExtraError
from actionopd_jax.records import JsonObject, ToolCall, ToolSpec

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
CLASSES = (
    "GorillaFileSystem",
    "MathAPI",
    "MessageAPI",
    "TicketAPI",
    "TradingBot",
    "TravelAPI",
    "TwitterAPI",
    "VehicleControlAPI",
)


def import_part(name: str) -> ModuleType:
    """Imports `bfcl_eval.NAME`.

    Raises:
        MissingExtraError: `bfcl-eval` (or a package that it needs here) is not installed.
    """
    try:
        return importlib.import_module(f"bfcl_eval.{name}")
    except ModuleNotFoundError as error:
        raise MissingExtraError("bfcl-eval", "--no-deps bfcl-eval==2026.3.23 mpmath==1.3.0") from error


@dataclasses.dataclass(frozen=True)
class Tool:
    """One public method: what the student sees (`spec`), and the function behind it."""

    spec: ToolSpec
    response: JsonObject
    class_name: str
    function: Callable[..., Any]
    parameters: tuple[str, ...]
    defaults: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One task.

    Attributes:
        raw: the entry as the checker wants it.
        turns: user message of each turn.
        answers: ground-truth calls of each turn, as the package writes them (Python).
        calls: the same, parsed, arguments by name.
        released: turn index -> names of the tools that are withheld before it.
    """

    task_id: str
    category: str
    raw: JsonObject
    turns: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...]
    calls: tuple[tuple[ToolCall, ...], ...]
    released: Mapping[int, tuple[str, ...]]
    tools: Mapping[str, Tool]

    @property
    def long_context(self) -> bool:
        return self.category == "long_context"

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.raw["involved_classes"])


def _data_folder() -> pathlib.Path:
    return pathlib.Path(str(import_part("constants").__path__[0])).parent / "data"


def _task_file(category: str) -> str:
    return f"BFCL_v4_multi_turn_{category}.json"


def _lines(path: pathlib.Path) -> list[JsonObject]:
    if not path.is_file():
        raise ConfigError(f"{path} is missing; reinstall with: pip install --force-reinstall --no-deps bfcl-eval==2026.3.23")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


@functools.cache
def tool_classes() -> Mapping[str, type]:
    """The eight API classes by name."""
    backend = import_part("constants.executable_backend_config")
    paths: dict[str, str] = backend.CLASS_FILE_PATH_MAPPING
    return {name: getattr(import_part(paths[name].removeprefix("bfcl_eval.")), name) for name in CLASSES}


@functools.cache
def _class_tools(class_name: str) -> Mapping[str, Tool]:
    files: dict[str, str] = import_part("constants.executable_backend_config").MULTI_TURN_FUNC_DOC_FILE_MAPPING
    tools: dict[str, Tool] = {}
    for doc in _lines(_data_folder() / "multi_turn_func_doc" / files[class_name]):
        function = getattr(tool_classes()[class_name], doc["name"])
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
        tools[doc["name"]] = Tool(
            spec=tool_spec(doc),
            response=doc.get("response", {}),
            class_name=class_name,
            function=function,
            parameters=tuple(p.name for p in parameters),
            defaults={p.name: p.default for p in parameters if p.default is not p.empty},
        )
    return tools


@functools.cache
def category_entries(category: str) -> tuple[Entry, ...]:
    """The 200 tasks of a category, in the package's order.

    Raises:
        ConfigError: a data file is missing, or tasks and ground truths do not fit together.
    """
    folder = _data_folder()
    prompt = import_part("constants.default_prompts").DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
    answers = {line["id"]: line["ground_truth"] for line in _lines(folder / "possible_answer" / _task_file(category))}
    return tuple(_entry(category, raw, answers, prompt) for raw in _lines(folder / _task_file(category)))


def _entry(category: str, raw: JsonObject, answers: Mapping[str, list[list[str]]], prompt: str) -> Entry:
    task_id = raw["id"]
    if len(answers.get(task_id, ())) != len(raw["question"]):
        raise ConfigError(f"bfcl task {task_id} has {len(raw['question'])} turns but another number of ground-truth turns")
    tools: dict[str, Tool] = {}
    for class_name in raw["involved_classes"]:
        tools.update(_class_tools(class_name))
    parameters = {name: tool.parameters for name, tool in tools.items()}
    # A turn without a message of its own is the one where withheld tools come in.
    turns = tuple("\n".join(message["content"] for message in turn) if turn else prompt for turn in raw["question"])
    return Entry(
        task_id=task_id,
        category=category,
        raw=raw,
        turns=turns,
        answers=tuple(tuple(turn) for turn in answers[task_id]),
        calls=tuple(tuple(parse_call(text, parameters) for text in turn) for turn in answers[task_id]),
        released={int(turn): tuple(names) for turn, names in raw.get("missed_function", {}).items()},
        tools=tools,
    )


@functools.cache
def version() -> str:
    """Package version and a digest of everything that the tasks are made of."""
    folder = _data_folder()
    files = [folder / part / _task_file(category) for category in CATEGORIES for part in ("", "possible_answer")]
    docs: dict[str, str] = import_part("constants.executable_backend_config").MULTI_TURN_FUNC_DOC_FILE_MAPPING
    files += [folder / "multi_turn_func_doc" / docs[name] for name in CLASSES]
    content = hashlib.sha256()
    for path in files:
        content.update(hashlib.sha256(path.read_bytes()).digest())
    return f"bfcl-eval {importlib.metadata.version('bfcl-eval')} data {content.hexdigest()[:12]}"
