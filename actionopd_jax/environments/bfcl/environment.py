"""One BFCL multi-turn conversation."""

from typing import Any

from actionopd_jax.environments.bfcl import execution
from actionopd_jax.environments.bfcl.data import Entry
from actionopd_jax.environments.bfcl.schemas import with_response
from actionopd_jax.errors import EnvironmentFailure
from actionopd_jax.records import (
    Action,
    ChatMessage,
    End,
    EndReason,
    Invalid,
    Message,
    Observation,
    Score,
    ToolCall,
    ToolSpec,
)

MAX_CALLS_PER_TURN = 20  # the official step limit; its steps may hold several calls, ours hold one

SYSTEM_PROMPT = (
    "You carry out a user's requests with the tools below. Make one tool call at a time and read its result. "
    "When the current request is finished, or cannot be done because information or a tool is missing, "
    "answer with a short message instead of a call: that ends your turn, and the user speaks next."
)


class BfclEnvironment:
    """The scripted user speaks whenever the student sends a message; after the last turn the episode is over.

    A turn with more than `MAX_CALLS_PER_TURN` calls (or more than its ground truth needs, where that is
    larger) ends the episode as a failure.
    """

    def __init__(self, entry: Entry, response_schemas: bool = False) -> None:
        self._entry = entry
        self._response_schemas = response_schemas
        self._instances: dict[str, Any] = {}
        self._turn = 0
        self._calls_in_turn = 0
        self._made: list[list[ToolCall]] = [[]]
        self._end: End | None = None
        self._score: Score | None = None

    def reset(self) -> Observation:
        if self._instances or self._end:
            raise EnvironmentFailure(f"bfcl {self._entry.task_id}: an environment is for one episode; make a new one")
        self._instances = execution.load_instances(self._entry)
        system = ChatMessage(role="system", content=SYSTEM_PROMPT)
        return self._observe(system, ChatMessage(role="user", content=self._entry.turns[0]))

    def step(self, action: Action) -> Observation | End:
        if self._end or not self._instances:
            raise EnvironmentFailure(f"bfcl {self._entry.task_id}: step outside an episode")
        match action:
            case Message():
                return self._finish_turn()
            case ToolCall():
                return self._call(action)
            case Invalid(reason, detail):
                return self._count_call(execution.error_text(detail or reason.value))

    def _call(self, call: ToolCall) -> Observation | End:
        complete = execution.complete_call(self._entry, call)
        if isinstance(complete, str):
            return self._count_call(execution.error_text(complete))
        self._made[-1].append(complete)
        return self._count_call(execution.run_tool(self._instances, self._entry, complete))

    def _count_call(self, result: str) -> Observation | End:
        self._calls_in_turn += 1
        limit = max(MAX_CALLS_PER_TURN, len(self._entry.answers[self._turn]))
        if self._calls_in_turn > limit:
            return self._finish(f"turn {self._turn} took more than {limit} calls")
        return self._observe(ChatMessage(role="tool", content=result))

    def _finish_turn(self) -> Observation | End:
        self._turn += 1
        self._calls_in_turn = 0
        if self._turn == len(self._entry.turns):
            return self._finish(f"all {self._turn} turns taken")
        self._made.append([])
        return self._observe(ChatMessage(role="user", content=self._entry.turns[self._turn]))

    def _finish(self, detail: str) -> End:
        self._end = End(reason=EndReason.DONE, detail=detail)
        return self._end

    def _observe(self, *messages: ChatMessage) -> Observation:
        return Observation(messages=messages, tools=self._visible_tools())

    def _visible_tools(self) -> tuple[ToolSpec, ...]:
        withheld = {name for turn, names in self._entry.released.items() if turn > self._turn for name in names}
        tools = [tool for name, tool in self._entry.tools.items() if name not in withheld]
        if self._response_schemas:
            return tuple(with_response(tool.spec, tool.response) for tool in tools)
        return tuple(tool.spec for tool in tools)

    def score(self) -> Score:
        """Success: every turn was taken and the official checker accepts all of them.

        `partial` is the share of turns with a ground truth that passed before the first one that did not.
        """
        if self._score is None or self._end is None:
            self._score = self._grade()
        return self._score

    def _grade(self) -> Score:
        taken = self._made[: self._turn]
        verdict = execution.check(self._entry, taken)
        passed = len(taken)
        if not verdict["valid"]:
            # The checker stops at the first turn that fails: find it from below.
            passed = 0
            while execution.check(self._entry, taken[: passed + 1])["valid"]:
                passed += 1
        graded = [bool(answers) for answers in self._entry.answers]
        details: dict[str, Any] = {"turns": len(graded), "turns_taken": len(taken), "turns_passed": passed}
        if "error_type" in verdict:
            details["error_type"] = verdict["error_type"]
        return Score(
            success=verdict["valid"] and len(taken) == len(graded),
            partial=sum(graded[:passed]) / sum(graded),
            details=details,
        )

    def evidence(self, tool: str) -> str | None:
        return execution.source(self._entry, tool)

    def close(self) -> None:
        self._instances = {}
        self._end = self._end or End(reason=EndReason.DONE, detail="closed")
