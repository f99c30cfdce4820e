"""Comparison of whole steps with TRL: the same model, lengths and group, with the two sides
alternating by step.

    single turn    16 prompts of about 43 tokens, 8 replies of 64 tokens each: sampling, loss and
                   AdamW
    trees          8 siblings of 8 turns, without sampling: TRL gets each turn as a row, in batches
                   of 8; ramify gets the paths

TRL runs in a separate process (``side_trl.py``) and makes a step on request. Both sides count CPU
seconds of one thread.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import peers
import trees
from figures import Figure
from processes import HERE, quiet_env

from ramify.clients.base import KnownPrefix, Request, Sampling
from ramify.inference.local.local_client import LocalClient
from ramify.models.load import Policy, save_policy
from ramify.train.backends.base import OptimizerSpec, TrainerComputeSpec
from ramify.train.backends.single_device import SingleBackend
from ramify.train.data.pack import pack
from ramify.train.losses import PpoClip
from ramify.train.losses.total_loss import LossSpec
from ramify.types.message import Reply
from ramify.types.training_sequences import TokenSequence

PROMPTS, SIBLINGS, REPLY = 16, 8, 64
LOSS = LossSpec(policy=PpoClip())
FP32 = TrainerComputeSpec(precision="fp32")
Step = Callable[[], float]
"""Makes an optimizer step and returns its CPU seconds."""


def against_trl(policy_of: Callable[[], Policy], *, quick: bool) -> Iterator[Figure]:
    rounds = 3 if quick else 7
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_policy(policy_of(), folder / "model")
        yield from _single_turn(policy_of(), folder, rounds)
        for ratio in (4,) if quick else (1, 4):
            yield from _trees(policy_of(), folder, ratio, rounds)


def _single_turn(policy: Policy, folder: Path, rounds: int) -> Iterator[Figure]:
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdefghij "), 90)) for _ in range(PROMPTS)]
    prompts = [policy.tokenizer(text)["input_ids"] for text in texts]
    (folder / "prompts").write_text("\n".join(map(json.dumps, texts)))
    # TRL's replies are forced to their length, too.
    policy.renderer.stop_ids = ()  # type: ignore[misc]
    name = f"a step of {PROMPTS} × {SIBLINGS} replies, single turn: TRL to ours"
    with (
        ours(policy) as (client, backend),
        peer(folder / "model", "once", folder / "prompts", SIBLINGS, REPLY) as theirs,
    ):
        loop = asyncio.new_event_loop()
        steps = iter(range(1000))
        yield _compared(
            name,
            rounds,
            lambda: _whole_step(loop, client, backend, prompts, next(steps)),
            theirs,
            2,
        )
        loop.run_until_complete(client.close())
        loop.close()


def _whole_step(
    loop: asyncio.AbstractEventLoop,
    client: LocalClient,
    backend: SingleBackend,
    prompts: list[list[int]],
    step: int,
) -> float:
    started = time.process_time()
    replies = loop.run_until_complete(_replies(client, prompts, step))
    rows = []
    for index, reply in enumerate(replies):
        reward = (index * 7919 + step) % 5  # arbitrary; the mean of each group is subtracted
        mean = (
            sum(
                (other * 7919 + step) % 5
                for other in range(index - index % SIBLINGS, index - index % SIBLINGS + 8)
            )
            / 8
        )
        rows.append(_row(f"{index}", prompts[index // SIBLINGS], reply, reward - mean))
    backend.forward_backward(pack(rows, backend.packing), LOSS)
    backend.optim_step()
    loop.run_until_complete(client.update(client.policy, step + 1))
    return time.process_time() - started


async def _replies(client: LocalClient, prompts: list[list[int]], step: int) -> list[Reply]:
    requests = [
        Request(
            (),
            Sampling(REPLY, 1.0, seed=step, logprobs=True),
            affinity=f"{step}.{index}",
            known=KnownPrefix(0, tuple(ids)),
        )
        for index, ids in enumerate(ids for ids in prompts for _ in range(SIBLINGS))
    ]
    return await asyncio.gather(*map(client.complete, requests))


def _row(name: str, prompt: list[int], reply: Reply, advantage: float) -> TokenSequence:
    assert reply.token_ids is not None
    assert reply.logprobs is not None
    ids = np.array([*prompt, *reply.token_ids])
    mask = np.arange(len(ids)) >= len(prompt)
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[len(prompt) :] = reply.logprobs
    weights = mask.astype(np.float32)
    return TokenSequence(
        name=name,
        token_ids=ids,
        mask=mask,
        sampler_logprobs=logprobs,
        advantages=advantage * weights,
        rl=weights,
    )


def _trees(policy: Policy, folder: Path, ratio: int, rounds: int) -> Iterator[Figure]:
    rows = trees.group(8, SIBLINGS, 8 * trees.REPLY * ratio)
    parts = [part for turn in trees.stepwise(rows) for part in turn]
    lines = []
    for part in parts:
        start = int(np.flatnonzero(part.rl)[0])
        ids, logprobs = part.token_ids.tolist(), part.sampler_logprobs.tolist()
        lines.append(
            json.dumps({"prompt": ids[:start], "reply": ids[start:], "logprobs": logprobs[start:]})
        )
    (folder / "rows").write_text("\n".join(lines))
    backend = SingleBackend(policy, OptimizerSpec(lr=1e-3), FP32)

    def step() -> float:
        started = time.process_time()
        backend.forward_backward(pack(rows, backend.packing), LOSS)
        backend.optim_step()
        return time.process_time() - started

    name = (
        f"a step of {SIBLINGS} siblings × 8 turns, prompt : response {ratio}:1: TRL, given rows, "
        "to ours"
    )
    with peer(folder / "model", "rows", folder / "rows", SIBLINGS) as theirs:
        yield _compared(name, rounds, step, theirs, 28)


def _compared(name: str, rounds: int, ours: Step, theirs: Step | None, least: float) -> Figure:
    if theirs is None:
        return Figure(name, None, "×", {})
    ours()
    theirs()
    pairs = []
    for round in range(rounds):
        times = [side() for side in ((ours, theirs) if round % 2 else (theirs, ours))]
        pairs.append(times if round % 2 else times[::-1])
    value = median(trl / own for own, trl in pairs)
    against = {
        "ours, s": median(own for own, _ in pairs),
        "TRL, s": median(trl for _, trl in pairs),
    }
    return Figure(name, value, "×", against, None, True, least)


@contextmanager
def ours(policy: Policy) -> Iterator[tuple[LocalClient, SingleBackend]]:
    yield (
        LocalClient(policy, slots=PROMPTS * SIBLINGS),
        SingleBackend(policy, OptimizerSpec(lr=1e-3), FP32),
    )


@contextmanager
def peer(*arguments: Any) -> Iterator[Step | None]:
    """Yield TRL's trainer as a function that makes a step; None if it is not installed or does not
    start."""
    python = peers.WITH_TRL.python_with("trl")
    if python is None:
        yield None
        return
    command = [python, str(HERE / "side_trl.py"), *map(str, arguments)]
    environment = quiet_env(OMP_NUM_THREADS="1")
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def step() -> float:
            stdin.write("\n")
            stdin.flush()
            return float(json.loads(stdout.readline()))

        try:
            if stdout.readline() != "ready\n":
                errors.seek(0)
                print(f"TRL did not start: {errors.read()[-2000:].decode()}", file=sys.stderr)
                yield None
            else:
                yield step
        finally:
            process.kill()
