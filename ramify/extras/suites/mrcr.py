"""The suite ``mrcr``: repeat the reply to the nth of several identical requests in a long
conversation, as in OpenAI's MRCR.

    mrcr(tokens=65_536)
    mrcr(families=("needles_8",))
    mrcr(test="8needle.parquet")                                          OpenAI's files

    User: Write a poem about lanterns.

    Assistant: The baker counts the quiet stone. …
    Prepend q7Wn0xTz1k to the 2nd (1 indexed) poem about lanterns. Do not include any other text
    in your response.  ->  q7Wn0xTz1kThe clerk of Lodavi sells …

The families of questions are ``needles_2``, ``needles_4`` and ``needles_8``, named after the number
of equal requests. The filler consists of other requests with the same form of text or the same
topic.

An answer that begins with the random text of the question is scored by its similarity to the right
one; any other answer scores 0.
"""

from __future__ import annotations

import functools
import random
import string
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any

import msgspec

from ramify.extras.suites.fact_planting import filler_rng, plant
from ramify.extras.suites.filler_text import ADJECTIVES, NOUNS, sentence, sentence_pool
from ramify.extras.suites.suite_common import (
    CHARS_PER_TOKEN,
    BenchmarkFileFormat,
    Row,
    chosen_families,
    suite_task,
)
from ramify.tasks.base import DatasetTask, Item
from ramify.tasks.scoring.answer_text import MAX_CHARS, as_text

FAMILIES = tuple(f"needles_{number}" for number in (2, 4, 8))
_FORMS = (
    "poem",
    "song",
    "riddle",
    "letter",
    "speech",
    "news article",
    "short story",
    "diary entry",
)
_TOPICS = tuple(f"{adjective} {noun}s" for adjective in ADJECTIVES for noun in NOUNS)
_SENTENCES = 5
_ALPHABET = string.ascii_letters + string.digits
_MARK_CHARS = 10
_MAX_RATIO = 4
"""Answers at least this many times as long as the right answer score 0."""
_ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th")


class MrcrScorer(msgspec.Struct, frozen=True):
    """A reward function that measures how similar an answer is to the expected text.

    The answer must begin with the question's random text. The reward is the
    ``difflib.SequenceMatcher`` ratio of what follows. It is 0 for other answers, and for answers at
    least four times as long as the right one.
    """

    def __call__(self, answer: Any, item: Item) -> float:
        gold, mark = str(item.gold), str(item.metadata["random_string_to_prepend"])
        text = answer if isinstance(answer, str) else as_text(answer)
        if text is None or not text.startswith(mark):
            return 0.0
        if len(text) >= min(MAX_CHARS, _MAX_RATIO * len(gold)):
            return 0.0
        matcher = SequenceMatcher(None, text.removeprefix(mark), gold.removeprefix(mark))
        return matcher.ratio()


def mrcr(
    *,
    tokens: int = 8_192,
    families: str | Sequence[str] | None = None,
    train: Any = None,
    validation: Any = None,
    test: Any = None,
    seed: int = 0,
) -> DatasetTask:
    """Return a task of repeating one of several replies to identical requests in a conversation.

    The question asks for the reply to the nth such request. Conversations are generated or come
    from MRCR.

    Args:
        tokens: Length of a generated text in tokens: 1,000 to 10,000,000. A token counts as four
            characters.
        families: Which of ``needles_2``, ``needles_4`` and ``needles_8`` are asked; None for all.
        train: A ``.jsonl`` or ``.parquet`` file in MRCR's form, or its rows, which replaces the
            generated split. The same for ``validation`` and ``test``.
        seed: Seed of the generated items.

    Raises ConfigError for an unknown family, a length outside these bounds, or a file in another
    form.
    """
    chosen = chosen_families("mrcr", families, FAMILIES, tokens)
    make = functools.partial(_make, tokens * CHARS_PER_TOKEN, chosen)
    sources = (train, validation, test)
    return suite_task(
        "mrcr", make, MrcrScorer(), seed=seed, families=chosen, sources=sources, file=MRCR
    )


def _make(chars: int, families: Sequence[str], rng: random.Random) -> Item:
    family = rng.choice(families)
    number = int(family.removeprefix("needles_"))
    form, topic = rng.choice(_FORMS), rng.choice(_TOPICS)
    replies = [" ".join(sentence(rng) for _ in range(_SENTENCES)) for _ in range(number)]
    nth = rng.randrange(number)
    mark = "".join(rng.choices(_ALPHABET, k=_MARK_CHARS))
    places = sorted(rng.random() for _ in replies)
    facts = [
        (place, _turns(form, topic, reply)) for place, reply in zip(places, replies, strict=True)
    ]
    text = plant(facts, _other_turns(filler_rng(rng), chars, form, topic), chars, "\n\n")
    gold = mark + replies[nth]
    wrong = mark + replies[nth - 1]
    question = (
        f"Prepend {mark} to the {_ORDINALS[nth]} (1 indexed) {form} about {topic}. Do not include "
        "any other text in your response."
    )
    return Item(
        question, text, gold, family, wrong=wrong, metadata={"random_string_to_prepend": mark}
    )


def _turns(form: str, topic: str, reply: str) -> str:
    return f"User: Write a {form} about {topic}.\n\nAssistant: {reply}"


def _other_turns(
    rng: random.Random, chars: int, form: str, topic: str
) -> Callable[[int], list[str]]:
    """Return a function that generates filler turns of the conversation: other requests and
    replies.

    Some share the text form or the topic of the question, but none shares both.
    """
    pool = sentence_pool(rng, chars)
    other_forms = tuple(each for each in _FORMS if each != form)
    other_topics = tuple(each for each in _TOPICS if each != topic)

    def made(num: int) -> list[str]:
        found = []
        for _ in range(num):
            reply = " ".join(rng.choices(pool, k=_SENTENCES))
            if rng.random() < 0.3:
                found.append(_turns(rng.choice(other_forms), topic, reply))
            else:
                found.append(_turns(rng.choice(_FORMS), rng.choice(other_topics), reply))
        return found

    return made


# --- OpenAI's files -------------------------------------------------------------------------------


def _mrcr_item(row: Row) -> Item:
    """Convert a row of OpenAI's MRCR file to a task item.

    The last message becomes the question, and the messages before it the context.
    """
    try:
        messages = msgspec.json.decode(row["prompt"], type=list[dict[str, str]])
        *before, last = [(each["role"].capitalize(), each["content"]) for each in messages]
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
        raise ValueError(
            "its prompt is not a JSON list of messages, each with role and content"
        ) from None
    gold, mark = str(row["answer"]), str(row["random_string_to_prepend"])
    if not mark or not gold.startswith(mark):
        raise ValueError("its answer does not begin with its random_string_to_prepend")
    return Item(
        last[1],
        "\n\n".join(f"{role}: {text}" for role, text in before),
        gold,
        f"needles_{row['n_needles']}",
        wrong=mark,
        metadata={"random_string_to_prepend": mark, "n_needles": row["n_needles"]},
    )


MRCR = BenchmarkFileFormat(
    "MRCR", ("prompt", "answer", "random_string_to_prepend", "n_needles"), _mrcr_item
)
