"""Cost of a hindsight teacher: its scoring as a share of one forward pass over a step's rollouts.

    python benchmarks/signals.py            print a table: rollouts of the study, and longer ones by
                                            length of the prompt
    python benchmarks/signals.py --json     also print {"figures": […]} as the last line, like
                                            engine.py

Groups of eight rollouts, three of them with hints (judges give hints for 35 to 40 %), go through
the scorer that training uses. A group is scored in one pass together with the reference of a KL
term, whose rows share the prompt with the teacher's. The teacher's cost is that pass minus the pass
without it. The cost of the teacher alone, as in a run without a KL term, is shown for comparison.
Times are CPU times of the computing thread, so that other load does not count; tokens are those
that were computed. The policies have the shapes of `recipes/programs.py` and `recipes/tiny.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from figures import Figure, show

from ramify.models.load import from_config
from ramify.models.tokenizer_training import train_tokenizer
from ramify.train.backends.base import TrainerComputeSpec
from ramify.train.backends.single_device import SingleBackend
from ramify.train.signals.base import TokenScoringRequest
from ramify.train.signals.teacher_logprobs import LocalTokenScorer

GROUPS, SIBLINGS, HINTED = 4, 8, 3
FLOOR = 0.5


class Case(NamedTuple):
    """Shape of rollouts, in tokens."""

    name: str
    prompt: int
    turns: int
    sampled: int
    """Sampled tokens per turn."""
    observed: int
    hint: int
    shape: dict[str, Any]


PROGRAMS = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 192,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
TINY = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
CASES = (
    Case("the study's rollouts", 22, 2, 20, 3, 6, PROGRAMS),
    *(Case(f"prompt of {num} tokens", num, 4, 60, 40, 25, TINY) for num in (64, 512, 2048)),
)


class Cost(NamedTuple):
    cpu_s: float
    tokens: float


def scorer(shape: dict[str, Any]) -> LocalTokenScorer:
    from transformers import AutoConfig

    torch.set_num_threads(1)
    tokenizer = train_tokenizer(["what is the sum of all that is red, said the code"] * 50, 280)
    made = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = AutoConfig.for_model(
        "qwen3", **{**made, "pad_token_id": tokenizer.pad_token_id, **shape}
    )
    policy = from_config(config, tokenizer, 0)
    backend = SingleBackend(policy, None, TrainerComputeSpec(precision="fp32"))

    async def here(function: Callable[[], Any]) -> Any:
        return function()

    return LocalTokenScorer(backend, policy.window, len(tokenizer), here)


def rows(case: Case) -> list[tuple[list[TokenScoringRequest], list[TokenScoringRequest]]]:
    """Return, for each group, the rollouts as sampled and the teacher's rows."""
    found = []
    for group in range(GROUPS):
        draw = random.Random(group)
        first = [draw.randrange(10, 270) for _ in range(case.prompt)]
        plain, hinted = [], []
        for sibling in range(SIBLINGS):
            own = random.Random(group * 100 + sibling)
            ids, spans = list(first), []
            for _ in range(case.turns):
                spans.append((len(ids), len(ids) + case.sampled))
                ids += [own.randrange(10, 270) for _ in range(case.sampled + case.observed)]
            ids = ids[: spans[-1][1]]
            plain.append(TokenScoringRequest(ids, spans, is_plain=True))
            if sibling < HINTED:
                hint = [own.randrange(10, 270) for _ in range(case.hint)]
                moved = [(start + case.hint, end + case.hint) for start, end in spans]
                hinted.append(TokenScoringRequest([*first, *hint, *ids[case.prompt :]], moved))
        found.append((plain, hinted))
    return found


def measured(scores: LocalTokenScorer, groups: Sequence[Sequence[TokenScoringRequest]]) -> Cost:
    before, started = scores.packed_tokens + scores.plain_tokens, time.thread_time()
    for group in groups:
        scores.compute(group)
    return Cost(time.thread_time() - started, scores.packed_tokens + scores.plain_tokens - before)


def figures(rounds: int) -> Iterator[Figure]:
    for case in CASES:
        scores, groups = scorer(case.shape), rows(case)
        plain, hinted = [plain for plain, _ in groups], [hinted for _, hinted in groups]
        both = [[*plain, *hinted] for plain, hinted in groups]
        measured(scores, both)
        costs = [
            tuple(measured(scores, each) for each in (plain, both, hinted)) for _ in range(rounds)
        ]
        added = median((b.cpu_s - a.cpu_s) / a.cpu_s for a, b, _ in costs)
        alone = median(c.cpu_s / a.cpu_s for a, _, c in costs)
        a, b, c = costs[0]
        tokens, tokens_alone = (b.tokens - a.tokens) / a.tokens, c.tokens / a.tokens
        yield Figure(
            f"teacher scoring, {case.name}, with the reference's pass",
            round(added, 3),
            "of a forward pass",
            {"of its tokens": round(tokens, 3)},
            FLOOR,
        )
        yield Figure(
            f"teacher scoring, {case.name}, by itself",
            round(alone, 3),
            "of a forward pass",
            {"of its tokens": round(tokens_alone, 3)},
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    arguments = parser.parse_args()
    found = list(figures(2 if arguments.quick else arguments.rounds))
    show(found)
    if arguments.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
