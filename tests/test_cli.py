import json
import re
import subprocess
import sys
import types

import pytest

import actionopd_jax
from actionopd_jax import cli
from actionopd_jax.cli.settings import load
from actionopd_jax.errors import ConfigError, RunStateError

CONFIG = """
from ml_collections import ConfigDict, FieldReference

def get_config(variant="seed=1"):
    name, _, value = variant.partition("=")
    if name != "seed":
        raise ValueError(f"unknown variant {variant}")
    seed = FieldReference(int(value))
    return ConfigDict(dict(
        steps=seed * 2,
        seed=seed,
        student=dict(path="builtin:tiny"),
        update=dict(weight_decay=0),
        teacher=dict(settings=dict(error_rate=0.25)),
        sources=tuple(dict(environment=e, split="train", starts_per_step=n) for e, n in (("e", 2), ("f", 1))),
        evaluation=dict(environment="e", split="test"),
    ))
"""


@pytest.fixture
def config_file(tmp_path):
    file = tmp_path / "config.py"
    file.write_text(CONFIG)
    return file


@pytest.fixture
def fake_loop(monkeypatch):
    """A loop that remembers its calls; `error` is raised when set."""
    loop = types.ModuleType("actionopd_jax.loop")
    loop.calls, loop.error = [], None

    def run(*arguments):
        loop.calls.append(arguments)
        if loop.error is not None:
            raise loop.error
        return {"success": 0.5}

    loop.train = loop.evaluate = run
    monkeypatch.setitem(sys.modules, "actionopd_jax.loop", loop)
    monkeypatch.setattr(actionopd_jax, "loop", loop, raising=False)
    return loop


def _one_line(capsys):
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("actionopd: ")
    assert err.count("\n") == 1
    return err


# -- settings ---------------------------------------------------------------------------------------


def test_load_without_overrides_fills_defaults(config_file):
    config = load(str(config_file), [])
    assert (config.seed, config.steps) == (1, 2)
    assert config.update.weight_decay == 0.0
    assert config.method.num_candidates == 4


def test_load_variant_reaches_get_config(config_file):
    assert load(f"{config_file}:seed=3", []).seed == 3


def test_load_file_whose_name_holds_a_colon_is_found(tmp_path):
    folder = tmp_path / "a.py:b"
    folder.mkdir()
    (folder / "config.py").write_text(CONFIG)
    assert load(str(folder / "config.py"), []).seed == 1


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("update.learning_rate", "1e-4", lambda c: c.update.learning_rate == 1e-4),
        ("update.weight_decay", "0.5", lambda c: c.update.weight_decay == 0.5),
        ("update.packing", "rows", lambda c: c.update.packing == "rows"),
        ("student.thinking", "False", lambda c: c.student.thinking is False),
        ("student.path", "3", lambda c: c.student.path == "3"),
        ("student.path", "a=b", lambda c: c.student.path == "a=b"),
        ("sources[0].starts_per_step", "7", lambda c: [s.starts_per_step for s in c.sources] == [7, 1]),
        ("sources.1.starts_per_step", "7", lambda c: [s.starts_per_step for s in c.sources] == [2, 7]),
        ("sources[1].num_tasks", "5", lambda c: c.sources[1].num_tasks == 5),
        ("teacher.settings.error_rate", "0.5", lambda c: c.teacher.settings == {"error_rate": 0.5}),
        ("seed", "-4", lambda c: c.seed == -4 and c.steps == 6),
    ],
)
def test_load_override_is_read_as_the_type_there(config_file, name, text, read):
    changes = [(name, text)] if name != "seed" else [("steps", "6"), (name, text)]
    assert read(load(str(config_file), changes))


def test_load_override_of_reference_moves_what_is_computed_from_it(config_file):
    assert load(str(config_file), [("seed", "5")]).steps == 10


def test_load_later_override_wins(config_file):
    assert load(str(config_file), [("seed", "5"), ("seed", "6")]).seed == 6


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("lr", "1", "unknown setting --config.lr: no lr; known: .*update"),
        ("update.learning_rat", "1", "no learning_rat in update; did you mean learning_rate?"),
        ("sources[2].split", "x", "no 2 in sources; known in sources: 0, 1"),
        ("sources.split", "x", "no split in sources"),
        ("seed.x", "1", "no x in seed"),
        ("teacher.settings.other", "1", "no other in teacher.settings"),
        ("", "1", "no path of a setting"),
        ("update..clip_eta", "1", "no path of a setting"),
        ("update", "1", "--config.update is a group of settings"),
        ("sources", "[]", "--config.sources is a list"),
        ("seed", "1.5", "--config.seed must be a whole number, got '1.5'"),
        ("seed", "", "--config.seed must be a whole number"),
        ("update.learning_rate", "fast", "--config.update.learning_rate must be a number, got 'fast'"),
        ("update.learning_rate", "nan", "update.learning_rate must be a finite number"),
        ("student.thinking", "maybe", "--config.student.thinking must be true or false"),
        ("update.learning_rate", "-1", "update.learning_rate must be positive"),
        ("update.packing", "boxes", "update.packing must be one of tree, rows, got 'boxes'"),
        ("sources[1].starts_per_step", "0", "sources.*starts_per_step must be at least 1"),
    ],
)
def test_load_wrong_override_names_it(config_file, name, text, message):
    with pytest.raises(ConfigError, match=message):
        load(str(config_file), [(name, text)])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = (", "does not run: line 1: SyntaxError"),
        ("import os\nx = unheard_of", "does not run: line 2: NameError: name 'unheard_of' is not defined"),
        ("import no_such_module_anywhere", "ModuleNotFoundError"),
        ("x = 1", r"must define get_config\(\)"),
        ("get_config = 3", r"must define get_config\(\)"),
        ("def get_config():\n    return 3", r"get_config\(\) must return a ConfigDict, got int"),
        ("def get_config():\n    return {}['a']", "failed: line 2: KeyError"),
        ("def get_config(variant):\n    pass", "needs a variant"),
        (
            "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict(dict(steps=1))",
            "missing setting seed",
        ),
        (
            "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict(dict(stepz=1))",
            "unknown setting stepz",
        ),
    ],
)
def test_load_wrong_config_file_says_where(tmp_path, source, message):
    file = tmp_path / "wrong.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=message):
        load(str(file), [])


def test_load_unknown_variant_is_named(config_file, tmp_path):
    with pytest.raises(ConfigError, match=r"get_config\('big'\) failed: line \d+: ValueError: unknown variant big"):
        load(f"{config_file}:big", [])
    (tmp_path / "plain.py").write_text("def get_config():\n    pass")
    with pytest.raises(ConfigError, match="takes no variant; drop :big"):
        load(f"{tmp_path / 'plain.py'}:big", [])


def test_load_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.py does not exist"):
        load(f"{tmp_path / 'nothing.py'}:x", [])
    with pytest.raises(ConfigError, match="is not a file"):
        load(str(tmp_path), [])
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match="must be a Python file"):
        load(str(tmp_path / "config.yaml"), [])


# -- commands ---------------------------------------------------------------------------------------


def test_train_calls_loop_with_checked_config(config_file, tmp_path, fake_loop, capsys):
    arguments = [
        "train",
        "--config.seed",
        "3",
        "--config",
        str(config_file),
        "--config.update.clip_eta=0.1",
        "--workdir",
        str(tmp_path / "w"),
    ]
    assert cli.main(arguments) == 0
    ((config, workdir),) = fake_loop.calls
    assert (config.seed, config.update.clip_eta, workdir) == (3, 0.1, tmp_path / "w")
    assert json.loads(capsys.readouterr().out) == {"success": 0.5}


def test_evaluate_hands_student_and_output_on(config_file, tmp_path, fake_loop):
    common = ["evaluate", "--config", str(config_file), "--workdir", str(tmp_path / "w")]
    assert cli.main([*common, "--student", "builtin:tiny", "--output", str(tmp_path / "new" / "r.json")]) == 0
    assert cli.main(common) == 0
    assert [call[1:] for call in fake_loop.calls] == [
        (tmp_path / "w", "builtin:tiny", tmp_path / "new" / "r.json"),
        (tmp_path / "w", None, None),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train", "--workdir", "w"], "required: --config"),
        (["train", "--config", "CONFIG"], "required: --workdir"),
        (["train", "--config", "CONFIG", "--workdir", "w", "--verbose"], "unrecognized arguments: --verbose"),
        (["train", "--config", "CONFIG", "--workdir", "w", "--config.seed"], "--config.seed needs a value"),
        (["train", "--config", "CONFIG", "--workdir", "w", "--config.seed", "--help"], "--config.seed needs a value"),
        (["train", "--config", "CONFIG", "--workdir", "CONFIG"], "is a file; name a folder"),
        (["train", "--config", "CONFIG", "--workdir", "CONFIG/below"], "is a file; name a folder"),
        (["evaluate", "--config", "CONFIG", "--workdir", "w", "--student", "missing"], "--student missing is not a folder"),
        (["evaluate", "--config", "CONFIG", "--workdir", "w", "--output", "."], "--output . is a folder"),
        (["evaluate", "--config", "CONFIG", "--workdir", "w", "--output", "CONFIG/r.json"], "--output .*is a file"),
    ],
)
def test_main_wrong_flags_end_with_one_line(config_file, tmp_path, monkeypatch, fake_loop, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main([argument.replace("CONFIG", str(config_file)) for argument in arguments]) == 2
    assert re.search(message, _one_line(capsys))
    assert fake_loop.calls == []
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RunStateError("other settings\nin two lines"), 2, "other settings in two lines"),
        (ExceptionGroup("tasks", [ExceptionGroup("inner", [ConfigError("bad setting")])]), 2, "bad setting"),
        (KeyboardInterrupt(), 130, "the same command continues the run"),
        (BaseExceptionGroup("tasks", [KeyboardInterrupt(), ValueError("x")]), 130, "the same command continues the run"),
    ],
)
def test_main_error_of_the_loop_ends_with_one_line(config_file, tmp_path, fake_loop, capsys, error, code, message):
    fake_loop.error = error
    assert cli.main(["train", "--config", str(config_file), "--workdir", str(tmp_path / "w")]) == code
    assert message in _one_line(capsys)


@pytest.mark.parametrize(
    "error", [ValueError("a defect"), ExceptionGroup("tasks", [ConfigError("x"), ValueError("a defect")])]
)
def test_main_defect_is_raised_with_its_traceback(config_file, tmp_path, fake_loop, error):
    fake_loop.error = error
    with pytest.raises(type(error)) as caught:
        cli.main(["train", "--config", str(config_file), "--workdir", str(tmp_path / "w")])
    assert caught.value is error


def test_main_help_and_version_succeed(capsys):
    for arguments in (["--help"], ["train", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "--config.update.learning_rate=1e-4" in out
    assert f"actionopd {actionopd_jax.__version__}" in out


def test_main_wrong_setting_ends_before_jax_is_imported(config_file, tmp_path):
    program = (
        "import sys; from actionopd_jax.cli import main; code = main(sys.argv[1:]);"
        "print(sorted({'jax', 'flax', 'orbax', 'transformers', 'grain'} & sys.modules.keys())); sys.exit(code)"
    )
    arguments = ["train", "--config", str(config_file), "--workdir", str(tmp_path / "w"), "--config.update.clip_eta=2"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert done.stdout == "[]\n"
    assert done.stderr == "actionopd: update.clip_eta must be in (0, 1)\n"
