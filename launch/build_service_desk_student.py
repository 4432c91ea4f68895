"""Builds the student that ships with the package, `builtin:service_desk`, from nothing.

    python launch/build_service_desk_student.py tokenizer runs/student
    actionopd train --config configs/service_desk_base.py --config.student.path=runs/student --workdir runs/base
    python launch/build_service_desk_student.py weights runs/base runs/student --step 240
    python launch/build_service_desk_student.py install runs/student

Half a minute, about an hour on two CPU cores, and seconds. `tokenizer` trains one on conversations of the scripted
expert and writes it with the model's `config.json`; `weights` exports a checkpoint, chosen by the evaluations in the
run's folder: good enough to be rewarded at times, bad enough to have something to learn; `install` copies the
finished folder into the package.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from flax import nnx

import actionopd_jax
from actionopd_jax.chat.train_tokenizer import train_tokenizer
from actionopd_jax.config import RunConfig, build
from actionopd_jax.environments.service_desk import ServiceDeskSuite, transcripts
from actionopd_jax.loop.assembly import Parts
from actionopd_jax.loop.export import export_student
from actionopd_jax.models import decoder_config
from actionopd_jax.records import digest
from actionopd_jax.training.checkpoint import Checkpointer
from actionopd_jax.training.state import abstract_state
from actionopd_jax.training.update import Updater
from actionopd_jax.training.workdir import what_matters

_PACKAGED = Path(actionopd_jax.__file__).parent / "assets" / "service_desk"
_NUM_TRANSCRIPTS = 400
_TOOL_REPEATS = 20  # every prompt holds the tools: their words weigh as much as those of the conversations
_VOCABULARY = 1280
_ROWS_MULTIPLE = 64


def corpus() -> Iterator[str]:
    """Everything that a student reads or writes at the service desk, as the expert's conversations have it."""
    suite = ServiceDeskSuite()
    tools = suite.make(suite.tasks("train")[0]).reset().tools
    for transcript in transcripts(suite, "train", _NUM_TRANSCRIPTS, 0):
        last = transcript.decisions[-1]
        for message in last.state.messages:
            yield message.content
            yield message.reasoning
            for call in message.tool_calls:
                yield json.dumps({"name": call.name, "arguments": call.arguments})
        yield last.reply.content
        yield last.reply.reasoning
    for tool in tools:
        text = json.dumps({"name": tool.name, "description": tool.description, "parameters": tool.parameters})
        yield from [text] * _TOOL_REPEATS


def write_tokenizer(folder: Path) -> None:
    """Writes the tokenizer, and the `config.json` of a decoder of about a million weights that fits it."""
    tokenizer = train_tokenizer(corpus(), _VOCABULARY)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    config = decoder_config.DecoderConfig(
        vocab_size=-(-tokenizer.vocab_size // _ROWS_MULTIPLE) * _ROWS_MULTIPLE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    values = decoder_config.to_hf(config, tokenizer.end_id)
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    print(f"{folder}: a tokenizer of {tokenizer.vocab_size} ids, a model of {config.num_parameters} weights")


def write_weights(run: Path, folder: Path, step: int) -> None:
    """Exports the weights that a run had after `step`."""
    values = msgspec.json.decode((run / "config.json").read_bytes())["settings"]
    config = build(RunConfig, values)
    parts = Parts(config)
    updater = Updater(parts.graphdef, config.update, temperature=1.0)
    abstract = abstract_state(updater.create_state(nnx.split(parts.model)[1]))
    with tempfile.TemporaryDirectory() as chosen:  # holds this checkpoint alone, so that it is the latest
        shutil.copytree(run / "checkpoints" / str(step), Path(chosen, str(step)))
        with Checkpointer(Path(chosen), keep=1) as checkpoints:
            state, _ = checkpoints.restore(abstract, digest(what_matters(config)))
    export_student(parts, state.params, folder)
    print(f"{folder}: the student after step {step}")


def main() -> None:
    """Reads the command and runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    tokenizer = commands.add_parser("tokenizer", help="train the tokenizer, write the model's config")
    weights = commands.add_parser("weights", help="export a checkpoint of a run")
    weights.add_argument("run", type=Path, help="work directory of the run")
    weights.add_argument("--step", type=int, required=True, help="which checkpoint")
    install = commands.add_parser("install", help="copy a finished student into the package")
    for command in (tokenizer, weights, install):
        command.add_argument("folder", type=Path, help="the student's folder")
    flags = parser.parse_args()
    if flags.command == "tokenizer":
        write_tokenizer(flags.folder)
    elif flags.command == "weights":
        write_weights(flags.run, flags.folder, flags.step)
    else:
        shutil.copytree(flags.folder, _PACKAGED, dirs_exist_ok=True)
        print(f"copied to {_PACKAGED}; rerun the tests, and configs/quickstart.py")


if __name__ == "__main__":
    main()
