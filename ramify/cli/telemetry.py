"""Spans of the commands' runs, sent where OpenTelemetry's own variables say: nothing else turns
them on.

    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 ramify ask …      OTLP over HTTP
    OTEL_TRACES_EXPORTER=console ramify ask …                           JSON on stderr

What spans say is ``engine/spans.py``'s. A program of one's own that has set OpenTelemetry up needs
none of this.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ramify.cli.stderr_notes import StderrNotes

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@contextlib.contextmanager
def exporting(notes: StderrNotes, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Send the spans of all runs in this block, if the environment says where to. Nothing here ends
    a command."""
    wanted = _wanted(environ)
    provider = _provider(wanted, environ, notes) if wanted else None
    if provider is None:
        yield
        return
    try:
        yield
    finally:
        provider.shutdown()  # sends what is left; the exporter's own timeout bounds it


def _wanted(environ: Mapping[str, str]) -> str:
    """``otlp``, ``console``, or nothing."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    chosen = environ.get("OTEL_TRACES_EXPORTER", "").split(",")[0].strip()
    if chosen == "none":
        return ""
    return chosen or ("otlp" if any(environ.get(name) for name in _ENDPOINTS) else "")


def _provider(wanted: str, environ: Mapping[str, str], notes: StderrNotes) -> Any:
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter(wanted)
    except ImportError as error:
        notes.say(
            "ramify: warning: OpenTelemetry's variables ask for spans: pip install 'ramify[otel]' "
            f"({error.name})"
        )
        return None
    if exporter is None:
        notes.say(
            f"ramify: warning: OTEL_TRACES_EXPORTER={wanted} is not known here: give otlp, console "
            "or none"
        )
        return None
    is_named = "OTEL_SERVICE_NAME" in environ or "service.name=" in environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    provider = TracerProvider(
        resource=Resource.create({} if is_named else {"service.name": "ramify"})
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    _say_once(notes)
    return provider


def _exporter(wanted: str) -> Any:
    if wanted == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)
    if wanted == "otlp":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    return None


def _say_once(notes: StderrNotes) -> None:
    """A collector that is not there is a warning, once, and not a traceback for each batch."""

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
