"""Settings of a run from a config file and the command line.

A config file is a Python file with a function `get_config()` that returns a `ConfigDict`; one with
variants takes their text: `FILE.py:TEXT` calls `get_config("TEXT")`. Every setting can be changed on
the command line by its path, `--config.update.learning_rate=1e-4` or `--config.sources[0].split=dev`;
the value is read as the type of the one that stands there. `ConfigDict` ends in this file.
"""

import ast
import dataclasses
import difflib
import importlib.util
import inspect
import re
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from actionopd_jax.config import RunConfig, build
from actionopd_jax.errors import ConfigError, UserError

# What running somebody's config file may raise; anything else (MemoryError, KeyboardInterrupt) is not about the file.
_FILE_ERRORS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError)
_FILE_ERRORS += (SyntaxError, TypeError, ValueError)

_PATH = re.compile(r"[A-Za-z_]\w*(\.([A-Za-z_]\w*|\d+)|\[\d+\])*")
_WORD = re.compile(r"\w+")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def load(config: str, overrides: Sequence[tuple[str, str]]) -> RunConfig:
    """Checked settings of a run.

    Args:
        config: `FILE` or `FILE:VARIANT`.
        overrides: (path, text) of settings given on the command line; a later one wins.

    Raises:
        ConfigError: the file is missing or does not run, an override names no setting or has the
            wrong type, or a value is out of range. One line that names it.
    """
    values = _run_file(*_split(config))
    complete = _with_defaults(RunConfig, _plain(values))
    changes = []
    for name, text in overrides:
        keys, existing = _find(complete, name)
        changes.append((keys, _read(name, text, existing)))
    for keys, value in changes:
        _assign_in_config(values, keys, value)
    complete = _with_defaults(RunConfig, _plain(values))
    for keys, value in changes:
        _assign(complete, keys, value)
    return build(RunConfig, complete)


def _split(config: str) -> tuple[Path, str | None]:
    file, suffix, variant = config.partition(".py:")
    if suffix and not Path(config).exists():
        return Path(f"{file}.py"), variant
    return Path(config), None


def _run_file(path: Path, variant: str | None) -> ConfigDict:
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise ConfigError(f"config file {path} {what}; give --config FILE or FILE.py:VARIANT")
    spec = importlib.util.spec_from_file_location("_actionopd_config", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"config file {path} must be a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except _FILE_ERRORS as error:
        raise ConfigError(f"config file {path} does not run: {_where(error, path)}") from error
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise ConfigError(f"config file {path} must define get_config()")
    arguments = () if variant is None else (variant,)
    _check_signature(path, get_config, arguments)
    call = f"get_config({', '.join(map(repr, arguments))})"
    try:
        values = get_config(*arguments)
    except UserError as error:
        raise ConfigError(f"{path}: {call}: {error}") from error
    except _FILE_ERRORS as error:
        raise ConfigError(f"{path}: {call} failed: {_where(error, path)}") from error
    if not isinstance(values, ConfigDict):
        raise ConfigError(f"{path}: {call} must return a ConfigDict, got {type(values).__name__}")
    return values


def _check_signature(path: Path, get_config: Callable[..., object], arguments: tuple[str, ...]) -> None:
    try:
        inspect.signature(get_config).bind(*arguments)
    except TypeError:
        if arguments:
            raise ConfigError(f"config file {path} takes no variant; drop :{arguments[0]}") from None
        raise ConfigError(f"config file {path} needs a variant: give --config {path}:VARIANT") from None


def _where(error: BaseException, path: Path) -> str:
    """The error in one line, with the line of the config file that it came from."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path.absolute()]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    message = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{f'line {line}: ' if line else ''}{type(error).__name__}: {message}"


def _with_defaults(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the settings that a config left out, so that they can be named; an integer becomes a float where one belongs."""
    hints = typing.get_type_hints(cls)
    full = dict(values)
    for field in dataclasses.fields(cls):
        name, hint = field.name, hints[field.name]
        if name not in full:
            if field.default is not dataclasses.MISSING:
                is_group = dataclasses.is_dataclass(hint)
                full[name] = dataclasses.asdict(typing.cast("Any", field.default)) if is_group else field.default
            elif field.default_factory is not dataclasses.MISSING:
                full[name] = field.default_factory()
        elif hint is float and type(full[name]) is int:
            full[name] = float(full[name])
        elif dataclasses.is_dataclass(hint) and isinstance(full[name], dict):
            full[name] = _with_defaults(typing.cast("type", hint), full[name])
        elif typing.get_origin(hint) is tuple and isinstance(full[name], list):
            item = typing.get_args(hint)[0]
            full[name] = [_with_defaults(item, element) if isinstance(element, dict) else element for element in full[name]]
    return full


def _plain(value: Any) -> Any:
    """Nested dictionaries and lists, references resolved."""
    if isinstance(value, ConfigDict | dict):
        return {key: _plain(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    return value


def _find(values: dict[str, Any], name: str) -> tuple[tuple[str | int, ...], Any]:
    """Keys of the path `name` and the value there."""
    if not _PATH.fullmatch(name):
        raise ConfigError(f"--config.{name} is no path of a setting, such as --config.sources[0].split")
    keys: list[str | int] = []
    value: Any = values
    for word in _WORD.findall(name):
        known = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        key = int(word) if isinstance(value, list) and word.isdecimal() else word
        if key not in known:
            group = f" in {'.'.join(map(str, keys))}" if keys else ""
            close = difflib.get_close_matches(word, map(str, known), n=1)
            hint = f"did you mean {close[0]}?" if close else f"known{group}: {', '.join(map(str, known)) or 'nothing'}"
            raise ConfigError(f"unknown setting --config.{name}: no {word}{group}; {hint}")
        keys.append(key)
        value = value[key]
    return tuple(keys), value


def _read(name: str, text: str, existing: object) -> object:
    """`text` as a value of the type of `existing`."""
    if isinstance(existing, dict | list):
        kind = "a group of settings" if isinstance(existing, dict) else "a list"
        inside = next(iter(existing), "NAME") if isinstance(existing, dict) else 0
        raise ConfigError(f"--config.{name} is {kind}: name a setting inside it, such as --config.{name}.{inside}")
    if isinstance(existing, str):
        return text
    try:
        if isinstance(existing, bool):
            return _BOOLEANS[text.lower()]
        if isinstance(existing, int | float):
            return type(existing)(text)
        return ast.literal_eval(text)
    except (KeyError, ValueError, SyntaxError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(type(existing), "a Python literal")
        raise ConfigError(f"--config.{name} must be {wanted}, got {text!r}") from None


def _assign(values: Any, keys: Sequence[str | int], value: object) -> None:
    for key in keys[:-1]:
        values = values[key]
    values[keys[-1]] = value


def _assign_in_config(values: Any, keys: Sequence[str | int], value: object) -> None:
    """Sets a value that the config itself holds, so that others computed from it by reference follow."""
    *groups, last = keys
    for key in groups:
        if not isinstance(values, ConfigDict) or key not in values:
            return
        values = typing.cast("Any", values)[key]
    if isinstance(values, ConfigDict) and last in values:
        with values.ignore_type():
            values[last] = value
