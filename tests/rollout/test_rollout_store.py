import io

import msgspec
import pytest
import zstandard
from rollout_doubles import add, task

from actionopd_jax.errors import RunStateError
from actionopd_jax.records import (
    Candidate,
    ChatReply,
    EndReason,
    Finish,
    Match,
    Score,
    StateGroup,
    TeacherSample,
    Trajectory,
)
from actionopd_jax.rollout.store import TrajectoryStore, read_trajectories, step_path


def trajectory(start, step=12, policy_version=3, name="three"):
    candidate = Candidate((1, 50, 7), (-0.1, -0.2, -0.3), Finish.STOP, add(1), (Match("canonical"),), 1, 1.0)
    teacher = (TeacherSample(add(1), 1, ChatReply("é")),)
    group = StateGroup(0, "key", (5, 6), teacher, (candidate, candidate), 1, policy_version)
    return Trajectory(step, start, task(name), (group,), EndReason.DONE, "", Score(True, 1.0), 1, 0.5)


def opened(path, step=12, policy_version=3, config_digest="abc"):
    return TrajectoryStore(path, step=step, policy_version=policy_version, config_digest=config_digest)


@pytest.fixture
def path(tmp_path):
    return step_path(tmp_path / "rollouts", 12)


def test_step_path_names_the_step(tmp_path):
    assert step_path(tmp_path, 12).name == "step_000012.jsonl.zst"


def test_store_keeps_trajectories_in_the_order_of_finishing(path):
    with opened(path) as store:
        store.append(trajectory(4))
        store.append(trajectory(1))
    assert list(read_trajectories(path)) == [trajectory(4), trajectory(1)]
    with opened(path) as store:
        assert store.finished == {4: trajectory(4), 1: trajectory(1)}
        store.append(trajectory(0))
    assert [found.start for found in read_trajectories(path)] == [4, 1, 0]


def test_store_is_plain_json_lines_in_zstd_frames(path):
    with opened(path) as store:
        store.append(trajectory(0))
    reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(path.read_bytes()), read_across_frames=True)
    header, line = reader.read().splitlines()
    assert msgspec.json.decode(header) == {"format": 1, "step": 12, "policy_version": 3, "config_digest": "abc"}
    assert msgspec.json.decode(line)["task"]["task_id"] == "three"


def test_store_appended_trajectory_is_on_disk_at_once(path):
    with opened(path) as store:
        store.append(trajectory(0))
        assert list(read_trajectories(path)) == [trajectory(0)]


def test_store_cut_at_every_byte_of_the_last_frame_recovers(path):
    with opened(path) as store:
        store.append(trajectory(0))
        before = path.stat().st_size
        store.append(trajectory(1))
    whole = path.read_bytes()
    for length in range(before, len(whole)):
        path.write_bytes(whole[:length])
        assert list(read_trajectories(path)) == [trajectory(0)]
        with opened(path) as store:
            assert list(store.finished) == [0]
            assert path.stat().st_size == before
            store.append(trajectory(1))
        assert path.read_bytes() == whole


def test_store_cut_within_the_header_starts_afresh(path):
    with opened(path):
        pass
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert list(read_trajectories(path)) == []
        with opened(path) as store:
            assert store.finished == {}
        assert path.read_bytes() == whole


def test_store_frames_larger_than_a_read_are_whole(path, monkeypatch):
    monkeypatch.setattr("actionopd_jax.rollout.store._CHUNK_BYTES", 7)
    with opened(path) as store:
        for start in range(3):
            store.append(trajectory(start))
    assert [found.start for found in read_trajectories(path)] == [0, 1, 2]
    with opened(path) as store:
        assert list(store.finished) == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"step": 13}, "step"), ({"policy_version": 4}, "policy_version"), ({"config_digest": "x"}, "config")],
)
def test_store_of_something_else_is_refused_and_left_alone(path, changes, name):
    with opened(path) as store:
        store.append(trajectory(0))
    whole = path.read_bytes()
    with pytest.raises(RunStateError, match=f"rollouts of {name}"):
        opened(path, **changes)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("changes", [{"step": 11}, {"policy_version": 2}])
def test_store_foreign_trajectory_is_refused(path, changes):
    with opened(path) as store, pytest.raises(RunStateError, match="does not belong"):
        store.append(trajectory(0, **changes))
    assert list(read_trajectories(path)) == []


def test_store_start_recorded_twice_is_refused(path):
    with opened(path) as store:
        store.append(trajectory(0))
        with pytest.raises(RunStateError, match="start 0 is recorded twice"):
            store.append(trajectory(0))


def test_store_damage_before_the_end_is_refused_and_left_alone(path):
    with opened(path) as store:
        store.append(trajectory(0))
        middle = path.stat().st_size - 20
        store.append(trajectory(1))
    damaged = bytearray(path.read_bytes())
    damaged[middle] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(RunStateError, match="damaged after byte"):
        opened(path)
    assert path.read_bytes() == bytes(damaged)
    with pytest.raises(RunStateError, match="damaged after byte"):
        list(read_trajectories(path))


def test_store_unknown_record_is_refused(path):
    with opened(path):
        pass
    with path.open("ab") as file:
        file.write(zstandard.ZstdCompressor().compress(b'{"what": 1}\n'))
    with pytest.raises(RunStateError, match="cannot be read"):
        opened(path)
