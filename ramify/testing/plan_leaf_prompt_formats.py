"""Parse the prompts of the model calls that ready plans make, and format replies to these calls.

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
"""A wrong reply has one wrong value, plus one more for each block of this many records."""


class ParsedPlanLeafRequest(msgspec.Struct, frozen=True):
    """The prompt of one of a ready plan's model calls, split into its kind, question and text.

    A leaf is one of the model calls that a ready plan makes.
    """

    kind: str
    """Kind of request: ``value``, ``answer``, ``facts``, ``sides``, ``summarise``, ``merge`` or
    ``passage``."""
    question: str
    """The user's question."""
    text: str
    """The text that the model call reads, without the heading that names its source."""

    @property
    def records(self) -> list[str]:
        """The numbered records in the text of the request, without their numbers."""
        return _RECORD.findall(self.text)

    @property
    def counts(self) -> dict[str, int]:
        """How often each value occurs, or an empty dict if the request contains no such counts."""
        return self._parse_json_line(0)

    @property
    def count_frequencies(self) -> dict[str, int]:
        """The number of values that occur once, twice and so on, keyed by the number of
        occurrences.

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
        """The separate passages that a ``merge`` request asks to combine."""
        return self.text.split(_BETWEEN)


def parse_leaf_prompt(prompt: str) -> ParsedPlanLeafRequest | None:
    """Parse the prompt of a model call that a ready plan makes, also called a leaf of the plan.

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
    """Return ``value`` written in the form that a request asks for: JSON or plain text."""
    if turn.kind == "passage":
        is_found = bool(value)
        fields = {"found": is_found, "answer": value or "", "certainty": 9 if is_found else 0}
        return json.dumps(fields)
    return value if isinstance(value, str) else json.dumps(value)


def with_some_wrong(right: Sequence[Any], draw: random.Random) -> list[Any]:
    """Return a copy of a list of right values in which a few values are replaced by wrong ones.

    Each wrong value is another value of the same list.
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
    """Return the features by which each kind of request from a ready plan is recognized.

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
