"""From a state to prompt ids, within the context budget (method, "Context")."""

import dataclasses
from collections.abc import Sequence

import msgspec

from actionopd_jax.chat.tokenizer import ChatTokenizer
from actionopd_jax.errors import ActionOPDError
from actionopd_jax.records import ChatMessage, State


class ContextOverflow(ActionOPDError):
    """What must stay in the prompt does not fit its budget: the rollout ends here."""

    def __init__(self, num_tokens: int, max_prompt_tokens: int) -> None:
        super().__init__(
            f"the protected part of the prompt has {num_tokens} tokens; student.max_prompt_tokens is {max_prompt_tokens}"
        )
        self.num_tokens = num_tokens
        self.max_prompt_tokens = max_prompt_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """The retained state and its prompt ids, generation prompt included."""

    state: State
    ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PromptBuilder:
    """Renders states as prompts of at most `max_prompt_tokens` ids.

    A longer prompt loses its oldest removable exchanges, whole ones only. System messages, the
    first user content, tool schemas and the latest exchange always stay.
    """

    tokenizer: ChatTokenizer
    max_prompt_tokens: int
    thinking: bool

    def build(self, state: State) -> Prompt:
        """The prompt of a state, and the state that it shows.

        Raises:
            ContextOverflow: what is protected does not fit.
        """
        ids = self._ids(state)
        if len(ids) <= self.max_prompt_tokens:
            return Prompt(state, ids)
        dropped: set[int] = set()
        retained = state
        for exchange in removable_exchanges(state.messages):
            dropped.update(exchange)
            kept = tuple(message for i, message in enumerate(state.messages) if i not in dropped)
            retained = msgspec.structs.replace(state, messages=kept)
            ids = self._ids(retained)
            if len(ids) <= self.max_prompt_tokens:
                return Prompt(retained, ids)
        raise ContextOverflow(len(ids), self.max_prompt_tokens)

    def _ids(self, state: State) -> tuple[int, ...]:
        return self.tokenizer.prompt_ids(state.messages, state.tools, self.thinking)


def removable_exchanges(messages: Sequence[ChatMessage]) -> list[tuple[int, ...]]:
    """Message indices of each exchange that may be dropped, in dropping order.

    An exchange is an assistant turn with its tool results. The last one before the next user turn
    is the answer to the user turn before it, and goes together with it: so a request outlives the
    tool calls that serve it. The exchange that answers the first user content, and the latest one,
    are not removable.
    """
    asked: list[list[int]] = [[]]  # per request: its user messages
    exchanges: list[list[list[int]]] = [[]]  # per request: the exchanges that serve it
    for index, message in enumerate(messages):
        if message.role == "system":
            continue
        if message.role == "assistant":
            exchanges[-1].append([index])
        elif message.role == "tool" and exchanges[-1]:
            exchanges[-1][-1].append(index)
        else:
            if exchanges[-1]:
                asked.append([])
                exchanges.append([])
            asked[-1].append(index)
    first = next((i for i, request in enumerate(asked) if request), 0)
    removable: list[tuple[int, ...]] = []
    for i, (request, serving) in enumerate(zip(asked, exchanges, strict=True)):
        removable.extend(tuple(exchange) for exchange in serving[:-1])
        if serving and i not in {first, len(asked) - 1}:
            removable.append((*request, *serving[-1]))
    return removable
