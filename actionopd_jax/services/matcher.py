"""The matcher: do a student's action and a teacher's action mean the same? (method: "Matching")

What the program can decide it decides; the rest goes to a judging model. Each pair is a judgment of
its own, no transitivity is inferred, and reasoning is never compared.
"""

from collections import Counter

import msgspec

from actionopd_jax.errors import RunStateError, ServiceError
from actionopd_jax.protocols import Judge, JudgeQuestion
from actionopd_jax.records import (
    Action,
    Invalid,
    Match,
    Message,
    NoMatch,
    State,
    ToolCall,
    ToolSpec,
    Unavailable,
    ValidAction,
    Verdict,
    digest,
    encode,
)
from actionopd_jax.services.cache import Cache
from actionopd_jax.services.inflight import InFlight
from actionopd_jax.services.matching import canonical, differing_paths, normalise_text

NAMESPACE = "verdicts"
_PROTOCOL = "match-1"  # part of every key: raise it when the question put to the judge changes meaning

_decoder = msgspec.json.Decoder(Verdict)


class SemanticMatcher:
    """Implements `protocols.Matcher` for the tasks of one suite.

    Verdicts name their source: "invalid", "kind" (call against message), "tool" (other tool name),
    "canonical", "normalised", "evidence" (promised but missing), "no judge" (a difference that only
    a model could judge, and there is none: no match), or the judge's identity.

    A judge that fails gives `Unavailable`, never no match. The judge's verdicts are cached, under
    everything that determines them; `Unavailable` is not, so that the next run asks again. Identical
    questions that are in flight at once are asked once.

    Args:
        judge: the matcher model, or None.
        promises_evidence: the suite says that every tool's source can be had; argument differences
            are then never judged without it.
        cache: where verdicts are kept; None asks anew each time.

    Attributes:
        verdict_counts: verdicts given, by "<tag>/<source>" (e.g. "match/canonical").
        judge_counts: pairs that needed the judge: "requests", "cached", "shared" (joined a running
            request), "failures".
    """

    def __init__(self, judge: Judge | None, promises_evidence: bool, cache: Cache | None) -> None:
        self._judge = judge
        self._promises_evidence = promises_evidence
        self._cache = cache
        self._in_flight: InFlight[Verdict] = InFlight()
        self.verdict_counts: Counter[str] = Counter()
        self.judge_counts: Counter[str] = Counter()

    async def match(self, state: State, action: Action, teacher_action: ValidAction, evidence: str | None) -> Verdict:
        """Judges one (candidate, teacher sample) pair at a state.

        Args:
            state: the public context, all that the judge may see besides the evidence.
            action: the candidate's action.
            teacher_action: the teacher's action.
            evidence: implementation source of the called tool; not used for messages.

        Raises:
            ValueError: two differing calls of a tool that the state does not have.
        """
        verdict = await self._verdict(state, action, teacher_action, evidence)
        self.verdict_counts[f"{verdict.__struct_config__.tag}/{verdict.source}"] += 1
        return verdict

    async def _verdict(self, state: State, action: Action, teacher_action: ValidAction, evidence: str | None) -> Verdict:
        match action, teacher_action:
            case (Invalid(), _) | (_, Invalid()):
                return NoMatch("invalid")
            case ToolCall(), ToolCall():
                return await self._calls(state, action, teacher_action, evidence)
            case Message(), Message():
                if normalise_text(action.text) == normalise_text(teacher_action.text):
                    return Match("normalised")
                return await self._ask(JudgeQuestion(state, action, teacher_action, None, (), None))
            case _:
                return NoMatch("kind")

    async def _calls(self, state: State, call: ToolCall, teacher_call: ToolCall, evidence: str | None) -> Verdict:
        if call.name != teacher_call.name:
            return NoMatch("tool")
        if canonical(call.arguments) == canonical(teacher_call.arguments):
            return Match("canonical")
        if self._promises_evidence and not (evidence and evidence.strip()):
            return Unavailable("evidence", f"no source of tool {call.name}")
        paths = differing_paths(call.arguments, teacher_call.arguments)
        return await self._ask(JudgeQuestion(state, call, teacher_call, _tool(state, call.name), paths, evidence))

    async def _ask(self, question: JudgeQuestion) -> Verdict:
        judge = self._judge
        if judge is None:
            return NoMatch("no judge")
        key = _key(judge, question)
        if self._cache is not None and (stored := self._cache.get(NAMESPACE, key)) is not None:
            self.judge_counts["cached"] += 1
            return _decode(stored)
        self.judge_counts["shared" if key in self._in_flight else "requests"] += 1
        return await self._in_flight.share(key, lambda: self._request(judge, question, key))

    async def _request(self, judge: Judge, question: JudgeQuestion, key: str) -> Verdict:
        try:
            verdict = await judge.judge(question)
        except ServiceError as error:
            verdict = Unavailable(judge.identity, str(error))
        if isinstance(verdict, Unavailable):
            self.judge_counts["failures"] += 1
        elif self._cache is not None:
            return _decode(self._cache.put(NAMESPACE, key, encode(verdict)))
        return verdict


def _key(judge: Judge, question: JudgeQuestion) -> str:
    """Everything that determines a verdict; the tool and the paths follow from what is in it."""
    return digest(
        [_PROTOCOL, judge.identity, question.state.key, question.action, question.teacher_action, question.evidence]
    )


def _tool(state: State, name: str) -> ToolSpec:
    for tool in state.tools:
        if tool.name == name:
            return tool
    raise ValueError(f"the state has no tool {name}, yet an action calls it")


def _decode(stored: bytes) -> Verdict:
    try:
        return _decoder.decode(stored)
    except msgspec.DecodeError as error:
        raise RunStateError(f"the cache holds an unreadable verdict ({error}); move the cache file away") from error
