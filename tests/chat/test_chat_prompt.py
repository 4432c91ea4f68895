import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actionopd_jax.chat.prompt import ContextOverflow, PromptBuilder, removable_exchanges
from actionopd_jax.records import ChatMessage, State, ToolCall, ToolSpec

TOOL = ToolSpec("find", "Find it", {"type": "object", "properties": {"city": {"type": "string"}}})


def conversation(shape: str) -> tuple[ChatMessage, ...]:
    """One message per letter: s system, u user, a call, t tool result, m assistant message; each content is unique."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "m": "assistant"}
    return tuple(
        ChatMessage(
            role=roles[letter],  # type: ignore[arg-type]
            content=f"text {i}",
            reasoning=f"because {i}" if letter in "am" else "",
            tool_calls=(ToolCall("find", {"city": f"c{i}"}),) if letter == "a" else (),
        )
        for i, letter in enumerate(shape)
    )


def state_of(shape: str) -> State:
    return State(environment="e", messages=conversation(shape), tools=(TOOL,))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("su", []),
        ("suat", []),
        ("suatat", [(2, 3)]),
        ("suattatat", [(2, 3, 4), (5, 6)]),
        ("sumu", []),  # the answer to the task's first content stays with it
        ("sumumu", [(3, 4)]),
        ("sumuatmu", [(4, 5), (3, 6)]),  # a request outlives the calls that serve it
        ("sumuatmumu", [(4, 5), (3, 6), (7, 8)]),
        ("suatmuatat", [(2, 3), (6, 7)]),  # the request under way stays
        ("smumu", [(1,)]),  # a greeting
        ("suaua", []),
        ("suauaua", [(3, 4)]),
        ("susmumu", [(4, 5)]),
        ("sumsuatmu", [(5, 6), (4, 7)]),
        ("tuat", []),
        ("suumuumu", [(4, 5, 6)]),
        ("", []),
    ],
)
def test_removable_exchanges_are_whole_and_oldest_first(shape, expected):
    assert removable_exchanges(conversation(shape)) == expected


def test_build_prompt_that_fits_keeps_the_state(small_tokenizer):
    state = state_of("suatmuat")
    prompt = PromptBuilder(small_tokenizer, 10_000, True).build(state)
    assert prompt.state is state
    assert prompt.ids == small_tokenizer.prompt_ids(state.messages, state.tools, True)


@pytest.mark.parametrize("thinking", [True, False])
def test_build_too_long_drops_the_fewest_oldest_exchanges(small_tokenizer, thinking):
    state = state_of("suatatmuatatmuatat")
    order = removable_exchanges(state.messages)
    kept = [
        tuple(m for i, m in enumerate(state.messages) if not any(i in exchange for exchange in order[:n]))
        for n in range(len(order) + 1)
    ]
    lengths = [len(small_tokenizer.prompt_ids(messages, state.tools, thinking)) for messages in kept]
    assert lengths == sorted(lengths, reverse=True)
    for n, length in enumerate(lengths):
        prompt = PromptBuilder(small_tokenizer, length, thinking).build(state)
        assert prompt.state == msgspec.structs.replace(state, messages=kept[n])
        assert len(prompt.ids) == length
    with pytest.raises(ContextOverflow, match=f"{lengths[-1]} tokens.*{lengths[-1] - 1}"):
        PromptBuilder(small_tokenizer, lengths[-1] - 1, thinking).build(state)
    assert state == state_of("suatatmuatatmuatat")


def test_build_retained_state_has_a_key_of_its_own(small_tokenizer):
    state = state_of("suatatat")
    whole = len(small_tokenizer.prompt_ids(state.messages, state.tools, True))
    assert state.key  # computed before, so that a copied cache would show
    retained = PromptBuilder(small_tokenizer, whole - 1, True).build(state).state
    assert retained.key == State(environment="e", messages=retained.messages, tools=(TOOL,)).key != state.key


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=st.text(alphabet="suatm", max_size=12), budget=st.integers(80, 400))
def test_build_any_history_fits_or_overflows_and_keeps_what_is_protected(small_tokenizer, shape, budget):
    state = state_of("su" + shape)
    try:
        prompt = PromptBuilder(small_tokenizer, budget, True).build(state)
    except ContextOverflow:
        order = {place for exchange in removable_exchanges(state.messages) for place in exchange}
        least = [message for place, message in enumerate(state.messages) if place not in order]
        assert len(small_tokenizer.prompt_ids(least, state.tools, True)) > budget
        return
    assert len(prompt.ids) <= budget
    kept = prompt.state.messages
    assert [m for m in kept if m.role == "system"] == [m for m in state.messages if m.role == "system"]
    assert state.messages[1] in kept
    assert kept[-1] == state.messages[-1]
    assert prompt.state.tools == state.tools
    places = [state.messages.index(m) for m in kept]
    assert places == sorted(places)
    for place, message in enumerate(state.messages):  # a tool result never survives its call, nor the reverse
        if message.role == "tool" and state.messages[place - 1].role in {"assistant", "tool"}:
            assert (message in kept) == (state.messages[place - 1] in kept)
