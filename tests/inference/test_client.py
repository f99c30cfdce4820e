"""The engine as a client: ids are extended and never retokenized; seeds, stop texts, cancellation
and weight updates."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ramify.clients.base import Client, KnownPrefix, Request, Sampling, Tool
from ramify.engine.prompt_scaffold import trained_scaffold_name
from ramify.errors import ConfigError, RequestRefusedError, ServerStatusError
from ramify.inference.base import UpdatableInferenceClient
from ramify.inference.local.local_client import LocalClient
from ramify.models.chat_renderer import prompt_ids
from ramify.models.load import SamplingDefaults, save_policy
from ramify.models.weights import fingerprint
from ramify.types.message import Message, Reply
from tests.inference.helpers import WINDOW, logits, pauses, policy

USER = Message("user", "count rows of 'red'\nlen 812")


def with_client(test: Callable[[LocalClient], Awaitable[None]]) -> Callable[[], None]:
    """Runs ``test`` with a client that is closed after it."""

    @functools.wraps(test)
    def run() -> None:
        async def whole() -> None:
            client = LocalClient(policy(), slots=8, prefill_tokens=64)
            try:
                await test(client)
            finally:
                await client.close()

        asyncio.run(whole())

    del run.__wrapped__  # type: ignore[attr-defined]  # pytest would take it for a fixture
    return run


def sampling_request(
    *messages: Message, known: KnownPrefix | None = None, affinity: str = "0", **sampling: Any
) -> Request:
    return Request(
        messages or (USER,),
        Sampling(**{"max_tokens": 12, "temperature": 1.0, "seed": 7, **sampling}),
        known=known,
        affinity=affinity,
    )


@with_client
async def test_local_client_implements_the_client_protocols(client: LocalClient) -> None:
    assert isinstance(client, Client)
    assert isinstance(client, UpdatableInferenceClient)
    assert (client.window, client.price and client.price.output, trained_scaffold_name(client)) == (
        WINDOW,
        0.0,
        "tiny",
    )


@with_client
async def test_reply_has_exact_ids_usage_and_logprobs(client: LocalClient) -> None:
    reply = await client.complete(sampling_request())
    renderer = client.policy.renderer
    assert reply.prompt_ids == tuple(renderer.prompt([USER]))
    assert reply.token_ids is not None
    assert reply.logprobs is not None
    assert reply.message == renderer.parse(reply.token_ids)
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.calls) == (
        len(reply.prompt_ids),
        12,
        1,
    )
    assert (reply.finish, reply.versions and reply.versions[0].end) == ("length", 12)
    path = [*reply.prompt_ids, *reply.token_ids]
    plain = logits(client.policy, path)[len(reply.prompt_ids) - 1 : -1].log_softmax(-1)
    exact = plain.gather(1, torch.tensor(reply.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(reply.logprobs), exact, rtol=0, atol=1e-5)
    scored = await client.logprobs(path)
    torch.testing.assert_close(torch.tensor(scored[-12:]), exact, rtol=0, atol=1e-5)


@with_client
async def test_conversation_extends_the_known_ids(client: LocalClient) -> None:
    """Even if the sampled ids differ from the tokenization of their text."""
    first = await client.complete(sampling_request())
    assert first.prompt_ids is not None
    assert first.token_ids is not None
    path = first.prompt_ids + first.token_ids
    after = Message("user", "17")
    second = await client.complete(
        sampling_request(USER, first.message, after, known=KnownPrefix(2, path))
    )
    assert second.prompt_ids is not None
    assert second.prompt_ids[: len(path)] == path
    assert list(second.prompt_ids[len(path) :]) == client.policy.renderer.extend(
        [after], after=path
    )
    assert (
        second.usage.cached_tokens == len(path) - 1
    )  # all but the last sampled token was computed before
    afresh = client.policy.renderer.prompt([USER, first.message, after])
    assert (
        prompt_ids(client.policy.renderer, sampling_request(USER, first.message, after)) == afresh
    )


@with_client
async def test_seed_determines_the_reply_in_any_batch(client: LocalClient) -> None:
    alone = await client.complete(sampling_request())
    crowd = await asyncio.gather(
        *(
            client.complete(sampling_request(Message("user", f"other {index}"), seed=index))
            for index in range(20)
        ),
        client.complete(sampling_request()),
    )
    assert crowd[-1].token_ids == alone.token_ids
    other_call, other_seed = await asyncio.gather(
        client.complete(sampling_request(affinity="0.1")), client.complete(sampling_request(seed=8))
    )
    unseeded = [await client.complete(sampling_request(seed=None, max_tokens=40)) for _ in range(2)]
    assert len({alone.token_ids, other_call.token_ids, other_seed.token_ids}) == 3
    assert unseeded[0].token_ids != unseeded[1].token_ids


@with_client
async def test_missing_temperature_uses_the_checkpoints_defaults(client: LocalClient) -> None:
    client.policy.defaults = SamplingDefaults(temperature=0.0)
    greedy = await asyncio.gather(
        *(client.complete(sampling_request(temperature=None, seed=seed)) for seed in range(3))
    )
    assert len({reply.token_ids for reply in greedy}) == 1
    assert (
        greedy[0].token_ids == (await client.complete(sampling_request(temperature=0.0))).token_ids
    )
    assert greedy[0].token_ids != (await client.complete(sampling_request())).token_ids
    client.policy.defaults = SamplingDefaults(1.0, top_k=3)
    drawn = await client.complete(sampling_request(temperature=None))
    assert drawn.kept is not None
    assert {len(kept) for kept in drawn.kept} == {3}
    assert (await client.complete(sampling_request(top_p=0.9, top_k=5))).kept is not None


@with_client
async def test_stop_text_ends_the_reply_and_is_removed(client: LocalClient) -> None:
    whole = await client.complete(sampling_request(max_tokens=60))
    text = whole.message.content
    stop = text[20:22]
    reply = await client.complete(sampling_request(max_tokens=60, stop=("never there", stop)))
    assert (reply.message.content, reply.finish) == (text[: text.index(stop)], "stop")
    assert whole.token_ids is not None
    assert reply.token_ids is not None
    assert reply.token_ids == whole.token_ids[: len(reply.token_ids)]
    assert stop in client.policy.renderer.parse(reply.token_ids).content


@with_client
async def test_reply_ends_at_its_end_token(client: LocalClient) -> None:
    requests = [sampling_request(seed=seed, max_tokens=200, temperature=20.0) for seed in range(12)]
    replies = await asyncio.gather(*map(client.complete, requests))
    ended = [reply for reply in replies if reply.finish == "stop"]
    assert ended
    for reply in ended:
        assert reply.token_ids is not None
        assert (reply.token_ids[-1], reply.token_ids.count(3)) == (3, 1)
        assert "<|end|>" not in reply.message.content


@with_client
async def test_prompt_beyond_the_window_is_refused(client: LocalClient) -> None:
    with pytest.raises(
        RequestRefusedError,
        match=rf"the prompt has \d+ tokens \(1 messages\), and the window of {WINDOW}",
    ) as caught:
        await client.complete(sampling_request(Message("user", "1234567890" * 40)))
    assert caught.value.too_long
    reply = await client.complete(sampling_request(max_tokens=10_000))
    assert reply.usage.total_tokens <= WINDOW
    known = KnownPrefix(2, tuple([5] * 200))
    with pytest.raises(
        RequestRefusedError, match=r"\(200 from the turns before, \d+ from 1 new messages\)"
    ):
        await client.complete(
            sampling_request(USER, Message("assistant"), Message("user", "12345" * 20), known=known)
        )


@with_client
async def test_cancelled_request_frees_its_slot(client: LocalClient) -> None:
    for _ in range(3):
        stands = pauses(client, after=3)
        tasks = [
            asyncio.ensure_future(client.complete(sampling_request(seed=seed, max_tokens=200)))
            for seed in range(30)
        ]
        while not stands.is_set():
            await asyncio.sleep(0)
        assert any(
            generation.logprobs for generation in await client.run(lambda: list(client.engine))
        )
        for task in tasks:
            task.cancel()
        assert {type(each) for each in await asyncio.gather(*tasks, return_exceptions=True)} == {
            asyncio.CancelledError
        }
        client.resume()
    assert (await client.complete(sampling_request())).usage.output_tokens == 12
    assert await client.run(lambda: client.engine.is_idle)


@with_client
async def test_weights_can_change_between_two_steps(client: LocalClient) -> None:
    stands = pauses(client, after=9)
    running = asyncio.ensure_future(
        client.complete(sampling_request(max_tokens=200, temperature=0.9))
    )
    while not stands.is_set():
        await asyncio.sleep(0)
    other = policy(seed=1)
    await client.update(other, version=5)
    client.resume()
    reply = await running
    assert reply.versions is not None
    assert [span.version for span in reply.versions] == [0, 5]
    assert reply.token_ids is not None
    first, second = reply.versions
    assert (first.start, first.end, second.end) == (0, second.start, len(reply.token_ids))
    assert (client.version, await client.fingerprint()) == (5, fingerprint(other.model))
    assert (await client.complete(sampling_request())).usage.cached_tokens > 0
    await client.update(client.policy, version=6)
    assert (await client.complete(sampling_request())).usage.cached_tokens == 0


@with_client
async def test_shared_weights_are_not_copied(client: LocalClient) -> None:
    await client.complete(sampling_request())

    def train() -> None:
        with torch.no_grad():
            client.policy.model.get_parameter("model.norm.weight").mul_(1.5)

    before = await client.fingerprint()
    await client.run(train)
    await client.update(client.policy.model, version=1)
    assert (await client.fingerprint() != before, client.version) == (True, 1)
    reply = await client.complete(sampling_request())
    assert reply.prompt_ids is not None
    assert reply.token_ids is not None
    assert reply.logprobs is not None
    scored = await client.logprobs(reply.prompt_ids + reply.token_ids)
    assert scored[-12:] == pytest.approx(reply.logprobs, abs=1e-5)


@with_client
async def test_mismatched_weights_are_refused_without_effect(client: LocalClient) -> None:
    before = await client.fingerprint()
    with pytest.raises(ConfigError, match=r"'model\.embed_tokens\.weight' is 320x64, but 320x32"):
        await client.update(policy(hidden_size=64), version=1)
    with pytest.raises(ConfigError, match="no tensor"):
        await client.update({}, version=1)
    with pytest.raises(ConfigError, match="weights are a str"):
        await client.update("new", version=1)
    assert (await client.fingerprint(), client.version) == (before, 0)


@with_client
async def test_failed_step_fails_only_the_waiting_requests(client: LocalClient) -> None:
    norm = client.policy.model.get_submodule("model.norm")
    handle = norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ServerStatusError, match="the engine failed: ZeroDivisionError"):
        await client.complete(sampling_request())
    handle.remove()
    assert (await client.complete(sampling_request())).usage.output_tokens == 12


@with_client
async def test_unsupported_request_is_refused(client: LocalClient) -> None:
    with pytest.raises(ConfigError, match="does not support min_p, mood: remove"):
        await client.complete(sampling_request(extra={"mood": 1, "min_p": 0.1}))
    with pytest.raises(ConfigError, match="remove native tools"):
        await client.complete(Request((USER,), tools=(Tool("look", "", {}),)))
    with pytest.raises(ConfigError, match="no system message"):
        await client.complete(sampling_request(Message("system", "Be."), USER))


@pytest.mark.parametrize(
    "wrong", [{"temperature": -0.1}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_k": -1}]
)
def test_out_of_range_sampling_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be at least 0"):
        asyncio.run(LocalClient(policy()).complete(sampling_request(**wrong)))


@with_client
async def test_stream_grows_into_the_reply(client: LocalClient) -> None:
    request = sampling_request(max_tokens=200)
    parts = [part async for part in client.stream(request)]
    reply = parts[-1]
    assert isinstance(reply, Reply)
    assert reply.token_ids == (await client.complete(request)).token_ids
    grown = [part.content for part in parts[:-1] if isinstance(part, Message)]
    assert all(reply.message.content.startswith(text) for text in grown)
    assert len(grown) == len(parts) - 1


def test_closed_client_refuses_requests() -> None:
    async def whole() -> None:
        client = LocalClient(policy())
        await client.complete(sampling_request())
        await client.close()
        await client.close()
        with pytest.raises(RuntimeError, match="closed"):
            await client.complete(sampling_request())

    asyncio.run(whole())


def test_closed_event_loop_with_a_pending_request_does_not_affect_others() -> None:
    client = LocalClient(policy())
    loop = asyncio.new_event_loop()
    lost = loop.create_task(client.complete(sampling_request(max_tokens=100)))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    reply = asyncio.run(client.complete(sampling_request(max_tokens=150)))
    assert reply.usage.output_tokens == 150
    assert not lost.done()
    lost._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 -- asyncio would complain, and rightly
    lost.get_coro().close()  # type: ignore[union-attr]
    asyncio.run(client.close())


def test_one_client_serves_several_loops() -> None:
    client = LocalClient(policy())
    first, second = (asyncio.run(client.complete(sampling_request())) for _ in range(2))
    asyncio.run(client.close())
    assert first.token_ids == second.token_ids


def test_logprobs_match_transformers(tmp_path: Any) -> None:
    made = policy()
    save_policy(made, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    client = LocalClient(made)
    reply = asyncio.run(
        client.complete(sampling_request(max_tokens=100, temperature=0.7, top_k=20))
    )
    asyncio.run(client.close())
    assert reply.prompt_ids is not None
    assert reply.token_ids is not None
    assert reply.kept is not None
    with torch.no_grad():
        rows = (
            theirs(torch.tensor([reply.prompt_ids + reply.token_ids])).logits[
                0, len(reply.prompt_ids) - 1 : -1
            ]
            / 0.7
        )
    exact = [
        row[list(kept)].log_softmax(-1)[kept.index(id)]
        for row, kept, id in zip(rows, reply.kept, reply.token_ids, strict=True)
    ]
    assert reply.logprobs == pytest.approx([float(each) for each in exact], abs=1e-5)
