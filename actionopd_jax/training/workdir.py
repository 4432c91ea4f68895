"""The work directory of a run: what it was started with, who is using it, and files that survive a kill.

    workdir/
        config.json         resolved settings, their digest, the code version; written before anything else
        cache.sqlite        answers of teachers and judges
        metrics.jsonl       one line per step
        events.*            the same for TensorBoard
        checkpoints/        training state
        rollouts/           collected trajectories, one file per step
        evaluations/        episode records and results

A directory is used by one process at a time, and continued only with the settings that it was
started with; those that change no result of a step already done (`FREE_ON_RESUME`) may differ.
"""

import contextlib
import dataclasses
import fcntl
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

import actionopd_jax
from actionopd_jax import config as settings
from actionopd_jax.errors import RunStateError
from actionopd_jax.records import JsonObject, digest

FREE_ON_RESUME = ("steps", "mesh", "rollout", "checkpoint", "evaluation")
"""Top-level settings that may change when a run continues."""

CACHE = "cache.sqlite"

_MAX_NAMED_KEYS = 3
_ABSENT = "(absent)"


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a file so that a reader, or a restart after a kill, sees the old content or the new one, nothing between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def append_line(path: Path, line: bytes) -> None:
    """Appends one line and returns once it is on disk. After a restart, `rewrite_lines` with the `complete_lines` first."""
    if b"\n" in line:
        raise ValueError(f"a line for {path} contains a line break")
    is_new = not path.exists()
    with path.open("ab") as file:
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        _sync_folder(path.parent)


def complete_lines(path: Path) -> list[bytes]:
    """Lines of a file written by `append_line`, without a last one that a kill cut short; none if there is no file."""
    if not path.exists():
        return []
    return path.read_bytes().split(b"\n")[:-1]


def rewrite_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Replaces a file of lines atomically."""
    write_atomic(path, b"".join(line + b"\n" for line in lines))


@dataclasses.dataclass(frozen=True)
class Workdir:
    """A work directory held by this process.

    Attributes:
        is_new: no run was in it before.
        found: names of what it held then; None: the directory itself was made for this run.
    """

    path: Path
    is_new: bool
    found: frozenset[str] | None = frozenset()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    def discard(self) -> None:
        """Removes what a new run has put here, for one that ends before it computed anything; what was found stays."""
        if not self.is_new:
            return
        found = self.found or frozenset()
        for entry in self.path.iterdir():
            if entry.name in found or (entry.name.startswith(CACHE) and CACHE in found):
                continue  # a cache that was brought along may just have been set aside, under another name
            if entry.is_dir():
                entry.rmdir()  # still empty
            else:
                entry.unlink()
        if self.found is None:
            self.path.rmdir()


@contextlib.contextmanager
def open_workdir(path: Path, config: settings.RunConfig) -> Iterator[Workdir]:
    """Holds `path` for this run; creates it, or continues what is there.

    Raises:
        RunStateError: the directory cannot be created, another process uses it, its `config.json` is
            damaged, or it belongs to a run with other settings (the first differing keys are named).
    """
    found = frozenset(entry.name for entry in path.iterdir()) if path.is_dir() else None
    with lock(path):
        file = path / "config.json"
        is_new = not file.exists()
        if not is_new:
            _refuse_other_settings(file, config)
        write_atomic(file, msgspec.json.format(msgspec.json.encode(_description(config)), indent=2) + b"\n")
        for folder in ("checkpoints", "rollouts", "evaluations"):
            (path / folder).mkdir(exist_ok=True)
        yield Workdir(path, is_new, found)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Keeps other processes out of a directory (created if needed) until the block ends or the process dies."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = (path / ".lock").open("a+")
    except OSError as error:
        raise RunStateError(f"work directory {path} cannot be used: {error.strerror}; choose another --workdir") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
            raise RunStateError(
                f"work directory {path} is in use by process {holder or '?'}; wait for it, or choose another --workdir"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def what_matters(config: settings.RunConfig) -> JsonObject:
    """The settings that a continued run must share with its start, as plain JSON values."""
    mapping = msgspec.json.decode(msgspec.json.encode(settings.to_mapping(config)))  # as config.json gives it back
    return {key: value for key, value in mapping.items() if key not in FREE_ON_RESUME}


def code_version() -> JsonObject:
    """Version of the package and, in a git checkout of it, the commit; `modified`: the checkout differs from that commit."""
    folder = Path(actionopd_jax.__file__).parent
    version: JsonObject = {"version": actionopd_jax.__version__, "commit": None, "modified": None}
    # An installed package may lie inside a foreign checkout (a virtual environment in a project): ask for the file.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return version
    version["commit"] = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--", ".")
    version["modified"] = None if changes is None else changes != ""
    return version


def _description(config: settings.RunConfig) -> JsonObject:
    return {"settings": settings.to_mapping(config), "digest": digest(what_matters(config)), "code": code_version()}


def _refuse_other_settings(file: Path, config: settings.RunConfig) -> None:
    try:
        stored = msgspec.json.decode(file.read_bytes())
        before = {key: value for key, value in stored["settings"].items() if key not in FREE_ON_RESUME}
        before_digest = stored["digest"]
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise RunStateError(f"{file} is damaged; choose another --workdir, or delete this one") from error
    now = what_matters(config)
    if before_digest == digest(now):
        return
    differences = list(_differences(before, now)) or ["digest: it was edited by hand"]
    more = "" if len(differences) <= _MAX_NAMED_KEYS else f", and {len(differences) - _MAX_NAMED_KEYS} more"
    raise RunStateError(
        f"work directory {file.parent} belongs to a run with other settings "
        f"({'; '.join(differences[:_MAX_NAMED_KEYS])}{more}); use its settings, or choose another --workdir"
    )


def _differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from _differences(before.get(key, _ABSENT), now.get(key, _ABSENT), f"{path}.{key}" if path else key)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for i, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from _differences(old, new, f"{path}[{i}]")
    elif before != now:
        yield f"{path}: was {before!r}, now {now!r}"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
