"""Runs whose replies are streamed over real HTTP: what is shown, what is recorded and booked."""

import asyncio

import ramify
from ramify import Store, testing
from ramify.progress import watch_reply_text
from ramify.types.event import ReplyReceived, RequestAttemptFailed

SCRIPT = [testing.cut("one two three four five six seven"), "the answer is 7"]


def test_part_of_a_broken_stream_is_recorded_and_booked(tmp_path):
    """The reply itself is recorded once, whole."""

    async def main():
        events, parts = [], []
        async with testing.ScriptedServer(SCRIPT, pieces=4, piece_s=0.05) as server:
            store = Store(tmp_path)
            async with ramify.RLM(f"vllm:m@{server.url}", store=store) as rlm:
                running = rlm.start("a small context", "Which?", on_event=events.append)
                with watch_reply_text(running.id, parts.append):
                    result = await running.result()
            return result, events, parts, store.load(result.run_id), server.served

    result, events, parts, run, served = asyncio.run(main())
    assert result.response == "the answer is 7"
    (failed,) = [event for event in events if isinstance(event, RequestAttemptFailed)]
    assert failed.text
    assert SCRIPT[0].text.startswith(failed.text)
    assert failed.usage.unknown_calls == 1
    assert run.usage.output_tokens > served.output_tokens  # the lost attempt counts in full
    (reply,) = [event.reply for event in events if isinstance(event, ReplyReceived)]
    assert reply.message.content == "the answer is 7"
    firsts = [at for at, part in enumerate(parts) if part.is_first]
    assert len(firsts) == 2
    assert "".join(part.text for part in parts[firsts[0] : firsts[1]]) == failed.text
    assert "".join(part.text for part in parts[firsts[1] :]) == "the answer is 7"


def test_whole_replies_leave_the_same_journal(tmp_path):
    """Streaming changes nothing that is recorded, except for times."""

    async def journal(stream):
        async with testing.ScriptedServer(["the answer is 7"], pieces=4) as server:
            store, model = Store(tmp_path / str(stream)), f"vllm:m@{server.url}"
            async with ramify.RLM(ramify.Model(model, stream=stream), store=store) as rlm:
                result = await rlm.acompletion("a small context", "Which?")
            run = store.load(result.run_id)
            return run.calls[0].turns[0].reply.message, run.usage, run.calls[0].answer

    assert asyncio.run(journal(True)) == asyncio.run(journal(False))
