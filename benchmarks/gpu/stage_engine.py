"""The embedded engine: tokens per second by number of sequences, beside transformers' ``generate``
and the limit of the memory bandwidth, and what it saves over a conversation of 16 turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from kit import VOCABULARY, Kit, Skipped
from transformers import AutoModelForCausalLM

from ramify.clients.base import Sampling
from ramify.inference.local.local_client import LocalClient
from ramify.models.load import Policy

SHAPE = "0.6B"
PROMPT, REPLY = 256, 128


def measure(kit: Kit) -> None:
    policy = kit.policy(SHAPE, torch.bfloat16 if kit.is_cuda else torch.float32)
    module: Any = AutoModelForCausalLM.from_config(kit.config(SHAPE))  # type: ignore[no-untyped-call]
    module = module.to(device=kit.device, dtype=policy.dtype).eval()
    for num in (1, 4, 16, 32) if kit.quick else (1, 16, 128, 512):
        with kit.figure(f"{num} sequences"):
            _speed(kit, policy, module, num)
    with kit.figure("16 turns"):
        _turns(kit, policy)


def _speed(kit: Kit, policy: Policy, module: Any, num: int) -> None:
    prompt, reply = (32, 16) if kit.quick else (PROMPT, REPLY)
    cache_gb = num * (prompt + reply) * _cache_bytes(kit, policy) / 1e9
    kit.need(f"a cache of {num} sequences", 3 * cache_gb)
    expected = limit = None
    if kit.sheet is not None:
        read = policy.num_parameters * policy.dtype.itemsize
        read += num * (prompt + reply / 2) * _cache_bytes(kit, policy)
        limit = num * kit.sheet.gb_per_s * 1e9 / read
        low = 0.0 if kit.quick else 0.05
        why = "the weights and the cache are read for every token"
        expected = kit.expect(f"{num} sequences", low * limit, limit, "tok/s", why)
    to_ours = kit.expect(
        "generate to engine", 0.1 if kit.quick else 0.5, 50, "×", "the same products in fewer calls"
    )
    given = np.random.default_rng(num).integers(4, VOCABULARY, (num, prompt)).tolist()

    def ours() -> None:
        asyncio.run(_sample(policy, given, reply))

    took = kit.timed(ours, 2 if kit.quick else 3).median
    if num == 16:
        with kit.traced("16"):
            ours()
    speed = num * reply / took
    against: dict[str, float | str] = {}
    if limit is not None:
        against = {"limit of the bandwidth, tok/s": limit, "share of it": speed / limit}
    kit.add(f"{num} sequences: tokens sampled", speed, "tok/s", expected=expected, against=against)
    if num <= 128:
        ids = torch.tensor(given, device=kit.device)
        theirs = kit.timed(lambda: _generate(module, ids, reply), 2).median
        kit.add(f"{num} sequences: generate to engine", theirs / took, "×", expected=to_ours)


def _cache_bytes(kit: Kit, policy: Policy) -> int:
    config = kit.config(SHAPE)
    heads = config.num_key_value_heads * config.head_dim
    return int(2 * config.num_hidden_layers * heads * policy.dtype.itemsize)


async def _sample(policy: Policy, given: list[list[int]], num: int) -> None:
    client = LocalClient(policy, slots=len(given))
    settings = Sampling(num, 1.0, seed=1, logprobs=True)
    await asyncio.gather(
        *(client.sample(ids, settings, str(index)) for index, ids in enumerate(given))
    )
    await client.close()


@torch.inference_mode()
def _generate(module: Any, ids: torch.Tensor, num: int) -> None:
    module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num,
        min_new_tokens=num,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        eos_token_id=None,
        pad_token_id=0,
    )


def _turns(kit: Kit, policy: Policy) -> None:
    """Conversations of 16 turns, with the cached beginning and without."""
    num, turns = (4, 6) if kit.quick else (32, 16)

    def side(reuse: bool) -> Callable[[], int]:
        return lambda: asyncio.run(_conversations(policy, num, turns, reuse))

    computed = {reuse: side(reuse)() for reuse in (True, False)}
    if not computed[True]:
        raise Skipped("the engine counts no tokens of this model")
    fewer = computed[False] / computed[True]
    expected = kit.expect("a gain", 0.8, 2 * fewer, "×", f"{fewer:.1f} × the tokens computed")
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(2):
        for reuse, found in seconds.items():
            kit.sync()
            started = time.perf_counter()
            side(reuse)()
            kit.sync()
            found.append(time.perf_counter() - started)
    kit.add(
        f"{turns} turns: time without reuse to with it",
        min(seconds[False]) / min(seconds[True]),
        "×",
        expected=expected,
        against={"tokens computed without reuse to with it": fewer},
    )


async def _conversations(policy: Policy, num: int, turns: int, reuse: bool) -> int:
    """Run them and return the number of tokens that went through the model."""
    client = LocalClient(policy, slots=num, reuse=reuse)
    rng = np.random.default_rng(3)

    async def one(index: int) -> None:
        ids = rng.integers(4, VOCABULARY, 128).tolist()
        for turn in range(turns):
            # Without the conversation's id and without reuse, no slot keeps its beginning.
            affinity = str(index) if reuse else f"{index}/{turn}"
            ended = await client.sample(ids, Sampling(24, 1.0, seed=turn), affinity)
            ids = [*ended.ids, *rng.integers(4, VOCABULARY, 40).tolist()]

    await asyncio.gather(*map(one, range(num)))
    computed = client.engine.num_computed
    await client.close()
    return computed
