"""The student's weights from a checkpoint of a run, without the optimizer's state."""

from pathlib import Path
from typing import Any

import jax
import msgspec
import orbax.checkpoint as ocp
from flax import nnx

from actionopd_jax.errors import RunStateError
from actionopd_jax.training.checkpoint import RunProgress

_STATE, _PROGRESS = "state", "progress"  # the items that `training.checkpoint.Checkpointer` saves


def restore_weights(folder: Path, params: nnx.State, config_digest: str, step: int | None) -> tuple[nnx.State, int]:
    """Reads the weights alone, onto the default device. Does not disturb a run that saves meanwhile.

    Args:
        folder: of the checkpoints.
        params: shapes and dtypes of the weights.
        config_digest: of the settings that the run was started with.
        step: None: the latest.

    Returns:
        The weights and their step.

    Raises:
        RunStateError: there is no such checkpoint, it was saved under other settings, or it is damaged.
    """
    if not folder.is_dir():
        raise RunStateError(f"{folder} does not exist: the run has saved no checkpoint yet")
    steps = ocp.CheckpointManager(folder.resolve(), options=ocp.CheckpointManagerOptions(read_only=True))
    try:
        there = steps.all_steps()
        if not there:
            raise RunStateError(f"{folder} holds no complete checkpoint: train first")
        step = max(there) if step is None else step
        if step not in there:
            raise RunStateError(f"{folder} holds no checkpoint of step {step}; there are: {', '.join(map(str, there))}")
        return _read(steps, step, params, config_digest, folder), step
    finally:
        steps.close()


def _read(steps: ocp.CheckpointManager, step: int, params: nnx.State, config_digest: str, folder: Path) -> nnx.State:
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {"params": jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), params)}
    restore_args = ocp.checkpoint_utils.construct_restore_args(target)
    weights = ocp.args.PyTreeRestore(target, restore_args=restore_args, partial_restore=True)

    def restore(name: str, args: Any) -> Any:
        return steps.restore(step, args=ocp.args.Composite(**{name: args}))[name]

    try:
        progress = msgspec.convert(restore(_PROGRESS, ocp.args.JsonRestore()), RunProgress)
        if progress.config_digest != config_digest:
            raise RunStateError(
                f"the checkpoint of step {step} in {folder} was saved with other settings (digest "
                f"{progress.config_digest[:12]}, now {config_digest[:12]}): use the settings in the run's config.json"
            )
        return restore(_STATE, weights)["params"]
    except (ValueError, KeyError, FileNotFoundError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunStateError(
            f"the checkpoint of step {step} in {folder} is damaged or belongs to another student: {reason}"
        ) from error
