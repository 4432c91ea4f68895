import asyncio
import re

import pytest

from actionopd_jax.chat.actions import parse_reply
from actionopd_jax.environments.service_desk import Expert, ServiceDeskSuite, phrases, transcripts, world
from actionopd_jax.environments.service_desk.corpus import play
from actionopd_jax.environments.service_desk.expert import ExpertSettings, choices
from actionopd_jax.environments.service_desk.judge import ActJudge
from actionopd_jax.environments.service_desk.situation import read
from actionopd_jax.errors import ConfigError
from actionopd_jax.protocols import ChatModel, ChatRequest, JudgeQuestion
from actionopd_jax.records import ChatMessage, End, Invalid, Match, Message, State, ToolCall
from actionopd_jax.seeds import python_random

SUITE = ServiceDeskSuite()
FAULTLESS = ExpertSettings(error_rate=0, invalid_rate=0)


@pytest.mark.parametrize(("split", "count"), [("train", 300), ("heldout", 200)])
def test_expert_without_errors_succeeds_on_every_task_in_few_decisions(split, count):
    played = list(transcripts(SUITE, split, count, 7, FAULTLESS))
    assert [t.task.task_id for t in played if not t.score.success] == []
    lengths = [len(t.decisions) for t in played]
    assert min(lengths) >= 4
    assert max(lengths) <= 10


def test_expert_with_default_errors_succeeds_mostly_but_not_always():
    rate = sum(t.score.success for t in transcripts(SUITE, "train", 400, 1)) / 400
    assert 0.93 <= rate < 1


def test_expert_that_always_forgets_the_policy_confirms_and_refuses_nothing():
    novice = ExpertSettings(error_rate=0, invalid_rate=0, lapse_rate=1)
    played = list(transcripts(SUITE, "train", 100, 1, novice))
    wordings = {line.split(" {")[0] for lines in (*phrases.CONFIRM.values(), *phrases.REFUSE.values()) for line in lines}
    spoken = [d.action.text for t in played for d in t.decisions if isinstance(d.action, Message)]
    assert spoken
    assert not any(line.startswith(tuple(wordings)) for line in spoken)
    outcomes = [({r.outcome for r in SUITE.scenario(t.task).requests}, t) for t in played]
    assert all(not t.score.success for kinds, t in outcomes if kinds & {"refuse", "decline"})
    assert any(t.score.success for _, t in outcomes)


def test_expert_that_forgets_the_policy_at_times_knows_it_at_others():
    rates = {
        rate: sum(t.score.success for t in transcripts(SUITE, "train", 100, 1, ExpertSettings(lapse_rate=rate)))
        for rate in (0.0, 0.5, 1.0)
    }
    assert rates[0.0] > rates[0.5] > rates[1.0]


def start(index=0):
    observation = SUITE.make(SUITE.tasks("train")[index]).reset()
    return State("service_desk", observation.messages, observation.tools)


def test_reply_is_a_function_of_seed_state_and_draw():
    state, task = start(), SUITE.tasks("train")[0]
    expert = SUITE.scripted_teacher(3, {})
    assert isinstance(expert, ChatModel)
    assert not expert.depends_on_task
    replies = [asyncio.run(expert.complete(ChatRequest(state, task, (k, 0)))) for k in range(40)]
    again = [SUITE.scripted_teacher(3, {}).reply(state, (k, 0)) for k in range(40)]
    assert replies == again
    assert len({r.content for r in replies}) > 1
    assert expert.identity != SUITE.scripted_teacher(4, {}).identity
    assert expert.identity != SUITE.scripted_teacher(3, {"error_rate": 0.5}).identity


@pytest.mark.parametrize(
    "settings", [{"error_rate": 1.5}, {"invalid_rate": -0.1}, {"lapse_rate": 2}, {"rate": 0.1}, {"error_rate": "high"}]
)
def test_bad_setting_is_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        SUITE.scripted_teacher(0, settings)


def test_invalid_rate_one_gives_only_invalid_output():
    expert = Expert(0, ExpertSettings(error_rate=0, invalid_rate=1))
    for transcript in transcripts(SUITE, "train", 40, 0, FAULTLESS):
        for decision in transcript.decisions:
            assert isinstance(parse_reply(expert.reply(decision.state), decision.state), Invalid)


def test_invalid_rate_is_met():
    expert, state = Expert(0), start(1)
    share = sum(isinstance(parse_reply(expert.reply(state, (k, 0)), state), Invalid) for k in range(2000)) / 2000
    assert 0.02 < share < 0.04


def test_reasoning_is_short():
    for transcript in transcripts(SUITE, "train", 100, 0):
        for decision in transcript.decisions:
            assert 3 <= len(decision.reply.reasoning.split()) <= 16, decision.reply.reasoning


def mistaken(rng, state, right):
    """What a poor student might do at a state."""
    text = " ".join(m.content for m in state.messages[1:])
    orders, emails = re.findall(r"W\d{4}", text) or ["W0000"], re.findall(r"\S+@\w+\.com", text) or ["a@b.com"]
    order = rng.choice(orders)
    return rng.choice(
        [
            right,
            right,
            right,
            Message(
                rng.choice(
                    ["Hello.", "", "Anything else?", "Done.", f"I can not cancel order {order}.", "What is the reason?"]
                )
            ),
            Message(f"Shall I {rng.choice(['cancel', 'refund', 'exchange'])} order {order}?"),
            ToolCall("get_order", {"order_id": order.lower()}),
            ToolCall("get_order", {"order_id": "W12"}),
            ToolCall("cancel_order", {"order_id": order}),
            ToolCall("refund_order", {"order_id": order, "reason": "damaged"}),
            ToolCall("exchange_item", {"order_id": order, "item": "mug"}),
            ToolCall("update_email", {"email": rng.choice(emails), "new_email": "x@y.com"}),
            ToolCall("find_customer", {"email": rng.choice(emails)}),
        ]
    )


def test_expert_gives_a_valid_action_at_whatever_state_a_student_reaches():
    expert, reached = Expert(0, FAULTLESS), 0
    for number, task in enumerate(SUITE.tasks("train")[:150]):
        rng = python_random("poor student", number)
        environment = SUITE.make(task)
        observation = environment.reset()
        history = observation.messages
        for _ in range(15):
            state = State("service_desk", history, observation.tools)
            right = parse_reply(expert.reply(state), state)
            assert not isinstance(right, Invalid)
            reached += 1
            action = mistaken(rng, state, right)
            seen = environment.step(action)
            if isinstance(seen, End):
                break
            calls, text = ((action,), "") if isinstance(action, ToolCall) else ((), action.text)
            history = (*history, ChatMessage("assistant", text, tool_calls=calls), *seen.messages)
    assert reached > 500


def test_expert_recovers_after_one_useless_message():
    class Distracted(Expert):
        def reply(self, state, draw=(0, 0)):
            first = not any(m.role == "assistant" for m in state.messages)
            return (
                super().reply(state, draw)
                if not first
                else super().reply(state, draw).__class__("Hello, how can I help you?")
            )

    for task in SUITE.tasks("heldout")[:100]:
        transcript = play(SUITE.make(task), task, Distracted(0, FAULTLESS))
        assert transcript.score.success, task


def conversation(*lines):
    turns = [ChatMessage("user" if i % 2 == 0 else "assistant", line) for i, line in enumerate(lines)]
    return State("service_desk", (ChatMessage("system", ""), *turns), ())


def test_situation_tells_new_email_from_own():
    seen = read(conversation("I want to change my email. The new email is a.b@post.com. My email is a.b@mail.com."))
    assert (seen.wish.kind, seen.wish.detail, seen.email) == ("email", "a.b@post.com", "a.b@mail.com")


def test_situation_takes_yes_only_as_an_answer_to_a_proposal():
    opening = "Please cancel my lamp. It is order W1234."
    assert read(conversation(opening, "Shall I cancel order W1234?", "Yes.")).wish.agreed
    assert not read(conversation(opening, "What is your email?", "Yes.")).wish.agreed
    assert read(conversation(opening, "Shall I cancel order W1234?", "No, I changed my mind.")).wish.declined
    wrong = read(conversation(opening, "Shall I cancel order W1?", "No, that is wrong. Please cancel my lamp."))
    assert not wrong.wish.agreed
    assert not wrong.wish.declined


@pytest.mark.parametrize(("key", "wordings"), list(phrases.OPENINGS.items()))
def test_situation_reads_every_opening(key, wordings):
    for wording in wordings:
        for greeting in phrases.GREETINGS:
            seen = read(conversation(greeting + wording.format(item="desk", status="shipped")))
            expected = "escalate" if key in world.TOPICS else "info" if key in world.INFO else key
            assert seen.wish.kind == expected
            assert seen.wish.topic == (key if expected in ("escalate", "info") else "")
            assert seen.wish.item == ("" if key == "email" else "desk")


def test_all_wordings_of_one_choice_match_and_of_two_do_not():
    judge, compared = ActJudge(), 0
    for transcript in transcripts(SUITE, "train", 150, 0, FAULTLESS):
        for decision in transcript.decisions:
            groups = [choice.wordings for choice in choices(read(decision.state)) if choice.wordings]
            for group in groups:
                for other in groups:
                    question = JudgeQuestion(decision.state, Message(group[0]), Message(other[-1]), None, (), None)
                    assert isinstance(judge.decide(question), Match) == (group is other), (group[0], other[-1])
                    compared += 1
    assert compared > 300
