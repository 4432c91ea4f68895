import json
import math
import struct

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from actionopd_jax.errors import RunStateError
from actionopd_jax.training.metrics import FILE_NAME, MetricsWriter, edge_means, edge_steps, read_metrics


def _events(workdir):
    """(step, tag, value) of every scalar event, read from the TFRecord files directly."""
    found = []
    for file in sorted(workdir.glob("events.*")):
        content, at = file.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack("<Q", content[at : at + 8])
            event = Event.FromString(content[at + 12 : at + 12 + length])
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            at += 16 + length
    return found


def test_metrics_written_come_back_and_reach_tensorboard(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"reward": 0.5, "groups": np.int64(3), "note": "warm"})
        writer.write(2, {"reward": np.float32(0.25), "skipped": True})
    assert read_metrics(tmp_path / FILE_NAME) == [
        {"step": 0, "reward": 0.5, "groups": 3, "note": "warm"},
        {"step": 2, "reward": 0.25, "skipped": True},
    ]
    assert _events(tmp_path) == [(0, "reward", 0.5), (0, "groups", 3.0), (2, "reward", 0.25), (2, "skipped", 1.0)]


def test_metrics_not_finite_are_null_and_no_event(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": math.nan, "b": np.float32(np.inf), "c": 1.0})
    (line,) = (tmp_path / FILE_NAME).read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, "a": None, "b": None, "c": 1.0}
    assert [tag for _, tag, _ in _events(tmp_path)] == ["c"]


def test_metrics_line_is_on_disk_before_close(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"a": 1.0})
    assert read_metrics(tmp_path / FILE_NAME) == [{"step": 1, "a": 1.0}]
    writer.close()
    writer.close()


@pytest.mark.parametrize("rest", [b"", b'{"step":4,"lo', b'{"step":4}'])
def test_metrics_killed_and_resumed_equal_uninterrupted(tmp_path, rest):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    with MetricsWriter(whole) as writer:
        for step in range(1, 6):
            writer.write(step, {"loss": 1 / step})
    with MetricsWriter(parts) as writer:
        for step in range(1, 4):
            writer.write(step, {"loss": 1 / step})
    with (parts / FILE_NAME).open("ab") as file:
        file.write(rest)
    with MetricsWriter(parts, restored_step=2) as writer:
        for step in range(3, 6):
            writer.write(step, {"loss": 1 / step})
    assert (parts / FILE_NAME).read_bytes() == (whole / FILE_NAME).read_bytes()


def test_metrics_nothing_restored_starts_afresh(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": 1})
    with MetricsWriter(tmp_path):
        pass
    assert read_metrics(tmp_path / FILE_NAME) == []


def test_metrics_step_repeated_refuses(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(3, {"a": 1})
        with pytest.raises(ValueError, match="step 3 after those of step 3"):
            writer.write(3, {"a": 1})
    with MetricsWriter(tmp_path, restored_step=3) as writer, pytest.raises(ValueError, match="after those of step 3"):
        writer.write(3, {"a": 1})


@pytest.mark.parametrize(
    ("values", "error"), [({"step": 1}, ValueError), ({"a": [1]}, TypeError), ({"a": np.complex64(1)}, TypeError)]
)
def test_metrics_refused_value_leaves_no_line(tmp_path, values, error):
    with MetricsWriter(tmp_path) as writer:
        with pytest.raises(error):
            writer.write(1, values)
        assert read_metrics(tmp_path / FILE_NAME) == []


def test_read_metrics_missing_file_refuses(tmp_path):
    with pytest.raises(RunStateError, match="no metrics at"):
        read_metrics(tmp_path / FILE_NAME)


@pytest.mark.parametrize("damaged", [b"{", b"[]", b'{"loss":1}', b'{"step":"x"}'])
def test_read_metrics_damaged_line_is_named(tmp_path, damaged):
    (tmp_path / FILE_NAME).write_bytes(b'{"step":1}\n' + damaged + b'\n{"step":3}\n')
    with pytest.raises(RunStateError, match="line 2 is damaged"):
        read_metrics(tmp_path / FILE_NAME)


@pytest.mark.parametrize(("num_steps", "first", "last"), [(1, 0.0, 0.0), (4, 0.0, 3.0), (10, 0.5, 8.5), (16, 1.0, 14.0)])
def test_edge_means_are_of_a_fifth_of_the_steps(num_steps, first, last):
    lines = [{"step": step, "rate": float(step)} for step in range(num_steps)]
    assert edge_means(lines, "rate") == (first, last)
    assert edge_steps(lines) == max(1, num_steps // 5)


def test_edge_means_leave_out_steps_without_the_figure():
    lines = [{"step": step, "rate": None if step == 0 else float(step)} for step in range(10)]
    assert edge_means(lines, "rate") == (1.0, 8.5)
    assert edge_means(lines, "other") == (None, None)
