"""The checked settings of a run: frozen dataclasses, built once from a `ConfigDict` or plain mapping.

Numerical settings of the method have no hidden defaults elsewhere: they stand here, with their
source. `build` refuses unknown keys, wrong types and values out of range with one line that names
the key; nothing heavy has started by then.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from actionopd_jax.errors import ConfigError
from actionopd_jax.records import JsonObject, Sampling

T = TypeVar("T")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudentConfig:
    """Which student to train. `path`: a Hugging Face style folder, or `builtin:NAME` for one shipped with the package."""

    path: str
    weights: Literal["pretrained", "random"] = "pretrained"  # random: config.json and tokenizer alone, seeded by the run
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    # auto: pallas on TPUs, else blockwise; dense holds tokens x tokens.
    attention: Literal["auto", "dense", "blockwise", "pallas"] = "auto"
    # What the backward pass recomputes: nothing; all but the results of matrix products; all of a layer (least memory).
    remat: Literal["none", "dots", "full"] = "full"
    max_prompt_tokens: int = 24_576
    max_response_tokens: int = 4_096
    thinking: bool = True

    def __post_init__(self) -> None:
        _require(self.path != "", "student.path must name a folder or builtin:NAME")
        _require(self.max_prompt_tokens > 0, "student.max_prompt_tokens must be positive")
        _require(self.max_response_tokens > 0, "student.max_response_tokens must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """How the student is sampled while collecting (paper, Table 8)."""

    kind: Literal["embedded"] = "embedded"
    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 20
    slots: int = 16  # prompts per generation batch
    max_wait_ms: float = 20.0  # how long the batcher waits for more ready states

    def __post_init__(self) -> None:
        _require(self.temperature > 0, "sampler.temperature must be positive (evaluation alone is greedy)")
        _require(0 < self.top_p <= 1, "sampler.top_p must be in (0, 1]")
        _require(self.top_k >= 0, "sampler.top_k must be 0 (off) or positive")
        _require(self.slots > 0, "sampler.slots must be positive")
        _require(self.max_wait_ms >= 0, "sampler.max_wait_ms must not be negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """`scripted`: the suite's own expert, with `settings` handed to it."""

    kind: Literal["scripted"] = "scripted"
    retries: int = 2  # per sample, on parser- or schema-invalid output (paper, A.3)
    settings: JsonObject = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.retries >= 0, "teacher.retries must not be negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """ActionOPD's own numbers (paper, sections 2.2, 2.3 and A.4), and KD for the warm start."""

    name: Literal["actionopd", "kd"] = "actionopd"
    num_candidates: int = 4
    num_teacher_samples: int = 3
    frequency_bonus: float = 0.5  # lambda
    reward: Literal["agreement", "validity", "constant", "shuffled"] = "agreement"
    commit: Literal["best", "uniform"] = "best"
    max_decisions: int = 20

    def __post_init__(self) -> None:
        _require(self.num_candidates >= 1, "method.num_candidates must be at least 1")
        _require(self.num_teacher_samples >= 1, "method.num_teacher_samples must be at least 1")
        _require(self.frequency_bonus >= 0, "method.frequency_bonus must not be negative")
        _require(self.max_decisions >= 1, "method.max_decisions must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """The surrogate and its optimizer (paper, A.4; optimizer numbers are this project's choice)."""

    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up
    warmup_steps: int = 0  # optimizer steps, as everywhere here
    decay_steps: int = 0  # linear, cosine: how long the decay takes
    final_learning_rate: float = 0.0  # linear, cosine: from the end of the decay on
    adam_mu_dtype: Literal["float32", "bfloat16"] = "float32"  # of the first moment
    adam_b1: float = 0.9
    adam_b2: float = 0.999
    adam_eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    clip_eta: float = 0.2
    dual_clip: float = 3.0
    advantage_epsilon: float = 1e-8
    minibatch_candidates: int = 256
    # What a minibatch keeps together: a tree shares most when all decisions of a trajectory are in it.
    minibatch_by: Literal["trajectories", "groups"] = "trajectories"
    packing: Literal["tree", "rows"] = "tree"
    bin_tokens: int = 32_768  # tokens of one packed bin: prompt + response of the longest row must fit
    bins_per_microbatch: int = 1  # on each data-parallel slice of the mesh
    max_bad_steps: int = 3  # updates with NaN or infinite gradients before the run stops

    def __post_init__(self) -> None:
        _require(self.learning_rate > 0, "update.learning_rate must be positive")
        _require(self.warmup_steps >= 0, "update.warmup_steps must not be negative")
        _require(self.decay_steps >= 0, "update.decay_steps must not be negative")
        decays = self.schedule != "constant"
        _require(decays == (self.decay_steps > 0), "update.decay_steps must be positive to decay, and 0 for constant")
        _require(
            0 <= self.final_learning_rate <= self.learning_rate,
            "update.final_learning_rate must be between 0 and update.learning_rate",
        )
        _require(0 <= self.adam_b1 < 1 and 0 <= self.adam_b2 < 1, "update.adam_b1 and adam_b2 must be in [0, 1)")
        _require(self.adam_eps > 0, "update.adam_eps must be positive")
        _require(self.weight_decay >= 0, "update.weight_decay must not be negative")
        _require(self.max_grad_norm > 0, "update.max_grad_norm must be positive")
        _require(0 < self.clip_eta < 1, "update.clip_eta must be in (0, 1)")
        _require(self.dual_clip > 1, "update.dual_clip must exceed 1: at 1 or below it would cancel the clipping itself")
        _require(self.advantage_epsilon > 0, "update.advantage_epsilon must be positive")
        _require(self.minibatch_candidates >= 1, "update.minibatch_candidates must be at least 1")
        whole_blocks = self.bin_tokens >= 128 and self.bin_tokens % 128 == 0
        _require(whole_blocks, "update.bin_tokens must be a positive multiple of 128")
        _require(self.bins_per_microbatch >= 1, "update.bins_per_microbatch must be at least 1")
        _require(self.max_bad_steps >= 1, "update.max_bad_steps must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each axis of the mesh has; their product is the number of devices that train.

    `replica`: copies of everything, each with its share of the bins. `fsdp`: a share of the bins and of
    the weights, which are gathered layer by layer. `tensor`: heads, MLP and vocabulary split.
    `context`: the tokens of a bin split. All 1: one device, no mesh.
    """

    replica: int = 1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            _require(size >= 1, f"mesh.{name} must be at least 1")

    @property
    def num_devices(self) -> int:
        return self.replica * self.fsdp * self.tensor * self.context

    @property
    def data_slices(self) -> int:
        """How many ways the bins are split."""
        return self.replica * self.fsdp


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One part of the task mixture: `starts_per_step` task starts from a split of an environment."""

    environment: str
    split: str
    starts_per_step: int
    num_tasks: int = 0  # 0: all tasks of the split
    settings: JsonObject = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.starts_per_step >= 1, "sources.starts_per_step must be at least 1")
        _require(self.num_tasks >= 0, "sources.num_tasks must be 0 (all) or positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How many things happen at once, and how long anything may take."""

    concurrent_tasks: int = 64
    concurrent_teacher_requests: int = 64
    environment_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        _require(self.concurrent_tasks >= 1, "rollout.concurrent_tasks must be at least 1")
        _require(self.concurrent_teacher_requests >= 1, "rollout.concurrent_teacher_requests must be at least 1")
        _require(self.environment_timeout_s > 0, "rollout.environment_timeout_s must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Greedy evaluation without a teacher (paper, B.3)."""

    environment: str
    split: str
    num_tasks: int = 0  # 0: all
    trials: int = 1
    every_steps: int = 0  # 0: only before the first and after the last step
    settings: JsonObject = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.num_tasks >= 0, "evaluation.num_tasks must be 0 (all) or positive")
        _require(self.trials >= 1, "evaluation.trials must be at least 1")
        _require(self.every_steps >= 0, "evaluation.every_steps must not be negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Every how many steps to save, and how many checkpoints to keep."""

    every_steps: int = 1
    keep: int = 2

    def __post_init__(self) -> None:
        _require(self.every_steps >= 1, "checkpoint.every_steps must be at least 1")
        _require(self.keep >= 1, "checkpoint.keep must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that determines a run."""

    steps: int
    seed: int
    student: StudentConfig
    sources: tuple[SourceConfig, ...]
    evaluation: EvaluationConfig
    sampler: SamplerConfig = SamplerConfig()
    teacher: TeacherConfig = TeacherConfig()
    method: MethodConfig = MethodConfig()
    update: UpdateConfig = UpdateConfig()
    mesh: MeshConfig = MeshConfig()
    rollout: RolloutConfig = RolloutConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def __post_init__(self) -> None:
        _require(self.steps >= 1, "steps must be at least 1")
        _require(len(self.sources) >= 1, "sources must name at least one environment")
        longest = self.student.max_prompt_tokens + self.student.max_response_tokens
        _require(
            self.update.bin_tokens >= longest,
            f"update.bin_tokens {self.update.bin_tokens} cannot hold the longest row: student.max_prompt_tokens + "
            f"max_response_tokens = {longest}",
        )
        _require(
            self.update.minibatch_candidates >= self.method.num_candidates,
            f"update.minibatch_candidates {self.update.minibatch_candidates} is smaller than one group of "
            f"method.num_candidates {self.method.num_candidates}",
        )

    @property
    def rollout_sampling(self) -> Sampling:
        """Decoding settings of the student while collecting."""
        return Sampling(
            temperature=self.sampler.temperature,
            top_p=self.sampler.top_p,
            top_k=self.sampler.top_k,
            max_tokens=self.student.max_response_tokens,
        )


def build(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Builds a settings dataclass from a mapping.

    Raises:
        ConfigError: an unknown or missing key, a wrong type, or a value out of range; names the key.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    prefix = f"{path}." if path else ""
    for key in values:
        if key not in fields:
            known = ", ".join(sorted(fields))
            raise ConfigError(f"unknown setting {prefix}{key}; known here: {known}")
    kwargs: dict[str, Any] = {}
    for name, field in fields.items():
        if name in values:
            kwargs[name] = _convert(hints[name], values[name], prefix + name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"missing setting {prefix}{name}")
    try:
        return cls(**kwargs)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if "[" in path else str(error)) from None


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} must be a group of settings, got {value!r}")
        return build(typing.cast("type", hint), value, path)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices or isinstance(value, bool) != any(isinstance(c, bool) for c in choices):
            raise ConfigError(f"{path} must be one of {', '.join(map(str, choices))}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path} must be a list, got {value!r}")
        item = typing.get_args(hint)[0]
        return tuple(_convert(item, element, f"{path}[{i}]") for i, element in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} must be a group of settings, got {value!r}")
        return dict(value)
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{path} must be a finite number, got {value!r}")
        return float(value)
    if not isinstance(hint, type) or isinstance(hint, types.UnionType):
        raise TypeError(f"unsupported annotation {hint} at {path}")
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{path} must be {hint.__name__}, got {value!r}")
    return value


def to_mapping(config: RunConfig) -> JsonObject:
    """The resolved settings as plain JSON values, for `config.json`."""
    return dataclasses.asdict(config)
