"""The command line: flags only. Nothing heavy is imported before settings and paths are known to be good.

Exit codes: 0 done; 2 something the user can mend, said in one line (or a preflight that does not fit); 130 interrupted;
1 any other error, with its traceback.
"""

import argparse
import json
import os
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import actionopd_jax
from actionopd_jax.cli.settings import load
from actionopd_jax.config import RunConfig
from actionopd_jax.errors import ConfigError, UserError

_DESCRIPTION = "Distil a black-box agent into a small open model by rewarding semantic agreement of actions."

_EPILOG = """\
Every setting of the config can be changed: --config.update.learning_rate=1e-4 --config.sources[0].split=dev
A config file with variants takes their text after a colon: --config FILE.py:VARIANT
"""

_OVERRIDE = "--config."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        return _fail(error)
    except BaseExceptionGroup as group:  # from a TaskGroup: concurrent tasks may fail together
        errors = list(_leaves(group))
        mendable = [error for error in errors if isinstance(error, UserError)]
        if len(mendable) == len(errors):
            return _fail(mendable[0])
        if any(isinstance(error, KeyboardInterrupt) for error in errors):
            return _interrupted()
        raise
    except KeyboardInterrupt:
        return _interrupted()


def _run(arguments: list[str]) -> int:
    rest, overrides = _split_overrides(arguments)
    flags = _parser().parse_args(rest)
    config = load(flags.config, overrides)
    if hasattr(flags, "workdir"):
        _check_folder(flags.workdir)
    return flags.command(config, flags)


def _train(config: RunConfig, flags: argparse.Namespace) -> int:
    from actionopd_jax import loop

    _print_summary(loop.train(config, flags.workdir))
    return 0


def _evaluate(config: RunConfig, flags: argparse.Namespace) -> int:
    is_name = flags.student is not None and flags.student.startswith(("builtin:", "hf://"))
    if flags.student is not None and not is_name and not Path(flags.student).is_dir():
        raise ConfigError(f"--student {flags.student} is not a folder; give a model folder or builtin:NAME")
    if flags.output is not None:
        if flags.output.is_dir():
            raise ConfigError(f"--output {flags.output} is a folder; give a file name")
        _check_folder(flags.output.absolute().parent, flag="--output")
    from actionopd_jax import loop

    _print_summary(loop.evaluate(config, flags.workdir, flags.student, flags.output))
    return 0


def _export(config: RunConfig, flags: argparse.Namespace) -> int:
    if not flags.max_shard_gb > 0:
        raise ConfigError(f"--max-shard-gb must be positive, got {flags.max_shard_gb}")
    if flags.output.exists() and not (flags.output.is_dir() and not any(flags.output.iterdir())):
        raise ConfigError(f"--output {flags.output} exists already; name a new folder")
    _check_folder(flags.output.absolute().parent, flag="--output")
    if not flags.workdir.is_dir():
        raise ConfigError(f"--workdir {flags.workdir} is not a folder; name the work directory of a run")
    from actionopd_jax import loop

    _print_summary(
        loop.export(
            config,
            flags.workdir,
            flags.output,
            step=flags.step,
            dtype=flags.dtype,
            max_shard_gb=flags.max_shard_gb,
        )
    )
    return 0


def _preflight(config: RunConfig, flags: argparse.Namespace) -> int:
    from actionopd_jax.loop.preflight import preflight, render

    report = preflight(config, flags.topology, Path(flags.config.partition(".py:")[0]).parent / "students")
    print(json.dumps(report) if flags.json else render(report))
    return 0 if report["fits"] else 2


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as everything else does."""

    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="actionopd", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--version", action="version", version=f"actionopd {actionopd_jax.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    train = _add_command(commands, "train", "train a student, or continue a run that its work directory holds", _train)
    evaluate = _add_command(commands, "evaluate", "play the evaluation tasks greedily, without a teacher", _evaluate)
    export = _add_command(commands, "export", "write a checkpoint's student as a Hugging Face model folder", _export)
    preflight = _add_command(
        commands, "preflight", "compile a config for a TPU slice, without one: does it fit?", _preflight
    )
    for command in (train, evaluate, export, preflight):
        command.add_argument("--config", required=True, metavar="FILE[:VARIANT]", help="config file (Python)")
    for command in (train, evaluate, export):
        command.add_argument("--workdir", required=True, type=Path, metavar="DIR", help="files of the run")
    evaluate.add_argument("--student", metavar="PATH", help="model folder or builtin:NAME; default: the last checkpoint")
    evaluate.add_argument("--output", type=Path, metavar="FILE", help="where to write the result as JSON")
    export.add_argument("--output", required=True, type=Path, metavar="DIR", help="the new model folder")
    export.add_argument("--step", type=int, metavar="N", help="step of the checkpoint; default: the latest")
    export.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the stored weights")
    export.add_argument("--max-shard-gb", type=float, default=5.0, metavar="X", help="size of a weight file, GiB (5)")
    preflight.add_argument("--topology", required=True, metavar="SLICE", help="v4:AxBxC, v5e:AxB, v5p:AxBxC or v6e:AxB")
    preflight.add_argument("--json", action="store_true", help="print the report as one line of JSON")
    return parser


def _add_command(
    commands: "argparse._SubParsersAction[_Parser]",
    name: str,
    summary: str,
    function: Callable[[RunConfig, argparse.Namespace], int],
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary, description=summary, epilog=_EPILOG, allow_abbrev=False)
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.set_defaults(command=function)
    return command


def _split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Takes `--config.PATH=VALUE` and `--config.PATH VALUE` out of the arguments."""
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    remaining = iter(arguments)
    for argument in remaining:
        if not argument.startswith(_OVERRIDE):
            rest.append(argument)
            continue
        name, equals, value = argument.removeprefix(_OVERRIDE).partition("=")
        if not equals:
            following = next(remaining, None)
            if following is None or following.startswith("--"):
                raise ConfigError(f"{argument} needs a value: {argument}=VALUE")
            value = following
        overrides.append((name, value))
    return rest, overrides


def _check_folder(path: Path, flag: str = "--workdir") -> None:
    """Refuses a path that cannot be a writable folder, before anything is computed for it."""
    nearest = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise ConfigError(f"{flag} {path}: {nearest} is a file; name a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {path}: no permission to write in {nearest}")


def _print_summary(summary: object) -> None:
    print(json.dumps(summary))


def _fail(error: UserError) -> int:
    print(f"actionopd: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def _interrupted() -> int:
    print("actionopd: interrupted; the same command continues the run from its last checkpoint", file=sys.stderr)
    return 130


def _leaves(group: BaseExceptionGroup) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
