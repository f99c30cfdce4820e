"""Export OpenTelemetry spans from the commands, if OpenTelemetry's environment variables request
it.

    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 ramify ask …      OTLP over HTTP
    OTEL_TRACES_EXPORTER=console ramify ask …                           JSON on stderr

``engine/opentelemetry_spans.py`` defines the content of the spans. A Python program that sets up
OpenTelemetry itself does not need this file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from ramify.cli.terminal_text import StderrMessageWriter
from ramify.pip_install_command import install_command

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@contextlib.contextmanager
def span_export_context(notes: StderrMessageWriter) -> Iterator[None]:
    """Export the spans of all runs in a ``with`` block, if environment variables request it.

    If the export fails, a warning is logged and the command continues.
    """
    exporter = _exporter_name()
    provider = _provider(exporter, notes) if exporter else None
    if provider is None:
        yield
        return
    try:
        yield
    finally:
        provider.shutdown()  # sends the remaining spans, within the exporter's timeout


def _exporter_name() -> str:
    """Return the name of the exporter that the environment variables select: ``otlp`` or
    ``console``.

    Returns an empty string if they select none.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    name = os.environ.get("OTEL_TRACES_EXPORTER", "").split(",")[0].strip()
    if name == "none":
        return ""
    return name or ("otlp" if any(os.environ.get(variable) for variable in _ENDPOINTS) else "")


def _provider(name: str, notes: StderrMessageWriter) -> Any:
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter(name)
    except ImportError as error:
        notes.say(
            f"ramify: warning: to export OpenTelemetry spans: {install_command('otel')} "
            f"({error.name})"
        )
        return None
    if exporter is None:
        notes.say(
            f"ramify: warning: OTEL_TRACES_EXPORTER={name} is not supported: give otlp, console "
            "or none"
        )
        return None
    is_named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    provider = TracerProvider(
        resource=Resource.create({} if is_named else {"service.name": "ramify"})
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    _say_once(notes)
    return provider


def _exporter(name: str) -> Any:
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)
    if name == "otlp":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    return None


def _say_once(notes: StderrMessageWriter) -> None:
    """Warn once that the telemetry collector is unreachable, instead of logging each traceback.

    Otherwise each batch of spans would log one.
    """

    class Once(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR:
                log.setLevel(logging.CRITICAL + 1)
                notes.say(
                    "ramify: warning: spans could not be sent: "
                    f"{' '.join(record.getMessage().split())[:200]}"
                )

    log = logging.getLogger("opentelemetry")
    log.addHandler(Once())
    log.propagate = False
