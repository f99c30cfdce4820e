"""What a hindsight teacher adds to a step: its scoring as a share of one forward pass over the step's rollouts.

    python benchmarks/signals.py            a table, by length of the prompt
    python benchmarks/signals.py --json     also prints {"figures": […]} as its last line, in the form of engine.py

Groups of eight rollouts of four turns, three of them hinted (35 to 40 % is what a judge hints), through the scorer that
training uses; processor time of the thread that computes, so that other work on the machine does not count. Tokens are
those that were computed, what rows of a group begin with alike once. The policy is that of `recipes/tiny.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from engine import Figure

from ramify.policy.load import from_config
from ramify.policy.tokenizer import train_tokenizer
from ramify.train.backends.base import Compute
from ramify.train.backends.single import Single
from ramify.train.signals.base import Row
from ramify.train.signals.scorer import PolicyScorer

GROUPS, SIBLINGS, HINTED, TURNS, SAMPLED, OBSERVED, HINT = 4, 8, 3, 4, 60, 40, 25
PROMPTS = (64, 256, 512)
FLOOR = 0.5
SHAPE = {
    "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 256, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip


class Cost(NamedTuple):
    cpu_s: float
    tokens: float


def scorer() -> PolicyScorer:
    from transformers import AutoConfig

    torch.set_num_threads(1)
    tokenizer = train_tokenizer(["what is the sum of all that is red, said the code"] * 50, 280)
    made = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model("qwen3", **{**made, "pad_token_id": tokenizer.pad_token_id, **SHAPE})
    policy = from_config(config, tokenizer, 0)
    backend = Single(policy, None, Compute(precision="fp32"))

    async def here(function: Callable[[], Any]) -> Any:
        return function()

    return PolicyScorer(backend, policy.window, len(tokenizer), here)


def rows(prompt: int, siblings: int, hint: int) -> list[list[Row]]:
    """Rows of each group; with ``hint`` so many tokens stand at the prompt's end."""
    found = []
    for group in range(GROUPS):
        draw = random.Random(group)
        first = [draw.randrange(10, 270) for _ in range(prompt)]
        members = []
        for sibling in range(siblings):
            own = random.Random(group * 100 + sibling)
            ids = [*first, *(own.randrange(10, 270) for _ in range(hint))]
            spans = []
            for _ in range(TURNS):
                spans.append((len(ids), len(ids) + SAMPLED))
                ids += [own.randrange(10, 270) for _ in range(SAMPLED + OBSERVED)]
            members.append(Row(ids[:-OBSERVED], spans))
        found.append(members)
    return found


def measured(scores: PolicyScorer, groups: list[list[Row]]) -> Cost:
    before, started = scores.packed_tokens, time.thread_time()
    for group in groups:
        scores.compute(group)
    return Cost(time.thread_time() - started, scores.packed_tokens - before)


def figures(rounds: int) -> list[Figure]:
    found = []
    scores = scorer()
    for prompt in PROMPTS:
        whole, teacher = rows(prompt, SIBLINGS, 0), rows(prompt, HINTED, HINT)
        measured(scores, whole)
        pairs = [(measured(scores, whole), measured(scores, teacher)) for _ in range(rounds)]
        seconds = median(b.cpu_s / a.cpu_s for a, b in pairs)
        tokens = pairs[0][1].tokens / pairs[0][0].tokens
        name = f"teacher scoring, prompt of {prompt} tokens"
        found.append(Figure(name, round(seconds, 3), "of a forward pass", {"tokens": round(tokens, 3)}, FLOOR))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    found = figures(arguments.rounds)
    for figure in found:
        print(
            f"{figure.name:40} {figure.value:>7} {figure.unit} ({figure.against['tokens']} of its tokens; at most {FLOOR})"
        )
    if arguments.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 0 if all(figure.holds for figure in found) else 1


if __name__ == "__main__":
    sys.exit(main())
