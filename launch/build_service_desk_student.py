"""Builds the student that ships with the package, `builtin:service_desk`, from nothing.

    python launch/build_service_desk_student.py start runs/start
    python launch/build_service_desk_student.py pretrain runs/start runs/pretrained
    actionopd train --config configs/service_desk_base.py --config.student.path=runs/pretrained --workdir runs/base
    python launch/build_service_desk_student.py novice runs/base/student runs/novice
    python launch/build_service_desk_student.py install runs/novice

On two CPU cores half a minute, a quarter of an hour, another one, forty minutes, and seconds. `start` trains a
tokenizer on conversations of the scripted expert and writes it with the model's config and first weights; `pretrain`
imitates the expert on conversations without the system prompt and its tools; the KD run adds those; `novice` imitates
an expert that at six decisions of ten forgets the policy (changes without a yes, forbidden changes tried), failed
conversations included; `install` copies the student into the package.

The novice is why there is something to learn: the base can read, call tools and serve, it follows the policy at times,
and greedily it does not. A base that was merely stopped early fails at reading, which rewards for actions teach slowly.

Short contexts come first because reading one word out of many is found by gradient descent only while the word has a
fair share of the attention: from 700 constant tokens and one that matters, a million weights learned no reading in
140 steps of KD (loss 0.24 per token, items and names guessed); without the constant ones they read items after 200.

The first weights are random except for what any pretrained model has and a million parameters would need tens of
millions of tokens to find: heads that copy. One head of layer 0 looks at the token before, one of layer 1 looks for an
earlier place where the current token was the one before and copies what stood there (an induction circuit), and the
heads above copy whatever they attend to. What is worth attending to is left to training.
"""

import argparse
import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import msgspec
import numpy as np
from flax import nnx
from rich.progress import track

import actionopd_jax
from actionopd_jax.chat.prompt import PromptBuilder
from actionopd_jax.chat.tokenizer import ChatTokenizer
from actionopd_jax.chat.train_tokenizer import train_tokenizer
from actionopd_jax.cli.settings import load
from actionopd_jax.environments.service_desk import ExpertSettings, ServiceDeskSuite, transcripts
from actionopd_jax.errors import UserError
from actionopd_jax.loop.assembly import Parts
from actionopd_jax.loop.export import export_student
from actionopd_jax.methods.kd import TeacherTurn, examples
from actionopd_jax.models import decoder_config, weights
from actionopd_jax.models.decoder import Decoder
from actionopd_jax.records import Example, JsonObject, ToolCall
from actionopd_jax.seeds import numpy_random

_PACKAGED = Path(actionopd_jax.__file__).parent / "assets" / "service_desk"
_CONFIG = Path(__file__).parents[1] / "configs" / "service_desk_base.py"
_NUM_TRANSCRIPTS = 400
_TOOL_REPEATS = 20  # every prompt holds the tools: their words weigh as much as those of the conversations
_VOCABULARY = 1280
_ROWS_MULTIPLE = 64
_EMBEDDING_SCALE = 0.08
_SHARPNESS = 2.2  # of the induction circuit's attention, through the query and key norms
_CONSTANT = 4.0  # one embedding dimension is the same for all tokens: what position-only attention can hold on to
_CONVERSATIONS_PER_STEP = 16
_WARMUP = 10  # steps


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


def write_start(folder: Path) -> None:
    """Writes the tokenizer, and a decoder of about a million weights that fits it."""
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
    model = Decoder(config, rngs=nnx.Rngs(0))
    add_copying_heads(model, numpy_random("copying heads"))
    weights.save(model, folder, tokenizer.end_id)
    print(f"{folder}: a tokenizer of {tokenizer.vocab_size} ids, a model of {config.num_parameters} weights")


def add_copying_heads(model: Decoder, rng: np.random.Generator) -> None:
    """Writes key head 0 (query heads 0 and 1) of layers 0 and 1, and values and outputs above; the rest stays random."""
    config, heads = model.config, (0, 1)
    width, head = config.hidden_size, config.head_dim
    layers = {name: np.array(param[...]) for name, param in model.layers.items()}
    embedding = _EMBEDDING_SCALE * rng.normal(size=(config.vocab_size, width))
    embedding[:, 0] = _EMBEDDING_SCALE * _CONSTANT
    frequency = config.rope_theta ** -(np.arange(0, head, 2) / head)

    def basis() -> np.ndarray:
        """`[head, width]` orthonormal rows that do not see the constant dimension."""
        rows = np.linalg.qr(rng.normal(size=(width, head)))[0].T
        rows[:, 0] = 0
        return rows

    token, previous = basis(), basis()
    # Layer 0: a constant query and key whose two fastest rotations agree exactly one position apart.
    fast = np.arange(2)
    query = np.zeros((width, head))
    query[0, fast], query[0, fast + head // 2] = np.cos(frequency[fast]), -np.sin(frequency[fast])
    layers["query"][0][:, heads] = query[:, None]
    layers["key"][0, :, 0] = 0
    layers["key"][0, 0, 0, fast] = 1
    layers["value"][0, :, 0] = token.T
    layers["output"][0, heads, ...] = 1.5 * _EMBEDDING_SCALE * previous
    # Layer 1: this token, compared with the token before, where rotation over a prompt's length is small.
    slow = np.flatnonzero(frequency < 0.006)
    dims = np.concatenate([slow, slow + head // 2])
    place = np.zeros((head, head))
    place[dims] = np.linalg.qr(rng.normal(size=(head, len(dims))))[0].T
    layers["query"][1][:, heads] = (place @ token).T[:, None]
    layers["key"][1, :, 0] = (place @ previous).T
    for norm in ("query_norm", "key_norm"):
        layers[norm][:2] = _SHARPNESS
    group = config.num_attention_heads // config.num_key_value_heads
    copying = [
        (1, 0),
        *((layer, i) for layer in range(2, config.num_hidden_layers) for i in range(config.num_key_value_heads)),
    ]
    for layer, key_head in copying:
        copied = basis()
        layers["value"][layer, :, key_head] = copied.T
        layers["output"][layer, key_head * group : (key_head + 1) * group, ...] = _EMBEDDING_SCALE * copied
    for name, values in layers.items():
        model.layers[name].set_value(jnp.asarray(values, jnp.float32))
    model.embedding.set_value(jnp.asarray(embedding, jnp.float32))


def conversations(
    tokenizer: ChatTokenizer, prompts: PromptBuilder, seed: int, lapse_rate: float | None
) -> Iterator[list[Example]]:
    """Likelihood targets of conversations on training tasks, all turns.

    Without a `lapse_rate` the successful ones, prompts without system message and tools; with one all conversations of
    an expert that forgets the policy at this rate, prompts whole.
    """
    novice = None if lapse_rate is None else ExpertSettings(lapse_rate=lapse_rate)
    played = transcripts(ServiceDeskSuite(), "train", sys.maxsize, seed, novice)
    for number, transcript in enumerate(one for one in played if novice or one.score.success):
        turns = []
        for decision, (state, reply, action) in enumerate(transcript.decisions):
            spoken = tuple(message for message in state.messages if message.role != "system")
            shown = state if novice else msgspec.structs.replace(state, messages=spoken, tools=())
            calls = (action,) if isinstance(action, ToolCall) else ()
            turns.append(
                TeacherTurn(
                    prompt_ids=prompts.build(shown).ids,
                    reply_ids=tokenizer.encode_response(reply.reasoning, reply.content, calls, thinking=True),
                    trajectory=str(number),
                    decision=decision,
                )
            )
        yield examples(turns)


def write_imitator(start: Path, folder: Path, steps: int, learning_rate: float, seed: int, lapse_rate: float | None) -> None:
    """Trains the weights in `start` on `conversations`; writes the student to `folder`."""
    settings: JsonObject = {"learning_rate": learning_rate, "warmup_steps": _WARMUP, "schedule": "cosine"}
    settings["decay_steps"] = max(steps - _WARMUP, 1)
    overrides = [("student.path", str(start)), *((f"update.{name}", str(value)) for name, value in settings.items())]
    config = load(str(_CONFIG), overrides)
    parts = Parts(config)
    updater = parts.updater(temperature=1.0, objective="likelihood")
    state = updater.create_state(nnx.split(parts.model)[1])
    source = conversations(parts.tokenizer, parts.prompts, seed, lapse_rate)
    for step in track(range(steps), "imitating"):
        batch = [turn for turns in itertools.islice(source, _CONVERSATIONS_PER_STEP) for turn in turns]
        state, figures = updater.update(state, batch)
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}: {figures['loss']:.4f} nats per token")
    export_student(parts, state.params, folder)
    print(f"{folder}: the student after {steps} steps on conversations")


def main() -> None:
    """Reads the command and runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    begin = commands.add_parser("start", help="train the tokenizer, write the model's config and first weights")
    pretrain = commands.add_parser("pretrain", help="imitate the expert on conversations alone")
    pretrain.add_argument("start", type=Path, help="the folder that start wrote")
    pretrain.add_argument("--steps", type=int, default=400)
    pretrain.add_argument("--learning-rate", type=float, default=3e-3)
    novice = commands.add_parser("novice", help="imitate an expert that forgets the policy at times")
    novice.add_argument("start", type=Path, help="the folder of the student that the KD run left")
    novice.add_argument("--steps", type=int, default=860)
    novice.add_argument("--learning-rate", type=float, default=2e-3)
    novice.add_argument("--lapse-rate", type=float, default=0.6)
    install = commands.add_parser("install", help="copy a finished student into the package")
    for command in (pretrain, novice):
        command.add_argument("--seed", type=int, default=7, help="of the expert; another one, other conversations")
    for command in (begin, pretrain, novice, install):
        command.add_argument("folder", type=Path, help="the student's folder")
    flags = parser.parse_args()
    if getattr(flags, "steps", 1) < 1:
        parser.error("--steps must be at least 1")
    try:
        run(flags)
    except UserError as error:
        sys.exit(f"build_service_desk_student: {error}")


def run(flags: argparse.Namespace) -> None:
    """One of the stages."""
    if flags.command == "start":
        write_start(flags.folder)
    elif flags.command == "pretrain":
        write_imitator(flags.start, flags.folder, flags.steps, flags.learning_rate, flags.seed, None)
    elif flags.command == "novice":
        write_imitator(flags.start, flags.folder, flags.steps, flags.learning_rate, flags.seed, flags.lapse_rate)
    else:
        shutil.copytree(flags.folder, _PACKAGED, dirs_exist_ok=True)
        print(f"copied to {_PACKAGED}; rerun the tests, and configs/quickstart.py")


if __name__ == "__main__":
    main()
