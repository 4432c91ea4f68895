import pytest

from actionopd_jax.environments import load
from actionopd_jax.environments.service_desk import ServiceDeskSuite
from actionopd_jax.errors import ConfigError
from actionopd_jax.records import Task


def test_load_service_desk_gives_the_suite():
    assert isinstance(load("service_desk", {}), ServiceDeskSuite)


def test_load_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'shop'; known: bfcl, service_desk"):
        load("shop", {})


@pytest.mark.parametrize("settings", [{"tasks": 3}, {"seed": -1}, {"train_tasks": "many"}, {"seed": True}])
def test_suite_bad_setting_is_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ServiceDeskSuite(settings)


def test_tasks_have_stable_unique_ids_and_the_asked_counts():
    suite = ServiceDeskSuite({"train_tasks": 30, "heldout_tasks": 7})
    train, heldout = suite.tasks("train"), suite.tasks("heldout")
    assert [task.task_id for task in heldout] == [f"0000{i}" for i in range(7)]
    assert len({task.key for task in (*train, *heldout)}) == 37
    assert len(ServiceDeskSuite().tasks("train")) == 4000
    assert len(ServiceDeskSuite().tasks("heldout")) == 500


def test_tasks_unknown_split_is_refused():
    with pytest.raises(ConfigError, match="unknown split 'test'"):
        ServiceDeskSuite().tasks("test")


@pytest.mark.parametrize(
    "task", [Task("bfcl", "train", "00000"), Task("service_desk", "dev", "0"), Task("service_desk", "train", "x")]
)
def test_make_foreign_task_is_refused(task):
    with pytest.raises(ConfigError, match="no task"):
        ServiceDeskSuite().make(task)


def test_scenario_is_determined_by_task_and_seed():
    task = Task("service_desk", "train", "00012")
    assert ServiceDeskSuite().scenario(task) == ServiceDeskSuite().scenario(task)
    assert ServiceDeskSuite({"seed": 1}).scenario(task) != ServiceDeskSuite().scenario(task)
    assert ServiceDeskSuite({"seed": 1}).version != ServiceDeskSuite().version


def test_splits_share_no_customer_no_order_and_no_instance():
    suite = ServiceDeskSuite()
    train = [suite.scenario(task) for task in suite.tasks("train")[:1000]]
    heldout = [suite.scenario(task) for task in suite.tasks("heldout")]
    for of in (
        lambda s: {person.name for person in s.people},
        lambda s: {person.email for person in s.people},
        lambda s: {order.order_id for order in s.orders},
        lambda s: {s},
    ):
        seen, unseen = set().union(*map(of, train)), set().union(*map(of, heldout))
        assert seen
        assert unseen
        assert not seen & unseen


def test_instances_cover_all_kinds_and_outcomes():
    suite = ServiceDeskSuite()
    requests = [r for task in suite.tasks("train")[:800] for r in suite.scenario(task).requests]
    assert {r.kind for r in requests} == {"cancel", "address", "refund", "exchange", "credit", "email", "escalate", "info"}
    for outcome in ("change", "refuse", "decline", "inform"):
        assert sum(r.outcome == outcome for r in requests) > 50, outcome
    assert {r.detail for r in requests if r.kind == "info"} == {"status", "price", "where", "days"}
    assert {r.obstacle for r in requests if r.outcome == "refuse"} == {"status", "days"}
