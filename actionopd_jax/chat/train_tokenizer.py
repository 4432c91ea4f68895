"""Trains a small byte-level BPE tokenizer in the Qwen3 chat format, for students built from nothing."""

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from actionopd_jax.chat.tokenizer import CONTROL_TOKENS, END_OF_TEXT, TURN_END, TURN_START, ChatTokenizer
from actionopd_jax.errors import StudentError

TEMPLATE_PATH = Path(__file__).with_name("qwen3_chat_template.jinja")

# Words with one leading character, single digits, punctuation with the newlines after it, blanks.
_WORDS = r"(?i:'(?:s|t|re|ve|m|ll|d))|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> ChatTokenizer:
    """A tokenizer of at most `vocab_size` ids: 256 bytes, merges learnt from `texts`, then the control tokens.

    Every string can be encoded, and decodes to itself. The same texts give the same tokenizer.

    Raises:
        StudentError: `vocab_size` has no room for the bytes and the control tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + len(CONTROL_TOKENS)
    if vocab_size < smallest:
        raise StudentError(f"a vocabulary of {vocab_size} is too small: bytes and control tokens need {smallest}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CONTROL_TOKENS), initial_alphabet=alphabet, min_frequency=2, show_progress=False
    )
    backend.train_from_iterator(_without_control_tokens(texts), trainer)
    # Tags stay visible when special tokens are skipped; the tokens that delimit turns do not.
    turn_tokens = (END_OF_TEXT, TURN_START, TURN_END)
    backend.add_tokens([AddedToken(t, normalized=False, special=t in turn_tokens) for t in CONTROL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=TEMPLATE_PATH.read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
    )
    return ChatTokenizer(tokenizer)


def _without_control_tokens(texts: Iterable[str]) -> Iterable[str]:
    pattern = re.compile("|".join(map(re.escape, CONTROL_TOKENS)))
    for text in texts:
        yield from filter(None, pattern.split(text))
