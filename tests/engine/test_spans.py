"""OpenTelemetry spans of a run: their tree, their attributes under the conventions for generative
AI, and the omission of texts."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ramify import RLM, Limits, Sampling, SandboxSpec, Scaffold, ScriptedClient
from ramify.clients.base import Price
from ramify.engine.opentelemetry_spans import OpenTelemetryListener
from ramify.testing.scripted_client import refused

pytest.importorskip("opentelemetry.sdk", reason="the extra otel")
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

ROOT = Path(__file__).parents[2]
SANDBOX = SandboxSpec(provider="inprocess", allow_weaker=True)
SESSION = Scaffold(
    name="test", system="You drive a session; FINAL ends it. {{tools}}{{limits}}", direct_chars=0
)
SECRET = "the secret text"


def cell(code: str) -> str:
    return f"```repl\n{code}\n```"


def script(messages: Any) -> Any:
    """The root calls a model, a tool and a child in one cell; the child answers; all else is a
    plain call."""
    if messages[0].role != "system":
        return "7"
    question, turn = messages[1].content, sum(message.role == "assistant" for message in messages)
    if "child" in question:
        return cell("FINAL(1)")
    if "broken" in question:
        return [cell("1/0"), refused("no such model")][turn]
    return [
        cell(f"# {SECRET}\nn = llm_query('how?')\nm = grep('x')\nk = rlm_query('child', 'part')"),
        cell("FINAL(n)"),
    ][turn]


def spans_of(question: str, content: bool | None = None) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    client = ScriptedClient(script, price=Price(1.0, 1.0))

    async def run() -> None:
        rlm = RLM(
            client,
            scaffold=SESSION,
            sandbox=SANDBOX,
            limits=Limits(max_depth=1),
            sampling=Sampling(temperature=0.5),
            tools={"grep": lambda word: [word]},
        )
        async with rlm:
            listener = OpenTelemetryListener(provider.get_tracer("test"), content)
            await rlm.start("text " + SECRET, question, on_event=listener).result()

    asyncio.run(run())
    return list(exporter.get_finished_spans())


def tree(spans: list[ReadableSpan]) -> list[str]:
    """Return the names in order of start, indented by depth."""
    below: dict[int | None, list[ReadableSpan]] = {}
    for span in sorted(spans, key=lambda span: span.start_time or 0):
        below.setdefault(span.parent.span_id if span.parent else None, []).append(span)

    def lines(parent: int | None, indent: str) -> list[str]:
        return [
            line
            for span in below.get(parent, [])
            for line in (indent + span.name, *lines(span.context.span_id, indent + "  "))
        ]

    return lines(None, "")


def first_named(spans: list[ReadableSpan], name: str) -> ReadableSpan:
    return next(
        span for span in sorted(spans, key=lambda span: span.start_time or 0) if span.name == name
    )


def test_spans_of_a_run_form_a_tree() -> None:
    spans = spans_of("how many?")
    assert tree(spans) == [
        "invoke_agent ramify",
        "  invoke_agent 0",
        "    chat test",
        "    execute_tool python",
        "      chat test",
        "      execute_tool grep",
        "      invoke_agent 0.1",
        "        chat test",
        "        execute_tool python",
        "    chat test",
        "    execute_tool python",
    ]
    assert len({span.context.trace_id for span in spans}) == 1
    for span in spans:
        parent = next(
            (each for each in spans if span.parent and each.context.span_id == span.parent.span_id),
            None,
        )
        assert (
            parent is None
            or parent.start_time <= span.start_time <= span.end_time <= parent.end_time
        )  # type: ignore[operator]


def test_span_attributes_follow_the_conventions() -> None:
    spans = spans_of("how many?")
    run, chat, code, tool = (
        first_named(spans, name)
        for name in ("invoke_agent ramify", "chat test", "execute_tool python", "execute_tool grep")
    )
    assert {span.kind for span in spans if span.name.startswith("chat")} == {SpanKind.CLIENT}
    assert {span.kind for span in spans if not span.name.startswith("chat")} == {SpanKind.INTERNAL}
    about = dict(chat.attributes or {})
    assert {
        key: about[key] for key in about if not key.startswith(("gen_ai.usage", "ramify.cost"))
    } == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "scripted",
        "gen_ai.request.model": "test",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.model": "test",
        "gen_ai.conversation.id": dict(run.attributes or {})["ramify.run"],
        "gen_ai.response.finish_reasons": ("stop",),
        "ramify.call": "0",
        "ramify.turn": 1,
    }
    chats = [dict(span.attributes or {}) for span in spans if span.name.startswith("chat")]
    whole = dict(run.attributes or {})
    for name in ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "ramify.cost"):
        assert whole[name] == pytest.approx(sum(each[name] for each in chats))
    assert (whole["ramify.stop"], run.status.status_code) == ("final", StatusCode.UNSET)
    assert dict(tool.attributes or {}) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "grep",
        "gen_ai.tool.type": "function",
    }
    assert dict(code.attributes or {})["gen_ai.tool.call.id"] == "0/1/1"


def test_texts_are_recorded_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SECRET not in "".join(span.to_json() for span in spans_of(f"how many? {SECRET}"))
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "SPAN_ONLY")
    spans = spans_of("how many?")
    chat, code = (
        dict(first_named(spans, name).attributes or {})
        for name in ("chat test", "execute_tool python")
    )
    roles = [message["role"] for message in json.loads(str(chat["gen_ai.input.messages"]))]
    assert roles == ["system", "user"]
    (said,) = json.loads(str(chat["gen_ai.output.messages"]))
    assert (said["role"], said["finish_reason"], said["parts"][0]["type"]) == (
        "assistant",
        "stop",
        "text",
    )
    assert SECRET in str(code["gen_ai.tool.call.arguments"])


def test_failed_spans_have_error_status_and_every_span_ends() -> None:
    spans = spans_of("broken")
    assert tree(spans) == [
        "invoke_agent ramify",
        "  invoke_agent 0",
        "    chat test",
        "    execute_tool python",
        "    chat test",
    ]
    failed = {span.name for span in spans if span.status.status_code is StatusCode.ERROR}
    assert failed == {"invoke_agent ramify", "invoke_agent 0", "chat test", "execute_tool python"}
    assert all(span.end_time for span in spans)


PROGRAM = """
import asyncio, json, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from ramify import RLM, ScriptedClient
exporter = InMemorySpanExporter()
if "on" in sys.argv:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
tracer = trace.get_tracer("mine")
with RLM(ScriptedClient(lambda messages: "7")) as rlm, tracer.start_as_current_span("mine"):
    assert rlm.completion("how many?").response == "7"

async def served():
    import aiohttp
    from ramify.serve.recursive_run_server import RecursiveRunServer
    rlm = RLM(ScriptedClient(lambda messages: "7"))
    async with RecursiveRunServer(rlm, name="m") as server, aiohttp.ClientSession() as http:
        key = {"Authorization": f"Bearer {server.key}"}
        headers = {"traceparent": "00-0123456789abcdef0123456789abcdef-00f067aa0ba902b7-01"}
        body = {"messages": [{"role": "user", "content": "how many?"}]}
        for more in (headers, {}):
            async with http.post(server.url + "/chat/completions", json=body, headers=key | more) as reply:
                assert reply.status == 200

asyncio.run(served())
print(json.dumps([[s.name, f"{s.context.trace_id:032x}", f"{s.parent.span_id:016x}" if s.parent else ""] for s in
                  exporter.get_finished_spans()]))
"""


def test_runs_join_the_trace_of_their_caller() -> None:
    """Runs in a separate process, which can set up OpenTelemetry globally."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "on"], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    spans = json.loads(done.stdout)
    assert [name for name, *_ in spans] == [
        "chat test",
        "invoke_agent ramify",
        "mine",
        *["chat test", "invoke_agent ramify"] * 2,
    ]
    assert len({trace for _, trace, _ in spans[:3]}) == 1
    assert spans[4] == [
        "invoke_agent ramify",
        "0123456789abcdef0123456789abcdef",
        "00f067aa0ba902b7",
    ]
    assert spans[6][2] == ""


def test_without_a_provider_nothing_is_traced() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
