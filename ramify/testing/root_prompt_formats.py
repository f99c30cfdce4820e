"""Parse the root-call prompts of several recursive language model systems, and write replies to
them.

Each prompt asks a root model for its next step.

    system      first question               code         answer
    ramify      "Question: …" (user)         ```repl      FINAL(result)
    rlms        "Answer the following: …"    ```repl      answer["content"], answer["ready"]
    droste      "Question: …" (user)         ```python    answer["content"], answer["ready"]
    dspy.RLM    the variable `question`      its fields   SUBMIT(result)

A form is recognized by the system prompt that the system itself writes, and only the messages of
the request are read. From them come the question, the number of cells run so far and the limits
that the prompt states. Which code a root writes is chosen by ``offline_model.py``.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Protocol

import msgspec

from ramify.types.message import Message

RESULT = "RESULT:"
"""Marker that a root's code prints before its result, so that the result can be found in the
output.
"""
MANY_CALLS = 1_000
"""Maximum number of sub-calls of a root call whose prompt states no limit."""
_RESULT = re.compile(rf"^{RESULT} (.*)", re.MULTILINE)
_BATCHES = """\
def ask(prompts: list[str]) -> list[str]:
    replies: list[str] = []
    for start in range(0, len(prompts), 20):
        part = prompts[start:start + 20]
        replies += llm_query_batched(part) if len(part) > 1 else [llm_query(part[0])]
    for place, reply in enumerate(replies):
        if reply.startswith(("Error: ", "[ERROR] ")):
            replies[place] = llm_query(prompts[place])
    return replies
"""
"""Source of an ``ask`` function that sends prompts in batches of 20, the size that these systems
recommend. It repeats prompts whose reply reports an error, because two of the systems return errors
as reply text."""
_WHOLE = """\
def ask(prompts: list[str]) -> list[str]:
    try:
        return llm_query_batched(prompts)
    except SubcallError as error:
        return [reply or "" for reply in error.results]
"""


class ParsedRootPrompt(msgspec.Struct, frozen=True):
    """A parsed prompt in which a system asks for the next step of a root call."""

    question: str
    """The question, as far as the request shows it."""
    step: int
    """Number of code cells that the root call has run."""
    max_calls: int = MANY_CALLS
    """Maximum number of sub-calls that the prompt allows."""
    max_chars: int = 400_000
    """Maximum number of characters that the prompt allows for one sub-call."""
    result: str | None = None
    """The result that the root's code has printed, or None."""
    is_last: bool = False
    """True if no more code will run, so that the reply must be the answer."""


class RlmLibraryPromptFormat(Protocol):
    """The prompt format of one system: how it requests the next step of a root call and reads the
    reply."""

    name: str
    """Name of the system."""
    ask: str
    """Source of the function ``ask``, which sends prompts to the system's sub-model."""

    def parse_prompt(self, messages: Sequence[Message]) -> ParsedRootPrompt | None:
        """Parse a request for the next step of a root call.

        Returns None if another system wrote the request.
        """
        ...

    def question_expression(self, question: str) -> str:
        """Return a Python expression for the question: a string literal, or a variable that the
        session already has.
        """
        ...

    def code_cell_reply(self, thought: str, code: str) -> str:
        """Return a model reply that makes the system run ``code``."""
        ...

    def answer(self, turn: ParsedRootPrompt) -> str:
        """Return a model reply that submits the session variable ``result`` as the answer.

        If no more code will run, the reply contains the text of the result instead.
        """
        ...


class RamifyPromptFormat:
    """The prompt format of Ramify's own scaffolds ``default`` and ``minimal``."""

    name = "ramify"
    ask = _WHOLE

    def parse_prompt(self, messages: Sequence[Message]) -> ParsedRootPrompt | None:
        system = messages[0].content
        if "fence marked repl" not in system or "FINAL(" not in system or len(messages) < 2:
            return None
        first = re.match(
            r"Question: (.*?)(?:\n\n`context` is .*)?\Z", messages[1].content, re.DOTALL
        )
        if first is None:
            return None
        calls = re.search(r"([\d,]+) model calls?,", system)
        chars = re.search(r"ask a language model.*?, at most ([\d,]+) characters", system)
        return ParsedRootPrompt(
            first[1],
            sum(message.role == "assistant" for message in messages),
            _matched_number(calls, MANY_CALLS),
            _matched_number(chars, 100_000),
            _result_in(messages),
            "Answer now with what you have" in messages[-1].content,
        )

    def question_expression(self, question: str) -> str:
        return repr(question)

    def code_cell_reply(self, thought: str, code: str) -> str:
        return f"{thought}\n\n```repl\n{code}\n```"

    def answer(self, turn: ParsedRootPrompt) -> str:
        if turn.is_last:
            return f"FINAL({turn.result if turn.result is not None else 'unknown'})"
        return self.code_cell_reply("The result is there.", "FINAL(result)")


class RlmsPromptFormat:
    """The prompt format of ``rlms``, the reference library for recursive language models."""

    name = "rlms"
    ask = _BATCHES

    def parse_prompt(self, messages: Sequence[Message]) -> ParsedRootPrompt | None:
        is_ours = messages[0].content.startswith("You are a Recursive Language Model (RLM)")
        if not is_ours or len(messages) < 2:
            return None
        first = re.match(
            r"Answer the following: (.*)\n\nYour context is a ", messages[1].content, re.DOTALL
        )
        if first is None:
            return None
        num_cells = sum(message.role == "assistant" for message in messages)
        return ParsedRootPrompt(first[1], num_cells, result=_result_in(messages))

    def question_expression(self, question: str) -> str:
        return repr(question)

    def code_cell_reply(self, thought: str, code: str) -> str:
        return f"{thought}\n\n```repl\n{code}\n```"

    def answer(self, turn: ParsedRootPrompt) -> str:
        code = 'answer["content"] = str(result)\nanswer["ready"] = True'
        return self.code_cell_reply("The result is there.", code)


class DrosteLibraryPromptFormat:
    """The prompt format of the library ``droste``."""

    name = "droste"
    ask = _BATCHES

    def parse_prompt(self, messages: Sequence[Message]) -> ParsedRootPrompt | None:
        system = messages[0].content
        is_extraction = "session ended without submitting a confirmed final answer" in system
        is_step = "You are in a Python REPL." in system and "## Authorized compute" in system
        first = next((m.content for m in messages if m.role == "user"), "")
        asked = re.match(r"Question: (.*)", first, re.DOTALL)
        if not (is_extraction or is_step) or asked is None:
            return None
        calls = re.search(r"\bsubcalls=(\d+)", system)
        chars = re.search(r"subcall_input_capacity=.*?(\d+) \(bounded\)", system)
        return ParsedRootPrompt(
            asked[1].strip(),
            sum(message.role == "assistant" for message in messages),
            _matched_number(calls, MANY_CALLS),
            2 * _matched_number(chars, 50_000),
            _result_in(messages),
            is_extraction,
        )

    def question_expression(self, question: str) -> str:
        return repr(question)

    def code_cell_reply(self, thought: str, code: str) -> str:
        return f"```python\n{code}\n```"

    def answer(self, turn: ParsedRootPrompt) -> str:
        if turn.is_last:
            return turn.result or "unable to determine from the work so far"
        return self.code_cell_reply("", 'answer["content"] = str(result)\nanswer["ready"] = True')


class DspyPromptFormat:
    """The prompt format of ``dspy.RLM`` with its chat adapter and the inputs ``context`` and
    ``question``.
    """

    name = "dspy"
    ask = _BATCHES

    def parse_prompt(self, messages: Sequence[Message]) -> ParsedRootPrompt | None:
        system = messages[0].content
        is_step = "[[ ## code ## ]]" in system and "SUBMIT(" in system
        is_extraction = "[[ ## repl_history ## ]]" in system and "[[ ## answer ## ]]" in system
        if not is_step and not is_extraction:
            return None
        last = messages[-1].content
        asked = re.search(
            r"Variable: `question`.*?\n *Preview:\n *```\n(.*?)\n *```", last, re.DOTALL
        )
        calls = re.search(r"max ([\d,]+) sub-LLM calls", system)
        return ParsedRootPrompt(
            textwrap.dedent(asked[1]) if asked else "",
            len(re.findall(r"^=== Step \d+ ===$", last, re.MULTILINE)),
            _matched_number(calls, MANY_CALLS),
            result=_result_in(messages[-1:]),
            is_last=not is_step,
        )

    def question_expression(self, question: str) -> str:
        return "question"

    def code_cell_reply(self, thought: str, code: str) -> str:
        return _dspy_fields(reasoning=thought, code=f"```python\n{code}\n```")

    def answer(self, turn: ParsedRootPrompt) -> str:
        if turn.is_last:
            return _dspy_fields(answer=turn.result if turn.result is not None else "unknown")
        return self.code_cell_reply("The result is there.", "SUBMIT(str(result))")


ROOT_FORMS: tuple[RlmLibraryPromptFormat, ...] = (
    RamifyPromptFormat(),
    RlmsPromptFormat(),
    DrosteLibraryPromptFormat(),
    DspyPromptFormat(),
)
"""The prompt formats of all known systems."""


def _dspy_fields(**fields: str) -> str:
    parts = [f"[[ ## {name} ## ]]\n{text}" for name, text in fields.items()]
    return "\n\n".join([*parts, "[[ ## completed ## ]]"])


def _result_in(messages: Sequence[Message]) -> str | None:
    """Return the last result that a system's code cells printed after the marker ``RESULT:``, or
    None.

    A system may also show the code, but there the marker is in quotes and not at the beginning of a
    line.
    """
    for message in reversed(messages):
        found = _RESULT.findall(message.content) if message.role != "assistant" else []
        if found:
            return str(found[-1])
    return None


def _matched_number(found: re.Match[str] | None, default: int) -> int:
    return default if found is None else int(found[1].replace(",", ""))
