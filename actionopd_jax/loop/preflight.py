"""Preflight: does a config compile for a TPU pod, and does it fit its memory? Asked on a machine without a TPU.

The compiler that ships in `libtpu` lowers the programs that training would run, for chips that are only
described. Nothing is executed or allocated: the answer is about compiling and memory, never about speed.
"""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from actionopd_jax.config import RunConfig, to_mapping
from actionopd_jax.errors import ActionOPDError, ConfigError, MissingExtraError, UserError
from actionopd_jax.models import student_files
from actionopd_jax.records import JsonObject

HBM_GIB = {"v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25}
"""Memory of a chip that programs may use, as the compiler states it where one is too large."""

_TOPOLOGY = re.compile(r"(\w+):(\d+(?:x\d+){1,2})")
_DIMENSIONS = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2}
# The worker describes chips that are not there: nothing must look for some, or lock the library against a second one.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-64",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


class Topology(msgspec.Struct, frozen=True):
    """Chips of one slice: `v5e:8x8` is 64 chips of generation v5e."""

    name: str
    generation: str
    chips: int


def parse_topology(text: str) -> Topology:
    """Reads `GENERATION:AxB` or, for v4 and v5p, `GENERATION:AxBxC`.

    Raises:
        ConfigError: another generation or form.
    """
    match = _TOPOLOGY.fullmatch(text)
    if match is None or match.group(1) not in HBM_GIB:
        raise ConfigError(f"--topology {text} is none; give one like v4:4x4x4, v5e:8x8, v5p:4x4x4 or v6e:8x8")
    generation, sides = match.group(1), [int(side) for side in match.group(2).split("x")]
    if len(sides) != _DIMENSIONS[generation] or 0 in sides:
        example = "x".join(["4"] * _DIMENSIONS[generation])
        raise ConfigError(
            f"--topology {text}: {generation} has {_DIMENSIONS[generation]} dimensions, such as {generation}:{example}"
        )
    return Topology(text, generation, math.prod(sides))


def preflight(config: RunConfig, topology: str, shapes: Path) -> JsonObject:
    """Compiles the programs of a config for a topology.

    Args:
        config: of the run; `mesh` must use every chip.
        topology: see `parse_topology`.
        shapes: folder where the model config of a hub student is looked for, as `NAME.json`.

    Returns:
        The report, see `docs/preflight.md`: `fits`, `peak_hbm_gib`, `hbm_gib`, `collectives`, and more.

    Raises:
        MissingExtraError: libtpu is not installed.
        ConfigError: the mesh does not use up the chips, or does not fit the student.
        StudentError: the student's `config.json` is missing or not supported.
    """
    chips = parse_topology(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise MissingExtraError("libtpu, the TPU compiler,", "'actionopd-jax[tpu]'")
    if config.mesh.num_devices != chips.chips:
        raise ConfigError(
            f"mesh has {config.mesh.num_devices} devices, {topology} has {chips.chips}: the product of mesh.replica, "
            "mesh.fsdp, mesh.tensor and mesh.context must be the number of chips"
        )
    order = {
        "config": to_mapping(config),
        "topology": msgspec.to_builtins(chips),
        "student": student_shape(config.student.path, shapes),
        "hbm_gib": HBM_GIB[chips.generation],
    }
    return _run_worker(order)


def student_shape(path: str, shapes: Path) -> JsonObject:
    """The content of a student's `config.json`; a hub name is looked up in `shapes`, nothing is fetched.

    `Qwen/Qwen3-4B` is `qwen3_4b.json` there.

    Raises:
        StudentError: the folder has none.
        ConfigError: no folder, and no such shape.
    """
    if path.startswith("builtin:") or Path(path).expanduser().is_dir():
        file = student_files.resolve(path) / "config.json"
    else:
        name = path.rpartition("/")[2].partition("@")[0].lower().replace("-", "_")
        file = shapes / f"{name}.json"
        if not file.is_file():
            raise ConfigError(f"student.path {path} is no folder here, and {file} does not exist: give one of them")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a model config: {error}") from None


def render(report: JsonObject) -> str:
    """The report as lines of text; sizes are GiB per device."""

    def size(value: float | None) -> str:
        return "too large" if value is None else f"{value:.2f}"

    mesh = " x ".join(f"{axis} {count}" for axis, count in report["mesh"].items() if count > 1) or "one device"
    lines = [
        f"{report['topology']}: {report['chips']} chips, {report['hosts']} hosts; mesh {mesh}; "
        f"{report['bins_per_microbatch']} bins of {report['bin_tokens']} tokens at a time",
        f"GiB per device: weights {size(report['weights_gib'])}, optimizer {size(report['optimizer_gib'])}, "
        f"gradients {size(report['gradients_gib'])}, activations and other temporaries {size(report['activations_gib'])}",
    ]
    for program in report["programs"]:
        moved = ", ".join(f"{kind} {each['count']} ({each['gib']:.2f} GiB)" for kind, each in program["collectives"].items())
        verdict = "" if program["fits"] else "  DOES NOT FIT"
        lines.append(
            f"  {program['program']:<10} peak {size(program['peak_hbm_gib']):>9}{verdict}  {moved or 'no collectives'}"
        )
    lines.append(f"update of one micro-batch, counted by hand: {report['flops']:.3g} floating-point operations per device")
    lines += report["notes"]
    verdict = "fits" if report["fits"] else "does not fit"
    lines.append(f"{verdict}: peak {size(report['peak_hbm_gib'])} of {report['hbm_gib']:.2f} GiB")
    return "\n".join([*lines, report["advice"]] if report["advice"] else lines)


def _run_worker(order: JsonObject) -> JsonObject:
    """Compiling needs environment variables that must be set before JAX starts: a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder) / "order.json", Path(folder) / "report.json"
        question.write_text(json.dumps(order), encoding="utf-8")
        command = [sys.executable, "-m", "actionopd_jax.loop.preflight_worker", str(question), str(answer)]
        done = subprocess.run(command, env={**os.environ, **_ENVIRONMENT}, capture_output=True, text=True, check=False)
        if not answer.exists():
            last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-20:])
            raise ActionOPDError(f"the compiler's process ended with code {done.returncode}:\n{last}")
        report = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in report:
        raise UserError(report["error"])
    return report
