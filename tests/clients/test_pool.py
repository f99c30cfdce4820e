"""The pool over real HTTP and over scripted clients: attempts, waits, accounting and names."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.clients.base import ASSUMED_WINDOW, Price
from ramify.clients.model_config import Model
from ramify.clients.providers import CLIENTS
from ramify.clients.rate_limited_requests import RETRYING, RateLimitedClientPool
from ramify.errors import (
    ConfigError,
    LimitReached,
    MalformedResponse,
    ModelError,
    RateLimited,
    ReplyLostError,
    RequestRefusedError,
    ServerStatusError,
    Unreachable,
    is_fixable_by_user,
)
from ramify.secret_redaction import register_secret
from ramify.testing.scripted_client import (
    ScriptedClient,
    cut,
    dropped,
    html,
    malformed,
    no_choices,
    no_usage,
    rate_limited,
    refused,
    server_error,
    stalled,
    unreachable,
)
from ramify.testing.scripted_server import ScriptedServer
from ramify.types.message import Message, Reply, Usage
from tests.clients.helpers import Books, Says, request, run, run_skipping

ANSWERED = b'{"choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}]}'


class RecordedSleep:
    """A fake ``sleep`` that returns at once and records the durations."""

    def __init__(self):
        self.naps = []

    async def __call__(self, seconds):
        self.naps.append(seconds)


def pool(**options):
    options.setdefault("sleep", RecordedSleep())
    options.setdefault("rng", random.Random(0))
    return RateLimitedClientPool(**options)


def ask(script, **options):
    """One request to a scripted client: (reply or error, books, messages about retries)."""

    async def main():
        books, notices, asking = Books(), [], pool(**options)
        client = ScriptedClient(script, price=Price(1.0, 2.0))
        try:
            outcome = await asking.ask(client, request(), books, notices.append)
        except ModelError as error:
            outcome = error
        await asking.close()
        return outcome, books, notices

    return run(main())


def test_reply_has_its_cost_and_is_settled_once():
    reply, books, notices = ask(["hello"])
    assert reply.message.content == "hello"
    assert (reply.usage, reply.cost) == (Usage(2, 2, calls=1), 6e-6)
    assert (books.entries, books.cost, books.open, notices) == (
        [("settle", reply.usage)],
        6e-6,
        0,
        [],
    )


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (rate_limited(0.01), "release"),
        (server_error(), "release"),
        (unreachable(), "release"),
        (dropped(), "forfeit"),
        (cut(), "forfeit"),
        (html(), "release"),
        (malformed(), "forfeit"),
        (no_choices(), "forfeit"),
    ],
    ids=lambda value: getattr(value, "fail", value),
)
def test_transient_failure_is_retried(failure, kind):
    reply, books, notices = ask([failure, "hello"])
    assert reply.message.content == "hello"
    assert books.kinds == [kind, "settle"]
    assert len(notices) == 1
    assert "trying again in" in notices[0]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(500, "release"), (503, "release"), (429, "release"), (504, "forfeit"), (524, "forfeit")],
)
def test_a_gateway_that_gave_up_waiting_may_have_been_paid(status, kind):
    """A gateway's time-out says nothing about the model behind it, which may have answered."""

    async def main():
        replies = [(status, b"", {"retry-after": "0"}), (200, ANSWERED, {})]
        async with Says(lambda exchange: replies.pop(0)) as server:
            pool = RateLimitedClientPool(
                base_urls={"openai": server.root}, keys={"openai": "k-12345"}, sleep=RecordedSleep()
            )
            books = Books()
            await pool.ask(pool.client("openai:m"), request(), books)
            await pool.close()
            return books.kinds

    assert run(main()) == [kind, "settle"]


def test_permanent_failure_is_raised_without_retry():
    outcome, books, notices = ask([refused(), "hello"])
    assert type(outcome) is RequestRefusedError
    assert (books.kinds, notices) == (["release"], [])


class VirtualTime(RecordedSleep):
    """A fake ``sleep`` for outages that end after ``outage_s`` seconds of it."""

    def script(self, failure, outage_s):
        while sum(self.naps) < outage_s:
            yield failure
        yield "hello"


@pytest.mark.parametrize(
    "failure",
    [unreachable(), dropped(), cut(), server_error(), html(), malformed(), no_choices()],
    ids=lambda value: value.fail,
)
@pytest.mark.parametrize(
    ("patience_s", "survives"), [(600.0, True), (301.0, True), (299.0, False), (60.0, False)]
)
def test_request_survives_outage_shorter_than_patience(failure, patience_s, survives):
    async def main():
        clock, books = VirtualTime(), Books()
        steps = clock.script(failure, 300.0)
        client = ScriptedClient(lambda _: next(steps), price=Price(1.0, 2.0))
        try:
            reply = await pool(sleep=clock).ask(client, request(), books, None, patience_s)
            outcome = reply.message.content
        except ModelError as error:
            outcome = error.waited_s if is_fixable_by_user(error) else None
        assert books.open == 0
        return outcome, sum(clock.naps)

    outcome, waited_s = run(main())
    if survives:
        assert outcome == "hello"
        assert 300.0 <= waited_s <= patience_s + 1e-9  # a sum of waits
    else:
        assert (outcome, waited_s) == (pytest.approx(patience_s), pytest.approx(patience_s))


def test_time_spent_connecting_counts_as_patience():
    """A server that accepts a connection and says nothing fails after the connect timeout."""

    async def main():
        async def slow(messages):
            await asyncio.sleep(0.3)
            return unreachable()

        client, books = ScriptedClient(slow), Books()
        with pytest.raises(Unreachable) as failed:
            await pool().ask(client, request(), books, None, 0.2)
        return len(client.requests), failed.value.waited_s >= 0.2, books.open

    assert run(main()) == (1, True, 0)


def test_retry_delay_beyond_remaining_patience_raises_at_once():
    async def main():
        clock, client = RecordedSleep(), ScriptedClient([rate_limited(601.0), "hello"])
        with pytest.raises(RateLimited) as raised:
            await pool(sleep=clock).ask(client, request(), Books(), None, 600.0)
        return clock.naps, raised.value.waited_s < 1.0

    assert run(main()) == ([], True)


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (server_error(), ServerStatusError),
        (dropped(), ReplyLostError),
        (rate_limited(0.0), RateLimited),
    ],
)
def test_request_fails_after_max_attempts(failure, error):
    outcome, books, notices = ask([failure] * 9, max_attempts=3)
    assert type(outcome) is error
    assert (len(books.entries), len(notices), books.open) == (3, 2, 0)


def test_backoff_grows_with_full_jitter():
    naps = RecordedSleep()
    ask([server_error()] * 9, max_attempts=9, sleep=naps, rng=random.Random(7))
    expected = random.Random(7)
    most = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert naps.naps == [expected.uniform(0.0, each) for each in most]


def test_retry_delay_beyond_default_patience_raises_at_once():
    outcome, books, _ = ask([rate_limited(3600.0), "hello"])
    assert isinstance(outcome, RateLimited)
    assert books.kinds == ["release"]


def test_reply_without_usage_is_settled_at_upper_bound():
    reply, books, _ = ask([no_usage("hello")])
    bound = request().max_usage()
    assert (reply.usage, books.entries) == (bound, [("settle", bound)])
    assert reply.cost == Price(1.0, 2.0).of(bound)


def test_timed_out_attempt_is_forfeited():
    outcome, books, _ = ask([stalled()], max_attempts=1, timeout_s=0.05)
    assert str(outcome) == "scripted:test: no reply within 0.05 s"
    assert books.kinds == ["forfeit"]


def test_cancelling_forfeits_sent_request_and_releases_waiting_one():
    async def main():
        asking = pool(max_in_flight=1)
        client = ScriptedClient([stalled(), stalled()])
        books = [Books(), Books()]
        tasks = [asyncio.create_task(asking.ask(client, request(), each)) for each in books]
        while not (client.in_flight and all(each.open for each in books)):
            await asyncio.sleep(0)
        for task in reversed(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [each.entries for each in books], [each.open for each in books]

    (((sent, why),), ((waiting, _),)), still_open = run(main())
    assert (sent, waiting, still_open) == ("forfeit", "release", [0, 0])
    assert why == "scripted:test: no reply had arrived when the request ended (cancelled)"


def test_cancelling_a_request_that_waits_for_the_run_frees_its_place_in_the_queue_of_its_model():
    async def main():
        asking = pool(max_in_flight=1)
        busy = ScriptedClient([stalled()], name="scripted:busy")
        client, books = ScriptedClient(["hello"]), Books()
        holder = asyncio.create_task(asking.ask(busy, request(), Books()))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(asking.ask(client, request(), books))
        await asyncio.sleep(0)
        for task in (waiting, holder):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert books.kinds == ["release"]
        reply = await asyncio.wait_for(asking.ask(client, request(), Books()), 60)
        return reply.message.content

    assert run(main()) == "hello"


def test_request_refused_by_account_is_not_sent():
    class Empty(Books):
        async def reserve(self):
            raise LimitReached("no calls left", "max_calls")

    async def main():
        client = ScriptedClient(["hello"])
        with pytest.raises(LimitReached):
            await pool().ask(client, request(), Empty())
        return client.requests

    assert run(main()) == []


class FaultyClient(ScriptedClient):
    """A client that raises ``fault`` for its first ``times`` requests, as after reading a reply
    that its author did not expect."""

    def __init__(self, fault, times):
        super().__init__(["fine"])
        self.faults = [fault] * times

    async def complete(self, request):
        if self.faults:
            raise self.faults.pop()
        return await super().complete(request)


@pytest.mark.parametrize(
    "fault",
    [
        KeyError("choices"),
        RecursionError("maximum recursion depth exceeded"),
        OverflowError("int too large to convert to float"),
        ExceptionGroup("two", [TypeError("a"), ValueError("b")]),
    ],
)
def test_unexpected_exception_of_a_client_is_a_bad_reply_that_is_retried(fault, caplog):
    async def main():
        books, notices = Books(), []
        reply = await pool().ask(FaultyClient(fault, 1), request(), books, notices.append)
        return reply.message.content, books.kinds, notices

    content, kinds, notices = run(main())
    assert (content, kinds) == ("fine", ["forfeit", "settle"])
    assert f"the reply could not be read ({type(fault).__name__}: " in notices[0]
    (record,) = [each for each in caplog.records if each.event == "unreadable_reply"]
    assert "in complete" in record.exc_text
    assert type(fault).__name__ in record.exc_text


@pytest.mark.parametrize(
    ("is_given", "key"), [(True, "given-0123456789-abcdef"), (False, "found-0123456789-abcdef")]
)
def test_unexpected_exception_that_repeats_is_a_model_error_without_the_key(is_given, key):
    if is_given:
        RateLimitedClientPool(keys={"openai": key})
    else:
        register_secret("test key", key)
    client = FaultyClient(KeyError(f"no field in\n{key}"), 9)
    with pytest.raises(
        MalformedResponse, match=r"^scripted:test: the reply could not be read"
    ) as caught:
        run(pool(max_attempts=3).ask(client, request(), Books()))
    assert len(client.faults) == 6
    assert "abcdef" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert is_fixable_by_user(caught.value)


def test_text_of_an_unexpected_exception_is_cut():
    client = FaultyClient(ValueError("x" * 999), 1)
    with pytest.raises(MalformedResponse, match=r"ValueError: x{200}\)"):
        run(pool(max_attempts=1).ask(client, request(), Books()))


def test_client_that_returns_no_reply_is_a_bad_reply():
    class Silent(ScriptedClient):
        async def complete(self, request):
            return None

    books = Books()
    with pytest.raises(MalformedResponse, match=r"could not be read \(AttributeError: "):
        run(pool(max_attempts=1).ask(Silent([]), request(), books))
    assert (books.kinds, books.open) == (["forfeit"], 0)


def test_fault_in_a_script_is_the_callers_error():
    def script(messages):
        raise KeyError("bug")

    async def main():
        books = Books()
        with pytest.raises(ConfigError, match=r"its script raised KeyError\('bug'\)") as caught:
            await pool().ask(ScriptedClient(script), request(), books)
        assert isinstance(caught.value.__cause__, KeyError)
        return books.kinds, books.open

    assert run(main()) == (["release"], 0)


def test_configuration_error_before_sending_releases_reservation():
    def script(messages):
        raise ConfigError("certificate bundle /no: not there")

    async def main():
        books = Books()
        with pytest.raises(ConfigError):
            await pool().ask(ScriptedClient(script), request(), books)
        return books.kinds, books.open

    assert run(main()) == (["release"], 0)


FAILURES = st.sampled_from(
    [
        rate_limited(0.0),
        server_error(),
        unreachable(),
        dropped(),
        cut(),
        malformed(),
        no_choices(),
        refused(),
    ]
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(FAILURES, st.just("fine")), min_size=1, max_size=24),
    st.integers(1, 4),
    st.integers(0, 6),
)
def test_every_reservation_is_resolved_once_and_usage_is_fully_accounted(lines, width, cancelled):
    async def main():
        client = ScriptedClient([*lines, *["fine"] * 200], latency_s=0.0005)
        asking, books = pool(max_in_flight=width, max_attempts=3), [Books() for _ in range(8)]
        tasks = [asyncio.create_task(asking.ask(client, request(), each)) for each in books]
        await asyncio.sleep(0.0007)
        for task in tasks[:cancelled]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [each.open for each in books] == [0] * 8
        assert client.most_in_flight <= width
        known = sum((each.usage for each in books), Usage())
        lost = sum(each.kinds.count("forfeit") for each in books)
        assert known.calls <= client.served.calls <= known.calls + lost

    run(main())


def test_usage_over_http_equals_usage_served():
    async def main():
        script = ["a"] * 20 + [rate_limited(0.02), server_error(), rate_limited(0.02)] + ["b"] * 80
        async with ScriptedServer(script, latency_s=0.005) as server:
            asking, books = pool(max_in_flight=16, base_urls={"vllm": server.url}), Books()
            client = asking.client("vllm:m")
            replies = await asyncio.gather(
                *(asking.ask(client, request(), books) for _ in range(100))
            )
            await asking.close()
            assert server.most_in_flight <= 16
            return (
                sorted(r.message.content for r in replies),
                books.usage == server.served,
                server.served.calls,
            )

    assert run(main()) == (["a"] * 20 + ["b"] * 80, True, 100)


def test_overloaded_server_serves_all_despite_more_refusals_than_attempts():
    """The server takes 3 requests at a time; 60 requests, 32 at once, meet more refusals than they
    have attempts."""

    async def main():
        here = 0

        async def script(messages):
            nonlocal here
            if here >= 3:
                return rate_limited(0.005)
            here += 1
            await asyncio.sleep(0.004)
            here -= 1
            return "done"

        asking, books = pool(max_in_flight=32, max_attempts=2), [Books() for _ in range(60)]
        client = ScriptedClient(script)
        replies = await asyncio.gather(*(asking.ask(client, request(), each) for each in books))
        return {reply.message.content for reply in replies}, sum(each.open for each in books)

    assert run(main()) == ({"done"}, 0)


def test_rate_limit_pauses_only_its_own_model():
    async def main():
        asking, loop = pool(), asyncio.get_running_loop()
        slow = ScriptedClient([rate_limited(0.3), *["slow"] * 3], name="scripted:slow")
        stuck = ScriptedClient([rate_limited(20.0), "stuck"], name="scripted:stuck")
        fast = ScriptedClient(lambda messages: "fast", name="scripted:fast")
        started, ends = loop.time(), []

        async def one(client):
            await asking.ask(client, request(), Books())
            ends.append(loop.time() - started)

        first, waiting = asyncio.create_task(one(slow)), asyncio.create_task(one(stuck))
        await asyncio.sleep(0.01)
        await asyncio.gather(*(one(fast) for _ in range(3)))
        has_waited = not waiting.done()
        waiting.cancel()
        ends.clear()
        await asyncio.gather(first, one(slow), one(slow))
        return has_waited, min(ends) >= 0.29

    assert run(main()) == (True, True)


def test_refused_connection_raises_unreachable():
    async def main():
        async with ScriptedServer(["x"]) as server:
            url = server.url
        asking, books = pool(max_attempts=2, base_urls={"vllm": url}), Books()
        with pytest.raises(Unreachable) as caught:
            await asking.ask(asking.client("vllm:m"), request(), books)
        await asking.close()
        return str(caught.value).startswith(
            f"vllm:m: cannot reach {url}/chat/completions ("
        ), books.kinds

    assert run(main()) == (True, ["release", "release"])


def test_one_long_rate_limit_does_not_block_other_requests():
    async def main():
        client = ScriptedClient([rate_limited(3600.0), *["hello"] * 3])
        asking = pool()
        with pytest.raises(RateLimited):
            await asking.ask(client, request(), Books())
        return (await asyncio.wait_for(asking.ask(client, request(), Books()), 60)).message.content

    assert run(main()) == "hello"


def test_an_adopted_client_is_found_by_its_name():
    async def main():
        asking = pool()
        client = asking.register(ScriptedClient(["x"], name="scripted:mine"))
        return asking.client("scripted:mine") is client

    assert run(main())


def test_script_file_can_be_used_as_model(tmp_path):
    path = tmp_path / "script.json"
    path.write_text('["from a file"]')

    async def main():
        asking = pool()
        client = asking.client(f"scripted:{path}")
        reply = await asking.ask(client, request(), Books())
        return client.name, reply.message.content

    assert run(main()) == (f"scripted:{path}", "from a file")


@pytest.mark.parametrize("options", [{"max_in_flight": 0}, {"max_attempts": 0}, {"timeout_s": 0}])
def test_limits_of_zero_are_refused(options):
    with pytest.raises(ConfigError, match="is 0: give"):
        RateLimitedClientPool(**options)


def test_a_wait_as_long_as_is_allowed_is_worth_it():
    async def main(asked_s):
        asking = RateLimitedClientPool()
        began_s = asyncio.get_running_loop().time()
        client = ScriptedClient([rate_limited(asked_s), "hello"])
        reply = await asking.ask(client, request(), Books())
        await asking.close()
        return reply.message.content, asyncio.get_running_loop().time() - began_s >= 300.0

    assert run_skipping(main(300.0)) == ("hello", True)
    with pytest.raises(RateLimited):
        run_skipping(main(300.1))


def test_notices_say_what_is_left():
    _, _, notices = ask([server_error()] * 2 + ["hello"], max_attempts=3)
    assert [notice[notice.index("(attempt") :] for notice in notices] == [
        "(attempt 1 of 3)",
        "(attempt 2 of 3)",
    ]

    async def main():
        notices = []
        client = ScriptedClient([server_error(), "hello"])
        await pool().ask(client, request(), Books(), notices.append, 60.0)
        return notices

    (notice,) = run_skipping(main())
    assert notice.endswith("s (for 60 s at most)")


@pytest.mark.parametrize(("seconds", "waits"), [(0.9, []), (1.0, [("budget", 1.0)])])
def test_a_wait_of_a_second_is_recorded(records, seconds, waits):
    class Slow(Books):
        async def reserve(self):
            await asyncio.sleep(seconds)
            await super().reserve()

    run_skipping(pool().ask(ScriptedClient(["hello"]), request(), Slow()))
    found = [each for each in records if each.event == "wait"]
    assert [(each.fields["reason"], round(each.fields["wait_s"], 1)) for each in found] == waits


@pytest.mark.parametrize("width", [1, 64])
def test_a_paused_model_is_the_reason_of_a_wait(records, width):
    """The request that was limited and the one behind it wait for the pause; a later one does
    not."""

    async def main():
        asking = pool(max_in_flight=width)
        client = ScriptedClient([rate_limited(20.0), "one", "two", "three"])
        first = asyncio.create_task(asking.ask(client, request(), Books()))
        await asyncio.sleep(5.0)
        await asyncio.gather(first, asking.ask(client, request(), Books()))
        await asking.ask(client, request(), Books())

    run_skipping(main())
    waits = [each.fields for each in records if each.event == "wait"]
    assert {each["reason"] for each in waits} == {"rate_limit"}
    assert sorted(round(each["wait_s"]) for each in waits) == [15, 20]


def test_a_wait_for_a_slot_is_not_one_for_a_rate_limit(records):
    async def main():
        asking, client = pool(max_in_flight=1), ScriptedClient(["one", "two"], latency_s=5.0)
        await asyncio.gather(*(asking.ask(client, request(), Books()) for _ in range(2)))

    run_skipping(main())
    assert [each for each in records if each.event == "wait"] == []


class Waits(random.Random):
    """Random numbers that are ``seconds``, or the largest possible."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def uniform(self, a, b):
        return min(self.seconds, b)


def beside_another(script, patience_s=0.0, **options):
    """A request during whose first attempt another one gets through: (reply or error, notices,
    naps)."""

    async def main():
        notices, sleep, steps = [], RecordedSleep(), iter(script)
        asking = RateLimitedClientPool(rng=Waits(4.0), sleep=sleep, **options)

        async def tell(messages):
            if messages[0].content == "another":
                return "hello"
            if len(client.requests) == 1:
                await asking.ask(client, request("another"), Books())
            return next(steps)

        client = ScriptedClient(tell)
        try:
            outcome = await asking.ask(client, request(), Books(), notices.append, patience_s)
        except ModelError as error:
            outcome = error
        return outcome, notices, sleep.naps

    return run_skipping(main())


def test_another_that_gets_through_excuses_a_rate_limit_but_no_failure():
    reply, (notice,), _ = beside_another([rate_limited(0.1), "mine"], max_attempts=1)
    assert reply.message.content == "mine"
    assert notice.endswith("trying again in 0.1 s (others got through)")
    error, notices, _ = beside_another([server_error(), "mine"], max_attempts=1)
    assert (type(error), notices) == (ServerStatusError, [])


def test_patience_is_used_up_to_its_last_half_second():
    """The pause of the rate limit counts, although others got through."""
    script = [rate_limited(0.5), *[server_error()] * 99]
    error, _, naps = beside_another(script, 8.5)
    assert (type(error), naps) == (
        ServerStatusError,
        pytest.approx([0.5, 1.0, 2.0, 4.0, 0.5], abs=0.1),
    )


def test_a_rate_limit_beside_another_may_last_as_long_as_the_patience(records):
    reply, *_ = beside_another([rate_limited(8.0), "mine"], 8.0)
    assert reply.message.content == "mine"
    assert "outage" not in [each.fields["reason"] for each in records if each.event == "wait"]
    error, *_ = beside_another([rate_limited(8.5), "mine"], 8.0)
    assert type(error) is RateLimited


def test_a_rate_limit_without_a_time_pauses_the_model_as_long_as_a_failure():
    async def main():
        notices = []
        client = ScriptedClient([rate_limited()] * 4 + ["hello"])
        await RateLimitedClientPool(rng=Waits(30.0)).ask(client, request(), Books(), notices.append)
        return [float(notice.split(RETRYING)[1].split()[0]) for notice in notices]

    assert run_skipping(main()) == pytest.approx([0.5, 1.0, 2.0, 4.0], abs=0.2)


def test_a_reservation_that_became_too_small_is_made_again_before_sending():
    class Grows(Books):
        num_checks = 0

        def is_still_valid(self):
            self.num_checks += 1
            if self.num_checks < 3:
                self.release("too small")
            return self.num_checks == 3

    async def main():
        asking, client, books = pool(max_in_flight=1), ScriptedClient(["one", "two"]), Grows()
        await asking.ask(client, request(), books)
        assert (books.kinds, books.open) == (["release", "release", "settle"], 0)
        await asking.ask(client, request(), Books())  # its slots were given back each time
        return len(client.requests)

    assert run(asyncio.wait_for(main(), 60)) == 2


def test_a_pool_without_options_sends_64_requests_and_waits_ten_minutes_for_each():
    async def main():
        asking, client = RateLimitedClientPool(), ScriptedClient(lambda _: stalled())
        asks = [
            asyncio.create_task(asking.ask(client, request(), Books(), patience_s=1.0))
            for _ in range(70)
        ]
        await asyncio.sleep(1.0)
        num_sent = client.in_flight
        errors = await asyncio.gather(*asks, return_exceptions=True)
        return num_sent, {str(error) for error in errors}

    assert run_skipping(main()) == (64, {"scripted:test: no reply within 600 s"})


def test_a_pool_without_options_tries_five_times():
    async def main():
        client = ScriptedClient([server_error()] * 9)
        with pytest.raises(ServerStatusError):
            await RateLimitedClientPool().ask(client, request(), Books())
        return len(client.requests)

    assert run_skipping(main()) == 5


def test_an_outage_is_recorded_once_and_its_wait_when_it_ends(caplog):
    async def main():
        client = ScriptedClient([server_error()] * 9 + ["hello", "at once"])
        asking = RateLimitedClientPool(rng=random.Random(0))
        await asking.ask(client, request(), Books(), None, 600.0)
        await asking.ask(client, request(), Books(), None, 600.0)
        await asking.close()

    caplog.set_level("INFO", "ramify")
    run_skipping(main())
    events = [record.event for record in caplog.records]
    assert events.count("retry") == 1
    (wait,) = [record for record in caplog.records if record.event == "wait"]
    assert wait.fields["reason"] == "outage"
    assert wait.fields["wait_s"] > 10


def test_a_reply_that_fills_its_limit_was_cut_by_it():
    def finish(num_tokens, price):
        reply = Reply(Message("assistant", "x"), Usage(2, num_tokens, calls=1), finish="other")
        client = ScriptedClient([reply], price=price)
        return run(pool().ask(client, request(), Books())).finish

    for price in (None, Price(1.0, 2.0)):
        assert [finish(63, price), finish(64, price)] == ["other", "length"]


def test_an_equal_model_has_the_same_client_until_the_pool_is_closed():
    async def main():
        asking = RateLimitedClientPool()
        one, same, other = (Model("openai:m", api_key=key) for key in ("k-1", "k-1", "k-2"))
        first = asking.client_for_model(one)
        found = [asking.client_for_model(same) is first, asking.client_for_model(other) is first]
        by_name = asking.client("vllm:m")
        found.append(asking.client("vllm:m") is by_name)
        await asking.close()
        found += [asking.client_for_model(one) is first, asking.client("vllm:m") is by_name]
        await asking.close()
        return found

    assert run(main()) == [True, False, True, False, False]


class Connected(ScriptedClient):
    """A client of a registered provider that records how it was connected and closed."""

    def __init__(self, name, **options):
        super().__init__(["hello"], name=name)
        self.options = options
        self.num_closes = 0

    async def close(self):
        self.num_closes += 1


def connect_plain(name, *, window, price, key, base_url):
    return Connected(name, window=window, price=price, key=key, base_url=base_url)


def connect_full(name, *, window, price, key, base_url, headers=None, environ=None, streams=None):
    return Connected(name, key=key, headers=headers, environ=environ, streams=streams)


def connect_none(name, **options):
    return object()


@pytest.fixture(autouse=True)
def registered():
    """Register the providers for each test, since tests of other files forget what was registered."""
    CLIENTS.register("test-plain")(connect_plain)
    CLIENTS.register("test-full")(connect_full)
    CLIENTS.register("test-none")(connect_none)


def test_a_registered_provider_gets_what_its_function_accepts():
    asking = RateLimitedClientPool(
        keys={"test-plain": "key-of-pool"}, base_urls={"test-plain": "http://pool"}
    )
    price = Price(1.0, 2.0)
    plain = asking.client_for_model(Model("test-plain:m", window=9000, price=price))
    assert plain.options == {
        "window": 9000,
        "price": price,
        "key": "key-of-pool",
        "base_url": "http://pool",
    }
    own = asking.client_for_model(
        Model("test-plain:m", base_url="http://own", api_key="key-of-model")
    )
    assert (own.options["key"], own.options["base_url"]) == ("key-of-model", "http://own")
    full = asking.client_for_model(Model("test-full:m", headers={"x-team": "a"}, stream=False))
    assert (full.options["headers"], full.options["streams"]) == ({"x-team": "a"}, False)
    assert full.options["environ"] == {}  # none of the variables that are bound is set
    assert asking.client_for_model(Model("test-full:m")).options["headers"] is None
    with pytest.raises(ConfigError, match="provider 'test-plain' sends no headers: omit them"):
        asking.client_for_model(Model("test-plain:m", headers={"x-team": "a"}))
    with pytest.raises(ConfigError, match="provider 'test-none' gives a object, not a Client"):
        asking.client("test-none:m")


def test_a_closed_pool_closes_each_client_that_it_connected_once():
    async def main():
        asking = RateLimitedClientPool()
        connected = [asking.client(f"test-plain:{name}") for name in "ab"]
        adopted = asking.register(Connected("test-plain:c"))
        await asking.close()
        await asking.close()
        return [each.num_closes for each in (*connected, adopted)]

    assert run(main()) == [1, 1, 0]


def test_a_model_of_unknown_window_has_a_small_one_if_it_is_local():
    asking = RateLimitedClientPool(keys={"openai": "key-0123456789-abcdef"})
    windows = [asking.client(name).window for name in ("vllm:unknown", "openai:unknown")]
    assert windows == [32_768, ASSUMED_WINDOW]
