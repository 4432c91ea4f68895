"""Finished trajectories on disk: what was paid for survives a kill.

`rollouts/step_000012.jsonl.zst` is a sequence of zstd frames, each one JSON line: first a header that
says what the records belong to, then one trajectory per frame. A frame is written, flushed and synced
before the next; a frame that a kill cut short is recognised by its missing end and cut off on opening.
`zstdcat` reads the file.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import zstandard

from actionopd_jax.errors import RunStateError
from actionopd_jax.records import Trajectory, encode

T = TypeVar("T")

_CHUNK_BYTES = 1 << 20
_FORMAT = 1


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file's records belong to."""

    format: int
    step: int
    policy_version: int
    config_digest: str


def step_path(folder: Path, step: int) -> Path:
    """The file of one step within a rollouts folder."""
    return folder / f"step_{step:06d}.jsonl.zst"


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Streams the complete trajectories of a file in the order they were finished; a cut last frame is left out.

    Raises:
        RunStateError: the file is damaged elsewhere than at its end.
    """
    with path.open("rb") as file:
        for number, (line, end) in enumerate(_frames(file, path)):
            if number > 0:
                yield _decode(line, Trajectory, path, end)


class TrajectoryStore:
    """The append-only file of one step.

    Raises:
        RunStateError: the file belongs to another step, policy version or configuration, or is damaged.
    """

    def __init__(self, path: Path, *, step: int, policy_version: int, config_digest: str) -> None:
        self.path = path
        self.finished: dict[int, Trajectory] = {}
        self._header = Header(_FORMAT, step, policy_version, config_digest)
        self._compressor = zstandard.ZstdCompressor(write_checksum=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("r+b" if path.exists() else "w+b")
        try:
            self._open()
        except RunStateError:
            self._file.close()
            raise

    def __enter__(self) -> "TrajectoryStore":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, trajectory: Trajectory) -> None:
        """Writes one trajectory; it is durable when this returns.

        Not a coroutine on purpose: no cancellation can come in between.
        """
        self._admit(trajectory)
        self._write(trajectory)

    def _open(self) -> None:
        end = 0
        for number, (line, end) in enumerate(_frames(self._file, self.path)):
            if number == 0:
                self._check_header(_decode(line, Header, self.path, end))
            else:
                self._admit(_decode(line, Trajectory, self.path, end))
        self._file.truncate(end)
        self._file.seek(end)
        if end == 0:
            self._write(self._header)
            _sync_folder(self.path.parent)

    def _check_header(self, found: Header) -> None:
        for name in Header.__struct_fields__:
            ours, theirs = getattr(self._header, name), getattr(found, name)
            if ours != theirs:
                raise RunStateError(
                    f"{self.path} holds rollouts of {name} {theirs}, this run has {ours}; move the file away or use another "
                    "work directory"
                )

    def _admit(self, trajectory: Trajectory) -> None:
        versions = {group.policy_version for group in trajectory.groups} - {self._header.policy_version}
        if trajectory.step != self._header.step or versions:
            raise RunStateError(
                f"{self.path}: a trajectory of step {trajectory.step}, policy versions {sorted(versions)}, does not belong "
                f"to step {self._header.step}, policy version {self._header.policy_version}"
            )
        if trajectory.start in self.finished:
            raise RunStateError(f"{self.path}: task start {trajectory.start} is recorded twice")
        self.finished[trajectory.start] = trajectory

    def _write(self, record: Header | Trajectory) -> None:
        self._file.write(self._compressor.compress(encode(record) + b"\n"))
        self._file.flush()
        os.fsync(self._file.fileno())


def _frames(file: BinaryIO, path: Path) -> Iterator[tuple[bytes, int]]:
    """Complete frames of a file as (content, byte offset of the frame's end)."""
    end = 0
    pending = b""
    while True:
        frame = zstandard.ZstdDecompressor().decompressobj()
        content: list[bytes] = []
        used = 0
        while not frame.eof:
            chunk = pending or file.read(_CHUNK_BYTES)
            if not chunk:
                return
            try:
                content.append(frame.decompress(chunk))
            except zstandard.ZstdError as error:
                raise RunStateError(f"{path} is damaged after byte {end}: {error}; move the file away") from error
            used += len(chunk)
            pending = b""
        pending = frame.unused_data
        end += used - len(pending)
        yield b"".join(content), end


def _decode(line: bytes, kind: type[T], path: Path, end: int) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise RunStateError(f"{path}: the record before byte {end} cannot be read: {error}; move the file away") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
