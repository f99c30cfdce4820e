"""Export the events of a run as OpenTelemetry spans (the extra ``otel``).

The spans follow OpenTelemetry's conventions for generative AI.

    invoke_agent ramify                     the run            gen_ai.conversation.id = its id
    └── invoke_agent 0                      a session: of the root or of a child
        ├── chat gpt-5-mini                 one request of a turn, from sending to reply
        └── execute_tool python             one cell
            ├── execute_tool git_log        a user's tool
            ├── chat gpt-5-nano             llm_query
            └── invoke_agent 0.1            rlm_query

Spans are built from the run's events. Texts are omitted unless
``OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`` asks for them; of a turn's prompt, only the
new part is then recorded. Nothing is imported until the host program has set up OpenTelemetry. If
it has not, tracing costs one dictionary lookup.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.types.call_tree import CallTree
from ramify.types.event import (
    AnyEvent,
    CallEnded,
    CallStarted,
    CellRan,
    Listener,
    ReplyReceived,
    RequestAttemptFailed,
    RequestStarted,
    RunEnded,
    RunStarted,
    ToolAnswered,
)
from ramify.types.message import Message, Usage, escape_surrogates
from ramify.types.run_call_node import RunCallNode
from ramify.types.trajectory import CallSite, Stop

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_API = "opentelemetry.trace"
_CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_PROVIDERS = {
    "azure": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "gemini": "gcp.gemini",
    "google": "gcp.gemini",
    "mistral": "mistral_ai",
    "vertex_ai": "gcp.vertex_ai",
    "xai": "x_ai",
}
"""Ramify's name of a provider -> its name in OpenTelemetry's conventions, if the two differ."""
_PARAMETERS = ("temperature", "top_p", "top_k", "max_tokens", "seed")
_PYTHON = "python"
"""Tool name used for running a cell (piece of code)."""


def tracing_listeners() -> tuple[Listener, ...]:
    """Return a tuple with a listener that creates spans for one run or conversation.

    The tuple is empty if this process has no tracer provider that records spans.
    ``opentelemetry.trace`` must already be imported.
    """
    api = sys.modules[_API]
    provider = api.get_tracer_provider()
    if isinstance(provider, (api.ProxyTracerProvider, api.NoOpTracerProvider)):
        return ()
    return (OpenTelemetryListener(provider.get_tracer("ramify")),)


@contextlib.contextmanager
def continue_trace(headers: Mapping[str, str]) -> Iterator[None]:
    """Make runs that start in a ``with`` block part of the caller's OpenTelemetry trace.

    The HTTP header ``traceparent`` names that trace; without this header, nothing changes.
    """
    if _API not in sys.modules or "traceparent" not in headers:
        yield
        return
    from opentelemetry import context, propagate

    token = context.attach(propagate.extract(headers))
    try:
        yield
    finally:
        context.detach(token)


class OpenTelemetryListener:
    """Creates OpenTelemetry spans from the events of a run or of a conversation's runs."""

    def __init__(self, tracer: Tracer, content: bool | None = None) -> None:
        """Create a listener that sends spans to ``tracer``.

        ``content`` decides whether the texts of prompts and replies are included. If it is None,
        the environment variable ``OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`` decides.
        """
        setting = os.environ.get(_CONTENT, "").lower()
        self._content = (
            setting in ("true", "span_only", "span_and_event") if content is None else content
        )
        self._tracer = tracer
        self._zero_ns = 0
        """Unix time of the start of the run's clock, in nanoseconds."""
        self._run: Span | None = None
        self._id = ""
        self._parameters: dict[str, Any] = {}
        self._tree = CallTree()
        self._sessions: dict[str, Span] = {}
        self._requests: dict[str, Span] = {}
        """Call id -> span of the call's request in flight."""
        self._cells: dict[tuple[str, int, int], Span] = {}

    def __call__(self, event: AnyEvent) -> None:
        if isinstance(event, CellRan):  # its span starts when the call was last active
            self._cell_ended(event)
        call = self._tree.apply(event)
        match event:
            case RunStarted():
                self._begin_run(event)
            case CallStarted() if call is not None and call.kind == "rlm":
                self._begin_session(call)  # the request spans of other calls contain everything
            case RequestStarted() if call is not None:
                self._begin_request(call, event)
            case RequestAttemptFailed() if event.call in self._requests:
                self._requests[event.call].add_event(
                    "ramify.attempt_failed", timestamp=self._ns(event.at_s)
                )
            case ReplyReceived():
                self._end_request(event)
            case ToolAnswered():
                self._add_tool_span(event)
            case CallEnded():
                self._end_call(event.id, event.at_s, event.stop)
            case RunEnded():
                self._end_run(event)

    # --- the run and its calls --------------------------------------------------------------------

    def _begin_run(self, event: RunStarted) -> None:
        self._zero_ns = int((event.started_at - event.at_s) * 1e9)
        sampling = event.config.get("sampling") or {}
        self._id = event.id
        self._parameters = {
            f"gen_ai.request.{name}": sampling[name]
            for name in _PARAMETERS
            if sampling.get(name) is not None
        }
        model = next(iter(event.config.get("model") or ()), "")
        # The parent is the span that is current where the run was started.
        self._run = self._tracer.start_span(
            "invoke_agent ramify",
            start_time=self._ns(event.at_s),
            attributes={
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.agent.name": "ramify",
                "gen_ai.conversation.id": event.id,
                "ramify.run": event.id,
                **_model_attributes(model),
                **({"ramify.task": event.task} if event.task else {}),
            },
        )
        if self._content:
            self._run.set_attribute(
                "gen_ai.input.messages", _messages_json([Message("user", event.question)])
            )

    def _begin_session(self, call: RunCallNode) -> None:
        self._sessions[call.id] = self._start_span(
            f"invoke_agent {call.id}",
            self._parent_span(call.parent),
            call.started_s,
            {
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.agent.name": "ramify session",
                "gen_ai.agent.id": call.id,
                "ramify.depth": call.depth,
                **_model_attributes(call.model),
            },
        )

    def _end_call(self, id: str, at_s: float, stop: Stop) -> None:
        if request := self._requests.pop(id, None):  # cut off, or failed permanently
            self._close(request, at_s, stop)
        for key in [key for key in self._cells if key[0] == id]:
            self._close(self._cells.pop(key), at_s, stop)
        if session := self._sessions.pop(id, None):
            self._close(session, at_s, stop)

    def _end_run(self, event: RunEnded) -> None:
        for call in self._tree.order:
            if call.stop is None:
                self._end_call(call.id, event.at_s, event.stop)
        if self._run is not None:
            self._run.set_attributes(_usage_attributes(event.usage, event.cost))
            if self._content and event.answer is not None:
                text = (
                    event.answer
                    if isinstance(event.answer, str)
                    else msgspec.json.encode(event.answer).decode()
                )
                self._run.set_attribute(
                    "gen_ai.output.messages",
                    _messages_json([Message("assistant", text)], str(event.stop)),
                )
            self._close(self._run, event.at_s, event.stop)
            self._run = None

    # --- requests, cells, tools -------------------------------------------------------------------

    def _begin_request(self, call: RunCallNode, event: RequestStarted) -> None:
        if call.id in self._requests:
            return
        name = _model_attributes(call.model)
        span = self._start_span(
            f"chat {name['gen_ai.request.model']}",
            self._sessions.get(call.id) or self._parent_span(call.parent),
            event.at_s,
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.conversation.id": self._id,
                "ramify.call": call.id,
                "ramify.turn": event.turn + 1,
                **name,
                **self._parameters,
            },
            is_client=True,
        )
        if self._content:
            span.set_attribute("gen_ai.input.messages", _messages_json(event.prompt))
        self._requests[call.id] = span

    def _end_request(self, event: ReplyReceived) -> None:
        span, reply = self._requests.pop(event.call, None), event.reply
        if span is None:
            return
        span.set_attributes(
            {
                "gen_ai.response.finish_reasons": [reply.finish],
                **_usage_attributes(reply.usage, reply.cost),
            }
        )
        if reply.model:
            span.set_attribute("gen_ai.response.model", reply.model)
        if event.cached:
            span.set_attribute("ramify.from_record", True)
        if self._content:
            span.set_attribute(
                "gen_ai.output.messages", _messages_json([reply.message], reply.finish)
            )
        self._close(span, event.at_s)

    def _add_tool_span(self, event: ToolAnswered) -> None:
        span = self._start_span(
            f"execute_tool {event.name}",
            self._parent_span(CallSite(event.call, event.turn, event.cell)),
            event.at_s - event.seconds,
            _tool_attributes(event.name),
        )
        self._close(span, event.at_s, Stop.ERROR if event.error is not None else None)

    def _cell_ended(self, event: CellRan) -> None:
        span = self._parent_span(CallSite(event.call, event.turn, event.cell))
        cell = event.result
        if span is not None:
            span.set_attribute("ramify.cell.worked_s", cell.seconds)
            if self._content:
                shown = "\n".join(filter(None, (cell.stdout, cell.value, cell.error)))
                span.set_attributes(
                    {
                        "gen_ai.tool.call.arguments": escape_surrogates(cell.code),
                        "gen_ai.tool.call.result": escape_surrogates(shown),
                    }
                )
            self._close(span, event.at_s, Stop.ERROR if cell.error is not None else None)
        self._cells.pop((event.call, event.turn, event.cell), None)

    # --- spans ------------------------------------------------------------------------------------

    def _parent_span(self, parent: CallSite | None) -> Span | None:
        """Return the span above a call, which is that of the code cell that made it.

        The span is started if necessary. Return the span of the run if ``parent`` is None.
        """
        if parent is None:
            return self._run
        key = (parent.call, parent.turn, parent.cell)
        if key not in self._cells:
            call = self._tree.nodes.get(parent.call)
            self._cells[key] = self._start_span(
                f"execute_tool {_PYTHON}",
                self._sessions.get(parent.call),
                call.active_s if call is not None else 0.0,
                {
                    **_tool_attributes(_PYTHON),
                    "gen_ai.tool.call.id": f"{parent.call}/{parent.turn + 1}/{parent.cell + 1}",
                },
            )
        return self._cells[key]

    def _start_span(
        self,
        name: str,
        above: Span | None,
        at_s: float,
        attributes: dict[str, Any],
        is_client: bool = False,
    ) -> Span:
        from opentelemetry.trace import SpanKind, set_span_in_context

        parent = above or self._run
        return self._tracer.start_span(
            name,
            set_span_in_context(parent) if parent is not None else None,
            SpanKind.CLIENT if is_client else SpanKind.INTERNAL,
            attributes,
            start_time=self._ns(at_s),
        )

    def _close(self, span: Span, at_s: float, stop: Stop | None = None) -> None:
        """End ``span``, and record on it why it ended, if ``stop`` is given.

        Errors and cancellations mark the span as failed. Reaching a limit does not.
        """
        if stop is not None:
            span.set_attribute("ramify.stop", str(stop))
        if stop in (Stop.ERROR, Stop.CANCELLED):
            from opentelemetry.trace import StatusCode

            span.set_attribute("error.type", str(stop))
            span.set_status(StatusCode.ERROR)
        span.end(self._ns(at_s))

    def _ns(self, at_s: float) -> int:
        return self._zero_ns + int(at_s * 1e9)


def _model_attributes(name: str) -> dict[str, str]:
    """Return the span attributes that name a model and its provider.

    ``name`` is a full model name, such as ``openai:gpt-5-mini@http://…``.
    """
    provider, colon, model = name.partition(":")
    model = model.partition("@http")[0] if colon else provider
    return {
        "gen_ai.provider.name": _PROVIDERS.get(provider, provider),
        "gen_ai.request.model": model,
    }


def _usage_attributes(usage: Usage, cost: float | None) -> dict[str, Any]:
    named = {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.cache_creation.input_tokens": usage.cache_write_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
    }
    always = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens")
    shown: dict[str, Any] = {
        name: value for name, value in named.items() if value or name in always
    }
    return shown if cost is None else {**shown, "ramify.cost": cost}


def _tool_attributes(name: str) -> dict[str, str]:
    return {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.type": "function",
    }


def _messages_json(messages: Sequence[Message], finish: str = "") -> str:
    """Return messages as JSON in the format of OpenTelemetry's conventions.

    For example ``[{"role": "user", "parts": [{"type": "text", "content": "…"}]}]``.
    """
    written = []
    for message in messages:
        parts: list[dict[str, Any]] = []
        if message.reasoning:
            parts.append({"type": "reasoning", "content": escape_surrogates(message.reasoning)})
        if message.content:
            parts.append({"type": "text", "content": escape_surrogates(message.content)})
        parts += [
            {
                "type": "tool_call",
                "id": call.id,
                "name": call.name,
                "arguments": escape_surrogates(call.arguments),
            }
            for call in message.tool_calls
        ]
        written.append(
            {"role": message.role, "parts": parts, **({"finish_reason": finish} if finish else {})}
        )
    return msgspec.json.encode(written).decode()
