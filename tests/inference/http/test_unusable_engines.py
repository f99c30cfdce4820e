"""Engines that cannot be used: unreachable, with another model, another version or other weights."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ramify.errors import ConfigError, TrainError
from ramify.inference.http.http_engines import HttpEngineClient
from ramify.inference.http.inference_spec import InferenceSpec, check_version
from ramify.inference.local.local_client import LocalClient
from ramify.models.load import from_config
from ramify.models.weights import fingerprint
from ramify.serve.policy_server import PolicyServer
from tests.inference.helpers import ENGINE_KEY, policy
from tests.inference.http.engine_world import other_server, run, world


@pytest.mark.parametrize(
    ("engine", "version", "says"),
    [
        (
            "vllm",
            {"version": "0.11.0"},
            r"is vllm 0\.11\.0; versions before 0\.29 are not supported: run a newer one",
        ),
        (
            "vllm",
            {"version": "0.32.0"},
            r"has no route /pause: start vLLM with VLLM_SERVER_DEV_MODE=1",
        ),
        ("ramify", {"version": "0.32.0"}, "is not a `ramify serve-policy`"),
        (
            "ramify",
            {"version": "9", "ramify_protocol": 2},
            "speaks protocol 2 .ramify 9., but this is protocol 3",
        ),
        (
            "ramify",
            {"version": "1", "ramify_protocol": 3, "weight_transfer": False},
            "does not take weights: start it with",
        ),
        (
            "sglang",
            {"version": "0.4.1"},
            r"is sglang 0\.4\.1; versions before 0\.5\.23 are not",
        ),
    ],
)
def test_incompatible_server_is_refused(engine: str, version: dict[str, Any], says: str) -> None:
    async def test() -> None:
        runner, url = await other_server(
            {
                "/health": {},
                "/version": version,
                "/server_info": version,
                "/openapi.json": {"paths": {}},
            }
        )
        engines = HttpEngineClient(policy(), InferenceSpec(engine=engine, urls=(url,)), name="x")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=says):
            await engines.start(Path("unused"), lambda _: None)
        await runner.cleanup()

    run(test)


@pytest.mark.parametrize("engine", ["ramify", "vllm"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocab_size": 400}, r"has another vocabulary \(320\) than the policy \(400\)"),
        ({"max_position_embeddings": 512}, r"has a window of 256 tokens and the policy one of 512"),
        (
            "bfloat16",
            r"computes in float32 and the policy in bfloat16: serve it with --dtype bfloat16",
        ),
    ],
)
def test_engine_with_another_model_is_refused(engine: str, change: Any, says: str) -> None:
    async def test() -> None:
        if isinstance(change, dict):
            config = msgspec.json.decode(json.dumps(policy().config.to_dict()))
            wanted = policy().config.__class__.from_dict({**config, **change})
            other = from_config(wanted, policy().tokenizer, 0)
        else:
            other = policy()
            other.model.to(getattr(torch, change))
        local = LocalClient(policy())
        async with PolicyServer(local, name="mine", key=ENGINE_KEY, weight_transfer=True) as server:
            engines = HttpEngineClient(
                other, InferenceSpec(engine=engine, urls=(server.url,)), name="x"
            )  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=says):
                await engines.start(Path("unused"), lambda _: None)
        await local.close()

    run(test)


def test_unreachable_engine_and_port_in_use_are_reported() -> None:
    async def test() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            spec = InferenceSpec(urls=(f"http://127.0.0.1:{port}",), probe_s=0.2)
            with pytest.raises(
                ConfigError,
                match=r"no engine answers: GET: cannot reach http.*/health \(connection refused",
            ):
                await HttpEngineClient(policy(), spec, name="x").start(
                    Path("unused"), lambda _: None
                )
            taken.listen()
            with pytest.raises(
                ConfigError, match=f"cannot listen on 127.0.0.1:{port} .*: choose another port"
            ):
                HttpEngineClient(policy(), InferenceSpec(ports=(port,)), name="x")

    run(test)


def test_engine_process_that_fails_to_start_is_reported(tmp_path: Path) -> None:
    async def test(*command: str) -> None:
        engines = HttpEngineClient(policy(), InferenceSpec(command=command), name="x")
        await engines.start(tmp_path, lambda folder: folder.mkdir(exist_ok=True))

    with pytest.raises(
        ConfigError, match="inference 0 cannot be started: no-such-program: No such file"
    ):
        asyncio.run(test("no-such-program"))
    with pytest.raises(
        ConfigError,
        match=r"did not answer: process \d+ on .* ended with status 3; its log ends: no model \(in .*server-0.log\)",
    ):
        asyncio.run(test("sh", "-c", "echo no model; exit 3"))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num": 0}, "num=0"),
        ({"ports": (1, 2)}, "inference.ports has 2 entries for 1 servers"),
        ({"num": 2, "ports": (7, 7)}, "each server needs a different port"),
        ({"urls": ("localhost:8000",)}, "'localhost:8000' is not an address"),
        ({"urls": ("http://a",), "num": 2}, "with urls no server is started"),
        ({"engine": "sglang", "weight_sync": "shared"}, "SGLang takes weights from files"),
        (
            {"engine": "vllm", "weight_sync": "delta", "weight_sync_options": {"places": True}},
            "the weight sync 'delta' sends vLLM whole layers",
        ),
        ({"request_s": 0}, "must be positive"),
    ],
)
def test_invalid_inference_spec_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        InferenceSpec(**fields)


def test_supported_engine_versions_are_accepted(records: list[logging.LogRecord]) -> None:
    for engine, good in (("vllm", "0.32.0"), ("vllm", "0.33.0+cpu"), ("sglang", "0.5.23")):
        check_version(engine, "x", good)
    assert records == []
    check_version("vllm", "http://n1", "0.34.1")
    (record,) = records
    assert record.getMessage() == (
        "http://n1 is vllm 0.34.1; versions from 0.29 to before 0.34 were checked. It is used, and "
        "the canary of each weight sync decides whether its replies are right"
    )
    with pytest.raises(ConfigError, match="of an unknown version"):
        check_version("vllm", "x", "")


def test_engines_with_different_weights_are_an_error() -> None:
    async def test() -> None:
        async with world() as made:
            with torch.no_grad():
                next(made.locals[1].policy.model.parameters())[0, 0] += 1
            with pytest.raises(TrainError, match="the engines have different weights"):
                await made.engines.fingerprint()
            found: Sequence[str | None] = [
                await each.fingerprint() for each in made.engines.engines
            ]
            assert found[0] == fingerprint(made.trained.model) != found[1]

    run(test)
