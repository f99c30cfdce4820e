"""Benchmarks of the trainer (forests against rows and TRL, growth of the time per step) and of its
sampling engine.

    python benchmarks/training.py            print a table; every figure comes from paired repeats
    python benchmarks/training.py --quick    fewer repeats, within five minutes on two cores
    python benchmarks/training.py --json     also print {"figures": […]} as the last line, like
                                             engine.py
    python benchmarks/training.py --write    also update docs/learning.md and docs/training.svg

    step-wise rows   each turn is a row that repeats everything before it; nothing is shared
    whole rows       the same, and every token passes every layer, as in trainers without trees; the
                     others' last layer computes only what a loss reads
    merged rows      each path is a row; nothing is shared
    forest           the trainer's form: shared tokens occur once if that is cheaper

All use the same trainer with the same model (0.5M parameters), in CPU seconds of one thread.
Replies have 16 tokens and observations 8. Prompt : response 16 : 1 means a prompt with 16 times the
sampled tokens of one sibling. A step is packing, forward and backward. The exit code is 1 if a
figure misses its limit. TRL has its own environment, which ``benchmarks/setup`` makes;
without it its figures are empty, and one of them says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import inference_part
import msgspec
import numpy as np
import peers
import step_parts
import torch
import training_page
import trees
from figures import Figure, show
from products import multiplications, products
from transformers import Qwen3Config
from trl_peer import against_trl

from ramify.models.dense import DenseModel
from ramify.models.forest_attention import ForestAttention
from ramify.models.load import Policy, from_config
from ramify.models.tokenizer_training import train_tokenizer
from ramify.models.training_forward import DenseTrunkRunner, pad_rows_for_onednn
from ramify.train.backends.base import TrainerComputeSpec
from ramify.train.backends.single_device import SingleBackend
from ramify.train.data.pack import PackingSpec, pack
from ramify.train.losses import PpoClip
from ramify.train.losses.total_loss import LossSpec
from ramify.types.training_sequences import Batch, PackedTokenSegment, TokenSequence

LOSS = LossSpec(policy=PpoClip())
FP32 = TrainerComputeSpec(precision="fp32")
"""Dtype in which both the forest and the rows compute, so that they differ only by rounding."""
GROUP = 8


def small_policy(window: int = 8192) -> Policy:
    """Return the half-million-parameter model of the recipes, with random weights."""
    config = Qwen3Config(
        vocab_size=trees.VOCAB,
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
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdefghij "), 60)) for _ in range(2000)]
    return from_config(config, train_tokenizer(texts, trees.VOCAB), 0)


class WholeTrunk(DenseTrunkRunner):
    """A trunk that computes all rows of the last layer, whichever are needed."""

    def __init__(self, model: DenseModel) -> None:
        super().__init__(model)
        self._whole = model

    def hidden(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        segments: Sequence[PackedTokenSegment],
        rows_N: torch.Tensor,
    ) -> torch.Tensor:
        ids_T, positions_T, segments = pad_rows_for_onednn(ids_T, positions_T, segments)
        h_TD = self._whole.hidden(ids_T, positions_T, ForestAttention(segments))
        return h_TD.index_select(0, rows_N)


class Bench(NamedTuple):
    """Inputs shared by all figures."""

    backend: SingleBackend
    quick: bool

    def learn(self, batches: list[Batch]) -> None:
        self.backend.forward_backward(batches, LOSS)
        self.backend.model.zero_grad(set_to_none=True)

    def learn_whole(self, batches: list[Batch]) -> None:
        """``learn`` with every token in every layer."""
        trunk, self.backend.trunk = self.backend.trunk, WholeTrunk(self.backend.model)
        try:
            self.learn(batches)
        finally:
            self.backend.trunk = trunk

    def forest(self, rows: list[TokenSequence]) -> list[Batch]:
        return pack(rows, self.backend.packing)

    def merged(self, rows: list[TokenSequence]) -> list[Batch]:
        return pack(rows, msgspec.structs.replace(self.backend.packing, share=False))

    def stepwise(self, rows: list[TokenSequence]) -> list[Batch]:
        return trees.stepwise_batches(rows, self.backend.packing)

    def ratios(
        self, rounds: int, ours: Callable[[], Any], *others: Callable[[], Any]
    ) -> list[list[float]]:
        """Return, for each of ``others`` and by round, its time divided by that of ``ours``. The
        order alternates."""
        found: list[list[float]] = [[] for _ in others]
        for round in range(rounds):
            times = {}
            sides = [ours, *others]
            for index in range(len(sides)) if round % 2 else reversed(range(len(sides))):
                times[index] = cpu_seconds(sides[index])
            for index in range(len(others)):
                found[index].append(times[index + 1] / times[0])
        return found


def cpu_seconds(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


# --- trees against rows ---------------------------------------------------------------------------


def sixteen_turns(b: Bench) -> Iterator[Figure]:
    """Measure siblings under one prompt. The step-wise side is timed on as many siblings as time
    allows, and scaled to all; rows fill their batches in any case."""
    for ratio, least, timed, rounds in ((1, 10, 8, 2), (4, 25, 2, 2), (16, 50, 1, 1)):
        rows = trees.group(16, GROUP, 16 * 16 * ratio)
        timed = timed if b.quick else GROUP
        rounds = rounds if b.quick else 3
        some = rows[:timed]
        b.learn(b.forest(rows))
        forest = b.forest(rows)
        alone = products(b.backend.model, forest, torch.float32)
        stepwise, whole, merged, multiplied = b.ratios(
            rounds,
            lambda rows=rows: b.learn(b.forest(rows)),
            lambda some=some: b.learn(b.stepwise(some)),
            lambda some=some: b.learn_whole(b.stepwise(some)),
            lambda rows=rows: b.learn(b.merged(rows)),
            alone,
        )
        model = b.backend.model
        fewer = multiplications(model, b.stepwise(rows)) / multiplications(model, forest)
        tokens = trees.num_tokens(b.stepwise(rows)) / trees.num_tokens(b.forest(rows))
        off = max(
            differences(b, b.forest(rows), b.merged(rows)),
            differences(b, b.forest(some), b.stepwise(some)),
        )
        value = median(stepwise) * GROUP / timed
        against = {
            "merged rows": median(merged),
            "fewer tokens": tokens,
            "fewer multiplications": fewer,
        }
        valid = max(off) <= 1e-5
        yield Figure(
            f"16 turns, 8 siblings, {ratio}:1: step-wise rows to forest",
            value,
            "×",
            against,
            None,
            valid,
            least,
        )
        gain = median(whole) * GROUP / timed
        yield Figure(
            f"the same, {ratio}:1: share of the ratio of tokens, of whole rows to forest",
            gain / tokens,
            "",
            {"whole rows": f"{gain:.3g} ×", "this trainer's rows": value / tokens},
            None,
            valid,
            0.9,
        )
        yield Figure(
            f"the same, {ratio}:1: the forest's step to its matrix products alone",
            1 / median(multiplied),
            "×",
            {},
        )
        yield Figure(f"the same, {ratio}:1: logprobs off by", off[0], "", {}, 1e-5)
        yield Figure(f"the same, {ratio}:1: gradient off by, relative", off[1], "", {}, 1e-5)


def differences(b: Bench, left: list[Batch], right: list[Batch]) -> tuple[float, float]:
    """Return the largest differences: (of a log-probability; of a parameter's gradient by norms,
    |one - other| / |other|)."""
    logprobs = [_logprobs(b, side) for side in (left, right)]
    off = max(
        abs(logprobs[0][key] - logprobs[1][key]) for key in logprobs[0].keys() | logprobs[1].keys()
    )
    gradients = [_gradient(b, side) for side in (left, right)]
    return off, max(
        float((one - other).abs().max() / other.abs().max())
        for one, other in zip(*gradients, strict=True)
    )


def _logprobs(b: Bench, batches: list[Batch]) -> dict[tuple[str, int], float]:
    found = {}
    for batch, column in zip(batches, b.backend.logprobs(batches), strict=True):
        for (index, token), value in zip(batch.owners.tolist(), column.tolist(), strict=True):
            found[batch.sequences[index], token] = value
    return found


def _gradient(b: Bench, batches: list[Batch]) -> list[torch.Tensor]:
    b.backend.forward_backward(batches, LOSS)
    found = [each.grad.clone() for each in b.backend.model.parameters() if each.grad is not None]
    b.backend.model.zero_grad(set_to_none=True)
    return found


def anywhere(b: Bench) -> Iterator[Figure]:
    """Measure forests with little or nothing to share: choosing by cost must never lose much."""
    shapes = [
        (8, 2, 1, 12),
        (16, 4, 1, 12),
        (16, 8, 1, 6),
        (48, 2, 2, 6),
        (48, 8, 2, 2),
        (200, 2, 4, 2),
        (4, 1, 3, 32),
    ]
    shapes += (
        []
        if b.quick
        else [(15, 8, 2, 4), (32, 4, 4, 3), (64, 8, 1, 5), (500, 3, 8, 1), (1000, 8, 1, 1)]
    )
    worst, against = 0.0, {}
    for prompt, siblings, turns, groups in shapes:
        rows = [row for seed in range(groups) for row in trees.group(turns, siblings, prompt, seed)]
        for row in rows:
            row.name = f"{prompt}/{id(row)}"
        b.learn(b.forest(rows))
        sides = (
            lambda rows=rows: b.learn(b.merged(rows)),
            lambda rows=rows: b.learn(b.forest(rows)),
        )
        (found,) = b.ratios(7 if b.quick else 15, *sides)
        against[f"prompt {prompt}, {siblings} × {turns} turns"] = median(found)
        worst = max(worst, median(found))
    yield Figure("forest to merged rows, at worst", worst, "×", against, 1.1)


def two_levels(b: Bench) -> Iterator[Figure]:
    """Measure siblings that fork again halfway, with a child under each fork, in one pass."""
    for prompt in (256,) if b.quick else (256, 1024):
        rows = trees.two_level(16, 4, prompt)
        whole = PackingSpec(1 << 20, True, b.backend.packing.cost)
        assert len(pack(rows, whole)) == 1
        some = rows if not b.quick else trees.two_level(16, 1, prompt)
        b.learn(pack(some, whole))
        sides = (
            lambda rows=rows, whole=whole: b.learn(pack(rows, whole)),
            lambda some=some: b.learn(b.stepwise(some)),
            lambda rows=rows: b.learn(b.merged(rows)),
        )
        stepwise, merged = b.ratios(2 if b.quick else 3, *sides)
        forest = trees.num_tokens(pack(rows, whole))
        tokens = {
            "fewer tokens": trees.num_tokens(b.stepwise(rows)) / forest,
            "merged rows": median(merged),
            "fewer tokens than merged": trees.num_tokens(b.merged(rows)) / forest,
        }
        off = differences(b, pack(rows, whole), b.merged(rows))
        value = median(stepwise) * len(rows) / len(some)
        name = (
            f"forks at two levels and children, 16 turns, prompt {prompt}: step-wise rows to forest"
        )
        yield Figure(name, value, "×", tokens, None, max(off) <= 1e-5, 3)


def growth(b: Bench) -> Iterator[Figure]:
    """Fit the exponent with which the time of a step grows; 1 is linear. Attention is quadratic in
    the prompt length."""
    sweeps: dict[str, tuple[list[int], Callable[[int], list[TokenSequence]], float | None]] = {
        "siblings": ([4, 8, 16, 32], lambda num: trees.group(4, num, 256), 1.1),
        "turns": ([4, 8, 16, 32], lambda num: trees.group(num, 8, 256), 1.4),
        "prompt": ([128, 256, 512, 1024, 2048], lambda num: trees.group(4, 8, num), 1.6),
    }
    for name, (values, rows_of, most) in sweeps.items():
        steps = {value: rows_of(value) for value in values}
        seconds: dict[int, list[float]] = {value: [] for value in values}
        for _ in range(3 if b.quick else 7):
            for value, rows in steps.items():
                seconds[value].append(cpu_seconds(lambda rows=rows: b.learn(b.forest(rows))))
        best = {value: min(found) for value, found in seconds.items()}
        slope = np.polyfit(np.log(values), np.log(list(best.values())), 1)[0]
        against = {f"{value}": f"{each:.3g} s" for value, each in best.items()}
        yield Figure(f"growth of a step with {name}, exponent", float(slope), "", against, most)


def speed(b: Bench) -> Iterator[Figure]:
    """Measure plain rows of 128 tokens, half of them trained: forward, backward and AdamW."""
    rng = np.random.default_rng(0)
    rows = []
    for index in range(32):
        mask = rng.random(128) < 0.5
        mask[0] = False
        zeros = np.zeros(128, np.float32)
        ids = rng.integers(0, trees.VOCAB, 128)
        streams = dict.fromkeys(("sampler_logprobs", "advantages", "rl"), zeros)
        rows.append(
            TokenSequence(
                name=f"{index}", token_ids=ids, mask=mask, ce=mask.astype(np.float32), **streams
            )
        )
    seconds = [cpu_seconds(lambda: b.learn(b.forest(rows))) for _ in range(12)]
    yield Figure(
        "SFT rows of 128 tokens",
        32 * 128 / median(seconds),
        "tok/CPU-s",
        {"best": 32 * 128 / min(seconds)},
    )


# --- TRL and the sampling engine ------------------------------------------------------------------


def trl(b: Bench) -> Iterator[Figure]:
    yield from against_trl(small_policy, quick=b.quick)


def parts(b: Bench) -> Iterator[Figure]:
    """Measure where the time of a step of ``recipes/tiny_recursive.py`` goes, with the packaged
    policy."""
    yield from step_parts.measure(quick=b.quick)


def sampling(b: Bench) -> Iterator[Figure]:
    for each in inference_part.measure(quick=b.quick):
        yield Figure(
            each.name, each.value, each.unit, dict(each.against), each.floor, True, each.least
        )


FIGURES = {
    figure.__name__: figure
    for figure in (sixteen_turns, anywhere, two_levels, growth, speed, parts, trl, sampling)
}


# --- the command line -----------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Figures of the trainer beside rows, and beside TRL."
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer repeats; within five minutes on two cores"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    parser.add_argument(
        "--only", metavar="NAME", action="append", choices=FIGURES, help=f"of: {', '.join(FIGURES)}"
    )
    parser.add_argument(
        "--write", action="store_true", help="put the figures into docs/learning.md"
    )
    peers.add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: list[Figure] = []
    if trl.__name__ in (options.only or FIGURES):
        figures += peers.check(options.without_peers, peers.WITH_TRL, "trl")
    if sampling.__name__ in (options.only or FIGURES):
        figures += peers.check(options.without_peers, peers.BESIDE, "xllamacpp", "gguf")
    bench = Bench(SingleBackend(small_policy(), compute=FP32), options.quick)
    for name in options.only or FIGURES:
        started = time.monotonic()
        for figure in FIGURES[name](bench):
            print(
                f"{figure.name}: {figure.value} {figure.unit} {figure.against or ''}",
                file=sys.stderr,
            )
            figures.append(figure)
        print(f"({name} took {time.monotonic() - started:.0f} s)", file=sys.stderr)
    show(figures)
    if options.write:
        training_page.write(figures)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in figures]}))
    return 1 if any(figure.holds is False for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
