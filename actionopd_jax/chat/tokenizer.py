"""A student's tokenizer and chat template: conversations to prompt ids, assistant turns to response ids.

The template is the student's own (Qwen3 format); nothing here writes chat markup by hand. Text that
comes from users, tools, schemas or arguments never becomes a control token: every such text is
replaced by a two-character mark before the template runs, and encoded as plain text afterwards.
"""

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import jinja2
from transformers import PreTrainedTokenizerFast

from actionopd_jax.errors import StudentError
from actionopd_jax.records import ChatMessage, JsonObject, ToolCall, ToolSpec

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
CONTROL_TOKENS = (
    END_OF_TEXT,
    TURN_START,
    TURN_END,
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""The control tokens of the Qwen3 chat format; a student's tokenizer must have each as one token."""

_MARK = "\ue000"  # private use: opens a two-character mark, and is itself marked where content holds it
_FIRST_INDEX = 0xE001
_CACHED_TURNS = 1024


class ChatTokenizer:
    """A fast tokenizer with a Qwen3-format chat template.

    Attributes:
        end_id: the end-of-turn token, last id of every complete response.
        pad_id: `<|endoftext|>`.
        vocab_size: ids at or beyond it mean nothing and must never be sampled (a model may have more rows).
        control_ids: every added token.
        turn_ids: the tokens that end or start a turn, which no response holds before its end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = {token.content: token_id for token_id, token in self._backend.get_added_tokens_decoder().items()}
        for text in CONTROL_TOKENS:
            if text not in added:
                raise StudentError(f"the tokenizer has no special token {text}; a student needs a Qwen3-format tokenizer")
        self.end_id: int = added[TURN_END]
        self.pad_id: int = added[END_OF_TEXT]
        self.vocab_size: int = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.control_ids: frozenset[int] = frozenset(added.values())
        self.turn_ids: frozenset[int] = frozenset(added[text] for text in (TURN_START, TURN_END, END_OF_TEXT))

        self._marked_texts = [*added, _MARK]
        self._mark_index = {text: _MARK + chr(_FIRST_INDEX + i) for i, text in enumerate(self._marked_texts)}
        longest_first = sorted(self._marked_texts, key=len, reverse=True)
        self._content_pattern = re.compile("|".join(map(re.escape, longest_first)) + "|[\ud800-\udfff]")
        last_index = chr(_FIRST_INDEX + len(self._marked_texts) - 1)
        self._mark_pattern = re.compile(f"{_MARK}([{chr(_FIRST_INDEX)}-{last_index}])")
        self._plain_ids = [self._encode_as_plain_text(text) for text in self._marked_texts]
        self._encode_turn = functools.lru_cache(maxsize=_CACHED_TURNS)(self._encode_marked)
        self._check_template()

    @classmethod
    def load(cls, folder: str | Path) -> "ChatTokenizer":
        """Reads `tokenizer.json`, `tokenizer_config.json` and the chat template of a local folder.

        Raises:
            StudentError: a file is missing or malformed, a control token is missing, or the chat
                template is not of the Qwen3 format.
        """
        folder = Path(folder)
        model = _read_json(folder / "tokenizer.json").get("model")
        if not isinstance(model, dict) or not {"vocab", "merges"} <= model.keys():
            raise StudentError(f"{folder / 'tokenizer.json'} holds no byte-pair model; fetch the student's files again")
        _read_json(folder / "tokenizer_config.json")
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StudentError(f"the tokenizer in {folder} cannot be read: {error}") from error
        if not isinstance(tokenizer.chat_template, str):
            raise StudentError(f"{folder} has no chat template; add the student's chat_template.jinja")
        return cls(tokenizer)

    def save(self, folder: str | Path) -> None:
        """Writes files that `load` and `transformers.AutoTokenizer` read."""
        self._tokenizer.save_pretrained(str(folder))

    def prompt_ids(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], thinking: bool) -> tuple[int, ...]:
        """Ids of the conversation up to and including the generation prompt."""
        return self._encode_rendered(self._render(messages, tools, generate=True, thinking=thinking))

    def encode_response(
        self, reasoning: str, content: str, tool_calls: Sequence[ToolCall], thinking: bool
    ) -> tuple[int, ...]:
        """Ids of an assistant turn as a student generates it after the generation prompt, end token included.

        The template's own rendering of the turn, so that within a tool chain a later prompt extends
        this prompt and response. Without `thinking` the reasoning is left out.
        """
        turn = ChatMessage(
            role="assistant",
            content=content.strip(),
            reasoning=reasoning.strip() if thinking else "",
            tool_calls=tuple(tool_calls),
        )
        return self._encode_rendered(self._render_response(turn, thinking))

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text; never control tokens, whatever the text spells."""
        return list(self._encode_marked(self._mark(text)))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens spelled out; bytes that are no UTF-8 show as U+FFFD.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return self._backend.decode([int(token_id) for token_id in ids], skip_special_tokens=False)

    # -- rendering ------------------------------------------------------------------------------

    def _render(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], *, generate: bool, thinking: bool) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                [self._message_fields(message) for message in messages],
                tools=[self._tool_fields(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=generate,
                enable_thinking=thinking,
            )
        except jinja2.TemplateError as error:
            raise StudentError(f"the chat template cannot render this conversation: {error}") from error
        assert isinstance(rendered, str)
        return rendered

    def _render_response(self, turn: ChatMessage, thinking: bool) -> str:
        question = ChatMessage(role="user", content="?")
        prompt = self._render([question], [], generate=True, thinking=thinking)
        rendered = self._render([question, turn], [], generate=False, thinking=thinking)
        end = rendered.rfind(TURN_END)
        if not rendered.startswith(prompt) or end < len(prompt):
            raise StudentError("the chat template is not of the Qwen3 format: an assistant turn does not extend its prompt")
        return rendered[len(prompt) : end + len(TURN_END)]

    def _message_fields(self, message: ChatMessage) -> JsonObject:
        fields: JsonObject = {"role": message.role, "content": self._mark(message.content)}
        if message.role == "assistant":
            fields["reasoning_content"] = self._mark(message.reasoning)
            if message.tool_calls:
                fields["tool_calls"] = [
                    {"type": "function", "function": {"name": self._mark(c.name), "arguments": self._mark_json(c.arguments)}}
                    for c in message.tool_calls
                ]
        return fields

    def _tool_fields(self, tool: ToolSpec) -> JsonObject:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return {"type": "function", "function": self._mark_json(function)}

    # -- control-token safety -------------------------------------------------------------------

    def _mark(self, text: str) -> str:
        return self._content_pattern.sub(lambda found: self._mark_index.get(found.group(), "\ufffd"), text)

    def _mark_json(self, value: object) -> object:
        if isinstance(value, str):
            return self._mark(value)
        if isinstance(value, dict):
            return {self._mark(key): self._mark_json(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark_json(item) for item in value]
        return value

    def _encode_rendered(self, rendered: str) -> tuple[int, ...]:
        # No token spans a turn's start, so turns are encoded one by one, and old ones come from the cache.
        head, *turns = rendered.split(TURN_START)
        ids = list(self._encode_turn(head))
        for turn in turns:
            ids.extend(self._encode_turn(TURN_START + turn))
        return tuple(ids)

    def _encode_marked(self, text: str) -> tuple[int, ...]:
        ids: list[int] = []
        for position, piece in enumerate(self._mark_pattern.split(text)):
            if position % 2:
                ids.extend(self._plain_ids[ord(piece) - _FIRST_INDEX])
            elif piece:
                ids.extend(self._backend.encode(piece, add_special_tokens=False).ids)
        return tuple(ids)

    def _encode_as_plain_text(self, text: str) -> tuple[int, ...]:
        # Cut after the first character, a control token is no longer recognised.
        ids: list[int] = []
        for piece in (text[:1], text[1:]):
            if piece:
                ids.extend(self._backend.encode(piece, add_special_tokens=False).ids)
        if not self.control_ids.isdisjoint(ids):
            raise StudentError(f"the tokenizer cannot write {text!r} as plain text; its added tokens overlap")
        return tuple(ids)

    def _check_template(self) -> None:
        call = ToolCall("f", {"k": [1, TURN_END]})
        arguments = f'{{"k": [1, "{self._mark(TURN_END)}"]}}'
        for thinking, reasoning in ((True, "<think>\nr\n</think>\n\n"), (False, "")):
            turn = ChatMessage(role="assistant", content="c", reasoning="r" if thinking else "", tool_calls=(call,))
            expected = f'{reasoning}c\n<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>{TURN_END}'
            if self._render_response(turn, thinking) != expected:
                raise StudentError("the chat template is not of the Qwen3 format: it renders a tool call differently")


def _read_json(path: Path) -> JsonObject:
    if not path.is_file():
        raise StudentError(f"{path} is missing; a student folder needs tokenizer.json and tokenizer_config.json")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StudentError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise StudentError(f"{path} is not a JSON object; fetch the student's files again")
    return content
