import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import actionopd_jax
from actionopd_jax.errors import RunStateError
from actionopd_jax.services.cache import SCHEMA_VERSION, Cache

ROOT = str(Path(actionopd_jax.__file__).parents[1])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "cache.sqlite"


def child(script: str, *arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_get_unknown_key_returns_none(path):
    with Cache(path) as cache:
        assert cache.get("teacher", "k") is None


@pytest.mark.parametrize("value", [b"", b"\x00\xff", b"x" * 3_000_000])
def test_put_value_is_there_after_reopening(path, value):
    with Cache(path) as cache:
        assert cache.put("teacher", "k", value) == value
        assert cache.get("teacher", "k") == value
    with Cache(path) as cache:
        assert cache.get("teacher", "k") == value


def test_put_second_answer_loses_and_is_told_the_first(path):
    with Cache(path) as cache:
        cache.put("teacher", "k", b"first")
        assert cache.put("teacher", "k", b"second") == b"first"
        assert cache.get("teacher", "k") == b"first"


def test_clear_namespace_leaves_the_others(path):
    with Cache(path) as cache:
        for namespace in ("self", "verdicts"):
            for key in ("a", "b"):
                cache.put(namespace, key, namespace.encode())
        assert cache.counts() == {"self": 2, "verdicts": 2}
        cache.clear("self")
        assert cache.counts() == {"verdicts": 2}
        assert cache.get("self", "a") is None
        assert cache.put("self", "a", b"new") == b"new"


def test_cache_in_memory_works_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Cache(":memory:") as cache:
        cache.put("n", "k", b"v")
        assert cache.get("n", "k") == b"v"
    assert list(tmp_path.iterdir()) == []


def test_close_twice_is_fine_and_use_afterwards_is_a_program_fault(path):
    cache = Cache(path)
    cache.close()
    cache.close()
    with pytest.raises(sqlite3.ProgrammingError):
        cache.get("n", "k")


def test_cache_file_survives_a_power_cut_by_its_settings(path):
    with Cache(path) as cache:
        assert cache._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert cache._connection.execute("PRAGMA synchronous").fetchone() == (2,)


# -- several writers -------------------------------------------------------------------------------


def test_put_many_threads_one_winner_per_key_and_nothing_lost(path):
    winners: list[dict[str, bytes]] = []
    barrier = threading.Barrier(6)

    def write(cache: Cache, thread: int) -> None:
        barrier.wait()
        winners.append({str(key): cache.put("n", str(key), f"{thread}".encode()) for key in range(40)})

    with Cache(path) as one, Cache(path) as other:  # two connections, three threads each
        threads = [threading.Thread(target=write, args=((one, other)[t % 2], t)) for t in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 6
        assert all(seen == winners[0] for seen in winners)
        assert {key: one.get("n", key) for key in winners[0]} == winners[0]
        assert one.counts() == {"n": 40}


WRITER = """
import sys
from actionopd_jax.services.cache import Cache
path, name, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Cache(path) as cache:
    for key in range(number):
        print(cache.put("n", str(key), name.encode() * 100)[:1].decode(), flush=True)
"""


def test_put_two_processes_agree_on_every_winner(path):
    writers = [child(WRITER, path, name, 150) for name in "ab"]
    heard = [writer.communicate()[0].split() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert heard[0] == heard[1]
    with Cache(path) as cache:
        assert [cache.get("n", str(key)) for key in range(150)] == [winner.encode() * 100 for winner in heard[0]]


def test_put_killed_process_keeps_every_answer_that_was_acknowledged(path):
    for round_number in range(3):
        writer = child(WRITER, path, "abc"[round_number], 1_000_000)
        assert writer.stdout is not None
        acknowledged = [writer.stdout.readline().strip() for _ in range(60 * (round_number + 1))]
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged += writer.stdout.read().split()
        writer.wait()
        writer.stdout.close()
        with Cache(path) as cache:
            stored = [cache.get("n", str(key)) for key in range(len(acknowledged))]
            assert stored == [winner.encode() * 100 for winner in acknowledged]
            assert cache._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert [file.name for file in path.parent.iterdir() if "damaged" in file.name] == []


# -- files that are no cache -----------------------------------------------------------------------


def filled(path: Path) -> None:
    with Cache(path) as cache:
        for key in range(200):
            cache.put("n", str(key), os.urandom(400))


def overwrite_everything(path: Path) -> None:
    path.write_bytes(b"this was never a database\n" * 500)


def overwrite_pages(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096 : 4096 * 12] = b"\xa5" * (4096 * 11)
    path.write_bytes(content)


def cut_in_half(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("damage", [overwrite_everything, overwrite_pages, cut_in_half])
def test_cache_damaged_file_is_set_aside_with_a_warning(path, damage, caplog):
    for number in (1, 2):  # the second damaged file does not replace the first
        filled(path)
        damage(path)
        content = path.read_bytes()
        with caplog.at_level(logging.WARNING), Cache(path) as cache:
            assert cache.counts() == {}
            cache.put("n", "k", b"v")
        aside = path.with_name(f"cache.sqlite.damaged-{number}")
        assert aside.read_bytes() == content
        assert str(aside) in caplog.text
        with Cache(path) as cache:
            assert cache.counts() == {"n": 1}


def test_cache_damaged_file_with_a_log_beside_it_takes_the_log_along(path):
    filled(path)
    overwrite_everything(path)
    path.with_name("cache.sqlite-wal").write_bytes(b"stale log" * 1000)
    with Cache(path) as cache:
        assert cache.counts() == {}
    assert path.with_name("cache.sqlite.damaged-1").exists()


OPENER = """
import sys
from actionopd_jax.services.cache import Cache
with Cache(sys.argv[1]) as cache:
    cache.put("n", sys.argv[2], b"v")
"""


def test_cache_damaged_file_opened_by_two_processes_is_set_aside_once(path):
    filled(path)
    overwrite_everything(path)
    openers = [child(OPENER, path, key) for key in "abc"]
    for opener in openers:
        opener.communicate()
    assert [opener.returncode for opener in openers] == [0, 0, 0]
    assert [file.name for file in path.parent.iterdir() if "damaged" in file.name] == ["cache.sqlite.damaged-1"]
    with Cache(path) as cache:
        assert cache.counts() == {"n": 3}


def test_cache_empty_file_becomes_a_cache(path):
    path.parent.mkdir()
    path.touch()
    with Cache(path) as cache:
        assert cache.put("n", "k", b"v") == b"v"


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1])
def test_cache_other_schema_version_is_refused_and_left_alone(path, version):
    filled(path)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    with pytest.raises(RunStateError, match=f"schema {version}"):
        Cache(path)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM answers").fetchone() == (200,)
    connection.close()


def test_cache_database_of_another_program_is_refused(path):
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    with pytest.raises(RunStateError, match="not a cache of this program"):
        Cache(path)


def test_cache_path_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(RunStateError, match="move the file away"):
        Cache(tmp_path)  # a folder
    (tmp_path / "file").touch()
    with pytest.raises(RunStateError, match="move the file away"):
        Cache(tmp_path / "file" / "cache.sqlite")


def test_put_full_disk_is_a_run_state_error(path):
    with Cache(path) as cache:
        cache._connection.execute("PRAGMA max_page_count = 10")
        with pytest.raises(RunStateError, match="full"):
            cache.put("n", "k", b"x" * 1_000_000)
        assert cache.get("n", "k") is None
