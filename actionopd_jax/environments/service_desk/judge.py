"""The embedded judge: decides the pairs that equality cannot, by acts and by the tools' source."""

import ast

from actionopd_jax.environments.service_desk import acts
from actionopd_jax.protocols import JudgeQuestion
from actionopd_jax.records import JsonObject, Match, Message, NoMatch, ToolCall, Verdict, encode

VERSION = 1
_SOURCE = "service_desk.judge"
_METHODS = {"strip", "lower", "upper", "title", "casefold", "split"}
_MISSING = object()


class ActJudge:
    """Matches messages by act, facts and negation, and calls by what the tool's source makes of their arguments."""

    identity = f"{_SOURCE}/{VERSION}"

    async def judge(self, question: JudgeQuestion) -> Verdict:
        return self.decide(question)

    def decide(self, question: JudgeQuestion) -> Verdict:
        """`NoMatch` whenever the act is not recognised or the source does not justify a difference."""
        action, other = question.action, question.teacher_action
        if isinstance(action, Message) and isinstance(other, Message):
            return _compare_messages(action.text, other.text)
        if isinstance(action, ToolCall) and isinstance(other, ToolCall) and action.name == other.name:
            return _compare_calls(action, other, question.evidence)
        return NoMatch(_SOURCE, "different kinds of action")


def _compare_messages(text: str, other: str) -> Verdict:
    one, two = acts.read(text), acts.read(other)
    if "other" in (one.kind, two.kind):
        return NoMatch(_SOURCE, "act not recognised")
    if one == two:
        return Match(_SOURCE, one.kind)
    return NoMatch(_SOURCE, f"{_describe(one)} is not {_describe(two)}")


def _describe(act: acts.Act) -> str:
    return " ".join([act.kind, *sorted(act.topics), *sorted(act.facts), *(["negated"] if act.negated else [])])


def _compare_calls(action: ToolCall, other: ToolCall, evidence: str | None) -> Verdict:
    if evidence is None:
        return NoMatch(_SOURCE, "no source to justify the difference")
    try:
        function = ast.parse(evidence).body[0]
    except (SyntaxError, IndexError):
        return NoMatch(_SOURCE, "the source is not a function")
    if not isinstance(function, ast.FunctionDef):
        return NoMatch(_SOURCE, "the source is not a function")
    one, two = (_effective(function, call.arguments) for call in (action, other))
    different = sorted(
        name for name in one.keys() | two.keys() if not _same(one.get(name, _MISSING), two.get(name, _MISSING))
    )
    if different:
        return NoMatch(_SOURCE, f"the source keeps apart: {', '.join(different)}")
    return Match(_SOURCE, "the source makes the arguments equal")


def _same(one: object, two: object) -> bool:
    if one is _MISSING or two is _MISSING:
        return one is two
    if isinstance(one, float) and one.is_integer():
        one = int(one)
    if isinstance(two, float) and two.is_integer():
        two = int(two)
    return encode(one) == encode(two)


def _effective(function: ast.FunctionDef, arguments: JsonObject) -> JsonObject:
    """The arguments after the function's defaults and its leading normalising assignments."""
    names = [argument.arg for argument in function.args.args]
    defaults = function.args.defaults
    values: JsonObject = {}
    for name, node in zip(names[len(names) - len(defaults) :], defaults, strict=True):
        if isinstance(node, ast.Constant):
            values[name] = node.value
    values |= arguments
    for statement in function.body:
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            break
        target = statement.targets[0]
        if not isinstance(target, ast.Name) or target.id not in values:
            break
        normalised = _evaluate(statement.value, target.id, values[target.id])
        if normalised is _MISSING:
            break
        values[target.id] = normalised
    return values


def _evaluate(node: ast.expr, name: str, value: object) -> object:
    """`name.strip().lower()`, `" ".join(name.split())` and the like, on a string; `_MISSING` for anything else."""
    if isinstance(node, ast.Name) and node.id == name:
        return value
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.keywords:
        return _MISSING
    method, owner = node.func.attr, node.func.value
    if method == "join" and isinstance(owner, ast.Constant) and isinstance(owner.value, str) and len(node.args) == 1:
        parts = _evaluate(node.args[0], name, value)
        return owner.value.join(parts) if isinstance(parts, list) else _MISSING
    inner = _evaluate(owner, name, value)
    if method in _METHODS and not node.args and isinstance(inner, str):
        return getattr(inner, method)()
    return _MISSING
