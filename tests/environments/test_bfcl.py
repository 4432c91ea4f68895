"""The BFCL adapter against the real package: ground truths, scripted users, isolation, scoring."""

import asyncio
import concurrent.futures
import dataclasses
import json
import random

import pytest

bfcl_eval = pytest.importorskip("bfcl_eval")

from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils  # noqa: E402

from actionopd_jax.chat.actions import parse_reply  # noqa: E402
from actionopd_jax.environments.bfcl import BfclSuite, data, environment, execution  # noqa: E402
from actionopd_jax.errors import ConfigError, EnvironmentFailure, ServiceBusyError  # noqa: E402
from actionopd_jax.protocols import ChatRequest  # noqa: E402
from actionopd_jax.records import (  # noqa: E402
    ChatMessage,
    End,
    EndReason,
    Invalid,
    InvalidReason,
    Message,
    State,
    Task,
    ToolCall,
)


@pytest.fixture(scope="module")
def suite():
    return BfclSuite({})


def task_of(task_id):
    return Task(environment="bfcl", split=task_id.removeprefix("multi_turn_").rsplit("_", 1)[0], task_id=task_id)


def teacher_episode(suite, task, settings=None):
    """Plays the scripted teacher; returns the score and the tool names whose calls the action parser refused."""
    teacher = suite.scripted_teacher(0, settings or {})
    env = suite.make(task)
    observation = env.reset()
    messages, hidden = list(observation.messages), []
    while not isinstance(observation, End):
        request = ChatRequest(state=State("bfcl", tuple(messages), observation.tools), task=task, draw=(0, 0))
        reply = asyncio.run(teacher.complete(request))
        parsed = parse_reply(reply, request.state)
        if reply.tool_calls:
            action = ToolCall(reply.tool_calls[0].name, json.loads(reply.tool_calls[0].arguments))
            messages.append(ChatMessage("assistant", reply.content, tool_calls=(action,)))
            if isinstance(parsed, Invalid):
                assert parsed.reason is InvalidReason.UNKNOWN_TOOL
                hidden.append(action.name)
            else:
                assert parsed == action
        else:
            action = Message(reply.content)
            messages.append(ChatMessage("assistant", reply.content))
        observation = env.step(action)
        messages += [] if isinstance(observation, End) else observation.messages
    score = env.score()
    env.close()
    return score, hidden


def checker_leftovers():
    return [name for name in vars(multi_turn_utils) if "instance" in name and "_" in name and name.startswith("actionopd")]


@pytest.mark.parametrize("category", data.CATEGORIES)
def test_teacher_on_every_task_succeeds_within_visible_tools(suite, category):
    hidden = {}
    for task in suite.tasks(category):
        score, called_hidden = teacher_episode(suite, task)
        assert score.success, task
        assert score.partial == 1.0, task
        if called_hidden:
            hidden[task.task_id] = called_hidden
    # One ground truth of the package calls a tool before the user has provided it.
    assert hidden == ({"multi_turn_miss_func_49": ["tail"]} if category == "miss_func" else {})
    assert checker_leftovers() == []


def test_silent_student_on_every_task_scores_zero(suite):
    for category in data.CATEGORIES:
        for task in suite.tasks(category):
            env = suite.make(task)
            observation = env.reset()
            while not isinstance(observation, End):
                observation = env.step(Message("ok"))
            assert not env.score().success, task
            assert env.score().partial == 0, task


def test_splits_train_and_heldout_part_the_scenarios(suite):
    train = {task.task_id for task in suite.tasks("train")}
    heldout = {task.task_id for task in suite.tasks("heldout")}
    assert (len(train), len(heldout)) == (150, 50)
    assert train | heldout == {task.task_id for task in suite.tasks("base")}
    for split in suite.splits():
        tasks = suite.tasks(split)
        assert all(task.split == split and task.environment == "bfcl" for task in tasks)
        assert len({task.task_id for task in tasks}) == len(tasks)
    numbers = {task.task_id.rsplit("_", 1)[1] for task in suite.tasks("miss_param_heldout")}
    assert numbers == {task_id.rsplit("_", 1)[1] for task_id in heldout}


def test_splits_scenario_numbers_share_their_classes_across_categories(suite):
    for others in zip(*(data.category_entries(category) for category in data.CATEGORIES), strict=True):
        assert len({entry.task_id.rsplit("_", 1)[1] for entry in others}) == 1
        assert len({frozenset(entry.classes) for entry in others}) == 1


def test_settings_classes_keep_only_tasks_with_these_tools():
    suite = BfclSuite({"categories": ["base"], "classes": ["MessageAPI", "TradingBot"]})
    assert list(suite.splits()) == ["base", "train", "heldout"]
    assert len(suite.tasks("base")) == 33  # 20 with TradingBot alone, 13 with both
    with pytest.raises(ConfigError, match="among the chosen categories"):
        suite.make(task_of("multi_turn_miss_func_0"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"categories": ["bas"]}, "bas"),
        ({"classes": ["Files"]}, "Files"),
        ({"categories": []}, "at least one"),
        ({"x": 1}, "x"),
    ],
)
def test_settings_wrong_value_names_it(settings, words):
    with pytest.raises(ConfigError, match=words):
        BfclSuite(settings)


def test_withheld_tool_appears_at_its_turn(suite):
    env = suite.make(task_of("multi_turn_miss_func_0"))  # withholds sort until turn 3
    observation = env.reset()
    for turn in range(5):
        assert ("sort" in {tool.name for tool in observation.tools}) == (turn >= 3)
        if turn < 4:
            observation = env.step(Message("next"))
            assert [message.role for message in observation.messages] == ["user"]
    assert isinstance(env.step(Message("bye")), End)


def test_reset_shows_system_and_first_user_message(suite):
    observation = suite.make(task_of("multi_turn_base_0")).reset()
    assert [message.role for message in observation.messages] == ["system", "user"]
    assert observation.messages[1].content == data.category_entries("base")[0].raw["question"][0][0]["content"]
    assert len(observation.tools) == 18 + 14


def test_call_returns_compact_json_of_the_real_tool(suite):
    env = suite.make(task_of("multi_turn_base_0"))
    env.reset()
    assert env.step(ToolCall("ls", {})).messages[0].content == '{"current_directory_content":["document","archive"]}'


def test_turn_with_too_many_calls_ends_as_failure(suite):
    env = suite.make(task_of("multi_turn_base_0"))
    env.reset()
    for _ in range(environment.MAX_CALLS_PER_TURN):
        assert not isinstance(env.step(ToolCall("pwd", {})), End)
    end = env.step(ToolCall("pwd", {}))
    assert isinstance(end, End)
    assert end.reason is EndReason.DONE
    assert "20 calls" in end.detail
    assert not env.score().success


def test_score_counts_turns_before_the_first_failing_one(suite):
    entry = data.category_entries("base")[0]
    env = suite.make(task_of(entry.task_id))
    env.reset()
    for call in entry.calls[0]:
        env.step(call)
    assert env.score().partial == 0  # the turn is not over
    env.step(Message("done"))
    assert env.score().partial == 1 / len(entry.turns)
    env.step(Message("nothing"))
    score = env.score()
    assert score.partial == 1 / len(entry.turns)
    assert not score.success
    assert score.details["error_type"] == "multi_turn:empty_turn_model_response"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (ToolCall("no_such", {}), "unknown tool"),
        (ToolCall("_load_scenario", {"scenario": {}}), "unknown tool"),
        (ToolCall("__init__", {}), "unknown tool"),
        (ToolCall("ls", {"b": True}), "no argument"),
        (ToolCall("cd", {}), "needs the argument"),
        (ToolCall("cd", {"folder": float("inf")}), "not finite"),
        (ToolCall("cd", {"folder": 3}), "Error during execution"),
    ],
)
def test_mistaken_call_is_an_observation(suite, call, words):
    env = suite.make(task_of("multi_turn_base_0"))
    env.reset()
    observation = env.step(call)
    assert observation.messages[0].role == "tool"
    assert words in observation.messages[0].content


@pytest.mark.parametrize(
    "call",
    [
        ToolCall("power", {"base": 10, "exponent": 10**9}),
        ToolCall("square_root", {"number": 2, "precision": 10**12}),
        ToolCall("logarithm", {"value": 2, "base": 3, "precision": 10**9}),
        ToolCall("round_number", {"number": 5, "decimal_places": -(10**9)}),
    ],
)
def test_costly_arithmetic_is_refused_at_once(suite, call):
    entry = next(entry for entry in data.category_entries("base") if "MathAPI" in entry.classes)
    env = suite.make(task_of(entry.task_id))
    env.reset()
    assert "Error during execution" in env.step(call).messages[0].content


def test_string_that_looks_like_code_stays_a_string(suite):
    text = "__import__('os').getcwd() ls(a=True) \\(x) \"q\" 'r' \n {}"
    calls = (ToolCall("touch", {"file_name": "n.txt"}), ToolCall("echo", {"content": text, "file_name": "n.txt"}))
    env = suite.make(task_of("multi_turn_base_0"))
    env.reset()
    for call in calls:
        env.step(call)
    result = env.step(ToolCall("cat", {"file_name": "n.txt"})).messages[0].content
    assert json.loads(result) == {"file_content": text}


def test_checker_takes_strings_as_the_student_wrote_them():
    entry = data.category_entries("base")[0]
    written = ToolCall("echo", {"content": "then ls(a=True)", "file_name": "n.txt"})
    touch = ToolCall("touch", {"file_name": "n.txt"})
    escaped = "echo(content='then ls\\x28a=True)',file_name='n.txt')"  # what the checker's rewriting leaves alone
    expecting = dataclasses.replace(entry, answers=(("touch('n.txt')", escaped),))
    assert execution.check(expecting, [[touch, written]])["valid"]
    assert not execution.check(expecting, [[touch]])["valid"]


def test_rendered_call_evaluates_to_its_arguments():
    from actionopd_jax.environments.bfcl.calls import render_call

    arguments = {"a": "f(1) \\(", "b": [1, -2.5, True, None, {"k(": "é\n"}]}
    text = render_call(ToolCall("tool", arguments))
    assert eval(text, {"tool": lambda **kwargs: kwargs}) == arguments
    assert text.count("(") == 1


def test_default_list_of_a_tool_is_not_shared_between_episodes(suite):
    entry = next(e for e in data.category_entries("base") if set(e.classes) == {"TwitterAPI", "VehicleControlAPI"})
    config = entry.raw["initial_config"]["TwitterAPI"]
    login = ToolCall("authenticate_twitter", {"username": config["username"], "password": config["password"]})
    seen = []
    for _ in range(2):
        env = suite.make(task_of(entry.task_id))
        env.reset()
        env.step(login)
        tweet = json.loads(env.step(ToolCall("post_tweet", {"content": "hi"})).messages[0].content)
        seen.append(tweet["mentions"])
        env.step(ToolCall("mention", {"tweet_id": tweet["id"], "mentioned_usernames": ["@x"]}))
        env.step(Message("done"))
        env.score()
    assert seen == [[], []]
    assert entry.tools["post_tweet"].defaults["mentions"] == []


def test_directory_moved_into_itself_is_scored_as_failure(suite):
    env = suite.make(task_of("multi_turn_base_0"))
    env.reset()
    env.step(ToolCall("mv", {"source": "document", "destination": "document"}))
    env.step(ToolCall("cp", {"source": "archive", "destination": "archive"}))
    env.step(ToolCall("find", {}))
    env.step(Message("done"))
    assert not env.score().success
    assert checker_leftovers() == []


def random_episode(suite, task, seed):
    rng = random.Random(seed)
    entry = next(e for c in data.CATEGORIES for e in data.category_entries(c) if e.task_id == task.task_id)
    pool = [call for turn in entry.calls for call in turn]
    odd = [None, True, -1, 10**30, 2.5, "", "..", "a(b)'\"\\", [], ["x", 1], {"k": "v"}]
    env = suite.make(task)
    observation = env.reset()
    while not isinstance(observation, End):
        kind = rng.random()
        if kind < 0.15:
            action = Message("go on")
        elif kind < 0.25:
            action = Invalid(InvalidReason.MALFORMED_JSON)
        elif kind < 0.6:
            action = rng.choice(pool)
        else:
            tool = rng.choice(list(entry.tools.values()))
            action = ToolCall(tool.spec.name, {name: rng.choice(odd) for name in tool.parameters if rng.random() < 0.9})
        observation = env.step(action)
    score = env.score()
    env.close()
    env.close()
    return observation, score


def test_random_actions_never_crash_and_always_end_with_a_reason(suite):
    tasks = [task for category in data.CATEGORIES for task in suite.tasks(category)[::10]]
    for seed, task in enumerate(tasks):
        end, score = random_episode(suite, task, seed)
        assert end.reason is EndReason.DONE
        assert end.detail
        assert 0 <= score.partial <= 1
    assert checker_leftovers() == []


def test_many_threads_at_once_give_the_same_scores(suite):
    tasks = [task for category in data.CATEGORIES for task in suite.tasks(category)[::20]]
    alone = [random_episode(suite, task, seed) for seed, task in enumerate(tasks)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(random_episode, [suite] * len(tasks), tasks, range(len(tasks))))
    assert together == alone


def test_step_outside_an_episode_is_a_failure(suite):
    env = suite.make(task_of("multi_turn_base_0"))
    with pytest.raises(EnvironmentFailure, match="outside an episode"):
        env.step(Message("hi"))
    env.close()
    with pytest.raises(EnvironmentFailure):
        env.reset()


def test_evidence_is_the_source_of_the_method(suite):
    env = suite.make(task_of("multi_turn_base_0"))
    assert env.evidence("ls").startswith("def ls(self")
    assert env.evidence("no_such") is None
    for entry in data.category_entries("base"):
        for name in entry.tools:
            assert execution.source(entry, name).startswith(f"def {name}(")


def test_version_names_package_and_data(suite):
    assert suite.version.startswith("bfcl-eval 2026.3.23 data ")


def test_missing_package_names_the_extra(monkeypatch):
    from actionopd_jax.errors import MissingExtraError

    monkeypatch.setitem(__import__("sys").modules, "bfcl_eval.no_such_part", None)
    with pytest.raises(MissingExtraError, match=r"pip install --no-deps bfcl-eval"):
        data.import_part("no_such_part")


def test_teacher_busy_once_then_answers(suite):
    task = task_of("multi_turn_base_0")
    teacher = suite.scripted_teacher(0, {"error_rate": 1.0})
    observation = suite.make(task).reset()
    request = ChatRequest(state=State("bfcl", observation.messages, observation.tools), task=task, draw=(0, 0))
    with pytest.raises(ServiceBusyError):
        asyncio.run(teacher.complete(request))
    assert asyncio.run(teacher.complete(request)).tool_calls[0].name == "cd"
