"""Parsers for the prompts of ready plans, and writers of the replies.

A ready plan is a fixed program of model calls, and its calls that read text are called leaves.

    plan        leaf        what it reads              reply
    aggregate   value       numbered records           JSON: one value for each record
                answer      counts                     a text
    pairwise    facts       numbered records           JSON: key and value for each record
                sides       counts of key and value    JSON: key and side of each key
    summarise   summarise   a passage                  a text
                merge       summaries                  a text
    search      passage     a passage                  JSON: found, answer and certainty

A form is recognized by the prompt of the leaf, which is taken from the ready plan itself. Only the
request is read. Which reply is right is known to the suites, and ``offline_model.py`` decides how
often a reply is right.
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.plans import ready_plans
from ramify.plans.leaf_questions import QUESTION

_SCHEMA = "The answer must be a value of this JSON schema:\n"
_ALONE = " Reply with the JSON value alone."
_RECORD = re.compile(r"^\d+: (.*)$", re.MULTILINE)
_PLACE = re.compile(r"\A\[[^\n]*\]\n")
_BETWEEN = "\n\n---\n\n"
_SHARE_WRONG = 20
"""Records per wrong value: a wrong reply has one wrong value, plus one more for every this many
records.
"""


class ParsedPlanLeafRequest(msgspec.Struct, frozen=True):
    """A parsed prompt of a plan's leaf.

    A leaf is one of the model calls that a ready plan makes.
    """

    kind: str
    """``value``, ``answer``, ``facts``, ``sides``, ``summarise``, ``merge`` or ``passage``."""
    question: str
    """The user's question."""
    text: str
    """The text that the leaf reads, without the heading that names its source."""

    @property
    def records(self) -> list[str]:
        """Numbered records in the text, without their numbers."""
        return _RECORD.findall(self.text)

    @property
    def counts(self) -> dict[str, int]:
        """Count of each value, if the leaf is asked about counts; otherwise empty."""
        return self._parse_json_line(0)

    @property
    def count_frequencies(self) -> dict[str, int]:
        """How many values occur once, twice and so on, keyed by that count.

        Empty if the leaf is not asked about counts.
        """
        return self._parse_json_line(1)

    def _parse_json_line(self, line: int) -> dict[str, int]:
        lines = self.text.splitlines()
        try:
            found = json.loads(lines[line]) if line < len(lines) else {}
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def passages(self) -> list[str]:
        """Separate texts that a leaf of the kind ``merge`` combines."""
        return self.text.split(_BETWEEN)


def parse_leaf_prompt(prompt: str) -> ParsedPlanLeafRequest | None:
    """Parse the prompt of a plan's leaf, that is, of one of its model calls.

    Returns None for any other prompt.
    """
    if not prompt.startswith("Question: "):
        return None
    body, _, schema = prompt.partition(f"\n\n{_SCHEMA}")
    for kind, is_typed, form in _request_forms():
        if is_typed is bool(schema) and (found := form.match(body)) is not None:
            text = _PLACE.sub("", body[found.end() :], count=1)
            return ParsedPlanLeafRequest(kind, found[1], text)
    return None


def format_reply(turn: ParsedPlanLeafRequest, value: Any) -> str:
    """Return the reply text that states ``value`` in the form that the request asks for: JSON or
    plain text.
    """
    if turn.kind == "passage":
        is_found = bool(value)
        fields = {"found": is_found, "answer": value or "", "certainty": 9 if is_found else 0}
        return json.dumps(fields)
    return value if isinstance(value, str) else json.dumps(value)


def with_some_wrong(right: Sequence[Any], draw: random.Random) -> list[Any]:
    """Return a copy of a list of right values in which a few are replaced by other values from the
    list.
    """
    replies = list(right)
    for place in draw.sample(
        range(len(replies)), min(len(replies), 1 + len(right) // _SHARE_WRONG)
    ):
        others = [value for value in right if value != right[place]]
        if others:
            replies[place] = draw.choice(others)
    return replies


@functools.cache
def _request_forms() -> tuple[tuple[str, bool, re.Pattern[str]], ...]:
    """Return the features by which the requests of the ready-made plans are recognised.

    For each kind of request, they are its name, whether its answer has a JSON schema, and a pattern
    for the beginning of its prompt.
    """
    wanted = {
        ("aggregate", "value"): "value",
        ("aggregate", "answer"): "answer",
        ("pairwise", "facts"): "facts",
        ("pairwise", "sides"): "sides",
        ("summarise", "summarise"): "summarise",
        ("summarise", "merge"): "merge",
        ("search", "answer"): "passage",
    }
    return tuple(
        (wanted[name, leaf.label], leaf.schema is not None, _beginning_pattern(leaf.prompt))
        for name in dict.fromkeys(name for name, _ in wanted)
        for leaf in ready_plans.ready_plan(name).leaves()
    )


def _beginning_pattern(prompt: str) -> re.Pattern[str]:
    """Return a pattern that matches the beginning of every prompt made from the template
    ``prompt``.

    Such prompts differ only in numbers and in the user's question, which the pattern captures.
    """
    pieces = (re.sub(r"\d+", r"\\d+", re.escape(each)) for each in prompt.split(QUESTION))
    return re.compile("(.*?)".join(pieces) + "\n\n", re.DOTALL)
