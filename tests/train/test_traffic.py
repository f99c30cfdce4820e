"""Training from recorded traffic: served conversations, thumbs, and a run over the store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.cli.parser import ExitCode
from ramify.clients.base import KnownPrefix, Request, Sampling
from ramify.errors import ConfigError
from ramify.evaluate.traffic_scores import (
    UserCorrectionDetector,
    regex_correction_rule,
    score_corrections,
    score_stored_conversations,
)
from ramify.inference.local.local_client import LocalClient
from ramify.models.load import Policy, load_policy, save_policy
from ramify.serve.redaction import RedactionRules
from ramify.serve.traffic_recorder import PolicyFactsForRecorder, ServedTrafficRecorder
from ramify.store.folder_store import Store
from ramify.store.reviews import HumanRunReview
from ramify.testing.scripted_client import ScriptedClient
from ramify.train.advantages.base import OptimizerStepAdvantages, RolloutAdvantages, TokenCredit
from ramify.train.advantages.reinforce_pp import ReinforcePP
from ramify.train.config import EvaluateSpec, PolicySpec, RlSpec, Run, Schedule, TaskSpec
from ramify.train.metrics import read_metrics
from ramify.train.resolve_run import resolve
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.train.signals.base import SignalContext
from ramify.train.signals.hint_sources import build_hint_source
from ramify.train.traffic_training import RecordedTrafficTask, mask_redacted_tokens
from ramify.types.message import Message
from ramify.types.trajectory import Group
from tests.cli.helpers import Shell
from tests.inference.helpers import policy
from tests.shown import train
from tests.train.small import even, small

Thumb = Callable[[Sequence[int]], float | None]
NUM_TOKENS = 8


def share_of_even(ids: Sequence[int]) -> float:
    return sum(id % 2 == 0 for id in ids) / len(ids)


def served(folder: Path) -> Policy:
    """A policy on disk, as it is served and then trained."""
    save_policy(policy(sharpness=1.0), folder)
    return load_policy(folder)


def record(
    made: Policy,
    store: Path,
    num: int,
    thumb: Thumb,
    *,
    temperature: float = 1.0,
    patterns: Sequence[str] = (),
    texts: Sequence[str] = (),
) -> None:
    """Record ``num`` conversations: one reply each, and one more after each of ``texts``."""

    async def go() -> None:
        engine = LocalClient(made, slots=32)
        recorder = ServedTrafficRecorder(
            store, PolicyFactsForRecorder.from_policy(made), RedactionRules(patterns)
        )

        async def user(number: int) -> None:
            messages: tuple[Message, ...] = (Message("user", f"{random.random()}"),)
            known = None
            for turn, text in enumerate([*texts, None]):
                sampling = Sampling(NUM_TOKENS, temperature, seed=number, logprobs=True)
                request = Request(messages, sampling, known=known)
                reply = await engine.complete(request)
                id = f"{number}/{turn}"
                await recorder.record(id, 0, request, reply)
                score = thumb(reply.token_ids or ())
                if score is not None:
                    await recorder.record_feedback(id, 0, score, "")
                if text is not None:
                    messages = (*messages, reply.message, Message("user", text))
                    ids = (*(reply.prompt_ids or ()), *(reply.token_ids or ()))
                    known = KnownPrefix(len(messages) - 1, ids)

        await asyncio.gather(*(user(number) for number in range(num)))
        await recorder.close()
        await engine.close()

    asyncio.run(go())


def run_of(folder: Path, store: Path, **changes: Any) -> Run:
    rl = RlSpec(
        steps=6,
        algorithm=ReinforcePP(),
        sample=RolloutBatchSpec(items=2),
        rollout=RolloutOptions(group=8),
    )
    given: dict[str, Any] = {
        "policy": PolicySpec(path=str(folder), slots=16),
        "warmup": None,
        "sft": None,
        "task": TaskSpec(name="tests.train.small:even", traffic=str(store)),
        "rl": msgspec.structs.replace(rl, optim=small().rl.optim),  # type: ignore[union-attr]
        "evaluate": EvaluateSpec(num=2, final=()),
        "schedule": Schedule(evaluate_every=None, save_rollouts_every=1),
        "scaffold": "bare",
    }
    return small(**(given | changes))


def test_training_uses_exactly_what_was_recorded(tmp_path: Path) -> None:
    made = served(tmp_path / "policy")
    record(made, tmp_path / "store", 16, share_of_even, texts=["no, wrong"])
    train(run_of(tmp_path / "policy", tmp_path / "store"), tmp_path / "out", say=pytest.fail)
    rows = [each.values for each in read_metrics(tmp_path / "out") if "reward" in each.values]
    assert len(rows) == 6
    assert all(0.2 < row["reward"] < 0.8 for row in rows)
    # Before the first step, the trainer's weights are those that were served.
    assert rows[0]["mismatch_max"] < 1e-5
    assert rows[0]["sampled_tokens"] == 16 * NUM_TOKENS
    assert rows[-1]["mismatch"] > rows[0]["mismatch"]


def test_a_rollout_is_a_reply_with_its_whole_prompt(tmp_path: Path) -> None:
    made = served(tmp_path / "policy")
    record(made, tmp_path / "store", 4, share_of_even, texts=["no, wrong"])
    task = RecordedTrafficTask(even, tmp_path / "store", group=8, temperature=1.0)
    [item] = task.splits["train"]
    store = Store(tmp_path / "store")
    seen = set()
    for number in range(8):
        rollout = asyncio.run(task.recorded_rollout(item, f"r{number}", number))
        about = rollout.metadata["traffic"]
        run = store.load(about["run"])
        path = run.path(run.call(about["call"]), about["turn"])
        [turn] = rollout.root.turns
        assert path is not None
        assert (*(turn.reply.prompt_ids or ()), *(turn.reply.token_ids or ())) == tuple(path.ids)
        assert rollout.rewards["feedback"] == share_of_even(turn.reply.token_ids or ())
        assert rollout.metadata.get("next_message") == (None if about["turn"] else "no, wrong")
        seen.add((about["run"], about["turn"]))
    assert len(seen) == 8


def test_redacted_tokens_are_not_learned(tmp_path: Path) -> None:
    made = served(tmp_path / "policy")
    record(made, tmp_path / "store", 4, share_of_even, patterns=["[a-zA-Z]"])
    task = RecordedTrafficTask(even, tmp_path / "store", group=1, temperature=1.0)
    rollouts = [
        asyncio.run(task.recorded_rollout(item, f"r{index}", 0))
        for index, item in enumerate(task.splits["train"])
    ]
    masked = 0
    for rollout in rollouts:
        num = len(rollout.root.turns[0].reply.token_ids or ())
        credit = TokenCredit([1.0] * num, [1.0] * num, [0.5] * num)
        assigned = OptimizerStepAdvantages([RolloutAdvantages(rollout, {("0", 0): credit})], {}, {})
        mask_redacted_tokens(assigned)
        after = assigned.rollouts[0].credits["0", 0]
        flags = next(
            (each.tokens["redacted"] for each in rollout.marks if each.tokens), [0.0] * num
        )
        assert after.rl == [1.0 - flag for flag in flags]
        assert after.ce == [0.5 * (1.0 - flag) for flag in flags]
        masked += int(sum(flags))
    assert masked


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"store": "nothing"}, "not a store of recorded traffic"),
        ({"thumb": lambda ids: None}, "has no rewards"),
        ({"temperature": 0.7}, "4 more were sampled at temperature 0.7"),
        ({"group": 5}, "has 4 replies with a reward"),
    ],
)
def test_a_store_that_cannot_be_learned_from(
    tmp_path: Path, change: dict[str, Any], error: str
) -> None:
    made = served(tmp_path / "policy")
    thumb = change.pop("thumb", share_of_even)
    record(made, tmp_path / "store", 4, thumb, temperature=change.get("temperature", 1.0))
    run = run_of(tmp_path / "policy", tmp_path / change.get("store", "store"))
    assert run.rl is not None
    rollout = RolloutOptions(group=change.get("group", 1))
    run = msgspec.structs.replace(run, rl=msgspec.structs.replace(run.rl, rollout=rollout))
    with pytest.raises(ConfigError, match=error):
        resolve(run)


def test_another_base_model_is_refused(tmp_path: Path) -> None:
    made = served(tmp_path / "policy")
    record(made, tmp_path / "store", 8, share_of_even)
    save_policy(policy(hidden_size=16, head_dim=4), tmp_path / "other")
    with pytest.raises(ConfigError, match="another base model"):
        train(run_of(tmp_path / "other", tmp_path / "store"), tmp_path / "out")


def test_corrections_score_the_reply_before_them(tmp_path: Path) -> None:
    made = served(tmp_path / "policy")
    record(made, tmp_path / "store", 3, lambda ids: None, texts=["No, that is wrong", "thanks"])
    store = Store(tmp_path / "store")
    done = asyncio.run(score_corrections(store, regex_correction_rule(["^no\\b"]), "pattern"))
    assert (done.num_scored, done.num_corrections) == (6, 3)
    again = asyncio.run(score_corrections(store, regex_correction_rule(["^no\\b"]), "pattern"))
    assert again.num_scored == 0
    task = RecordedTrafficTask(even, tmp_path / "store", group=1, temperature=1.0)
    assert sorted((each.turn, each.rewards["accepted"]) for each in task.replies) == [
        (0, 0.0), (0, 0.0), (0, 0.0), (1, 1.0), (1, 1.0), (1, 1.0)
    ]  # fmt: skip


def test_a_judge_decides_what_is_a_correction(tmp_path: Path) -> None:
    made = served(tmp_path / "policy")
    record(made, tmp_path / "store", 1, lambda ids: None, texts=["No, that is wrong", "thanks"])
    store = Store(tmp_path / "store")
    judge = UserCorrectionDetector(ScriptedClient(["Yes.", "perhaps"]))
    done = asyncio.run(score_corrections(store, judge, "judge"))
    assert (done.num_scored, done.num_corrections, done.num_undecided) == (1, 1, 1)


def test_traffic_is_scored_from_the_command_line(tmp_path: Path) -> None:
    """As docs/traffic.md says."""
    made = served(tmp_path / "policy")
    record(made, tmp_path / "traffic", 2, lambda ids: None, texts=["No, that is wrong", "thanks"])
    shell = Shell(tmp_path)
    shell.write(
        "checks.py",
        "def verified(run):\n    return len(run.root.turns) == 3\n\n\n"
        "def raises(run):\n    return 1 / 0\n\n\n"
        "def unnumbered(run):\n    return {'good': None}\n",
    )
    judge = shell.model([{"match": "", "reply": ["yes"] * 4}])

    def told(*options: str) -> str:
        done = shell.run("runs", "score", "traffic", *options)
        return done.out.strip() if done.code == ExitCode.ANSWERED else done.err.strip()

    # A reply that has the reward keeps it, so a second rule finds nothing to score.
    assert told("--correction", r"^no\b") == "scored 4 replies, 2 of them corrected by the user"
    assert told("--judge", judge) == "scored 0 replies, 0 of them corrected by the user"
    assert told("--by", "checks.py:verified") == "scored 2 conversations"
    assert "raises raised ZeroDivisionError: division by zero, at" in told(
        "--by", "checks.py:raises"
    )
    assert "must be a finite number" in told("--by", "checks.py:unnumbered")
    assert "score by one of --correction" in told()
    assert "--max-cost needs --judge" in told("--by", "checks.py:verified", "--max-cost", "2")
    assert "is not a regular expression" in told("--correction", "(")
    task = RecordedTrafficTask(even, tmp_path / "traffic", group=1, temperature=1.0)
    assert [sorted(each.rewards) for each in task.replies].count(["accepted", "correct"]) == 4


def test_a_verifier_and_a_review_score_whole_conversations(tmp_path: Path) -> None:
    made = served(tmp_path / "policy")
    record(made, tmp_path / "store", 2, lambda ids: None)
    store = Store(tmp_path / "store")
    score_stored_conversations(store, lambda run: {"long": float(len(run.root.turns) > 1)})
    store.write_review(store.ids()[0], HumanRunReview(rewards={"long": 0.5}))
    task = RecordedTrafficTask(even, tmp_path / "store", group=1, temperature=1.0)
    assert sorted(each.rewards["long"] for each in task.replies) == [0.0, 0.5]


def test_the_next_message_is_a_hint_for_a_reply_that_failed(tmp_path: Path) -> None:
    made = served(tmp_path / "policy")
    thumbs = iter([0.0, 1.0])
    record(made, tmp_path / "store", 1, lambda ids: next(thumbs), texts=["No, I meant blue"])
    task = RecordedTrafficTask(even, tmp_path / "store", group=2, temperature=1.0)
    [item] = task.splits["train"]
    rollouts = [
        asyncio.run(task.recorded_rollout(item, f"r{number}", number)) for number in range(2)
    ]
    context = SignalContext(step=0, items={item.id: item}, weights={})
    hints = build_hint_source("next_message")
    assert hints is not None
    found = asyncio.run(hints.hints(Group(item.id, rollouts), context))
    by_turn = {
        rollout.metadata["traffic"]["turn"]: each
        for rollout, each in zip(rollouts, found, strict=True)
    }
    [text] = by_turn[0].at["0", 0]
    assert "No, I meant blue" in text
    assert not by_turn[1].at
    assert by_turn[1].reading.abstained == "did not fail"
