"""Runs over HTTP through a server from another project: ``transformers serve``, with two tiny
checkpoints.

The text of the replies does not matter (see ``checkpoint.py``). Tested is the protocol: that runs
complete, that tokens are counted as the server counts them, that limits reach it, and what
its refusals are called.
"""

import ast
import asyncio
import os
from pathlib import Path

import pytest

import ramify
from ramify.clients.base import Request, Sampling
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.errors import ModelError, RequestRefusedError, ServerStatusError
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
    """Tokens as the server counts them: one per byte, per mark of the template, and per reply that
    ``reader`` knows."""
    text = "".join(f"_{each.role}\n{each.content}_\n" for each in messages) + "_assistant\n_"
    for reply in REPLIES.values():
        text = text.replace(reply, "_")
    return len(text.encode())


def error_of_request(server, request, name):
    """Return the error of one attempt."""

    async def main():
        pool = RateLimitedClientPool()
        try:
            with pytest.raises(ModelError) as caught:
                await pool.client(server.model(name)).complete(request)
            return caught.value
        finally:
            await pool.close()

    return asyncio.run(main())


def test_direct_answer_counts_tokens_as_server_does(server):
    with ramify.RLM(server.model("reader")) as rlm:
        result = rlm.completion("What is asyncio for?")
    (turn,) = result.trajectory.root.turns
    assert (result.response, result.stop) == (REPLIES["plain"], Stop.FINAL)
    assert (turn.reply.finish, turn.reply.model) == ("stop", "reader@main")
    assert result.usage == Usage(prompt_tokens(turn.prompt), 2, calls=1)  # the reply, and its end
    assert result.cost is None


def test_recursive_run_counts_usage_of_every_call(server, tmp_path):
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


def test_model_without_code_stops_at_max_turns(server, tmp_path):
    limits = ramify.Limits(max_turns=3, max_reply_tokens=40)
    store = ramify.Store(tmp_path)
    with ramify.RLM(
        server.model("noise"), store=store, limits=limits, scaffold=ramify.Scaffold(direct_chars=0)
    ) as rlm:
        result = rlm.completion("line\n" * 1000, "How many lines?")
    root = store.load(result.run_id).root
    # Each reply was cut at its limit, and was asked for again with a larger one.
    assert (result.stop, root.stop) == (Stop.MAX_TURNS, Stop.MAX_TURNS)
    assert result.response == root.turns[-1].reply.message.content  # its last word, unchanged
    sizes = [(turn.reply.finish, turn.reply.usage.output_tokens) for turn in root.turns]
    assert sizes == [("length", num) for num in (40, 80, 160, 40)]
    assert result.usage == sum((turn.reply.usage for turn in root.turns), Usage())


def test_reply_is_cut_at_max_reply_tokens(server):
    with ramify.RLM(server.model("noise"), limits=ramify.Limits(max_reply_tokens=7)) as rlm:
        result = rlm.completion("Say something long.")
    assert len(result.response) == result.usage.output_tokens == 7  # a byte is a token
    assert result.trajectory.root.turns[0].reply.finish == "length"


def test_seed_makes_sampling_repeatable(server):
    def say(seed):
        sampling = Sampling(
            temperature=1.0, seed=seed, extra={"generation_config": '{"do_sample": true}'}
        )
        limits = ramify.Limits(max_reply_tokens=30)
        with ramify.RLM(server.model("noise"), limits=limits, sampling=sampling) as rlm:
            return rlm.completion("Say something.").response

    assert say(1) == say(1) != say(2)


def test_unknown_request_field_is_refused(server):
    request = Request((Message("user", "hi"),), Sampling(extra={"return_token_ids": True}))
    error = error_of_request(server, request, "reader")
    assert isinstance(error, RequestRefusedError)
    assert not error.transient
    assert "422" in str(error)
    assert "return_token_ids" in str(error)
    assert "\n" not in str(error)


def test_unknown_model_is_transient_server_error(server):
    """It answers 500 with plain text: worth another attempt, since it does not say what was
    wrong."""
    error = error_of_request(server, Request((Message("user", "hi"),), Sampling()), "absent")
    assert isinstance(error, ServerStatusError)
    assert str(error) == f"{server.model('absent')} answered 500: Internal Server Error"


def test_base_url_without_v1_is_not_found(server):
    request = Request((Message("user", "hi"),), Sampling())

    async def main():
        pool = RateLimitedClientPool()
        with pytest.raises(RequestRefusedError, match="answered 404: Not Found"):
            await pool.client(f"openai:reader@{server.url.removesuffix('/v1')}").complete(request)
        await pool.close()

    asyncio.run(main())
