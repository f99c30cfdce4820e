"""Observations that do not fit the model's window are shortened; the run still gets its answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ramify import Scaffold, Stop, Store
from ramify.engine import observation_messages
from ramify.types.message import Message
from tests.engine.helpers import SCAFFOLD, client, code, rlm

WORDY = "x = 7\nprint('z' * 8000)"


def in_turns(*turns: str) -> Callable[[tuple[Message, ...]], str]:
    """Return a model that gives one line per turn, however often a prompt is refused."""
    return lambda messages: turns[sum(message.role == "assistant" for message in messages)]


def test_terse_observation_is_truncated_to_fit() -> None:
    model = client(in_turns("print('abcdefghi' * 10)", "FINAL(7)"), window=19)
    with rlm(model, scaffold="tiny", limits={"max_reply_tokens": 10}) as r:
        result = r.completion("alpha", "?")
    assert (result.answer, result.stop, result.error) == (7, Stop.FINAL, None)
    shown = [request.messages[-1].content for request in model.requests]
    assert shown == ["?\nlen 5", *(("abcdefghi" * 10)[:most] for most in (90, 45, 22))]
    assert result.trajectory.root.turns[1].prompt[0].content == ("abcdefghi" * 10)[:22]


@pytest.mark.parametrize("compact_at", [0.0, 0.8])
def test_long_observation_keeps_head_and_tail(compact_at: float) -> None:
    def script(messages: tuple[Message, ...]) -> str:
        if messages[-1].content == observation_messages.SUMMARISE:
            return "x is there."
        return code("FINAL(x)" if len(messages) > 2 else WORDY)

    scaffold = Scaffold(
        name="test",
        system="You drive to FINAL. {{tools}}{{limits}}",
        direct_chars=0,
        compact_at=compact_at,
    )
    with rlm(client(script, window=1000), scaffold=scaffold, limits={"max_reply_tokens": 100}) as r:
        result = r.completion("text", "?")
    assert (result.answer, result.stop, result.error) == (7, Stop.FINAL, None)
    observation = result.trajectory.root.turns[1].prompt[0].content
    assert observation.startswith("zzz")
    assert "characters left out: your window has no room for them" in observation
    assert observation.endswith("[turn 1 of 30]")


def test_a_question_is_never_shortened() -> None:
    model = client(in_turns("FINAL(1)"), window=20)
    with (
        rlm(model, scaffold="tiny") as r,
        pytest.raises(Exception, match="tokens and the window 20"),
    ):
        r.completion("alpha", "?" * 400)
    assert len(model.requests) == 1


def test_last_word_request_omits_an_observation_that_does_not_fit() -> None:
    def script(messages: tuple[Message, ...]) -> str:
        return "FINAL(7)" if "The limit is reached" in messages[-1].content else code(WORDY)

    scaffold = Scaffold(
        name="test",
        system="You drive to FINAL. {{tools}}{{limits}}",
        direct_chars=0,
        compact_at=0.0,
    )
    with rlm(
        client(script, window=1000),
        scaffold=scaffold,
        limits={"max_turns": 1, "max_reply_tokens": 100},
    ) as r:
        result = r.completion("text", "?")
    assert (result.answer, result.stop, result.error) == (7, Stop.MAX_TURNS, None)


def test_child_with_oversized_observation_still_answers() -> None:
    def script(messages: tuple[Message, ...]) -> str:
        if messages[0].content.startswith("all"):
            return "FINAL(rlm_query('one', context))"
        return "FINAL(7)" if len(messages) > 1 else "print('x' * 90)"

    with rlm(client(script, window=25), scaffold="tiny", limits={"max_reply_tokens": 10}) as r:
        result = r.completion("alpha", "all")
    assert (result.answer, result.stop) == (7, Stop.FINAL)


@pytest.mark.parametrize("does_summarise", [True, False])
def test_replay_repeats_shortened_observations(tmp_path: Path, does_summarise: bool) -> None:
    """Refused prompts are refused again from the journal, without requests or divergence."""

    def script(messages: tuple[Message, ...]) -> Any:
        if messages[-1].content == observation_messages.SUMMARISE:
            return "x is there."
        return code("FINAL(x)" if len(messages) > 2 else WORDY)

    model = client(script, window=1000 if does_summarise else 330)
    with rlm(
        model, scaffold=SCAFFOLD, store=Store(tmp_path), limits={"max_reply_tokens": 100}
    ) as r:
        first = r.completion("text", "?")
        num_asked = len(model.requests)
        again = r.replay("last")
    assert (first.answer, again.answer, len(model.requests)) == (7, 7, num_asked)
    assert again.trajectory.root.turns == first.trajectory.root.turns
    assert again.trajectory.errors == first.trajectory.errors
