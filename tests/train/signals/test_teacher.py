"""A teacher on the small policy: rows built from ids, scores from the right position, and no score
instead of zeros if one is missing."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ramify.errors import ConfigError, RamifyError
from ramify.extras.studies.hindsight_hints import HindsightHints
from ramify.inference.local.local_client import LocalClient
from ramify.models.load import Policy, from_config, save_policy
from ramify.models.tokenizer_training import train_tokenizer
from ramify.train.backends.base import TrainerComputeSpec
from ramify.train.backends.lora import merged_weights
from ramify.train.backends.single_device import SingleBackend
from ramify.train.signals.base import (
    TokenScores,
    TokenScoringRequest,
)
from ramify.train.signals.teacher import ALL, TEMPLATE, TeacherSignal
from ramify.train.signals.teacher_logprobs import (
    EngineLogprobScorer,
    TeacherModels,
    check_vocabulary,
)
from ramify.types.message import Message
from ramify.types.trajectory import Group, Trajectory
from tests.train.signals.teacher_parts import (
    ITEM,
    TEXTS,
    HintingJudge,
    RecordingScorer,
    read,
    sampled,
    scorer_of,
    teacher_with_hints,
)
from tests.train.small import SHAPE


@pytest.fixture(scope="module")
def policy() -> Policy:
    from transformers import AutoConfig

    torch.set_num_threads(1)
    tokenizer = train_tokenizer(TEXTS, 300)
    made = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return from_config(
        AutoConfig.for_model(**{**made, "pad_token_id": tokenizer.pad_token_id, **SHAPE}),
        tokenizer,
        3,
    )


@pytest.fixture(scope="module")
def group(policy: Policy) -> Group:
    """Three sampled conversations of two turns each."""
    return asyncio.run(sampled(policy, 3))


HINT, OTHER = "call f7 where w3 stands", "it raised an error in w3 of 5"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_policy_as_its_own_teacher_gives_zero_gaps(policy: Policy, temperature: float) -> None:
    one = asyncio.run(sampled(policy, 2, temperature))
    exact = read(
        TeacherSignal(source="live", student="recomputed"), one, policy, temperature=temperature
    )
    assert [value for each in exact for row in each.tokens.values() for value in row] == [
        0.0
    ] * sum(
        len(turn.reply.token_ids or ()) for each in one.trajectories for turn in each.root.turns
    )
    sampler = read(TeacherSignal(source="live"), one, policy, temperature=temperature)
    assert (
        max(abs(value) for each in sampler for row in each.tokens.values() for value in row) < 1e-5
    )


def test_scores_match_the_engine_on_the_hinted_path(policy: Policy, group: Group) -> None:
    """Compared with the engine, which computes one path without packing."""
    teacher = teacher_with_hints(HINT)
    found = read(teacher, group, policy)

    async def expected(trajectory: Trajectory) -> dict[tuple[str, int], list[float]]:
        client = LocalClient(policy)
        try:
            asked = [Message("user", ITEM.question + TEMPLATE.format(hint=HINT))]
            prompt = policy.renderer.prompt(asked)
            path = trajectory.paths(trajectory.root)[0]
            old = len(trajectory.root.turns[0].reply.prompt_ids or ())
            ids = [*prompt, *path.ids[old:]]
            logprobs = [math.nan, *await client.logprobs(ids)]
            shift = len(prompt) - old
            return {(s.call, s.turn): logprobs[s.start + shift : s.end + shift] for s in path.spans}
        finally:
            await client.close()

    for trajectory, reading in zip(group.trajectories, found, strict=True):
        theirs = asyncio.run(expected(trajectory))
        assert reading.logprobs.keys() == theirs.keys() == reading.tokens.keys()
        for place, values in theirs.items():
            assert reading.logprobs[place] == pytest.approx(values, abs=1e-5)
            sampler_logprobs = trajectory.root.turns[place[1]].reply.logprobs or ()
            gaps = [a - b for a, b in zip(values, sampler_logprobs, strict=True)]
            assert reading.tokens[place] == pytest.approx(gaps, abs=1e-5)
            assert any(abs(value) > 1e-3 for value in reading.tokens[place])
        assert reading.notes == {("0", 1): HINT}


def test_per_turn_hint_is_placed_directly_before_its_turn(policy: Policy, group: Group) -> None:
    teacher = TeacherSignal(hints=HindsightHints(judge=HintingJudge(HINT), per_turn=True))
    seen: list[TokenScoringRequest] = []

    class Watching:
        async def score(
            self, rows: Sequence[TokenScoringRequest], *, top: int = 0
        ) -> list[TokenScores]:
            seen.extend(rows)
            return [
                TokenScores([-1.0] * sum(end - start for start, end in row.spans)) for row in rows
            ]

    found = read(teacher, group, policy, reference=Watching())[0]
    assert sorted(found.tokens) == [("0", 0), ("0", 1)]
    texts = [policy.tokenizer.decode(list(row.ids)) for row in seen[:2]]
    assert "w3 of 5?\n\n[A hint for this task]\n" + HINT in texts[0]
    assert "error\n\n[A hint for this task]\n" + HINT in texts[1]
    assert texts[1].count(HINT) == 1
    path = group.trajectories[0].paths(group.trajectories[0].root)[0]
    for row, span in zip(seen[:2], path.spans, strict=True):
        assert [list(row.ids[start:end]) for start, end in row.spans] == [
            list(path.ids[span.start : span.end])
        ]


def test_top_k_candidates_of_teacher_and_student(policy: Policy, group: Group) -> None:
    size = policy.config.vocab_size
    whole = read(teacher_with_hints(HINT, top=ALL), group, policy)[0].top[("0", 0)]
    assert len(whole.ids[0]) == size
    assert [sum(map(math.exp, row)) for row in whole.teacher] == pytest.approx(
        [1.0] * len(whole.teacher), abs=1e-5
    )
    teachers = read(teacher_with_hints(HINT, top=5), group, policy)[0]
    assert teachers.top[("0", 0)].ids == [row[:5] for row in whole.ids]
    assert teachers.top[("0", 0)].student == []
    students = read(teacher_with_hints(HINT, top=5, support="student"), group, policy)[0].top[
        ("0", 0)
    ]
    plain = read(TeacherSignal(source="live", top=5), group, policy)[0].top[("0", 0)]
    assert (students.ids, students.student) == (plain.ids, plain.teacher)
    for ids, row, all_ids, all_row in zip(
        students.ids, students.teacher, whole.ids, whole.teacher, strict=True
    ):
        lookup = dict(zip(all_ids, all_row, strict=True))
        assert row == pytest.approx([lookup[id] for id in ids], abs=1e-5)


def test_overlap_chooses_the_hint_whose_teacher_agrees_most_with_the_policy(
    policy: Policy, group: Group
) -> None:
    num = 8
    plain = read(TeacherSignal(source="live", top=num), group, policy)

    def shared(hint: str, index: int) -> int:
        theirs = read(teacher_with_hints(hint, top=num), group, policy)[index].top
        return sum(
            len({*a} & {*b})
            for place, top in theirs.items()
            for a, b in zip(top.ids, plain[index].top[place].ids, strict=True)
        )

    chosen = read(teacher_with_hints(HINT, OTHER, choose="overlap", overlap=num), group, policy)
    for index, reading in enumerate(chosen):
        counts = {hint: shared(hint, index) for hint in (HINT, OTHER)}
        assert counts[reading.notes[("0", 1)]] == max(counts.values())


def test_candidates_of_the_chosen_hint_take_one_pass_per_model(
    policy: Policy, group: Group
) -> None:
    """The policy's top four tokens under the chosen hint: both models score each row once."""
    options: dict[str, Any] = {"top": 4, "support": "student"}
    theirs, ours = RecordingScorer(policy), RecordingScorer(policy)
    teacher = teacher_with_hints(HINT, OTHER, choose="overlap", **options)
    found = read(teacher, group, policy, reference=theirs, live=ours)
    assert [len(rows) for rows in theirs.asked] == [len(rows) for rows in ours.asked] == [6]
    first = RecordingScorer(policy)
    read(teacher_with_hints(HINT, OTHER), group, policy, reference=first)
    assert [len(rows) for rows in first.asked] == [
        3
    ]  # without a comparison only the first hint is scored
    alone = {
        hint: read(teacher_with_hints(hint, **options), group, policy) for hint in (HINT, OTHER)
    }
    for index, reading in enumerate(found):
        expected = alone[reading.notes[("0", 1)]][index].top
        for place, top in reading.top.items():
            assert (top.ids, len(top.ids[0])) == (expected[place].ids, 4)
            assert np.allclose(top.teacher, expected[place].teacher, atol=1e-5)
            assert np.allclose(top.student, expected[place].student, atol=1e-5)


def test_reference_logprobs_are_computed_in_the_teachers_pass(policy: Policy, group: Group) -> None:
    """One of three rollouts has a hint; all three get the reference's log-probabilities, and the
    teacher adds only the hint and one reply."""
    scorer = RecordingScorer(policy)
    teacher = TeacherSignal(hints=HindsightHints(judge=HintingJudge(HINT, only="r1")))
    found = read(teacher, group, policy, wants_reference=True, reference=scorer)
    assert [bool(each.tokens) for each in found] == [False, True, False]
    plain = read(TeacherSignal(source="live"), group, policy)
    for reading, expected in zip(found, plain, strict=True):
        assert reading.reference.keys() == expected.logprobs.keys()
        for place, values in expected.logprobs.items():
            assert reading.reference[place] == pytest.approx(values, abs=1e-5)
    (rows,) = scorer.asked
    whole = [len(row.ids) for row in rows if row.is_plain]
    assert scorer.inner.plain_tokens <= sum(whole)
    assert scorer.inner.packed_tokens <= max(len(row.ids) for row in rows if not row.is_plain)
    # no trajectory has a hint; the teacher is not the policy of the KL
    for judge in (HintingJudge(), HintingJudge(HINT)):
        source = "reference" if not judge.hints else "ema"
        quiet = TeacherSignal(hints=HindsightHints(judge=judge), source=source)
        assert not any(
            each.reference
            for each in read(
                quiet, group, policy, wants_reference=True, ema=RecordingScorer(policy)
            )
        )


def test_turns_named_scores_only_the_turn_that_the_hint_is_about(
    policy: Policy, group: Group
) -> None:
    hinting = HintingJudge(HINT, about=0)
    whole = read(TeacherSignal(hints=HindsightHints(judge=hinting)), group, policy)[0]
    named = read(TeacherSignal(hints=HindsightHints(judge=hinting), turns="named"), group, policy)[
        0
    ]
    assert (sorted(whole.tokens), sorted(named.tokens)) == ([("0", 0), ("0", 1)], [("0", 0)])
    assert named.tokens[("0", 0)] == pytest.approx(whole.tokens[("0", 0)], abs=1e-5)
    assert named.notes == {("0", 0): HINT}
    nameless = read(teacher_with_hints(HINT, turns="named"), group, policy)[0]
    assert sorted(nameless.tokens) == [("0", 0), ("0", 1)]


def test_evidence_keeps_only_tokens_that_the_hint_moves(policy: Policy, group: Group) -> None:
    found = read(teacher_with_hints(HINT), group, policy)[0].tokens
    most = max(abs(value) for row in found.values() for value in row)
    some = read(teacher_with_hints(HINT, evidence=most / 2), group, policy)[0].tokens
    none = read(teacher_with_hints(HINT, evidence=99.0), group, policy)[0].tokens
    flat = [value for row in some.values() for value in row]
    assert 0 < sum(value != 0 for value in flat) < len(flat)
    assert not any(value for row in none.values() for value in row)


class BrokenEngine:
    """An engine that returns wrong prompt log-probabilities."""

    name = "broken:engine"

    def __init__(self, *, drop: int = 0, value: Any = -1.0) -> None:
        self.drop, self.value = drop, value

    async def logprobs(self, ids: Sequence[int]) -> list[Any]:
        return [self.value, *[-1.0] * (len(ids) - 2 - self.drop)]


@pytest.mark.parametrize(
    ("broken", "is_scored"),
    [
        (BrokenEngine(), True),
        (BrokenEngine(drop=1), False),
        (BrokenEngine(value=None), True),
        (BrokenEngine(value=math.nan), True),
    ],
)
def test_unscorable_rollouts_get_no_scores_instead_of_zeros(
    policy: Policy, group: Group, broken: BrokenEngine, is_scored: bool
) -> None:
    """The value for the first token, which nothing predicts, is ignored."""
    found = read(teacher_with_hints(HINT), group, policy, reference=EngineLogprobScorer(broken))
    assert [bool(each.tokens) for each in found] == [is_scored] * 3
    if not is_scored:
        assert {each.abstained for each in found} == {"RamifyError"}


def test_engine_with_missing_or_invalid_logprobs_is_rejected(policy: Policy) -> None:
    row = TokenScoringRequest([1, 2, 3], [(1, 3)])
    for broken in (BrokenEngine(value=None), BrokenEngine(value=0.5)):
        with pytest.raises(RamifyError, match="returned an invalid log-probability"):
            asyncio.run(EngineLogprobScorer(broken).score([row]))
    with pytest.raises(RamifyError, match="of the given tokens only"):
        asyncio.run(EngineLogprobScorer(BrokenEngine()).score([row], top=3))
    with pytest.raises(ConfigError, match="returns no log-probabilities of prompts"):
        EngineLogprobScorer(type("Client", (), {"name": "openai:x"})())


def test_rows_too_long_and_unreproducible_prompts_are_not_scored(
    policy: Policy, group: Group
) -> None:
    long = TeacherSignal(
        hints=HindsightHints(judge=HintingJudge(HINT)), template="{hint}" + " call f7" * 600
    )
    assert {each.abstained for each in read(long, group, policy)} == {"RamifyError"}
    other = Trajectory(
        "x",
        "?",
        task="t/0",
        calls=[msgspec.structs.replace(group.trajectories[0].root)],
        rewards={"c": 0.0},
    )
    turn = other.calls[0].turns[0]
    strange = msgspec.structs.replace(turn.reply, prompt_ids=(7, 7, 7))
    other.calls[0].turns = [msgspec.structs.replace(turn, reply=strange)]
    found = read(teacher_with_hints(HINT), Group("t/0", [other]), policy)[0]
    assert (found.abstained, found.tokens) == ("the prompt cannot be written again", {})
    assert found.counts["unscored/the prompt cannot be written again"] == 1


def test_rows_of_a_group_share_their_prefix(policy: Policy) -> None:
    async def ratio() -> float:
        async with scorer_of(policy) as scorer:
            prompt = list(range(20, 220))
            rows = [
                TokenScoringRequest([*prompt, *range(30 + n, 60 + n)], [(200, 230)])
                for n in range(8)
            ]
            together = await asyncio.gather(scorer.score(rows[:4]), scorer.score(rows[4:]))
            alone = [(await scorer.score([row]))[0] for row in rows]
            for a, b in zip([*together[0], *together[1]], alone, strict=True):
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
            return (scorer.row_tokens - 8 * 230) / (scorer.packed_tokens - 8 * 230)

    assert asyncio.run(ratio()) > 3  # eight rows of 230 tokens, 200 of them shared


# --- teacher sources


@pytest.fixture
def folder(policy: Policy, tmp_path: Path) -> Iterator[Path]:
    save_policy(policy, tmp_path / "checkpoint")
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


def teachers(policy: Policy, out: Path, *names: str, decay: float = 0.25) -> TeacherModels:
    def backend_of(each: Policy) -> SingleBackend:
        return SingleBackend(each, None, TrainerComputeSpec(precision="fp32"))

    sources = dict.fromkeys(names, decay)
    return TeacherModels(
        sources,
        policy,
        backend_of,
        out,
        lambda to: save_policy(policy, to),
        lambda: merged_weights(policy.model),
    )


def test_frozen_averaged_live_and_checkpoint_teachers(policy: Policy, folder: Path) -> None:
    """The policy's weights change between two steps: one teacher stays fixed, one is a moving
    average, one is the policy itself."""
    names = ("reference", "ema", "live", "random", str(folder / "checkpoint"))
    found = teachers(policy, folder / "out", *names)
    row = TokenScoringRequest([5, 6, 7, 8], [(1, 4)])
    weight = next(iter(policy.model.parameters()))
    before = weight.detach().clone()

    async def scores(step: int) -> dict[str, list[float]]:
        scorers = await found.teachers_at_step(step)
        return {name: (await scorers[name].score([row]))[0].logprobs for name in names}

    async def both() -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        first = await scores(0)
        with torch.no_grad():
            weight.add_(
                0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
            )
        return first, await scores(1)

    try:
        first, second = asyncio.run(both())
        assert (
            first["reference"]
            == first["ema"]
            == first["live"]
            == first[names[4]]
            == second["reference"]
            == second[names[4]]
        )
        assert first["random"] != first["live"]
        assert second["live"] != first["live"]
        assert second["ema"] not in (first["ema"], second["live"])
        averaged = next(iter(found.models["ema"].model.parameters()))
        assert torch.allclose(averaged, before * 0.75 + weight * 0.25, atol=1e-6)
        found.close()
        found.save(folder / "kept")
        again = teachers(policy, folder / "out", "reference", "ema")
        again.load(
            folder / "kept"
        )  # a resumed run: both are restored, and the next step is averaged in
        resumed = asyncio.run(again.teachers_at_step(2))
        assert asyncio.run(resumed["reference"].score([row]))[0].logprobs == second["reference"]
        wanted = averaged.lerp(weight, 0.25)
        assert torch.equal(next(iter(again.models["ema"].model.parameters())), wanted)
        again.close()
        elsewhere = teachers(policy, folder / "other", "reference", "ema")
        with pytest.raises(
            ConfigError, match="other/reference is not there: it holds the initial policy"
        ):
            asyncio.run(elsewhere.teachers_at_step(2))
        with pytest.raises(
            ConfigError,
            match="the checkpoint does not hold the averaged weights of the teacher 'ema'",
        ):
            elsewhere.load(folder / "none")
        elsewhere.close()
    finally:
        with torch.no_grad():
            weight.copy_(before)


def test_teacher_with_different_vocabulary_is_rejected_at_the_start(
    policy: Policy, folder: Path
) -> None:
    from transformers import AutoConfig

    tokenizer = train_tokenizer(
        TEXTS[:1] + ["other words entirely, 0123 and more of them"] * 50, 270
    )
    made = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    other = from_config(
        AutoConfig.for_model(**{**made, "pad_token_id": tokenizer.pad_token_id, **SHAPE}),
        tokenizer,
        3,
    )
    save_policy(other, folder / "other")
    with pytest.raises(ConfigError, match=r"has another vocabulary: .* is token .* of the policy"):
        teachers(policy, folder, str(folder / "other"))
    check_vocabulary(policy, policy, "itself")
    with pytest.raises(ConfigError, match="nowhere"):
        teachers(policy, folder, "nowhere")


def test_invalid_teacher_options_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"does not contain \{hint\}"):
        TeacherSignal(template="x")
    with pytest.raises(ConfigError, match="evidence=-1 must be above 0"):
        TeacherSignal(evidence=-1)
    with pytest.warns(UserWarning, match="a live teacher .* degraded or collapsed"):
        teacher_with_hints(HINT, source="live")
