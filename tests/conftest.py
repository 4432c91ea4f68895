import json
from pathlib import Path

import pytest
import tokenizers

from actionopd_jax.chat.tokenizer import ChatTokenizer
from actionopd_jax.chat.train_tokenizer import train_tokenizer

_CITIES = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Seoul", "Quito", "Perth")
_VERBS = ("find", "book", "cancel", "change", "list", "check", "refund", "describe")
_THINGS = ("flight", "hotel", "order", "ticket", "table", "delivery", "plan", "invoice")
_TURNS = (
    "Could you please tell me whether my {thing} from {city} has already arrived?",
    "I am sorry, but the {thing} cannot be changed any more; would another day suit you?",
    "Your request to {verb} the {thing} was successful. Is there anything else that you need?",
    "The customer wants to {verb} a {thing}, so the identifier must be known before the tool is used.",
    "Everything about the {thing} in {city} is shown below: status, price, number, name and date.",
    "Thank you very much, that is exactly what I was looking for. Goodbye!",
)


def _training_texts() -> list[str]:
    texts = []
    for i, city in enumerate(_CITIES):
        for j, verb in enumerate(_VERBS):
            thing = _THINGS[(3 * i + j) % len(_THINGS)]
            arguments = {
                "city": city,
                "count": i + j,
                "urgent": j % 2 == 0,
                "description": f"{verb} {thing}",
                "type": "string",
            }
            texts.append(json.dumps({"name": f"{verb}_{thing}", "arguments": arguments}))
            texts.append(f"Please {verb} the {thing} in {city} for {10 * i + j} people.")
            texts.extend(turn.format(city=city, verb=verb, thing=thing) for turn in _TURNS)
    return texts


@pytest.fixture(scope="session")
def small_tokenizer() -> ChatTokenizer:
    """A tokenizer of about 600 ids, trained on a few hundred lines."""
    return train_tokenizer(_training_texts(), 600)


@pytest.fixture(scope="session")
def small_tokenizer_folder(small_tokenizer: ChatTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokenizer, saved."""
    folder = tmp_path_factory.mktemp("tokenizer")
    small_tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def raw_tokenizer(small_tokenizer_folder: Path) -> tokenizers.Tokenizer:
    """The same tokenizer without the chat layer: it turns tags in a text into control tokens."""
    return tokenizers.Tokenizer.from_file(str(small_tokenizer_folder / "tokenizer.json"))
