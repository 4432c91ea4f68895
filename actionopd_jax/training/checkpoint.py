"""Checkpoints: the training state and where the run stands, saved and restored as one."""

import os
from pathlib import Path

import msgspec
import orbax.checkpoint as ocp

from actionopd_jax.errors import RunStateError
from actionopd_jax.records import JsonObject
from actionopd_jax.training.state import TrainState

_STATE, _PROGRESS = "state", "progress"


class RunProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What a continued run needs beside the arrays.

    Attributes:
        step: collection steps done; equals the state's.
        config_digest: of the settings that matter for continuing.
        data_state: position of the task mixture.
        method_state: whatever the method keeps between steps.
        code_version: of the program that saved.
    """

    step: int
    config_digest: str
    data_state: bytes = b""
    method_state: JsonObject = {}
    code_version: JsonObject = {}


class Checkpointer:
    """Saves to and restores from a folder with one checkpoint per step; use as a context manager.

    A checkpoint appears under its name only when it is complete, so one that was interrupted is never
    seen. Restoring places arrays as the abstract state says, on whatever mesh.

    Args:
        folder: created if missing.
        keep: how many of the latest to keep.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._steps = ocp.CheckpointManager(os.path.abspath(folder), options=options)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for writes and stops the background threads."""
        self._steps.close()

    def latest_step(self) -> int | None:
        """The step of the latest complete checkpoint; None without any."""
        return self._steps.latest_step()

    def save(self, state: TrainState, progress: RunProgress) -> None:
        """Saves; when it returns, the checkpoint is complete on disk.

        Raises:
            ValueError: `progress.step` is not the state's.
            RunStateError: the folder already holds this step or a later one.
        """
        if progress.step != int(state.step):
            raise ValueError(f"progress says step {progress.step}, the state is at step {int(state.step)}")
        latest = self.latest_step()
        if latest is not None and progress.step <= latest:
            raise RunStateError(
                f"{self._folder} already holds step {latest}: cannot save step {progress.step}; continue from the latest "
                "checkpoint or choose another work directory"
            )
        self._steps.save(
            progress.step,
            args=ocp.args.Composite(
                **{
                    _STATE: ocp.args.StandardSave(state),  # pyright: ignore[reportArgumentType]
                    _PROGRESS: ocp.args.JsonSave(msgspec.to_builtins(progress)),
                }
            ),
        )
        self._steps.wait_until_finished()
        self._steps.check_for_errors()

    def restore(self, abstract: TrainState, config_digest: str) -> tuple[TrainState, RunProgress]:
        """The latest checkpoint, in the shapes, dtypes and shardings of `abstract`.

        Raises:
            RunStateError: there is none, it was saved under other settings, or it does not fit `abstract`.
        """
        step = self.latest_step()
        if step is None:
            raise RunStateError(f"{self._folder} holds no complete checkpoint: start the run anew")
        progress = self._read_progress(step)
        if progress.config_digest != config_digest:
            raise RunStateError(
                f"the checkpoint of step {step} in {self._folder} was saved with other settings (digest "
                f"{progress.config_digest[:12]}, now {config_digest[:12]}): use the settings in config.json or "
                "another work directory"
            )
        args = ocp.args.Composite(**{_STATE: ocp.args.StandardRestore(abstract)})  # pyright: ignore[reportArgumentType]
        try:
            state = self._steps.restore(step, args=args)[_STATE]
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise RunStateError(
                f"the checkpoint of step {step} in {self._folder} is damaged or belongs to another student: {error}"
            ) from error
        return state, progress

    def _read_progress(self, step: int) -> RunProgress:
        try:
            saved = self._steps.restore(step, args=ocp.args.Composite(**{_PROGRESS: ocp.args.JsonRestore()}))[_PROGRESS]
            return msgspec.convert(saved, RunProgress)
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise RunStateError(f"the checkpoint of step {step} in {self._folder} is damaged: {error}") from error
