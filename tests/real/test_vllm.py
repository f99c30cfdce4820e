"""vLLM itself, if TEST_VLLM names its program (``…/bin/vllm``; its CPU build will do): weights
by our weight sync methods through its own routes, and the output matrix that is tied to the embeddings, which
its ``reload_weights`` leaves as it was.

Seen with the CPU build of vLLM 0.32.0: some 100 s to start; a sync of the packaged policy 0.1 to
0.2 s.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch

from ramify.clients.base import Request, Sampling
from ramify.inference.http.http_engines import HttpEngineClient
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.inference.local.local_client import LocalClient
from ramify.inference.weight_sync.base import to_lazy_weight, to_lazy_weights
from ramify.models.load import load_policy, save_policy
from ramify.train.backends.lora import attach, base_tensors_and_adapters, merged_weights
from ramify.types.message import Message
from tests.packaged import TINY

VLLM = os.environ.get("TEST_VLLM", "")
OPTIONS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not VLLM, reason="TEST_VLLM names no program of vLLM")
@pytest.mark.parametrize("weight_sync", ["shared", "delta"])
def test_weight_sync_through_vllm_routes(
    weight_sync: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in OPTIONS.items():
        monkeypatch.setenv(name, value)
    policy = load_policy(TINY)
    spec = InferenceSpec(
        engine="vllm",
        command=(VLLM, "serve"),
        args=("--enforce-eager",),
        weight_sync=weight_sync,
        probe_s=30,
    )
    asked = Request(
        (Message("user", "count rows of 'red'\nlen 812"),),
        Sampling(24, 1.0, seed=5, logprobs=True),
        affinity="0",
    )
    long = Request((Message("user", "go on"),), Sampling(200, 1.0, seed=1, logprobs=True))

    async def run() -> None:
        engines, local = HttpEngineClient(policy, spec, name="vllm:tiny"), LocalClient(policy)
        await engines.start(tmp_path, lambda folder: save_policy(policy, folder))
        try:
            for version in (0, 1, 2):
                if version:

                    def change(seed: int = version) -> None:
                        with torch.no_grad():
                            for parameter in policy.model.parameters():
                                make = torch.Generator().manual_seed(seed)
                                parameter += 0.02 * torch.randn(parameter.shape, generator=make)

                    await local.run(change)
                    await local.update(policy, version)
                    await engines.update(
                        to_lazy_weights(policy.model.named_parameters(), torch.float32), version
                    )
                reply = await engines.complete(asked)
                path = (*(reply.prompt_ids or ()), *(reply.token_ids or ()))
                ours = await local.logprobs(path)
                assert await engines.logprobs(path) == pytest.approx(ours, abs=1e-3)
                assert ours[len(reply.prompt_ids or ()) - 1 :] == pytest.approx(
                    reply.logprobs, abs=1e-3
                )
            running = asyncio.ensure_future(engines.complete(long))
            await asyncio.sleep(0.5)
            await engines.update(to_lazy_weights(policy.model.named_parameters(), torch.float32), 3)
            assert {span.version for span in (await running).versions or ()} <= {2, 3}
        finally:
            await engines.close()
            await local.close()

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not VLLM, reason="TEST_VLLM names no program of vLLM")
def test_lora_adapters_are_merged_inside_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if vLLM fuses a matrix with an adapter and matrices without one."""
    for name, value in OPTIONS.items():
        monkeypatch.setenv(name, value)
    serving, trained = load_policy(TINY), load_policy(TINY)
    attach(trained.model, 2, 4.0, ("q_proj", "down_proj"))
    spec = InferenceSpec(
        engine="vllm",
        command=(VLLM, "serve"),
        args=("--enforce-eager",),
        weight_sync="delta",
        probe_s=30,
    )
    asked = Request(
        (Message("user", "count rows of 'red'\nlen 812"),), Sampling(24, 1.0, seed=5, logprobs=True)
    )

    async def run() -> None:
        engines, local = HttpEngineClient(serving, spec, name="vllm:tiny"), LocalClient(serving)
        await engines.start(tmp_path, lambda folder: save_policy(serving, folder))
        before: list[float] = []
        try:
            for version in (1, 2, 3):
                with torch.no_grad():
                    for parameter in trained.model.parameters():
                        if parameter.requires_grad:
                            parameter += 0.1 * torch.randn(parameter.shape)
                await local.update(dict(merged_weights(trained.model)), version)
                named = base_tensors_and_adapters(trained.model)
                await engines.update(
                    [to_lazy_weight(*each[:2], torch.float32, each[2]) for each in named], version
                )
                reply = await engines.complete(asked)
                path = (*(reply.prompt_ids or ()), *(reply.token_ids or ()))
                ours = await local.logprobs(path)
                assert await engines.logprobs(path) == pytest.approx(ours, abs=1e-3)
                assert not before or before != pytest.approx(ours[:20], abs=1e-2)
                before = ours[:20]
        finally:
            await engines.close()
            await local.close()

    asyncio.run(run())
