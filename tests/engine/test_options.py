"""Options of a question: keywords, one object, and defaults of the RLM or the conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ramify import RLM, Limits, RunOptions, Sampling, ScriptedClient, Stop, Store
from ramify.engine.question import RunKeywordOptions
from ramify.errors import ConfigError, ReplayDiverged, SourceError
from tests.engine.helpers import client, rlm


def test_every_option_can_be_given_as_a_keyword() -> None:
    assert set(RunKeywordOptions.__annotations__) == set(RunOptions.__struct_fields__)


def test_keyword_overrides_a_field_of_options() -> None:
    options = RunOptions(answer_type=int, sampling=Sampling(seed=1))
    with rlm(["[1]", "2"]) as asking:
        both = asking.completion("A list?", None, options, answer_type=list[int])
        one = asking.completion("A number?", options=options)
    assert (both.answer, one.answer) == ([1], 2)


def test_options_of_the_rlm_are_defaults() -> None:
    seen: list[Any] = []
    defaults = RunOptions(answer_type=int, sampling=Sampling(seed=7))
    model = client(["3", "four", "5"])
    with rlm(model, options=defaults, on_event=seen.append) as asking:
        number = asking.completion("How many?", limits=Limits(max_calls=9))
        text = asking.completion("In words?", answer_type=str)
        asking.completion("How many?", sampling=Sampling(seed=8), on_event=None)
    assert (number.answer, text.answer) == (3, "four")
    assert [request.sampling.seed for request in model.requests] == [7, 7, 8]
    starts = [event.config["limits"]["max_calls"] for event in seen if hasattr(event, "config")]
    assert starts == [9, 1000]


def test_a_question_can_have_its_own_model() -> None:
    usual, other = client(["usual"]), ScriptedClient(["other", "again"], name="scripted:other")
    with rlm(usual) as asking:
        answers = [
            asking.completion("Who?").response,
            asking.completion("Who?", model=other).response,
        ]
        result = asking.completion("Who?", options=RunOptions(model=other))
    assert (*answers, result.response) == ("usual", "other", "again")
    assert result.trajectory.metadata["model"] == ["scripted:other"]


def test_questions_inherit_the_options_of_their_conversation() -> None:
    script = ["```repl\nFINAL(1)\n```", "```repl\nFINAL('2')\n```"]
    with rlm(script) as asking, asking.conversation("text", answer_type=int) as talk:
        first = talk.ask("First?", limits=Limits(max_turns=1))
        second = talk.ask("Second?", answer_type=str)
    assert (first.answer, second.answer) == (1, "2")


@pytest.mark.parametrize(
    ("keyword", "advice"),
    {
        "max_cots": "did you mean 'max_cost'? give limits=ramify.Limits(max_cost=…)",
        "max_turn": "did you mean 'max_turns'? give limits=ramify.Limits(max_turns=…)",
        "temprature": "did you mean 'temperature'? give sampling=ramify.Sampling(temperature=…)",
        "api_kye": "did you mean 'api_key'? it belongs to a model: give model=ramify.Model(",
        "limit": "did you mean 'limits'? known: answer_type, ",
    }.items(),
)
def test_misspelled_keyword_of_rlm_suggests_option_or_field(keyword: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RLM(ScriptedClient([]), **{keyword: 1})
    assert str(caught.value).startswith(f"unknown option '{keyword}': {advice}")


@pytest.mark.parametrize("method", ["completion", "start", "conversation", "resume", "replay"])
def test_unknown_option_suggests_the_nearest_name(method: str) -> None:
    with rlm([]) as asking, pytest.raises(ConfigError) as caught:
        getattr(asking, method)("Who?", anser_type=int)
    assert str(caught.value).startswith(
        "unknown option 'anser_type': did you mean 'answer_type'? known: answer_type, budget, cache, cite"
    )


def test_limit_given_as_an_option_is_refused_with_its_place() -> None:
    for name, place in {
        "max_turns": "limits=ramify.Limits(max_turns=…)",
        "temperature": "sampling=ramify.Sampling(temperature=…)",
        "tier": "sandbox=ramify.JailSpec(tier=…)",
    }.items():
        with rlm([]) as asking, pytest.raises(ConfigError) as caught:
            asking.completion("Who?", **{name: 1})
        assert str(caught.value) == f"unknown option '{name}': give {place}"


def test_async_listener_in_a_lambda_is_dropped_at_first_event() -> None:
    """Otherwise each event would leave a coroutine that is never awaited, and a warning."""

    async def listen(event: Any) -> None:
        raise AssertionError

    with rlm(["one"]) as asking, pytest.warns(UserWarning, match="not called again: .*it is async"):
        assert asking.completion("Who?", on_event=lambda event: listen(event)).response == "one"


def test_path_of_a_context_that_does_not_exist_is_refused_with_remedy() -> None:
    with rlm([]) as asking, pytest.raises(SourceError, match=r"^log.txt does not exist: check its"):
        asking.completion(Path("log.txt"), "Who?")


def test_options_of_the_wrong_type_are_refused() -> None:
    with rlm([]) as asking:
        with pytest.raises(ConfigError, match=r"^options is a Limits: give a ramify.RunOptions"):
            asking.completion("Who?", None, Limits())  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"^the question is a RunOptions: give options=…$"):
            asking.completion("Who?", RunOptions())  # type: ignore[arg-type]


def test_replay_takes_recorded_options(tmp_path: Any) -> None:
    store = Store(tmp_path)
    with rlm(["one"], store=store) as asking:
        run = asking.completion("Who?").run_id
    other = ScriptedClient(["two"], name="scripted:other")
    with rlm([], store=store) as asking:
        assert asking.replay(run).response == "one"
        with pytest.raises(ConfigError, match=r"takes cite from its record: omit it$"):
            asking.replay(run, cite=True)
    with rlm(["```repl\nwhile True: pass\n```"], store=store) as asking:
        cut = asking.completion("c" * 40_000, "Who?", limits=Limits(max_seconds=1))
        assert cut.stop is Stop.DEADLINE
    with rlm(other, store=store) as asking, pytest.raises(ReplayDiverged):
        asking.replay(cut.run_id)
