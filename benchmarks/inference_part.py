"""Benchmarks of the embedded engine against transformers' ``generate`` with the same weights. It is
the part of ``training.py`` about sampling and can also run on its own.

    python benchmarks/inference_part.py [--quick] [--json] [--device cuda] [--without-peers]

    single turn    64 prompts of 64 tokens, 64 new tokens each
    multi turn     64 conversations of 8 turns: replies of 8 to 48 tokens, observations of 16.
                   ``generate`` gets the padded batch of each turn and waits for its longest reply;
                   the engine continues each conversation independently
    siblings       64 replies to one prompt of 384 tokens
    llama.cpp      the single turn again, with the same weights as GGUF in fp32 (``side_llama.py``)
    limit          a step of 1 to 64 decoding sequences, over the time of its matrix products alone
                   and of reading its weights and keys and values once
    agreement      largest difference of a log-probability to transformers' own forward pass

Repeats are paired: each times both sides in turn, in CPU seconds of one thread (wall seconds on a
GPU). The figure is the median of the ratios. Both sides sample at temperature 1 and return the
log-probabilities of their samples; llama.cpp is also timed without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import peers
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from ramify.clients.base import KnownPrefix, Request, Sampling
from ramify.inference.local.engine import InferenceEngineLimits, LocalEngine
from ramify.inference.local.generation_request import GenerationState
from ramify.inference.local.local_client import LocalClient
from ramify.inference.local.model_runner import create_runner
from ramify.models.load import Policy, from_config, save_policy
from ramify.models.tokenizer_training import train_tokenizer

ROWS, TURNS, OBSERVATION, SHARED = 64, 8, 16, 384
REPLY = (8, 48)


class Figure(NamedTuple):
    name: str
    value: float
    unit: str
    against: dict[str, float]
    """Measurements from which the ratio is computed."""
    least: float | None = None
    floor: float | None = None

    @property
    def holds(self) -> bool | None:
        if self.least is None and self.floor is None:
            return None
        return (self.least is None or self.value >= self.least) and (
            self.floor is None or self.value <= self.floor
        )

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "holds": self.holds}


class Sides:
    """The same weights in the engine and in transformers' module."""

    def __init__(self, device: str, window: int = 512) -> None:
        self.device = device
        pick = random.Random(0)
        texts = ["".join(pick.choice("abcdefghij ") for _ in range(60)) for _ in range(2000)]
        config = Qwen3Config(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            tie_word_embeddings=True,
            max_position_embeddings=window,
            bos_token_id=None,
            eos_token_id=3,
            pad_token_id=0,
        )
        self.policy: Policy = from_config(config, train_tokenizer(texts, 512), 0, device=device)
        # No token ends a reply: both sides must sample the given number of tokens.
        self.policy.renderer.stop_ids = ()  # type: ignore[misc]
        with tempfile.TemporaryDirectory() as folder:
            save_policy(self.policy, folder)
            self.module: Any = (
                AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
            )

    def clock(self) -> float:
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def generate(
        self, ids: torch.Tensor, mask: torch.Tensor, num: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (new ids, their log-probabilities)."""
        with torch.inference_mode():
            out = self.module.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=num,
                min_new_tokens=num,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
            new = out.sequences[:, ids.shape[1] :]
            logprobs = (
                torch.stack(out.logits, 1).float().log_softmax(-1).gather(2, new[..., None])[..., 0]
            )
        return new, logprobs.cpu()


def prompts(num: int, length: int, seed: int) -> list[list[int]]:
    pick = random.Random(seed)
    return [[pick.randrange(4, 512) for _ in range(length)] for _ in range(num)]


def lengths(seed: int) -> list[list[int]]:
    """Return [row][turn] -> tokens of each reply."""
    pick = random.Random(seed)
    return [[pick.randint(*REPLY) for _ in range(TURNS)] for _ in range(ROWS)]


# --- the engine -----------------------------------------------------------------------------------


async def reply(client: LocalClient, ids: list[int], num: int, call: str) -> list[int]:
    """Request one reply to a prompt of exact ids, as the engine's caller does."""
    beginning = KnownPrefix(0, tuple(ids))
    request = Request((), Sampling(num, 1.0, seed=1, logprobs=True), affinity=call, known=beginning)
    done = await client.complete(request)
    assert done.token_ids is not None
    assert done.logprobs is not None
    return list(done.prompt_ids or ()) + list(done.token_ids)


def engine_once(sides: Sides, given: list[list[int]], num: int) -> None:
    async def run() -> None:
        client = LocalClient(sides.policy, slots=ROWS)
        await asyncio.gather(
            *(reply(client, ids, num, str(index)) for index, ids in enumerate(given))
        )
        await client.close()

    asyncio.run(run())


def engine_turns(sides: Sides, given: list[list[int]], replies: list[list[int]]) -> None:
    async def conversation(client: LocalClient, index: int) -> None:
        path = given[index]
        for turn, num in enumerate(replies[index]):
            path = await reply(client, path, num, str(index))
            path += prompts(1, OBSERVATION, 1000 * index + turn)[0]

    async def run() -> None:
        client = LocalClient(sides.policy, slots=ROWS)
        await asyncio.gather(*(conversation(client, index) for index in range(ROWS)))
        await client.close()

    asyncio.run(run())


# --- transformers ---------------------------------------------------------------------------------


def generate_once(sides: Sides, given: list[list[int]], num: int) -> None:
    ids = torch.tensor(given, device=sides.device)
    sides.generate(ids, torch.ones_like(ids), num)


def generate_turns(sides: Sides, given: list[list[int]], replies: list[list[int]]) -> None:
    paths = [list(ids) for ids in given]
    for turn in range(TURNS):
        width = max(map(len, paths))
        ids = torch.tensor(
            [[0] * (width - len(path)) + path for path in paths], device=sides.device
        )
        mask = torch.tensor(
            [[0] * (width - len(path)) + [1] * len(path) for path in paths], device=sides.device
        )
        new, _ = sides.generate(ids, mask, max(row[turn] for row in replies))
        for index, row in enumerate(new.tolist()):
            paths[index] += (
                row[: replies[index][turn]] + prompts(1, OBSERVATION, 1000 * index + turn)[0]
            )


# --- figures --------------------------------------------------------------------------------------


def paired(
    sides: Sides,
    repeats: int,
    ours: Callable[[int], None],
    theirs: Callable[[int], None],
    num_tokens: Callable[[int], int],
) -> tuple[float, dict[str, float]]:
    """Return (median ratio of the other side's time to the engine's, tokens per second of both)."""
    ratios, speeds = [], []
    for repeat in range(-1, repeats):  # the first one warms up
        times = []
        for side in (ours, theirs) if repeat % 2 else (theirs, ours):
            started = sides.clock()
            side(repeat)
            times.append(sides.clock() - started)
        our_s, their_s = times if repeat % 2 else reversed(times)
        if repeat >= 0:
            ratios.append(their_s / our_s)
            speeds.append((num_tokens(repeat) / our_s, num_tokens(repeat) / their_s))
    return median(ratios), {
        "engine tok/s": round(median(each[0] for each in speeds)),
        "generate tok/s": round(median(each[1] for each in speeds)),
    }


def llama_cpp(sides: Sides, repeats: int) -> Iterator[Figure]:
    """Measure single turns beside llama.cpp; nothing if it is not installed."""
    python = peers.BESIDE.python_with("xllamacpp", "gguf")
    if python is None or sides.device != "cpu":
        return
    given = [prompts(ROWS, 64, seed) for seed in range(repeats)]
    with tempfile.TemporaryDirectory() as folder:
        save_policy(sides.policy, folder)
        (Path(folder) / "work.json").write_text(json.dumps({"prompts": given, "new": 64}))
        done = subprocess.run(
            [python, str(Path(__file__).with_name("side_llama.py")), folder],
            capture_output=True,
            text=True,
            check=True,
        )
    theirs = json.loads(done.stdout.splitlines()[-1])
    # Far down a greedy reply, rounding may decide between two ids.
    same = theirs["greedy"][:16] == greedy_reply(sides, given[0][0], 16)
    ours = []
    for each in given:
        started = sides.clock()
        engine_once(sides, each, 64)
        ours.append(sides.clock() - started)
    num_tokens = ROWS * 64
    speeds = {
        "engine tok/s": num_tokens / median(ours),
        "llama.cpp tok/s": num_tokens / median(theirs["logprobs"]),
        "llama.cpp tok/s without log-probabilities": num_tokens / median(theirs["plain"]),
    }
    yield Figure(
        "engine / llama.cpp, single turn",
        round(speeds["engine tok/s"] / speeds["llama.cpp tok/s"], 2) if same else 0.0,
        "x",
        {name: round(value) for name, value in speeds.items()},
        least=1.0,
    )


def greedy_reply(sides: Sides, ids: list[int], num: int) -> list[int]:
    """Return the likeliest ids one after the other, by transformers."""
    with torch.inference_mode():
        out = sides.module.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=num,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    found: list[int] = out[0, len(ids) :].tolist()
    return found


def limit(sides: Sides, num: int, repeats: int) -> Figure:
    """Measure a step of ``num`` sequences of 64 to 128 tokens. The three times alternate, and the
    least of each counts, since other work on the machine only adds to it."""
    model: Any = sides.policy.model
    products = [
        (torch.randn(num, weight.shape[1]), torch.randn(*weight.shape).t())
        for name, weight in model.named_parameters()
        if weight.dim() == 2 and "embed_tokens" not in name
    ]
    if model.shape.tied:
        head = model.lm_head.weight
        products.append((torch.randn(num, head.shape[1]), torch.randn(*head.shape).t()))
    shape = model.shape
    numbers_read = sum(each.numel() for each in model.parameters())
    numbers_read += num * 96 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_size
    read = torch.randn(numbers_read)
    steps, multiplied, reading = [], [], []
    bytes_held = 0
    for repeat in range(repeats):
        engine = LocalEngine(create_runner(model), InferenceEngineLimits(num, 1024, 2 << 30, 1024))
        for index, ids in enumerate(prompts(num, 64, repeat)):
            engine.add(GenerationState(ids, max_tokens=64, seed=f"{repeat}|{index}"))
        while engine.num_computed < num * 64:
            engine.step()
        started, before = time.thread_time(), engine.num_steps
        while not engine.is_idle:
            engine.step()
        steps.append((time.thread_time() - started) / (engine.num_steps - before))
        bytes_held = engine.runner.cache_bytes
        with torch.inference_mode():
            for _ in range(20):
                started = time.thread_time()
                for x, weight in products:
                    torch.mm(x, weight)
                multiplied.append(time.thread_time() - started)
                started = time.thread_time()
                read.sum()
                reading.append(time.thread_time() - started)
    least = min(multiplied) + min(reading)
    return Figure(
        f"step of {num} sequences / its products and reading alone",
        round(min(steps) / least, 2),
        "x",
        {
            "tok/s": round(num / min(steps)),
            "step us": round(min(steps) * 1e6),
            "products us": round(min(multiplied) * 1e6),
            "reading us": round(min(reading) * 1e6),
            "cache MB": round(bytes_held / 1e6, 1),
        },
    )


def measure(device: str = "cpu", *, quick: bool = False) -> list[Figure]:
    """Return all figures of this part."""
    sides = Sides(device, window=1024)
    repeats = 3 if quick else 9
    single = paired(
        sides,
        repeats,
        lambda seed: engine_once(sides, prompts(ROWS, 64, seed), 64),
        lambda seed: generate_once(sides, prompts(ROWS, 64, seed), 64),
        lambda _: ROWS * 64,
    )
    multi = paired(
        sides,
        repeats,
        lambda seed: engine_turns(sides, prompts(ROWS, 64, seed), lengths(seed)),
        lambda seed: generate_turns(sides, prompts(ROWS, 64, seed), lengths(seed)),
        lambda seed: sum(map(sum, lengths(seed))),
    )
    siblings = paired(
        sides,
        repeats,
        lambda seed: engine_once(sides, prompts(1, SHARED, seed) * ROWS, 32),
        lambda seed: generate_once(sides, prompts(1, SHARED, seed) * ROWS, 32),
        lambda _: ROWS * 32,
    )
    return [
        Figure("engine / generate, single turn", round(single[0], 2), "x", single[1], least=1.5),
        Figure("engine / generate, 8 turns", round(multi[0], 2), "x", multi[1], least=2.5),
        Figure(
            "engine / generate, siblings under 384 tokens", round(siblings[0], 2), "x", siblings[1]
        ),
        *llama_cpp(sides, repeats),
        *([limit(sides, num, repeats) for num in (1, 4, 16, 64)] if device == "cpu" else ()),
        Figure(
            "engine against a plain forward pass, worst logprob",
            agreement(sides),
            "nats",
            {},
            floor=1e-5,
        ),
    ]


def agreement(sides: Sides) -> float:
    """Return the largest difference of a log-probability over conversations of four turns with
    reused slots."""
    worst = 0.0

    async def run() -> None:
        nonlocal worst
        client = LocalClient(sides.policy, slots=8)
        paths = prompts(24, 40, 7)
        for turn in range(4):
            requests = [
                Request(
                    (),
                    Sampling(20, 1.0, seed=turn),
                    affinity=str(index),
                    known=KnownPrefix(0, tuple(path)),
                )
                for index, path in enumerate(paths)
            ]
            done = await asyncio.gather(*map(client.complete, requests))
            for index, each in enumerate(done):
                paths[index] = [*(each.prompt_ids or ()), *(each.token_ids or ())]
                ids = torch.tensor([paths[index]], device=sides.device)
                with torch.inference_mode():
                    plain = sides.module(ids).logits[0, :-1].float().log_softmax(-1)
                exact = plain.gather(1, ids[0, 1:, None])[-20:, 0].cpu()
                worst = max(worst, float((exact - torch.tensor(each.logprobs)).abs().max()))
                paths[index] += [5, 6, 7]
        await client.close()

    asyncio.run(run())
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cpu")
    peers.add_option(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(given.device, quick=given.quick)
    missing = list(peers.check(given.without_peers, peers.BESIDE, "xllamacpp", "gguf"))
    for each in figures:
        bound = (
            f">= {each.least}"
            if each.least is not None
            else f"<= {each.floor}"
            if each.floor is not None
            else ""
        )
        verdict = {True: "holds", False: "MISSED", None: ""}[each.holds]
        print(
            f"{each.name:<52} {each.value:>8.3g} {each.unit:<5} {bound:<9} {verdict:<7} "
            f"{each.against or ''}"
        )
    if given.json:
        print(json.dumps({"figures": [each.as_json() for each in [*figures, *missing]]}))
    return 0 if not missing and all(each.holds is not False for each in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
