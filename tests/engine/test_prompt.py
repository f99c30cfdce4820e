"""The prompt states the facts of its run, and only those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ramify import RLM, JailSpec, Limits, SandboxSpec, Scaffold, ScriptedClient, Store, load
from ramify.clients.base import Price
from ramify.engine.prompt_scaffold import MARKERS
from ramify.errors import ConfigError
from ramify.models.tokenizer_training import train_tokenizer
from ramify.tasks.base import RolloutInitialState
from ramify.types.message import Message
from tests.engine.helpers import code
from tests.models.templates import CHATML

SESSION = Scaffold(direct_chars=0)
TEXT = "one line of text\n" * 5_000


def sent(context: Any, *script: str, model: str = "test", **options: Any) -> list[list[str]]:
    """Return the texts of the messages of every request."""
    options.setdefault("scaffold", SESSION)
    window = options.pop("window", 128_000)
    client = ScriptedClient([*script, code("FINAL(1)"), "FINAL(1)"], name=model, window=window)
    with RLM(client, **options) as rlm:
        rlm.completion(context, "What?", direct=False)
    return [[message.content for message in request.messages] for request in client.requests]


def system(context: Any, **options: Any) -> str:
    return sent(context, **options)[0][0]


def test_a_prompt_without_context_does_not_speak_of_one() -> None:
    client = ScriptedClient([code("FINAL(1)")])
    with RLM(client, scaffold=SESSION) as rlm:
        rlm.completion("How many?", direct=False)
    for message in client.requests[0].messages:
        assert "context" not in message.content
        assert " 0 characters" not in message.content


CONTEXTS: dict[str, Any] = {
    "a str of": TEXT,
    "a list of 2 items": ["a" * 9_000, "b"],
    "a list of 0 items": [],
    "a tuple of 2 items": ("a", 2),
    "a dict of 2 entries": {"a": 1, "b": [2]},
    "from file name to text: 2 files": {"a.txt": "x" * 99, "b/c.md": "y"},
    "rows, each a dict with 'id', 'name'": [{"id": n, "name": "n"} for n in range(9)],
    "from table name to rows": {"t": [{"id": 1}], "u": [{"k": 2}]},
    "messages (2 user, 1 assistant)": [
        {"role": role, "content": "hello"} for role in ("user", "assistant", "user")
    ],
    "a value of type set": {"a", "b"},
}


@pytest.mark.parametrize("shape", CONTEXTS)
def test_the_examples_run_for_each_kind_of_context(shape: str) -> None:
    """A child gets each context, since a root's may not be empty."""
    context = CONTEXTS[shape]

    def reader(messages: tuple[Message, ...]) -> str:
        if messages[0].role != "system":
            return "NONE"
        if "larger question" not in messages[0].content:
            return code(f"FINAL(rlm_query('?', context={context!r}))")
        assert shape in messages[1].content
        cells = messages[0].content.split("```repl\n")[1:]
        assert len(cells) == 2
        return code(*[cell.partition("\n```")[0] for cell in cells], "FINAL('ran')")

    scaffold = Scaffold(direct_chars=0, defer_final=False)
    with RLM(ScriptedClient(reader), scaffold=scaffold) as rlm:
        result = rlm.completion(TEXT, "?")
    child = next(call for call in result.trajectory.calls if call.depth == 1 and call.kind == "rlm")
    assert [cell.error for turn in child.turns for cell in turn.cells] == [None] * 3
    assert result.answer == "ran"


def test_a_folder_and_a_database_are_looked_at_with_their_own_functions(tmp_path: Path) -> None:
    import sqlite3

    for name in ("a.db", "b.db"):
        with sqlite3.connect(tmp_path / name) as database:
            database.execute("create table people (name text)")
        database.close()
    (tmp_path / "notes.txt").write_text("x" * 50)
    for paths, db in (([tmp_path / "a.db"], ""), ([tmp_path], ", db='a.db'")):
        prompt = system(load(paths))
        assert f'sql("SELECT name FROM sqlite_master"{db})' in prompt


def test_models_are_named_with_their_sizes_and_prices() -> None:
    small = ScriptedClient(["r"], name="x:maker/nano", window=10_000, price=Price(0.1, 0.4))
    prompt = system(TEXT, model="x:big", sub_model=[small, ScriptedClient([], name="y:other")])
    assert '"big" (you)' in prompt
    assert '"nano" (`llm_query` and your children)' in prompt
    assert '"other" (only by name)' in prompt
    assert "$0.1 in and $0.4 out per million tokens" in prompt
    assert "reads 5,400 characters" in prompt, "three for each token beside the longest reply"
    assert "model=None" in prompt
    assert "model=None" not in system(TEXT)


def test_no_function_is_named_that_this_run_does_not_have() -> None:
    assert "rlm_query" in system(TEXT)
    assert "rlm_query" not in system(TEXT, limits=Limits(max_depth=0))
    own = system(TEXT, tools={"budget": lambda: 3})
    assert own.count("budget()") == 1
    assert "what is left" not in own


def test_the_machine_is_described_as_it_is(tmp_path: Path) -> None:
    spec = JailSpec(packages=("msgspec",), mounts=((str(tmp_path), str(tmp_path)),))
    prompt = system(TEXT, sandbox=spec)
    assert "Python's standard library, and msgspec." in prompt
    assert f"you can read: {tmp_path}." in prompt
    assert "There is no network." in prompt
    weak = SandboxSpec(provider="process", allow_weaker=True)
    assert "network" not in system(TEXT, sandbox=weak)


def test_budget_in_a_session_is_what_is_left() -> None:
    limits = Limits(max_turns=9, max_calls=20)
    requests = sent(TEXT, code("budget()"), code("budget = 5\nbudget + 1"), limits=limits)
    assert "=> {'turns': 8, 'calls': 18, 'tokens': " in requests[1][3]
    assert requests[2][5].startswith("=> 6\n"), "it is not reserved"


def test_limits_are_said_when_a_quarter_a_tenth_and_the_last_remain() -> None:
    requests = sent(TEXT, *[code("1")] * 20, limits=Limits(max_turns=20))
    lines = [line for text in requests[-1] for line in text.splitlines() if "[limit]" in line]
    assert lines == [
        "[limit] 5 of 20 turns left",
        "[limit] 2 of 20 turns left: finish soon",
        "[limit] 1 of 20 turns left: answer now with FINAL(…)",
    ]


def test_parts_of_the_worked_example_fit_model_and_budget() -> None:
    assert "size = 4300\n" in system(TEXT, window=10_000)
    few = system(TEXT * 100, limits=Limits(max_calls=12))
    assert 'if "a word" in part][:6]' in few
    assert "llm_query_batched([" not in system(TEXT, limits=Limits(max_calls=1))


def test_a_child_is_told_its_own_facts() -> None:
    small = ScriptedClient([code("FINAL(2)")], name="x:small", window=20_000)
    sent(TEXT, code("rlm_query('q', context=['x', 'y'])"), sub_model=small)
    prompt, first = (message.content for message in small.requests[0].messages)
    assert "part of a larger question" in prompt
    assert "rlm_query" not in prompt
    assert '"small" (you and `llm_query`)' in prompt
    assert first.startswith("Question: q\n\n`context` is a list of 2 items, each a str of 1")


RULES = "Dates are day/month."
PAIRS = [("How many hosts?", 3), {"question": "Which?", "answer": "web-1"}]


def test_instructions_and_examples_are_added_to_every_prompt() -> None:
    asked = {"instructions": RULES, "examples": PAIRS}
    child = code("FINAL(rlm_query('q'))")
    requests = sent(TEXT, child, code("FINAL(2)"), **asked)
    assert len(requests) >= 2
    for request in requests:
        assert request[0].endswith(
            "Instructions of the user:\nDates are day/month.\n\nExamples of such questions and "
            "their answers:\nQuestion: How many hosts?\nAnswer: 3\nQuestion: Which?\nAnswer: web-1"
        )
        assert "`llm_query_batched(prompts)`" in request[0], "nothing is replaced"
    client = ScriptedClient(["31"])
    with RLM(client) as rlm:
        rlm.completion("short", "?", instructions=RULES)
    assert client.requests[0].messages[0].content.endswith(f"Instructions of the user:\n{RULES}")


def test_instructions_of_a_task_are_added_to_those_of_the_user() -> None:
    start = RolloutInitialState(
        context=TEXT, instructions="Answer in words.", examples=[("1?", "one")]
    )
    (first, *_) = sent(start, instructions=RULES)
    assert f"{RULES}\n\nAnswer in words.\n\nExamples" in first[0]


def test_a_later_question_may_have_other_instructions() -> None:
    client = ScriptedClient([code("FINAL(1)"), code("FINAL(2)"), code("FINAL(3)")])
    with RLM(client, instructions=RULES) as rlm, rlm.conversation(TEXT) as talk:
        talk.ask("first?")
        talk.ask("second?", instructions="In French.")
        talk.ask("third?", instructions="In French.")
    texts = [message.content for message in client.requests[-1].messages]
    assert [text.count("In French.") for text in texts] == [0, 0, 0, 1, 0, 0][: len(texts)]


def test_a_resumed_run_keeps_its_instructions(tmp_path: Path) -> None:
    store = Store(tmp_path)
    client = ScriptedClient([code("1")] * 3 + ["so far"])
    limits = Limits(max_turns=2)
    with RLM(client, store=store, scaffold=SESSION, limits=limits) as rlm:
        run = rlm.completion(TEXT, "?", instructions=RULES, examples=PAIRS).run_id
    again = ScriptedClient([code("FINAL('done')")])
    with RLM(again, store=store, scaffold=SESSION, limits=Limits(max_turns=9)) as rlm:
        assert rlm.resume(run).answer == "done"
    assert RULES in again.requests[0].messages[0].content
    refused = pytest.raises(ConfigError, match="takes instructions from its record")
    with RLM(again, store=store, scaffold=SESSION) as rlm, refused:
        rlm.resume(run, instructions="others")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"examples": [("only a question",)]}, "example 1 has no answer"),
        ({"examples": [("q", "a"), {"question": "q"}]}, "example 2 has no answer"),
        ({"examples": [{"question": "q", "anser": "a"}]}, "unknown field 'anser'.*answer"),
        ({"examples": "q"}, "examples='q' is a str: give a list"),
        ({"examples": [("q", "a", "b")]}, "example 1 has 3 parts"),
        ({"instructions": 5}, "instructions=5 is a int: give a text"),
        ({"instructions": "x" * 400_000}, "have 400,026 characters.*reads about 359,424 at once"),
        ({"instructions": "x", "scaffold": "tiny"}, "'tiny' has no system message"),
    ],
)
def test_wrong_instructions_are_refused_before_anything_is_sent(
    options: dict[str, Any], problem: str
) -> None:
    client = ScriptedClient(["1"])
    with pytest.raises(ConfigError, match=problem), RLM(client, **options) as rlm:
        rlm.completion(TEXT, "?")
    assert client.requests == []


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"system": "{{limits}} FINAL"}, r"system has no \{\{tools\}\}"),
        ({"system": "{{tools}} {{final}}"}, r"system has no \{\{limits\}\}"),
        ({"system": "{{tools}} {{limits}}"}, r"system has no \{\{final\}\}.*word FINAL"),
        ({"child_system": "{{limits}} FINAL"}, r"child_system has no \{\{tools\}\}"),
        ({"first": "{{about}}"}, r"first has no \{\{question\}\}"),
    ],
)
def test_a_scaffold_that_would_lose_a_fact_is_refused(fields: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Scaffold(name="mine", **fields)


def test_every_marker_is_documented_and_filled() -> None:
    own = "\n".join(f"<{name}>{{{{{name}}}}}</{name}>" for name in MARKERS)
    prompt = system(TEXT, scaffold=Scaffold(system=own, direct_chars=0), tools={"K": 1})
    for name in MARKERS:
        text = prompt.partition(f"<{name}>")[2].partition(f"</{name}>")[0]
        assert bool(text) is (name != "instructions"), name


def test_a_preview_is_what_a_run_sends() -> None:
    client = ScriptedClient([code("FINAL(rlm_query('What?'))"), code("FINAL(1)"), code("FINAL(1)")])
    with RLM(client, instructions=RULES) as rlm:
        previews = [rlm.prompt(TEXT, "What?", depth=depth) for depth in (0, 1)]
        previews.append(rlm.prompt("short", "What?"))
        assert client.requests == []
        rlm.completion(TEXT, "What?")
        rlm.completion("short", "What?")
    assert [preview.is_direct for preview in previews] == [False, False, True]
    made = [client.requests[index] for index in (0, 1, -1)]
    for preview, request in zip(previews, made, strict=True):
        assert preview.messages == request.messages
        assert preview.max_reply_tokens == request.sampling.max_tokens
    with (
        RLM(client) as rlm,
        pytest.raises(ConfigError, match="depth 2 has no calls: max_depth is 1"),
    ):
        rlm.prompt(TEXT, "What?", depth=2)


def test_a_preview_needs_no_key_and_counts_with_a_tokenizer() -> None:
    with RLM("openai:gpt-5-mini") as rlm:
        preview = rlm.prompt(TEXT, "What?")
    tokenizer = train_tokenizer([preview.text()], vocab_size=270)
    tokenizer.chat_template = CHATML
    rendered = preview.rendered(tokenizer)
    assert rendered.startswith("<|im_start|>system\nYou answer a question")
    assert rendered.endswith("<|im_start|>assistant\n")
    assert len(preview.token_ids(tokenizer)) > 100
    assert preview.cost(1_000_000, 0) == 0.25
