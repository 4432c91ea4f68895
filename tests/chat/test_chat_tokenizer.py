import json
import os
import shutil
from pathlib import Path

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actionopd_jax.chat.tokenizer import CONTROL_TOKENS, ChatTokenizer
from actionopd_jax.chat.train_tokenizer import TEMPLATE_PATH, train_tokenizer
from actionopd_jax.errors import StudentError
from actionopd_jax.records import ChatMessage, ToolCall, ToolSpec

quick = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

TOOL = ToolSpec("find", "Find a café", {"type": "object", "properties": {"city": {"type": "string"}}})
CHAIN = (
    ChatMessage(role="system", content="Be brief."),
    ChatMessage(role="user", content="First request"),
    ChatMessage(role="assistant", content="First answer", reasoning="Old thoughts"),
    ChatMessage(role="user", content="Second request"),
    ChatMessage(
        role="assistant", content="Looking.", reasoning="New thoughts", tool_calls=(ToolCall("find", {"city": "Köln"}),)
    ),
    ChatMessage(role="tool", content="result 1"),
    ChatMessage(role="tool", content="result 2"),
)
RENDERED = """<|im_start|>system
Be brief.

# Tools
<tools>
{"name": "find", "description": "Find a café", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
</tools>

To call one tool, answer with:
<tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call><|im_end|>
<|im_start|>user
First request<|im_end|>
<|im_start|>assistant
First answer<|im_end|>
<|im_start|>user
Second request<|im_end|>
<|im_start|>assistant
<think>
New thoughts
</think>

Looking.
<tool_call>
{"name": "find", "arguments": {"city": "Köln"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
result 1
</tool_response>
<tool_response>
result 2
</tool_response><|im_end|>
<|im_start|>assistant
"""


def chain(text: str, *, name: str = "find") -> tuple[tuple[ChatMessage, ...], tuple[ToolSpec, ...]]:
    """A conversation with `text` in every place that holds somebody's words."""
    call = ToolCall(name, {"city": text, text + "k": [{"deep": text}]})
    messages = (
        ChatMessage(role="system", content=text),
        ChatMessage(role="user", content=text),
        ChatMessage(role="assistant", content=text, reasoning=text, tool_calls=(call, call)),
        ChatMessage(role="tool", content=text),
        ChatMessage(role="assistant", content=text),
        ChatMessage(role="system", content=text),
        ChatMessage(role="user", content=text),
    )
    schema = {"type": "object", "properties": {text: {"type": "string", "description": text, "enum": [text]}}}
    return messages, (ToolSpec(name, text, schema),)


def assert_safe(tokenizer: ChatTokenizer) -> None:
    def controls(text: str) -> list[int]:
        return [i for i in tokenizer.prompt_ids(*chain(text), True) if i in tokenizer.control_ids]

    harmless = controls("plain")
    for token in (*CONTROL_TOKENS, *(a + b for a in CONTROL_TOKENS for b in CONTROL_TOKENS[:3])):
        for text in (token, f"x{token}y", f"{token[:3]}{token}{token[3:]}", f"\ue000{token}\ue001"):
            assert controls(text) == harmless
    messages, tools = chain("a</think>b\ue000\ue001c<|im_end|>d")
    assert tokenizer.decode(tokenizer.prompt_ids(messages, tools, True)).count("a</think>b\ue000\ue001c<|im_end|>d") >= 10


def assert_later_prompt_extends(
    tokenizer: ChatTokenizer, messages, tools, turn: ChatMessage, results, thinking: bool
) -> None:
    prompt = tokenizer.prompt_ids(messages, tools, thinking)
    response = tokenizer.encode_response(turn.reasoning, turn.content, turn.tool_calls, thinking)
    assert response[-1] == tokenizer.end_id
    assert response.count(tokenizer.end_id) == 1
    later = tokenizer.prompt_ids((*messages, turn, *results), tools, thinking)
    assert later[: len(prompt) + len(response)] == prompt + response


def test_prompt_ids_tool_chain_renders_in_the_qwen3_format(small_tokenizer):
    assert small_tokenizer.decode(small_tokenizer.prompt_ids(CHAIN, [TOOL], True)) == RENDERED


def test_prompt_ids_without_thinking_opens_behind_an_empty_think_block(small_tokenizer):
    text = small_tokenizer.decode(small_tokenizer.prompt_ids(CHAIN[:2], [], False))
    assert text.endswith("First request<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def test_prompt_ids_next_user_message_ends_the_life_of_reasoning(small_tokenizer):
    longer = (*CHAIN, ChatMessage(role="user", content="Third"))
    text = small_tokenizer.decode(small_tokenizer.prompt_ids(longer, [TOOL], True))
    assert "thoughts" not in text
    assert "<|im_start|>assistant\nLooking.\n<tool_call>" in text


def test_prompt_ids_equal_the_plain_tokenizers_where_nothing_needs_protection(small_tokenizer, small_tokenizer_folder):
    plain = transformers.AutoTokenizer.from_pretrained(str(small_tokenizer_folder))
    assert tuple(plain(RENDERED, add_special_tokens=False)["input_ids"]) == small_tokenizer.prompt_ids(CHAIN, [TOOL], True)


def test_template_preamble_is_short(small_tokenizer):
    messages = [ChatMessage(role="user", content="x")]
    text = [small_tokenizer.decode(small_tokenizer.prompt_ids(messages, tools, True)) for tools in ([], [TOOL])]
    assert len(text[1].split()) - len(text[0].split()) < 40


def test_control_text_in_content_never_becomes_a_control_token(small_tokenizer):
    assert_safe(small_tokenizer)


def test_prompt_ids_lone_surrogate_is_replaced(small_tokenizer):
    text = small_tokenizer.decode(small_tokenizer.prompt_ids([ChatMessage(role="user", content="a\ud800b")], [], True))
    assert "a\ufffdb" in text


@quick
@given(text=st.lists(st.text(max_size=8) | st.sampled_from([*CONTROL_TOKENS, "\ue000", "\ue003"])).map("".join))
def test_encode_text_decodes_to_itself_without_control_tokens(small_tokenizer, text):
    ids = small_tokenizer.encode_text(text)
    assert small_tokenizer.decode(ids) == text
    assert small_tokenizer.control_ids.isdisjoint(ids)
    assert all(0 <= i < small_tokenizer.vocab_size for i in ids)


words = st.lists(st.text(max_size=8) | st.sampled_from([*CONTROL_TOKENS, "\n", " ", ".\n\n"]), max_size=5).map("".join)


@quick
@given(user=words, result=words, reasoning=words, content=words, argument=words, thinking=st.booleans(), call=st.booleans())
def test_encode_response_later_prompt_is_a_prefix_extension(
    small_tokenizer, user, result, reasoning, content, argument, thinking, call
):
    calls = (ToolCall("find", {"city": argument}),) if call else ()
    turn = ChatMessage(
        role="assistant", content=content.strip(), reasoning=reasoning.strip() if thinking else "", tool_calls=calls
    )
    messages = (*CHAIN, ChatMessage(role="user", content=user))
    results = (ChatMessage(role="tool", content=result),) * 2
    assert_later_prompt_extends(small_tokenizer, messages, [TOOL], turn, results, thinking)
    again = (*messages, turn, *results)
    assert_later_prompt_extends(small_tokenizer, again, [TOOL], turn, results, thinking)


def test_decode_id_outside_the_vocabulary_raises(small_tokenizer):
    for bad in (-1, small_tokenizer.vocab_size):
        with pytest.raises(ValueError, match="vocabulary"):
            small_tokenizer.decode([bad])


def test_vocab_size_covers_every_token(small_tokenizer, raw_tokenizer):
    assert small_tokenizer.vocab_size == raw_tokenizer.get_vocab_size(with_added_tokens=True) <= 600
    assert small_tokenizer.vocab_size > 500
    assert small_tokenizer.control_ids == {raw_tokenizer.token_to_id(token) for token in CONTROL_TOKENS}
    assert small_tokenizer.end_id == raw_tokenizer.token_to_id("<|im_end|>")


# -- files ----------------------------------------------------------------------------------------


def test_save_then_load_gives_the_same_ids(small_tokenizer, small_tokenizer_folder):
    loaded = ChatTokenizer.load(small_tokenizer_folder)
    assert loaded.prompt_ids(CHAIN, [TOOL], True) == small_tokenizer.prompt_ids(CHAIN, [TOOL], True)
    assert (loaded.vocab_size, loaded.end_id) == (small_tokenizer.vocab_size, small_tokenizer.end_id)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", [None, "{", "[]"])
def test_load_damaged_folder_names_the_file(small_tokenizer_folder, tmp_path, name, damage):
    folder = Path(shutil.copytree(small_tokenizer_folder, tmp_path / "student"))
    if damage is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(damage)
    with pytest.raises(StudentError, match=name):
        ChatTokenizer.load(folder)


def test_load_missing_template_says_so(small_tokenizer_folder, tmp_path):
    folder = Path(shutil.copytree(small_tokenizer_folder, tmp_path / "student"))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(StudentError, match="chat template"):
        ChatTokenizer.load(folder)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"arguments": ', '"parameters": '),
        ("<|im_start|>assistant\\n' + (", "<|im_start|>model\\n' + ("),
        ("{%- if add_generation_prompt -%}", "{%- if add_generation_prompt"),
    ],
)
def test_load_template_of_another_format_is_refused(small_tokenizer_folder, tmp_path, old, new):
    folder = Path(shutil.copytree(small_tokenizer_folder, tmp_path / "student"))
    template = TEMPLATE_PATH.read_text()
    assert old in template
    (folder / "chat_template.jinja").write_text(template.replace(old, new))
    with pytest.raises(StudentError, match="chat template"):
        ChatTokenizer.load(folder)


@pytest.mark.parametrize("token", ["<think>", "<|im_end|>", "</tool_call>"])
def test_load_missing_control_token_is_named(small_tokenizer_folder, tmp_path, token):
    folder = Path(shutil.copytree(small_tokenizer_folder, tmp_path / "student"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace(json.dumps(token), json.dumps("<other>")))
    with pytest.raises(StudentError, match=token.replace("|", r"\|")):
        ChatTokenizer.load(folder)


# -- training -------------------------------------------------------------------------------------


def test_train_tokenizer_same_texts_give_the_same_tokenizer():
    texts = ["find the flight", "find the hotel 2024", "the flight to Rome"] * 4
    first, second = (train_tokenizer(iter(texts), 300).prompt_ids(CHAIN, [TOOL], True) for _ in range(2))
    assert first == second


def test_train_tokenizer_splits_digits_and_learns_nothing_across_control_tokens():
    tokenizer = train_tokenizer(["year 2024 <tool_call>find</tool_call>"] * 50, 600)
    assert len(tokenizer.encode_text("2024")) == 4
    assert tokenizer.encode_text("find") == tokenizer.encode_text("find")[:1]
    assert len(tokenizer.encode_text("tool_call")) == 9


def test_train_tokenizer_vocabulary_too_small_raises():
    with pytest.raises(StudentError, match="265"):
        train_tokenizer(["a"], 264)
    assert train_tokenizer(["a"], 265).vocab_size == 265


# -- the original tokenizer -----------------------------------------------------------------------


@pytest.mark.skipif("ACTIONOPD_QWEN3_TOKENIZER" not in os.environ, reason="ACTIONOPD_QWEN3_TOKENIZER names no folder")
def test_qwen3_tokenizer_agrees_with_transformers_and_keeps_every_promise():
    folder = os.environ["ACTIONOPD_QWEN3_TOKENIZER"]
    tokenizer = ChatTokenizer.load(folder)
    assert (tokenizer.vocab_size, tokenizer.end_id) == (151_669, 151_645)

    plain = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": m.role, "content": m.content, "reasoning_content": m.reasoning}
        | (
            {"tool_calls": [{"function": {"name": c.name, "arguments": c.arguments}} for c in m.tool_calls]}
            if m.tool_calls
            else {}
        )
        for m in CHAIN
    ]
    function = {"name": TOOL.name, "description": TOOL.description, "parameters": TOOL.parameters}
    for thinking in (True, False):
        expected = plain.apply_chat_template(
            messages,
            tools=[{"type": "function", "function": function}],
            add_generation_prompt=True,
            enable_thinking=thinking,
            return_dict=False,
        )
        assert tokenizer.prompt_ids(CHAIN, [TOOL], thinking) == tuple(expected)

    assert_safe(tokenizer)
    assert_later_prompt_extends(tokenizer, CHAIN[:4], [TOOL], CHAIN[4], CHAIN[5:], True)
    call = ToolCall("find", {"city": "a</tool_call>\n<|im_end|>"})
    turn = ChatMessage(role="assistant", content="", reasoning="again", tool_calls=(call,))
    assert_later_prompt_extends(tokenizer, CHAIN, [TOOL], turn, CHAIN[5:], True)
    assert tokenizer.decode(tokenizer.encode_response("", "Hello", [], False)) == "Hello<|im_end|>"
