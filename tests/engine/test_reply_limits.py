"""How long each reply may be, which setting is named when one is cut, and what a small budget
leaves for the final reply."""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path
from typing import Any

import pytest

from ramify import RLM, DepthOptions, Limits, Model, Sampling, Scaffold, Stop, Store
from ramify.clients.base import Price, Request
from ramify.engine.model_requests import request_hash
from ramify.engine.run_result import Result
from ramify.errors import ReplyFiltered, ReplyTruncatedError, RequestRefusedError
from ramify.testing.scripted_client import ScriptedClient
from ramify.testing.scripted_server import ScriptedServer
from ramify.types.message import Message, Reply, Usage
from tests.engine.helpers import by_role, client, code, rlm

CHEAP, FREE_OUTPUT = Price(0.01, 10.0), Price(1.0, 0.0)


def cut(text: str = "half") -> Reply:
    return Reply(Message("assistant", text), finish="length")


@pytest.mark.parametrize(
    ("name", "options", "reasoning"),
    [
        ("m", {}, 0),
        ("o3", {}, 16_384),
        ("o3", {"window": 20_000}, 4900),  # a fourth of it, with the text
        ("o3", {"window": 399}, 0),
        ("o3", {"max_tokens": 50_000}, 5000),  # a tenth of the budget
        ("o3", {"price": CHEAP, "max_cost": 1.0}, 10_000),
        ("o3", {"price": CHEAP, "max_cost": 0.999_999_5}, 9999),
        ("o3", {"price": FREE_OUTPUT, "max_cost": 1.0}, 16_384),
        ("o3", {"max_reasoning_tokens": 7}, 7),
        ("m", {"sampling": Sampling(extra={"thinking": {"budget_tokens": 300}})}, 300),
        ("m", {"sampling": Sampling(extra={"thinking": {"type": "adaptive"}})}, 0),
    ],
)
def test_reply_may_have_reasoning_beside_its_text(
    name: str, options: dict[str, Any], reasoning: int
) -> None:
    """It depends on the model, its window, and the run's budget."""
    options = dict(options)
    of_client = {key: options.pop(key) for key in ("window", "price") if key in options}
    of_rlm = {key: options.pop(key) for key in ("sampling",) if key in options}
    model = ScriptedClient(["7"], f"scripted:{name}", **{"window": 1_000_000, **of_client})
    limits = Limits(max_reply_tokens=100, **options)
    with rlm(model, scaffold="default", limits=limits, **of_rlm) as r:
        assert r.completion("How many?").answer == "7"
    assert model.requests[0].sampling.max_tokens == 100 + reasoning


def ended(model: Any, question: str = "How many?", **options: Any) -> Result:
    """Return the result of a direct question, which may be a failure."""

    async def main() -> Result:
        async with RLM(model, scaffold="default", **options) as r:
            return await r.start(question).result()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "text", "setting"),
    [
        ("m", "half", "max_reply_tokens"),
        ("m", "", "max_reply_tokens"),
        ("o3", "half", "max_reply_tokens"),
        ("o3", " \n", "max_reasoning_tokens"),
    ],
)
def test_cut_reply_names_the_limit_that_it_reached(name: str, text: str, setting: str) -> None:
    model = ScriptedClient([cut(text)] * 3, f"scripted:{name}", window=1_000_000)
    result = ended(model, limits=Limits(max_reply_tokens=100))
    assert isinstance(result.failure, ReplyTruncatedError)
    assert str(result.failure).endswith(f"ask for less, or raise {setting}")


@pytest.mark.parametrize(
    ("sampled", "of_depth", "most", "setting"),
    [
        (60, None, 60, "sampling.max_tokens of openai:test"),
        (100, None, 100, "max_reply_tokens"),
        (8192, 50, 50, "max_reply_tokens of depth 0"),
        (8192, 100, 100, "max_reply_tokens"),
        (60, 60, 60, "sampling.max_tokens of openai:test"),
    ],
)
def test_lowest_of_several_limits_is_named(
    sampled: int, of_depth: int | None, most: int, setting: str
) -> None:
    """The first of equal ones."""

    async def main() -> tuple[int, str]:
        async with ScriptedServer([cut()]) as server:
            model = Model(f"openai:test@{server.url}", sampling=Sampling(max_tokens=sampled))
            depths = [DepthOptions(max_reply_tokens=of_depth)]
            limits = Limits(max_reply_tokens=100)
            async with RLM(model, scaffold="default", limits=limits, depths=depths) as r:
                result = await r.start("How many?").result()
            error = str(result.failure).removesuffix(f"@{server.url}")
        return server.requests[0].json["max_tokens"], error

    sent, error = asyncio.run(main())
    assert sent == most
    assert error.endswith(f"at its limit of {most} tokens; ask for less, or raise {setting}")


# --- small budgets --------------------------------------------------------------------------------

PLAIN = Scaffold(name="test", system="You drive to FINAL. {{tools}}{{limits}}", direct_chars=0)


def turns_then_answer(messages: tuple[Message, ...]) -> str:
    return "FINAL(7)" if "Answer now" in messages[-1].content else code("1")


@pytest.mark.parametrize(
    "limits",
    [
        *({"max_tokens": 1000 * k} for k in (9, 12, 16, 20, 24, 27, 30, 33, 36, 40)),
        *({"max_cost": cents / 100} for cents in (5, 7, 10, 12, 15, 20)),
    ],
    ids=str,
)
def test_budget_with_room_for_turns_is_used_for_them(limits: dict[str, Any]) -> None:
    """A larger budget never gives fewer turns."""
    model = client(turns_then_answer, price=Price(1.0, 10.0))
    with rlm(model, limits={"max_turns": 5, **limits}, sandbox="inprocess") as r:
        result = r.completion("text " * 9000, "How many?")
    assert (result.stop, result.answer, len(model.requests)) == (Stop.MAX_TURNS, 7, 6)


@pytest.mark.parametrize("max_tokens", [9000, 12_000, 13_000])
def test_final_reply_is_as_long_as_what_was_held_for_it(max_tokens: int) -> None:
    model = client(turns_then_answer)
    limits = {"max_tokens": max_tokens, "max_turns": 100}
    with rlm(model, limits=limits, sandbox="inprocess") as r:
        result = r.completion("text " * 9000, "How many?")
    assert (result.stop, result.answer) == (Stop.MAX_TOKENS, 7)
    assert result.usage.total_tokens <= max_tokens
    *turns, last = [request.sampling.max_tokens for request in model.requests]
    assert turns == sorted(turns, reverse=True)
    assert last == turns[-1] == 512
    # A turn of the usual length would not have fitted, and this is the number that helps a user.
    needed = int(result.reason.split("may take ")[1].split(" ")[0].replace(",", ""))
    assert needed > 8192 + 512


@pytest.mark.parametrize(
    ("limits", "reply", "last"),
    [
        ({"max_reply_tokens": 8192}, 512, 512),
        ({"max_reply_tokens": 1024}, 512, 512),
        ({"max_reply_tokens": 1022}, 512, 512),
        ({"max_reply_tokens": 100}, 100, 100),
        ({"max_reply_tokens": 100, "max_reasoning_tokens": 7}, 107, 107),
    ],
)
def test_refusal_says_what_a_turn_and_the_final_reply_may_take(
    limits: dict[str, int], reply: int, last: int
) -> None:
    """The prompt of the final reply: this turn's prompt and reply, and 1,000 tokens for the request
    to answer. A reply shortened below 512 tokens is of no use."""
    ample, small = ({"max_tokens": most, **limits} for most in (90_000, 500))
    with rlm([], scaffold=PLAIN, limits=ample, sandbox="inprocess") as r:
        prompt = Request(r.prompt("text", "?").messages).max_input_tokens()
    prompt += len("500") - len("90,000")  # which the prompts state
    with rlm([], scaffold=PLAIN, limits=small, sandbox="inprocess") as r:
        result = r.completion("text", "?")
    most = 2 * (prompt + reply) + 1000 + last
    assert result.error == (
        "nothing was asked: the next turn and the final reply, with their prompts, may take "
        f"{most:,} tokens, and 500 of 500 were left: raise max_tokens"
    )
    assert result.cost is None
    most += 2 * (len(f"{most:,}") - len("500"))
    enough = {**limits, "max_tokens": most, "max_turns": 1}
    with rlm(turns_then_answer, scaffold=PLAIN, limits=enough, sandbox="inprocess") as r:
        assert r.completion("text", "?").answer == 7


@pytest.mark.parametrize("max_reply_tokens", [50, 500, 513, 1000, 1500, 2000, 8192])
def test_lower_reply_limit_needs_no_larger_budget(max_reply_tokens: int) -> None:
    limits = {"max_tokens": 9000, "max_reply_tokens": max_reply_tokens}
    with rlm([code("1"), code("FINAL(7)")], limits=limits) as r:
        result = r.completion("text " * 9000, "How many?")
    assert (result.stop, result.answer) == (Stop.FINAL, 7)


def test_refusal_of_a_first_turn_names_its_dollars() -> None:
    model = client([code("FINAL(7)")], price=Price(1.0, 10.0))
    limits = {"max_cost": 0.012, "max_reply_tokens": 500}
    with rlm(model, limits=limits) as r:
        result = r.completion("text " * 9000, "How many?")
    assert (result.stop, model.requests) == (Stop.MAX_COST, [])
    assert re.fullmatch(
        r"nothing was asked: the next turn and the final reply, with their prompts, may cost "
        r"\$0\.0\d+, and \$0\.012 of \$0\.012 were left: raise max_cost",
        str(result.error),
    )


def test_plain_call_that_is_too_long_for_budget_and_window_names_the_window() -> None:
    model = client([code("FINAL(7)")], window=1000)
    with RLM(model, limits=Limits(max_tokens=10_000)) as r:
        with pytest.raises(
            RequestRefusedError, match=r"about 1[23],\d{3} tokens, and the window .* 1,000"
        ):
            r.completion("text " * 10_000, "How many?", direct="always")
        result = r.completion("text " * 10_000, "How many?", direct=False)
    assert result.answer == 7


@pytest.mark.parametrize(("longest", "least"), [(8192, 512), (1024, 512), (1022, 512), (100, 100)])
def test_direct_reply_is_shortened_to_512_tokens_at_least(longest: int, least: int) -> None:
    model = client([cut()] * 2)
    limits = Limits(max_reply_tokens=longest)
    assert ended(model, limits=limits).stop is Stop.MAX_TOKENS
    most = Request(model.requests[0].messages).max_input_tokens() + least
    result = ended(model, limits=Limits(max_reply_tokens=longest, max_tokens=most))
    assert model.requests[-1].sampling.max_tokens == least
    setting = "max_tokens" if least < longest else "max_reply_tokens"
    wanted = f"at its limit of {least} tokens; ask for less, or raise {setting}"
    assert str(result.failure).endswith(wanted)
    ended(model, limits=Limits(max_reply_tokens=longest, max_tokens=most - 1))
    assert len(model.requests) == 2


def test_reply_of_a_subcall_is_refused_and_not_shortened() -> None:
    """Its caller can ask for less; a text that ends early would look like an answer."""
    cell = "try: llm_query('a')\nexcept SubcallError as error: FINAL(str(error))"
    model = client(by_role([code(cell)]))
    with rlm(model, limits={"max_tokens": 6_000}, sandbox="inprocess") as r:
        assert "the run's limit of 6,000 tokens is reached" in r.completion("text", "?").answer
    assert len(model.requests) == 1


def test_truncated_reply_is_not_asked_for_again_beyond_the_budget() -> None:
    model = client([cut("```repl\nFINAL(1"), code("FINAL(2)")])
    with rlm(model, limits={"max_tokens": 12_000}, sandbox="inprocess") as r:
        assert r.completion("text " * 9000, "?").answer == 2
    first, second = model.requests
    assert first.messages == second.messages[: len(first.messages)]
    assert "was cut at its limit of tokens" in second.messages[-1].content


# --- costs ----------------------------------------------------------------------------------------


def test_cost_is_unknown_until_a_model_with_a_price_has_replied() -> None:
    def cost(root: Price | None, sub: Price | None, cell: str, **limits: Any) -> float | None:
        other = client(lambda _: "x", price=sub)
        model = client(lambda _: code(cell), price=root)
        with rlm(model, sub_model=other, limits=limits, sandbox="inprocess") as r:
            return r.completion("text", "?").cost

    priced = Price(1.0, 10.0)
    assert cost(None, priced, "FINAL(1)") is None
    assert cost(None, priced, "FINAL(llm_query('a'))") is not None
    assert cost(priced, priced, "FINAL(1)", max_tokens=1) == 0.0
    assert cost(None, None, "FINAL(1)", max_cost=math.inf) is None


@pytest.mark.parametrize("price", [None, Price(1.0, 10.0)])
def test_reused_reply_costs_nothing(price: Price | None, tmp_path: Path) -> None:
    model = client(["seven"], price=price)
    with RLM(model, scaffold="default", store=Store(tmp_path)) as r:
        assert r.completion("How many?").response == "seven"
        again = r.completion("How many?", cache=True)
    assert (again.response, again.usage.calls) == ("seven", 0)
    assert again.cost == (None if price is None else 0.0)


# --- what journals and errors say -----------------------------------------------------------------


def test_hash_of_a_request_stays_the_same() -> None:
    """Journals and caches of earlier versions are found by it."""
    request = Request((Message("user", "How many?"),), Sampling(max_tokens=100))
    assert request_hash("openai:m", request) == "451c3ca96ffb535a755b0b32fdd97c87"


def test_refusal_is_quoted_and_has_its_own_kind() -> None:
    text = "x" * 199 + "yz"
    refusal = Reply(Message("assistant", text), finish="content_filter", filter="refusal")
    result = ended(client([refusal]))
    assert isinstance(result.failure, ReplyFiltered)
    assert f"refused to answer (refusal): '{text[:200]}'; ask" in str(result.failure)
    bare = Reply(Message("assistant", ""), finish="content_filter", filter="refusal")
    assert "refused to answer (refusal); ask" in str(ended(client([bare])).failure)
    cell = "try: llm_query('a')\nexcept SubcallError as error: FINAL(error.kind)"
    with rlm(by_role([code(cell)], lambda _: refusal), sandbox="inprocess") as r:
        assert r.completion("text", "?").answer == "refusal"


def test_only_the_first_excess_is_a_warning() -> None:
    sizes = iter(range(1000, 9000, 1000))

    def script(messages: tuple[Message, ...]) -> Any:
        if messages[0].role == "system":
            return code("for _ in range(3): llm_query('p')\nFINAL(1)")
        return Reply(Message("assistant", "x"), Usage(10, next(sizes), calls=1))

    with rlm(script, limits={"max_reply_tokens": 50}, sandbox="inprocess") as r:
        result = r.completion("text", "?")
    (warning,) = [text for text in result.trajectory.warnings if "reported" in text]
    assert "reported 1,010 tokens for call 0.0, turn 0, which had reserved " in warning
