import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import actionopd_jax
from actionopd_jax.errors import RunStateError, ServiceError
from actionopd_jax.protocols import ChatRequest
from actionopd_jax.records import ChatMessage, ChatReply, Message, RawToolCall, State, Task, ToolCall, ToolSpec
from actionopd_jax.services.cache import Cache
from actionopd_jax.services.teacher import MultisetTeacher, TeacherCounts

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
STATE = State("demo", (ChatMessage("user", "Weather in Paris?"),), (ToolSpec("weather", "Forecast", SCHEMA),))
OTHER_STATE = State("demo", (ChatMessage("user", "Weather in Rome?"),), STATE.tools)
TASK, OTHER_TASK = Task("demo", "train", "1"), Task("demo", "train", "2")

PARIS = ChatReply("", (RawToolCall("weather", '{"city": "Paris"}'),), "The user wants Paris.")
ROME = ChatReply("", (RawToolCall("weather", '{"city": "Rome"}'),))
HELLO = ChatReply("Hello")
INVALID = [
    ChatReply("", (RawToolCall("weather", '{"city": 1}'),)),
    ChatReply("", (RawToolCall("unknown", "{}"),)),
    ChatReply("", (RawToolCall("weather", "{'city': 'Paris'}"),)),
    ChatReply(""),
]
BAD = INVALID[0]


@dataclasses.dataclass
class ScriptedModel:
    """Answers by draw; remembers its requests; measures how many run at once."""

    answer: Callable[[tuple[int, int]], ChatReply | Exception]
    identity: str = "teacher-a"
    depends_on_task: bool = False
    turns: int = 1  # of the event loop, per answer

    def __post_init__(self):
        self.requests: list[ChatRequest] = []
        self.running = self.most = 0

    @property
    def draws(self):
        return sorted(request.draw for request in self.requests)

    async def complete(self, request: ChatRequest) -> ChatReply:
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            # Later draws answer sooner: order must not come from arrival.
            for _ in range(self.turns * (10 - request.draw[0])):
                await asyncio.sleep(0)
        finally:
            self.running -= 1
        answer = self.answer(request.draw)
        if isinstance(answer, Exception):
            raise answer
        return answer


def script(table: dict) -> Callable:
    return lambda draw: table[draw]


def sample(teacher: MultisetTeacher, k=3, state=STATE, task=TASK):
    return asyncio.run(teacher.sample(state, task, k))


def cities(samples):
    return [s.action.arguments["city"] if isinstance(s.action, ToolCall) else s.action.text for s in samples]


def test_sample_valid_replies_keep_order_and_multiplicity():
    model = ScriptedModel(script({(0, 0): PARIS, (1, 0): HELLO, (2, 0): PARIS}))
    teacher = MultisetTeacher(model, 2, 8, None)
    samples = sample(teacher)
    assert [s.action for s in samples] == [ToolCall("weather", {"city": "Paris"}), Message("Hello"), samples[0].action]
    assert [s.attempts for s in samples] == [1, 1, 1]
    assert [s.reply for s in samples] == [PARIS, HELLO, PARIS]
    assert teacher.counts == TeacherCounts(requests=3)
    assert all(request.state is STATE and request.task == TASK for request in model.requests)


@pytest.mark.parametrize("invalid", INVALID)
def test_sample_invalid_reply_is_asked_again_and_the_valid_ones_are_not(invalid):
    table = {(0, 0): PARIS, (1, 0): invalid, (1, 1): invalid, (1, 2): ROME, (2, 0): invalid, (2, 1): HELLO}
    model = ScriptedModel(script(table))
    teacher = MultisetTeacher(model, 2, 8, None)
    samples = sample(teacher)
    assert cities(samples) == ["Paris", "Rome", "Hello"]
    assert [s.attempts for s in samples] == [1, 3, 2]
    assert model.draws == sorted(table)
    assert teacher.counts == TeacherCounts(requests=6, retries=3, invalid=3)


def test_sample_draw_that_stays_invalid_is_missing_from_the_multiset():
    model = ScriptedModel(lambda draw: BAD if draw[0] == 1 else ROME)
    teacher = MultisetTeacher(model, 2, 8, None)
    assert cities(sample(teacher)) == ["Rome", "Rome"]
    assert teacher.counts == TeacherCounts(requests=5, retries=2, invalid=3, missing=1)


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_sample_nothing_valid_gives_the_empty_multiset_after_the_retries(retries):
    model = ScriptedModel(lambda _: BAD)
    assert list(sample(MultisetTeacher(model, retries, 8, None))) == []
    assert model.draws == [(k, attempt) for k in range(3) for attempt in range(retries + 1)]


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_sample_requests_in_flight_stay_within_the_limit(concurrency):
    async def scenario():
        model = ScriptedModel(lambda draw: PARIS, turns=3)
        teacher = MultisetTeacher(model, 0, concurrency, None)
        await asyncio.gather(*(teacher.sample(state, TASK, 4) for state in (STATE, OTHER_STATE)))
        assert (model.most, len(model.requests)) == (concurrency, 8)

    asyncio.run(scenario())


def test_sample_limit_serves_one_event_loop_after_another():
    teacher = MultisetTeacher(ScriptedModel(lambda _: PARIS), 0, 1, None)
    for _ in range(2):  # contended in both loops
        assert len(sample(teacher)) == 3


@pytest.mark.parametrize(("retries", "concurrency"), [(-1, 1), (0, 0)])
def test_teacher_bad_numbers_are_refused(retries, concurrency):
    with pytest.raises(ValueError, match="must"):
        MultisetTeacher(ScriptedModel(lambda _: PARIS), retries, concurrency, None)


# -- cache -----------------------------------------------------------------------------------------

FLAKY = {(0, 0): BAD, (0, 1): PARIS, (1, 0): BAD, (1, 1): BAD, (1, 2): BAD, (2, 0): ROME}


def test_sample_after_a_restart_replays_everything_without_a_request(tmp_path):
    with Cache(tmp_path / "cache.sqlite") as cache:
        first = sample(MultisetTeacher(ScriptedModel(script(FLAKY)), 2, 8, cache))
        assert cache.counts() == {"teacher": 6}
    with Cache(tmp_path / "cache.sqlite") as cache:
        model = ScriptedModel(script({}))
        teacher = MultisetTeacher(model, 2, 8, cache)
        assert sample(teacher) == first
        assert model.requests == []
        assert teacher.counts == TeacherCounts(cached=6, retries=3, invalid=4, missing=1)


def test_sample_after_a_failure_asks_only_what_was_not_answered():
    with Cache(":memory:") as cache:
        failing = FLAKY | {(1, 1): ServiceError("teacher is down")}
        with pytest.raises(ServiceError, match="teacher is down"):
            sample(MultisetTeacher(ScriptedModel(script(failing)), 2, 8, cache))
        model = ScriptedModel(script(FLAKY))
        assert cities(sample(MultisetTeacher(model, 2, 8, cache))) == ["Paris", "Rome"]
        assert model.draws == [(1, 1), (1, 2)]


def test_sample_larger_k_asks_the_further_draws_alone():
    with Cache(":memory:") as cache:
        for k, draws in ((2, [(0, 0), (1, 0)]), (4, [(2, 0), (3, 0)]), (3, [])):
            model = ScriptedModel(lambda _: PARIS)
            assert len(sample(MultisetTeacher(model, 2, 8, cache), k)) == k
            assert model.draws == draws


@pytest.mark.parametrize(
    ("depends_on_task", "state", "task", "identity", "asked"),
    [
        (False, STATE, OTHER_TASK, "teacher-a", 0),
        (True, STATE, TASK, "teacher-a", 0),
        (True, STATE, OTHER_TASK, "teacher-a", 3),
        (False, OTHER_STATE, TASK, "teacher-a", 3),
        (False, STATE, TASK, "teacher-b", 3),
    ],
)
def test_sample_replies_are_shared_only_where_nothing_that_matters_differs(depends_on_task, state, task, identity, asked):
    with Cache(":memory:") as cache:
        sample(MultisetTeacher(ScriptedModel(lambda _: PARIS, "teacher-a", depends_on_task), 2, 8, cache))
        model = ScriptedModel(lambda _: ROME, identity, depends_on_task)
        samples = sample(MultisetTeacher(model, 2, 8, cache), 3, state, task)
        assert len(model.requests) == asked
        assert cities(samples) == ["Rome" if asked else "Paris"] * 3


def test_sample_cleared_namespace_asks_again_and_leaves_other_teachers_alone():
    with Cache(":memory:") as cache:
        for namespace in ("self", "teacher"):
            sample(MultisetTeacher(ScriptedModel(lambda _: PARIS), 2, 8, cache, namespace))
        cache.clear("self")
        for namespace, asked in (("self", 3), ("teacher", 0)):
            model = ScriptedModel(lambda _: PARIS)
            sample(MultisetTeacher(model, 2, 8, cache, namespace))
            assert len(model.requests) == asked


def test_sample_equal_states_at_once_are_asked_once_and_answered_alike():
    async def scenario():
        numbers = iter(range(100))
        model = ScriptedModel(lambda _: ChatReply(f"answer {next(numbers)}"))
        teacher = MultisetTeacher(model, 2, 8, None)
        multisets = await asyncio.gather(*(teacher.sample(STATE, TASK, 3) for _ in range(3)))
        assert multisets[0] == multisets[1] == multisets[2]
        assert len(set(cities(multisets[0]))) == 3
        assert teacher.counts == TeacherCounts(requests=3, shared=6)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "broken",
    [
        ChatReply("bad \ud800 text"),
        ChatReply("Hello", (), "bad \ud800 reasoning"),
        ChatReply("", (PARIS.tool_calls[0], RawToolCall("weather", "\ud800"))),
    ],
)
def test_sample_reply_with_a_lone_surrogate_is_kept_and_invalid(broken):
    with Cache(":memory:") as cache:
        sample(MultisetTeacher(ScriptedModel(script({(0, 0): broken, (0, 1): PARIS})), 2, 8, cache), 1)
        assert cities(sample(MultisetTeacher(ScriptedModel(script({})), 2, 8, cache), 1)) == ["Paris"]


def test_sample_unreadable_cached_reply_names_the_remedy():
    with Cache(":memory:") as cache:
        sample(MultisetTeacher(ScriptedModel(lambda _: PARIS), 2, 8, cache))
        for value in ("{", '{"unknown": 1}'):
            cache._connection.execute("UPDATE answers SET value = CAST(? AS BLOB)", (value,))
            with pytest.raises(RunStateError, match="move the cache file away"):
                sample(MultisetTeacher(ScriptedModel(script({})), 2, 8, cache))


# -- failures and cancellation ---------------------------------------------------------------------


def test_sample_service_failure_lets_the_other_draws_finish_first():
    model = ScriptedModel(lambda draw: ServiceError(f"draw {draw[0]} failed") if draw[0] != 1 else PARIS)
    with Cache(":memory:") as cache:
        with pytest.raises(ServiceError, match="draw 0 failed"):  # the first draw, though the last to fail
            sample(MultisetTeacher(model, 2, 8, cache))
        assert cache.counts() == {"teacher": 1}


def test_sample_cancelled_stops_its_requests_and_frees_the_limit():
    async def scenario():
        model = ScriptedModel(lambda _: PARIS, turns=1000)
        with Cache(":memory:") as cache:
            teacher = MultisetTeacher(model, 2, 2, cache)
            task = asyncio.create_task(teacher.sample(STATE, TASK, 4))
            for _ in range(5):
                await asyncio.sleep(0)
            assert model.running == 2
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(5):
                await asyncio.sleep(0)
            assert (model.running, cache.counts()) == (0, {})
            model.turns = 1
            assert len(await teacher.sample(STATE, TASK, 4)) == 4

    asyncio.run(scenario())


KILLED = """
import asyncio, json, sys
from actionopd_jax.records import ChatMessage, ChatReply, State, Task
from actionopd_jax.services.cache import Cache
from actionopd_jax.services.teacher import MultisetTeacher

class Model:
    identity, depends_on_task = "teacher-a", False
    async def complete(self, request):
        # The answer to draw 5 never comes.
        await asyncio.sleep(3600 if request.draw[0] == 5 else 0)
        return ChatReply(f"answer {request.draw[0]}")

async def main():
    cache = Cache(sys.argv[1])
    teacher = MultisetTeacher(Model(), 2, 8, cache)
    state = State("demo", (ChatMessage("user", "hi"),), ())
    sampling = asyncio.create_task(teacher.sample(state, Task("demo", "train", "1"), 6))
    while cache.counts().get("teacher", 0) < 5:
        await asyncio.sleep(0.01)
    print("five answers", flush=True)
    await sampling

asyncio.run(main())
"""


def test_sample_after_a_kill_asks_only_the_draw_that_had_no_answer(tmp_path):
    root = str(Path(actionopd_jax.__file__).parents[1])
    path = tmp_path / "cache.sqlite"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True, cwd=root)
    assert process.stdout is not None
    assert process.stdout.readline() == "five answers\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with Cache(path) as cache:
        model = ScriptedModel(lambda draw: ChatReply(f"answer {draw[0]}"))
        samples = sample(MultisetTeacher(model, 2, 8, cache), 6, State("demo", (ChatMessage("user", "hi"),), ()))
        assert model.draws == [(5, 0)]
        assert cities(samples) == [f"answer {k}" for k in range(6)]


def test_counts_are_plain_numbers_for_the_metrics():
    assert json.dumps(dataclasses.asdict(TeacherCounts(requests=1))).startswith('{"requests": 1')
