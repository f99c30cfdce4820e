"""Runs over HTTP through a server that was not written here: ``transformers serve``, with two tiny
checkpoints.

What a model says does not matter here (see ``checkpoint.py``); what counts is the protocol: that
runs go through, that every token is counted as the server counts it, that bounds reach it, and what
its refusals are called.
"""

import ast
import asyncio
import os
from pathlib import Path

import pytest

import ramify
from ramify.clients.base import Request, Sampling
from ramify.clients.pool import ClientPool
from ramify.errors import ModelError, Refused, ServerFailed
from ramify.types.message import Message, Usage
from ramify.types.trajectory import Stop
from tests.real import serving

ASYNCIO = Path(asyncio.__file__).parent

LOOK = """\
Counting is work for code; what each module is for is work for a reader.
```repl
import ast
def undocumented(source):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    public = [n for n in ast.walk(ast.parse(source)) if isinstance(n, kinds) and not n.name.startswith("_")]
    return sum(not ast.get_docstring(n) for n in public)
total = sum(undocumented(text) for name, text in context.items() if name.endswith(".py"))
about = llm_query_batched([f"What is {name} for?" for name in sorted(context)[:6]])
print(total, about)
```"""
REPLIES = {
    "plain": "To wait for many things at once.",
    "first": LOOK,
    "then": "```repl\nFINAL({'functions': total, 'about': about[0]})\n```",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    missing = serving.missing()
    if missing:
        reason = f"transformers serve needs {', '.join(missing)}: scripts/test installs the extra 'serve-test'"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(f"NOT RUN: {reason}")
    with serving.serving(tmp_path_factory.mktemp("serving"), REPLIES) as running:
        yield running


def prompt_tokens(messages):
    """What the server counts: a token per byte, per mark of the template, and per reply that
    ``reader`` has learnt."""
    text = "".join(f"_{each.role}\n{each.content}_\n" for each in messages) + "_assistant\n_"
    for reply in REPLIES.values():
        text = text.replace(reply, "_")
    return len(text.encode())


def refusal(server, request, name):
    """The error of one attempt."""

    async def main():
        pool = ClientPool()
        try:
            with pytest.raises(ModelError) as caught:
                await pool.client(server.model(name)).complete(request)
            return caught.value
        finally:
            await pool.close()

    return asyncio.run(main())


def test_a_plain_question(server):
    with ramify.RLM(server.model("reader")) as rlm:
        result = rlm.completion("What is asyncio for?")
    (turn,) = result.trajectory.root.turns
    assert (result.response, result.stop) == (REPLIES["plain"], Stop.FINAL)
    assert (turn.reply.finish, turn.reply.model) == ("stop", "reader@main")
    assert result.usage == Usage(prompt_tokens(turn.prompt), 2, calls=1)  # the reply, and its end
    assert result.cost is None


def test_a_recursive_run_and_its_bill(server, tmp_path):
    store = ramify.Store(tmp_path)
    with ramify.RLM(
        server.model("reader"), store=store, scaffold=ramify.Scaffold(direct_chars=0)
    ) as rlm:
        result = rlm.completion(
            ramify.load([ASYNCIO]), "How many public functions have no docstring?"
        )
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [
        node for path in ASYNCIO.rglob("*.py") for node in ast.walk(ast.parse(path.read_bytes()))
    ]
    functions = [
        node for node in nodes if isinstance(node, kinds) and not node.name.startswith("_")
    ]
    expected = sum(ast.get_docstring(node) is None for node in functions)
    assert result.answer == {"functions": expected, "about": REPLIES["plain"]}

    tree = result.trajectory
    assert [(call.id, call.kind, call.stop) for call in tree.calls] == [
        ("0", "rlm", Stop.FINAL),
        *((f"0.{i}", "lm", Stop.FINAL) for i in range(6)),
    ]
    prompts = [
        tree.conversation(call, i)[:-1] for call in tree.calls for i in range(len(call.turns))
    ]
    assert len(prompts) == 8
    assert result.usage == Usage(sum(map(prompt_tokens, prompts)), 2 * 8, calls=8)
    assert store.load(result.run_id) == tree


def test_a_model_that_never_writes_code(server, tmp_path):
    limits = ramify.Limits(max_turns=3, max_reply_tokens=40)
    store = ramify.Store(tmp_path)
    with ramify.RLM(
        server.model("noise"), store=store, limits=limits, scaffold=ramify.Scaffold(direct_chars=0)
    ) as rlm:
        result = rlm.completion("line\n" * 1000, "How many lines?")
    root = store.load(result.run_id).root
    # Each reply was cut at its limit, and was asked for again with a larger one.
    assert (result.stop, root.stop) == (Stop.MAX_TURNS, Stop.MAX_TURNS)
    assert result.response == root.turns[-1].reply.message.content  # its last word, taken as it is
    sizes = [(turn.reply.finish, turn.reply.usage.output_tokens) for turn in root.turns]
    assert sizes == [("length", num) for num in (40, 80, 160, 40)]
    assert result.usage == sum((turn.reply.usage for turn in root.turns), Usage())


def test_the_length_of_a_reply_is_kept(server):
    with ramify.RLM(server.model("noise"), limits=ramify.Limits(max_reply_tokens=7)) as rlm:
        result = rlm.completion("Say something long.")
    assert len(result.response) == result.usage.output_tokens == 7  # a byte is a token
    assert result.trajectory.root.turns[0].reply.finish == "length"


def test_what_is_sampled_can_be_repeated(server):
    def say(seed):
        sampling = Sampling(
            temperature=1.0, seed=seed, extra={"generation_config": '{"do_sample": true}'}
        )
        limits = ramify.Limits(max_reply_tokens=30)
        with ramify.RLM(server.model("noise"), limits=limits, sampling=sampling) as rlm:
            return rlm.completion("Say something.").response

    assert say(1) == say(1) != say(2)


def test_a_field_that_the_server_does_not_know(server):
    request = Request((Message("user", "hi"),), Sampling(extra={"return_token_ids": True}))
    error = refusal(server, request, "reader")
    assert isinstance(error, Refused)
    assert not error.transient
    assert "422" in str(error)
    assert "return_token_ids" in str(error)
    assert "\n" not in str(error)


def test_a_model_that_the_server_does_not_have(server):
    """It answers 500 with plain text: worth another attempt, since it does not say what was
    wrong."""
    error = refusal(server, Request((Message("user", "hi"),), Sampling()), "absent")
    assert isinstance(error, ServerFailed)
    assert str(error) == f"{server.model('absent')} answered 500: Internal Server Error"


def test_a_base_url_without_its_version(server):
    request = Request((Message("user", "hi"),), Sampling())

    async def main():
        pool = ClientPool()
        with pytest.raises(Refused, match="answered 404: Not Found"):
            await pool.client(f"openai:reader@{server.url.removesuffix('/v1')}").complete(request)
        await pool.close()

    asyncio.run(main())
