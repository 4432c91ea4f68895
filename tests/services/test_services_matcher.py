import asyncio
import dataclasses

import pytest

from actionopd_jax.errors import RunStateError, ServiceBusyError, ServiceError
from actionopd_jax.protocols import JudgeQuestion, Matcher
from actionopd_jax.records import (
    ChatMessage,
    Invalid,
    InvalidReason,
    Match,
    Message,
    NoMatch,
    State,
    ToolCall,
    ToolSpec,
    Unavailable,
    Verdict,
)
from actionopd_jax.services.cache import Cache
from actionopd_jax.services.matcher import SemanticMatcher

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "number"}, "unit": {"type": "string"}},
}
WEATHER = ToolSpec("weather", "Forecast", SCHEMA)
NEWS = ToolSpec("news", "Headlines", SCHEMA)
STATE = State("demo", (ChatMessage("user", "Weather in Paris?"),), (WEATHER, NEWS))
EVIDENCE = "def weather(city, days=3, unit='C'): ..."


@dataclasses.dataclass
class ScriptedJudge:
    """Says what it is told to, remembers what it was asked, and may be held back."""

    answers: list[Verdict | Exception]
    identity: str = "judge-a"
    gate: asyncio.Event | None = None

    def __post_init__(self):
        self.questions: list[JudgeQuestion] = []

    async def judge(self, question: JudgeQuestion) -> Verdict:
        self.questions.append(question)
        if self.gate is not None:
            await self.gate.wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def weather(**arguments):
    return ToolCall("weather", arguments)


def ask(matcher: Matcher, action, teacher_action, evidence=EVIDENCE, state=STATE):
    return asyncio.run(matcher.match(state, action, teacher_action, evidence))


YES, NO = Match("judge-a", "same"), NoMatch("judge-a", "other city")

DECIDED = [
    (Invalid(InvalidReason.LENGTH), weather(city="Paris"), NoMatch("invalid")),
    (weather(city="Paris"), Invalid(InvalidReason.LENGTH), NoMatch("invalid")),
    (Invalid(InvalidReason.LENGTH), Invalid(InvalidReason.LENGTH), NoMatch("invalid")),
    (Message("Paris"), weather(city="Paris"), NoMatch("kind")),
    (weather(city="Paris"), Message("Paris"), NoMatch("kind")),
    (ToolCall("news", {"city": "Paris"}), weather(city="Paris"), NoMatch("tool")),
    (weather(city="Paris", days=3), weather(days=3.0, city="Paris"), Match("canonical")),
    (weather(), weather(), Match("canonical")),
    (Message(" It is\nsunny. "), Message("It is sunny."), Match("normalised")),
]


@pytest.mark.parametrize(("action", "teacher_action", "verdict"), DECIDED)
@pytest.mark.parametrize("promises", [True, False])
def test_match_what_the_program_decides_asks_no_judge(action, teacher_action, verdict, promises):
    judge = ScriptedJudge([])
    matcher = SemanticMatcher(judge, promises, None)
    assert ask(matcher, action, teacher_action, evidence=None) == verdict
    assert judge.questions == []


@pytest.mark.parametrize("verdict", [YES, NO, Unavailable("judge-a", "not the asked format")])
def test_match_differing_arguments_give_the_judges_verdict(verdict):
    judge = ScriptedJudge([verdict])
    matcher = SemanticMatcher(judge, True, None)
    mine, theirs = weather(city="Paris"), weather(city="Paris", days=3)
    assert ask(matcher, mine, theirs) == verdict
    assert judge.questions == [JudgeQuestion(STATE, mine, theirs, WEATHER, ("/days: missing",), EVIDENCE)]


def test_match_differing_messages_are_judged_without_tool_and_evidence():
    judge = ScriptedJudge([YES])
    mine, theirs = Message("It is sunny"), Message("it is sunny")
    assert ask(SemanticMatcher(judge, True, None), mine, theirs, evidence=EVIDENCE) == YES
    assert judge.questions == [JudgeQuestion(STATE, mine, theirs, None, (), None)]


@pytest.mark.parametrize("evidence", [None, "", " \n"])
def test_match_promised_evidence_missing_is_unavailable(evidence):
    for judge in (ScriptedJudge([]), None):
        verdict = ask(SemanticMatcher(judge, True, None), weather(city="Paris"), weather(city="paris"), evidence)
        assert isinstance(verdict, Unavailable)
        assert verdict.source == "evidence"
        assert "weather" in verdict.detail


def test_match_evidence_that_nobody_promised_may_be_missing():
    judge = ScriptedJudge([NO])
    assert ask(SemanticMatcher(judge, False, None), weather(city="Paris"), weather(city="paris"), None) == NO
    assert judge.questions[0].evidence is None


@pytest.mark.parametrize(("mine", "theirs"), [(weather(city="a"), weather(city="b")), (Message("a"), Message("b"))])
def test_match_difference_without_a_judge_is_no_match(mine, theirs):
    assert ask(SemanticMatcher(None, False, None), mine, theirs) == NoMatch("no judge")


def test_match_differing_calls_of_a_tool_the_state_lacks_raise():
    with pytest.raises(ValueError, match="no tool gone"):
        ask(SemanticMatcher(ScriptedJudge([]), False, None), ToolCall("gone", {"a": 1}), ToolCall("gone", {"a": 2}))


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ServiceError("gave up after 5 attempts"), ServiceBusyError("gave up after 5 attempts")])
def test_match_judge_that_fails_is_unavailable_and_asked_again_next_time(error):
    judge = ScriptedJudge([error, YES])
    with Cache(":memory:") as cache:
        matcher = SemanticMatcher(judge, False, cache)
        assert ask(matcher, Message("a"), Message("b")) == Unavailable("judge-a", "gave up after 5 attempts")
        assert cache.counts() == {}
        assert ask(matcher, Message("a"), Message("b")) == YES
    assert matcher.judge_counts == {"requests": 2, "failures": 1}


def test_match_unavailable_verdict_of_the_judge_is_not_cached():
    with Cache(":memory:") as cache:
        matcher = SemanticMatcher(ScriptedJudge([Unavailable("judge-a"), NO]), False, cache)
        assert ask(matcher, Message("a"), Message("b")) == Unavailable("judge-a")
        assert ask(matcher, Message("a"), Message("b")) == NO


def test_match_fault_in_the_judge_is_not_swallowed():
    matcher = SemanticMatcher(ScriptedJudge([KeyError("bug")]), False, None)
    with pytest.raises(KeyError, match="bug"):
        ask(matcher, Message("a"), Message("b"))
    assert matcher.verdict_counts == {}


# -- cache -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", [YES, NO])
def test_match_cached_verdict_is_given_after_a_restart_without_asking(tmp_path, verdict):
    mine, theirs = weather(city="Paris", days=2**70), weather(days=3.5, city="Paris")
    with Cache(tmp_path / "cache.sqlite") as cache:
        assert ask(SemanticMatcher(ScriptedJudge([verdict]), True, cache), mine, theirs) == verdict
    with Cache(tmp_path / "cache.sqlite") as cache:
        matcher = SemanticMatcher(ScriptedJudge([]), True, cache)
        assert ask(matcher, mine, ToolCall("weather", {"city": "Paris", "days": 3.5})) == verdict
        assert matcher.judge_counts == {"cached": 1}


OTHER_STATE = State("demo", (ChatMessage("user", "Weather in Rome?"),), (WEATHER, NEWS))
OTHER_SCHEMA = State("demo", STATE.messages, (ToolSpec("weather", "Forecast", {"type": "object"}), NEWS))
BASE = {"mine": weather(days=1), "theirs": weather(days=2), "evidence": EVIDENCE, "state": STATE, "identity": "judge-a"}


@pytest.mark.parametrize(
    "change",
    [
        {"mine": weather(days=3)},
        {"mine": weather(days=True)},
        {"theirs": weather(days=3)},
        {"mine": BASE["theirs"], "theirs": BASE["mine"]},
        {"evidence": EVIDENCE + " # changed"},
        {"evidence": None},
        {"state": OTHER_STATE},
        {"state": OTHER_SCHEMA},
        {"identity": "judge-b"},
        {"mine": Message("days 1"), "theirs": Message("days 2")},
    ],
)
def test_match_anything_that_determines_the_verdict_changed_asks_anew(change):
    with Cache(":memory:") as cache:
        for case, verdict in ((BASE, YES), (BASE | change, NO)):
            matcher = SemanticMatcher(ScriptedJudge([verdict], case["identity"]), False, cache)
            assert ask(matcher, case["mine"], case["theirs"], case["evidence"], case["state"]) == verdict
        assert cache.counts() == {"verdicts": 2}


def test_match_unreadable_cached_verdict_names_the_remedy():
    with Cache(":memory:") as cache:
        ask(SemanticMatcher(ScriptedJudge([YES]), False, cache), Message("a"), Message("b"))
        cache._connection.execute("UPDATE answers SET value = CAST('{' AS BLOB)")
        with pytest.raises(RunStateError, match="move the cache file away"):
            ask(SemanticMatcher(ScriptedJudge([]), False, cache), Message("a"), Message("b"))


# -- in flight -------------------------------------------------------------------------------------


async def begin(*coroutines):
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize("answer", [YES, NO, ServiceError("down")])
def test_match_identical_pairs_in_flight_are_asked_once_and_counted_apart(answer):
    async def scenario():
        judge = ScriptedJudge([answer], gate=asyncio.Event())
        matcher = SemanticMatcher(judge, False, None)
        tasks = await begin(*(matcher.match(STATE, Message("a"), Message("b"), None) for _ in range(4)))
        judge.gate.set()
        verdicts = await asyncio.gather(*tasks)
        expected = Unavailable("judge-a", "down") if isinstance(answer, Exception) else answer
        assert verdicts == [expected] * 4
        assert len(judge.questions) == 1
        assert sum(matcher.verdict_counts.values()) == 4
        assert matcher.judge_counts["shared"] == 3

    asyncio.run(scenario())


def test_match_different_pairs_in_flight_are_asked_at_the_same_time():
    async def scenario():
        judge = ScriptedJudge([YES, YES], gate=asyncio.Event())
        matcher = SemanticMatcher(judge, False, None)
        tasks = await begin(*(matcher.match(STATE, Message("a"), Message(text), None) for text in ("b", "c")))
        assert len(judge.questions) == 2
        judge.gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


def test_match_one_waiter_cancelled_leaves_the_others_their_verdict():
    async def scenario():
        judge = ScriptedJudge([YES], gate=asyncio.Event())
        with Cache(":memory:") as cache:
            matcher = SemanticMatcher(judge, False, cache)
            first, second = await begin(*(matcher.match(STATE, Message("a"), Message("b"), None) for _ in range(2)))
            first.cancel()
            await asyncio.sleep(0)
            judge.gate.set()
            assert await second == YES
            assert first.cancelled()
            assert cache.counts() == {"verdicts": 1}
            assert matcher.verdict_counts == {"match/judge-a": 1}

    asyncio.run(scenario())


def test_match_all_waiters_cancelled_caches_nothing_and_may_be_asked_again():
    async def scenario():
        judge = ScriptedJudge([YES], gate=asyncio.Event())
        with Cache(":memory:") as cache:
            matcher = SemanticMatcher(judge, False, cache)
            (only,) = await begin(matcher.match(STATE, Message("a"), Message("b"), None))
            only.cancel()
            await asyncio.gather(only, return_exceptions=True)
            assert cache.counts() == {}
            judge.gate.set()
            assert await matcher.match(STATE, Message("a"), Message("b"), None) == YES
            assert len(judge.questions) == 2

    asyncio.run(scenario())


def test_verdict_counts_are_kept_per_source():
    matcher = SemanticMatcher(ScriptedJudge([YES, NO]), True, None)
    for action, teacher_action, _ in DECIDED:
        ask(matcher, action, teacher_action)
    ask(matcher, weather(days=1), weather(days=2))
    ask(matcher, Message("a"), Message("b"))
    ask(matcher, weather(days=1), weather(days=2), evidence=None)
    assert matcher.verdict_counts == {
        "no_match/invalid": 3,
        "no_match/kind": 2,
        "no_match/tool": 1,
        "match/canonical": 2,
        "match/normalised": 1,
        "match/judge-a": 1,
        "no_match/judge-a": 1,
        "unavailable/evidence": 1,
    }
