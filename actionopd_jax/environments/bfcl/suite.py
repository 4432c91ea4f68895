"""BFCL multi-turn as a suite: splits, tasks, environments, teacher, judge."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence

from actionopd_jax.config import build
from actionopd_jax.environments.bfcl import data
from actionopd_jax.environments.bfcl.environment import BfclEnvironment
from actionopd_jax.environments.bfcl.teacher import GroundTruthTeacher, TurnEndJudge
from actionopd_jax.errors import ConfigError
from actionopd_jax.records import JsonObject, Task

NUM_TRAIN = 150  # of the 200 scenarios; the other 50 are held out


@dataclasses.dataclass(frozen=True, kw_only=True)
class BfclSettings:
    """Which tasks to use.

    Attributes:
        categories: any of base, miss_func, miss_param, long_context.
        classes: keep only tasks whose tools all come from these API classes; empty keeps every task.
        response_schemas: append each tool's result schema to its description, as the official prompts do
            (about 40 % longer prompts).
    """

    categories: tuple[str, ...] = data.CATEGORIES
    classes: tuple[str, ...] = ()
    response_schemas: bool = False

    def __post_init__(self) -> None:
        for key, values, known in (
            ("categories", self.categories, data.CATEGORIES),
            ("classes", self.classes, data.CLASSES),
        ):
            for value in values:
                if value not in known:
                    raise ConfigError(f"bfcl {key} must be among {', '.join(known)}; got {value!r}")
        if not self.categories:
            raise ConfigError("bfcl categories must name at least one of " + ", ".join(data.CATEGORIES))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BfclTeacherSettings:
    """Shares of the scripted teacher's draws that are malformed, or fail once."""

    invalid_rate: float = 0.0
    error_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("invalid_rate", "error_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"bfcl teacher {name} must be in [0, 1]")


@functools.cache
def train_scenarios() -> frozenset[str]:
    """Scenario numbers of the training part: the first 150 base tasks in the order of their ids' digests.

    Task `multi_turn_CATEGORY_7` is a variant of `multi_turn_base_7` in every category, so the number decides
    for all four.
    """
    ids = sorted(
        (entry.task_id for entry in data.category_entries("base")), key=lambda i: hashlib.sha256(i.encode()).digest()
    )
    return frozenset(task_id.rsplit("_", 1)[1] for task_id in ids[:NUM_TRAIN])


class BfclSuite:
    """BFCL v4 multi-turn (https://gorilla.cs.berkeley.edu/leaderboard.html) from the `bfcl-eval` package.

    Splits: each category by name (`base`, …); `train` and `heldout`, the base category parted by this
    project; `CATEGORY_train` and `CATEGORY_heldout`, the same parting of the others.

    Raises:
        ConfigError: unknown settings.
        MissingExtraError: the package is not installed.
    """

    name = "bfcl"
    promises_evidence = True

    def __init__(self, settings: JsonObject | None = None) -> None:
        self._settings = build(BfclSettings, settings or {}, "settings")
        self.version = data.version()

    def splits(self) -> Sequence[str]:
        splits = list(self._settings.categories)
        if "base" in splits:
            splits += ["train", "heldout"]
        return [*splits, *(f"{c}_{part}" for c in self._settings.categories if c != "base" for part in ("train", "heldout"))]

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self.splits():
            raise ConfigError(f"bfcl has no split {split!r} with these settings; it has {', '.join(self.splits())}")
        category, part = split, ""
        for suffix in ("train", "heldout"):
            if split.endswith(suffix):
                category, part = split.removesuffix(suffix).removesuffix("_") or "base", suffix
        return [
            Task(environment=self.name, split=split, task_id=entry.task_id)
            for entry in data.category_entries(category)
            if self._chosen(entry) and (not part or (part == "train") == self._trains(entry))
        ]

    def _chosen(self, entry: data.Entry) -> bool:
        return not self._settings.classes or set(entry.classes) <= set(self._settings.classes)

    @staticmethod
    def _trains(entry: data.Entry) -> bool:
        return entry.task_id.rsplit("_", 1)[1] in train_scenarios()

    @functools.cached_property
    def _entries(self) -> Mapping[str, data.Entry]:
        chosen = (entry for category in self._settings.categories for entry in data.category_entries(category))
        return {entry.task_id: entry for entry in chosen if self._chosen(entry)}

    def make(self, task: Task) -> BfclEnvironment:
        if task.task_id not in self._entries:
            raise ConfigError(f"bfcl has no task {task.task_id!r} among the chosen categories and classes")
        return BfclEnvironment(self._entries[task.task_id], self._settings.response_schemas)

    def scripted_teacher(self, seed: int, settings: JsonObject) -> GroundTruthTeacher:
        rates = build(BfclTeacherSettings, settings, "teacher.settings")
        return GroundTruthTeacher(self._entries, self.version, seed, rates.invalid_rate, rates.error_rate)

    def judge(self) -> TurnEndJudge:
        return TurnEndJudge()
