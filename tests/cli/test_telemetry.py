"""Spans of a command are sent over OTLP to a collector; a missing collector is only a warning."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cli.helpers import SESSION_SCRIPT, Shell

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel")


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Yield the address of an OTLP/HTTP collector and the list of bodies that it receives."""
    bodies: list[bytes] = []

    class RecordingHandler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), RecordingHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()
        thread.join()


def test_spans_reach_a_collector(shell: Shell) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    shell.write("log.txt", "abc")
    with collector() as (url, bodies):
        done = shell.ask(
            SESSION_SCRIPT,
            "--no-direct",
            "how long?",
            "log.txt",
            OTEL_EXPORTER_OTLP_ENDPOINT=url,
            OTEL_EXPORTER_OTLP_COMPRESSION="none",
        )
    assert (done.code, done.out) == (0, "3\n")
    (resource,) = [
        each
        for body in bodies
        for each in ExportTraceServiceRequest.FromString(body).resource_spans
    ]
    assert ("service.name", "ramify") in {
        (each.key, each.value.string_value) for each in resource.resource.attributes
    }
    names = sorted(span.name for scope in resource.scope_spans for span in scope.spans)
    assert names == [
        "chat script.json",
        "chat script.json",
        "execute_tool python",
        "execute_tool python",
        "invoke_agent 0",
        "invoke_agent ramify",
    ]


RECIPE = """
import msgspec
from ramify.train.config import EvaluateSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from tests.train.small import small

def run():
    rl = msgspec.structs.replace(small().rl, steps=1, sample=RolloutBatchSpec(items=2), rollout=RolloutOptions(group=2))
    return small(warmup=None, rl=rl, evaluate=EvaluateSpec(num=3, final=()))
"""


def test_each_rollout_of_a_training_run_is_a_trace(shell: Shell) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    shell.write("recipe.py", RECIPE)
    with collector() as (url, bodies):
        done = shell.run(
            "train",
            "recipe.py",
            "--out",
            "out",
            "--quiet",
            OTEL_EXPORTER_OTLP_ENDPOINT=url,
            OTEL_EXPORTER_OTLP_COMPRESSION="none",
        )
    assert done.code == 0, done.err
    scopes = [
        scope
        for body in bodies
        for each in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in each.scope_spans
    ]
    roots = [
        span.trace_id
        for scope in scopes
        for span in scope.spans
        if span.name == "invoke_agent ramify"
    ]
    assert (len(roots), len(set(roots))) == (
        10,
        10,
    )  # four rollouts, and two evaluations of three each


def test_unreachable_collector_causes_one_warning(shell: Shell) -> None:
    done = shell.ask(
        ["hi"],
        "hello?",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9",
        OTEL_EXPORTER_OTLP_TIMEOUT="1",
    )
    assert (done.code, done.out) == (0, "hi\n")
    assert done.err.count("spans could not be sent") == 1
    assert "Traceback" not in done.err
    unknown = shell.ask(["hi"], "hello?", OTEL_TRACES_EXPORTER="jaeger")
    assert "OTEL_TRACES_EXPORTER=jaeger is not supported: give otlp, console or none" in unknown.err
