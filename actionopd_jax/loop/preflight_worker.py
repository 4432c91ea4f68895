"""The process that compiles for a described TPU slice: `python -m actionopd_jax.loop.preflight_worker ORDER REPORT`."""

import dataclasses
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from actionopd_jax.config import MeshConfig, RunConfig, build
from actionopd_jax.errors import ConfigError, UserError
from actionopd_jax.learning.packing import term_slots
from actionopd_jax.loop import flops, hlo
from actionopd_jax.models import decoder_config, sharding
from actionopd_jax.models.decoder import Decoder
from actionopd_jax.models.decoder_config import DecoderConfig
from actionopd_jax.models.generation import KeyValues, generate
from actionopd_jax.models.sampler import bucket
from actionopd_jax.records import JsonObject
from actionopd_jax.training.programs import MicroBatch, Programs, zero_accumulator

_GIB = 1 << 30
# Less time spent on speed: several times quicker, and memory is what is asked for.
_OPTIONS = {"exec_time_optimization_effort": -1.0}
_TOO_LARGE = re.compile(r"\(([\d.]+)([KMGT])\) exceeds available HBM|Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm")
_UNITS = {"K": 1 / (1 << 20), "M": 1 / (1 << 10), "G": 1.0, "T": float(1 << 10)}
_MAX_ADVICE_TRIES = 4


class _Pod:
    """A config on described chips: its mesh, and the programs of a step with the shapes of their inputs."""

    def __init__(self, config: RunConfig, student: DecoderConfig, devices: list[Any]) -> None:
        self.config, self.student = config, student
        self.mesh: Mesh = sharding.make_mesh(config.mesh, devices)
        self.graphdef, self.weights = nnx.split(nnx.eval_shape(lambda: _decoder(config, student)))
        is_kd = config.method.name == "kd"
        self.programs = Programs(
            self.graphdef,
            config.update,
            temperature=1.0 if is_kd else config.sampler.temperature,
            objective="likelihood" if is_kd else "surrogate",
            mesh=self.mesh,
            weights=self.weights,
        )
        self.state = jax.eval_shape(self.programs.create_state, self.weights)
        self.total = jax.eval_shape(zero_accumulator, self.weights)

    @property
    def micro_batch(self) -> MicroBatch:
        """Whole bins, as many loss terms as a bin of responses alone would have."""
        update = self.config.update
        bins = update.bins_per_microbatch * self.config.mesh.data_slices
        tokens, terms = (bins, update.bin_tokens), (bins, term_slots(update.bin_tokens))
        kinds = {"weight": jnp.float32, "old_logprobs": jnp.float32, "active": jnp.bool_}
        shapes: dict[str, Any] = {
            name: jax.ShapeDtypeStruct(
                tokens if name in {"tokens", "positions", "end"} else terms, kinds.get(name, jnp.int32)
            )
            for name in MicroBatch._fields
        }
        return MicroBatch(**shapes)

    def lowerings(self) -> Iterator[tuple[str, Callable[[], Any], int]]:
        """(name, how to lower it, bytes per device that stay in memory beside its arguments)."""
        layout = self.programs.layout
        assert layout is not None
        moments = bytes_per_device(self.state.opt_state, layout.opt_state)
        micro = self.micro_batch
        yield "accumulate", lambda: self.programs.accumulate.lower(self.total, self.weights, micro, False), moments
        yield "apply", lambda: self.programs.apply.lower(self.state, self.total), 0
        yield "score", lambda: self.programs.score.lower(self.weights, micro), moments
        if self.config.sampler.kind == "embedded":
            yield "sample", self._lower_sampling, moments

    def _lower_sampling(self) -> Any:
        config, student = self.config, self.student
        slots, layout = config.sampler.slots, self.programs.layout

        def on_mesh(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            spec = sharding.activation_spec(shape, ("batch", *[None] * (len(shape) - 1)), self.mesh.shape)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

        where = NamedSharding(self.mesh, PartitionSpec())
        shape = (student.num_hidden_layers, 0, student.num_key_value_heads, student.head_dim)
        none: Any = jax.ShapeDtypeStruct(shape, _dtype(config), sharding=where)
        weights = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self.weights, layout and layout.params
        )
        return generate.lower(
            self.graphdef,
            weights,
            KeyValues(none, none),
            on_mesh((slots, bucket(config.student.max_prompt_tokens)), jnp.int32),
            on_mesh((slots,), jnp.int32),
            on_mesh((slots,), jnp.bool_),
            on_mesh((slots, 2), jnp.uint32),
            sampling=config.rollout_sampling,
            num_candidates=config.method.num_candidates,
            num_valid_ids=student.vocab_size,
            end_id=0,
        )


def _dtype(config: RunConfig) -> Any:
    return jnp.bfloat16 if config.student.compute_dtype == "bfloat16" else jnp.float32


def _decoder(config: RunConfig, student: DecoderConfig) -> Decoder:
    attention = "pallas" if config.student.attention == "auto" else config.student.attention
    return Decoder(
        student,
        rngs=nnx.Rngs(0),
        dtype=_dtype(config),
        attention_implementation=attention,
        remat=config.student.remat,
    )


def bytes_per_device(tree: Any, shardings: Any) -> int:
    """Bytes of one device's share of some arrays."""

    def one(leaf: Any, where: NamedSharding) -> int:
        return int(np.prod(where.shard_shape(leaf.shape), dtype=np.int64)) * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(one, tree, shardings)))


def measure(name: str, lower: Callable[[], Any], resident: int, hbm_gib: float) -> JsonObject:
    """Compiles one program. `peak_hbm_gib` includes what stays in memory beside it; None where the compiler gave none."""
    began = time.monotonic()
    try:
        compiled = lower().compile(compiler_options=_OPTIONS)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needed = needed_gib(str(error))
        peak = None if needed is None else needed + resident / _GIB
        return {
            "program": name,
            "fits": False,
            "peak_hbm_gib": peak,
            "compile_s": time.monotonic() - began,
            "collectives": {},
        }
    memory = compiled.memory_analysis()
    peak = (memory.peak_memory_in_bytes + resident) / _GIB
    found = hlo.collectives(compiled.as_text())
    return {
        "program": name,
        "fits": peak <= hbm_gib,
        "peak_hbm_gib": peak,
        "arguments_gib": memory.argument_size_in_bytes / _GIB,
        "temporaries_gib": memory.temp_size_in_bytes / _GIB,
        "resident_gib": resident / _GIB,
        "collectives": {kind: {"count": each.count, "gib": each.num_bytes / _GIB} for kind, each in sorted(found.items())},
        "compile_s": time.monotonic() - began,
    }


def needed_gib(message: str) -> float | None:
    """How much memory the compiler says that a refused program needs."""
    match = _TOO_LARGE.search(message)
    if match is None:
        return None
    number, unit = match.group(1) or match.group(3), match.group(2) or match.group(4)
    return float(number) * _UNITS[unit]


def report(config: RunConfig, student: DecoderConfig, topology: JsonObject, hbm_gib: float) -> JsonObject:
    """Compiles every program of the config; advises where one does not fit."""
    devices = describe(topology)
    pod = _Pod(config, student, devices)
    layout = pod.programs.layout
    assert layout is not None
    with jax.set_mesh(pod.mesh):
        programs = [measure(name, lower, resident, hbm_gib) for name, lower, resident in pod.lowerings()]
    fits = all(program["fits"] for program in programs)
    peaks = [program["peak_hbm_gib"] for program in programs]
    accumulate = programs[0]
    fallback = sharding.replicated_kv_heads(student.num_key_value_heads, config.mesh)
    bins = config.update.bins_per_microbatch * config.mesh.data_slices
    return {
        "topology": topology["name"],
        "chips": topology["chips"],
        "hosts": len({device.process_index for device in devices}),
        "mesh": dataclasses.asdict(config.mesh),
        "fits": fits,
        "peak_hbm_gib": None if None in peaks else max(peaks),
        "hbm_gib": hbm_gib,
        "weights_gib": bytes_per_device(pod.weights, layout.params) / _GIB,
        "optimizer_gib": bytes_per_device(pod.state.opt_state, layout.opt_state) / _GIB,
        "gradients_gib": bytes_per_device(pod.total.grads, layout.params) / _GIB,
        "activations_gib": accumulate.get("temporaries_gib"),
        "bin_tokens": config.update.bin_tokens,
        "bins_per_microbatch": bins,
        "collectives": accumulate["collectives"],
        "flops": flops.update(student, config.update.bin_tokens, config.student.remat) * bins / topology["chips"],
        "programs": programs,
        "notes": [] if fallback is None else [fallback],
        "advice": None if fits else advise(config, student, devices, hbm_gib),
    }


def describe(topology: JsonObject) -> list[Any]:
    """The devices of a slice that is not there."""
    settings: dict[str, Any] = {"chip_config_name": "megacore"} if topology["generation"] == "v4" else {}
    if topology["chips"] == 1:
        settings["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology["name"], **settings).devices)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--topology {topology['name']}: the compiler knows no such slice: {reason}") from error


def advise(config: RunConfig, student: DecoderConfig, devices: list[Any], hbm_gib: float) -> str:
    """The first of a few other settings with which a micro-batch fits, as command-line settings."""
    for changed in itertools.islice(_alternatives(config), _MAX_ADVICE_TRIES):
        try:
            pod = _Pod(changed, student, devices)
        except ConfigError:
            continue
        with jax.set_mesh(pod.mesh):
            first = itertools.islice(pod.lowerings(), 1)
            fits = all(measure(name, lower, beside, hbm_gib)["fits"] for name, lower, beside in first)
        if fits:
            sizes = dataclasses.asdict(changed.mesh)
            mesh = " ".join(f"--config.mesh.{axis}={size}" for axis, size in sizes.items())
            return f"an update fits with {mesh} --config.update.bins_per_microbatch={changed.update.bins_per_microbatch}"
    return "none of the meshes tried fits either: use more chips, a smaller update.bin_tokens, or adam_mu_dtype bfloat16"


def _alternatives(config: RunConfig) -> Iterator[RunConfig]:
    """One bin at a time, then tokens and weights split over more devices, `replica` given up first."""
    update = dataclasses.replace(config.update, bins_per_microbatch=1)
    if config.update.bins_per_microbatch > 1:
        yield dataclasses.replace(config, update=update)
    mesh, chips = config.mesh, config.mesh.num_devices
    for factor in (1, 2, 4, 8):
        for tensor in (factor, 1):
            split = MeshConfig(
                fsdp=max(chips // (mesh.tensor * mesh.context * factor), 1),
                tensor=mesh.tensor * tensor,
                context=mesh.context * factor // tensor,
            )
            if split.num_devices == chips and split != mesh and not (factor == 1 and mesh.replica == 1):
                yield dataclasses.replace(config, update=update, mesh=split)


def main(order_file: str, report_file: str) -> None:
    order = json.loads(Path(order_file).read_text(encoding="utf-8"))
    try:
        config = build(RunConfig, order["config"])
        student = decoder_config.from_hf(order["student"], "the student's config.json")
        answer = report(config, student, order["topology"], order["hbm_gib"])
    except UserError as error:
        answer = {"error": str(error)}
    Path(report_file).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
