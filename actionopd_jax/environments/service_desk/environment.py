"""The service desk as an environment, and its tasks as a suite."""

import sqlite3
from collections.abc import Sequence

from actionopd_jax.environments.service_desk import policy, tools, world
from actionopd_jax.environments.service_desk.customer import Customer
from actionopd_jax.environments.service_desk.expert import Expert, ExpertSettings
from actionopd_jax.environments.service_desk.judge import ActJudge
from actionopd_jax.errors import ConfigError
from actionopd_jax.records import (
    ChatMessage,
    End,
    JsonObject,
    Message,
    Observation,
    Score,
    Task,
    ToolCall,
    ValidAction,
    digest,
)

NAME = "service_desk"
FORMAT_VERSION = 2  # of instances, customer and checks; policy and tools enter by digest
VERSION = f"{FORMAT_VERSION}-{digest([policy.SYSTEM, tools.SPECS, [tool.source for tool in tools.TOOLS.values()]])[:12]}"
SPLITS = {"train": 4000, "heldout": 500}
"""Splits and their default numbers of tasks."""


class ServiceDesk:
    """One task start: a database, a customer, and the checks. Implements `protocols.Environment`."""

    def __init__(self, scenario: world.Scenario) -> None:
        self._scenario = scenario
        self._customer = Customer(scenario)
        self._db: sqlite3.Connection | None = scenario.database()
        self._rows: tuple[tuple[object, ...], ...] = ()
        self._unconfirmed = False

    def reset(self) -> Observation:
        """The system text with the policy, and the customer's first line."""
        return Observation(
            messages=(ChatMessage("system", policy.SYSTEM), ChatMessage("user", self._customer.opening())),
            tools=tools.SPECS,
        )

    def step(self, action: ToolCall | ValidAction) -> Observation | End:
        """A call gives its result, a message the customer's answer; the end comes when the customer leaves."""
        if isinstance(action, Message):
            answer = self._customer.hear(action.text)
            if answer is None:
                return End(detail="served" if self._customer.satisfied else "out of patience")
            return Observation((ChatMessage("user", answer),), tools.SPECS)
        db = self._database()
        before = db.total_changes
        result = tools.execute(db, action)
        if db.total_changes != before and not self._customer.notice(action):
            self._unconfirmed = True
        return Observation((ChatMessage("tool", tools.observation_text(result)),), tools.SPECS)

    def score(self) -> Score:
        """Success is every check passed; `details` maps each check to its outcome.

        Checks: `database` (the rows equal those after the gold plan), `confirmed` (nothing irreversible
        without a yes), `request_1`, … (answered, with the reason or the value that was due).
        """
        told = self._customer.told
        checks = {"database": self._final_rows() == self._scenario.goal, "confirmed": not self._unconfirmed}
        for number in range(len(self._scenario.requests)):
            checks[f"request_{number + 1}"] = number < len(told) and told[number]
        failed = [name for name, passed in checks.items() if not passed]
        return Score(success=not failed, partial=1 - len(failed) / len(checks), details={"failed": failed})

    def evidence(self, tool: str) -> str | None:
        """The source of a tool's function; None for a tool that does not exist."""
        return tools.TOOLS[tool].source if tool in tools.TOOLS else None

    def close(self) -> None:
        """Keeps the final rows for `score` and frees the database."""
        if self._db is not None:
            self._rows = world.snapshot(self._db)
            self._db.close()
            self._db = None

    def _final_rows(self) -> tuple[tuple[object, ...], ...]:
        return self._rows if self._db is None else world.snapshot(self._db)

    def _database(self) -> sqlite3.Connection:
        if self._db is None:
            raise ValueError("step after close")
        return self._db


class ServiceDeskSuite:
    """The tasks of the service desk. Implements `protocols.Suite`.

    Settings: `seed` (0; another seed is another family of tasks), `train_tasks` and `heldout_tasks`
    (how many of them there are).
    """

    name = NAME
    promises_evidence = True

    def __init__(self, settings: JsonObject | None = None) -> None:
        known = {"seed": 0} | {f"{split}_tasks": count for split, count in SPLITS.items()}
        values = known | dict(settings or {})
        for key, value in values.items():
            if key not in known:
                raise ConfigError(f"unknown setting {key} of {NAME}; known: {', '.join(known)}")
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{key} of {NAME} must be a whole number, got {value!r}")
        self._seed = values["seed"]
        self._counts = {split: values[f"{split}_tasks"] for split in SPLITS}
        self.version = f"{VERSION}-{self._seed}"

    def splits(self) -> Sequence[str]:
        return tuple(SPLITS)

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, `00000` onwards.

        Raises:
            ConfigError: unknown split.
        """
        if split not in self._counts:
            raise ConfigError(f"unknown split {split!r} of {NAME}; known: {', '.join(self._counts)}")
        return tuple(Task(NAME, split, f"{index:05d}") for index in range(self._counts[split]))

    def scenario(self, task: Task) -> world.Scenario:
        """The instance behind a task: hidden from student, teacher and matcher.

        Raises:
            ConfigError: no such task.
        """
        known = task.environment == NAME and task.split in SPLITS and task.task_id.isdecimal()
        if not known:
            raise ConfigError(f"{NAME} has no task {task.key}")
        return world.scenario(task.split, int(task.task_id), self._seed)

    def make(self, task: Task) -> ServiceDesk:
        return ServiceDesk(self.scenario(task))

    def scripted_teacher(self, seed: int, settings: JsonObject) -> Expert:
        return Expert(seed, ExpertSettings.build(settings))

    def judge(self) -> ActJudge:
        return ActJudge()
