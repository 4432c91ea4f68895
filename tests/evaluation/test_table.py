import io
import json

import pytest
from rich.console import Console

from actionopd_jax.errors import RunStateError
from actionopd_jax.evaluation.result import summarise
from actionopd_jax.evaluation.table import read_result, result_table, write_result


def _rows(table):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines() if "│" in line]
    return {row[0]: row[1:] for row in rows}


@pytest.fixture
def before(episode):
    return summarise([episode(str(i), success=i == 0) for i in range(3)], 1, {})


@pytest.fixture
def after(episode):
    return summarise([episode(str(i), success=i < 2) for i in range(3)], 1, {})


def test_result_table_two_results_show_gain_from_unrounded_values(before, after):
    rows = _rows(result_table({"before": before, "after": after}))
    assert rows["success %"] == ["33.3", "66.7", "+33.3"]
    assert _rows(result_table({"after": after, "before": before}))["success %"][2] == "-33.3"
    assert "pass^4 %" not in rows
    assert rows["tasks × trials"][:2] == ["3 × 1", "3 × 1"]
    assert rows["ended: done"][:2] == ["3", "3"]


def test_result_table_one_result_shows_pass_4_and_unscored(episode):
    result = summarise([episode("a", i, i < 4) for i in range(5)] + [episode("b", 0, None)], 5, {})
    rows = _rows(result_table({"x": result}))
    assert rows["pass^4 %"] == ["20.0"]
    assert rows["episodes without a score"] == ["1"]
    assert rows["ended: environment_failure"] == ["1"]


def test_write_result_read_back_is_equal_and_unrounded(tmp_path, after):
    file = tmp_path / "new" / "result.json"
    write_result(file, after)
    assert read_result(file) == after
    assert json.loads(file.read_text())["success"] == 2 / 3


def test_read_result_missing_or_other_file_refuses(tmp_path):
    with pytest.raises(RunStateError, match="no evaluation result at"):
        read_result(tmp_path / "nothing.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(RunStateError, match="is no evaluation result"):
        read_result(tmp_path / "other.json")
