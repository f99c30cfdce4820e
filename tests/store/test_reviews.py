"""Labels, notes and corrected scores beside a journal."""

from __future__ import annotations

from multiprocessing.dummy import Pool
from pathlib import Path

import msgspec
import pytest

from ramify import Store
from ramify.errors import ConfigError, StoreError
from ramify.store.reviews import (
    HumanRunReview,
    inter_rater_agreements,
    read_reviews,
    review_file,
    write_review,
)
from ramify.train.data.sft_data import read
from ramify.types.event import CallEnded, CallStarted, RunEnded, RunStarted
from ramify.types.trajectory import Stop, Trajectory


def store_run(store: Store, run_id: str) -> Path:
    with store.create(run_id) as journal:
        journal.append(RunStarted(id=run_id, question="q", started_at=1.0))
        journal.append(CallStarted(id="0", kind="rlm", model="m", depth=0, question="q"))
        journal.append(CallEnded(id="0", stop=Stop.FINAL, answer="5"))
        journal.append(RunEnded(stop=Stop.FINAL, answer="5"))
    return store.path(run_id)


def test_review_is_stored_beside_journal_and_deleted_with_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store_run(store, "20260301-000000-one")
    before = path.read_bytes()
    saved = store.write_review("last", HumanRunReview(("odd",), "wrong unit", {"correct": 0.0}))
    assert path.read_bytes() == before
    assert (store.review("last"), store.runs()[0].review) == (saved, saved)
    assert oct(review_file(path).stat().st_mode)[-3:] == "600"
    store.write_review("last", HumanRunReview())
    assert (review_file(path).exists(), store.runs()[0].review) == (False, None)
    store.write_review("last", saved)
    store.remove("last")
    assert list((tmp_path / "runs").iterdir()) == []


def test_corrected_scores_become_training_rewards(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store_run(store, "20260301-000000-one")
    store_run(store, "20260301-000001-two")
    store.write_review("20260301-000001-two", HumanRunReview(rewards={"correct": 1.0}))
    assert [each.rewards for each in read(store.root)] == [{}, {"correct": 1.0}]

    lines = tmp_path / "rollouts.jsonl"
    runs = [Trajectory(id=name, question="q", rewards={"correct": 1.0, "f1": 0.5}) for name in "ab"]
    lines.write_bytes(b"".join(msgspec.json.encode(run) + b"\n" for run in runs))
    write_review(lines, "b", HumanRunReview(rewards={"correct": 0.0}))
    assert [each.rewards for each in read(lines)] == [
        {"correct": 1.0, "f1": 0.5},
        {"correct": 0.0, "f1": 0.5},
    ]


def test_verdicts_become_a_score_while_people_agree() -> None:
    """Explicit corrections of other scores stay; a verdict that is taken back leaves no score."""
    review = HumanRunReview(("odd",), "n", {"f1": 0.5}).with_verdict("ana", "right", "correct")
    assert review.labels_and_verdict == ("odd", "right")
    assert (review.combined_verdict, review.rewards) == ("right", {"f1": 0.5, "correct": 1.0})
    unsure = review.with_verdict("ben", "not sure", "correct")
    assert (unsure.combined_verdict, unsure.rewards["correct"]) == ("right", 1.0)
    disputed = review.with_verdict("ben", "wrong", "correct")
    assert (disputed.combined_verdict, disputed.rewards) == ("disputed", {"f1": 0.5})
    agreed = disputed.with_verdict("ana", "wrong", "correct")
    assert (agreed.combined_verdict, agreed.rewards["correct"]) == ("wrong", 0.0)
    back = review.with_verdict("ana", None, "correct")
    assert back == HumanRunReview(("odd",), "n", {"f1": 0.5})
    assert not HumanRunReview(verdicts={"ana": "not sure"}).is_empty()
    with pytest.raises(ConfigError, match="a person's name must have 1 to 60 characters"):
        review.with_verdict(" ", "right", "correct")


def test_agreement_is_cohens_kappa() -> None:
    """Cohen's table: both right 20, both wrong 15, and 5 and 10 differ: kappa 0.4."""
    said = [("right", "right")] * 20 + [("right", "wrong")] * 5
    said += [("wrong", "right")] * 10 + [("wrong", "wrong")] * 15
    verdicts = [{"ana": first, "ben": second} for first, second in said]
    verdicts += [{"ana": "right"}, {"ana": "right", "ben": "not sure"}, {}]
    (found,) = inter_rater_agreements(verdicts)
    assert (found.people, found.both, found.same) == (("ana", "ben"), 50, 35)
    assert found.kappa == pytest.approx(0.4)
    (alike,) = inter_rater_agreements([{"ana": "right", "ben": "right"}] * 3)
    assert (alike.same, alike.kappa) == (3, None)
    assert inter_rater_agreements([{"ana": "right"}]) == []


def test_concurrent_reviews_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    with Pool(8) as pool:
        pool.map(
            lambda n: write_review(path, f"run-{n}", HumanRunReview((f"label {n}",))), range(32)
        )
    assert sorted(each.labels for each in read_reviews(path).values()) == sorted(
        (f"label {n}",) for n in range(32)
    )


def test_invalid_reviews_are_refused_and_damaged_files_reported(tmp_path: Path) -> None:
    for bad in (
        lambda: HumanRunReview(("",)),
        lambda: HumanRunReview(("x" * 61,)),
        lambda: HumanRunReview(note="x" * 10_001),
        lambda: HumanRunReview(rewards={"correct": float("nan")}),
    ):
        with pytest.raises(ConfigError):
            bad()
    store = Store(tmp_path)
    path = store_run(store, "20260301-000000-one")
    review_file(path).write_text("{not json")
    with pytest.raises(StoreError, match=r"is not a file of reviews: .*; repair or delete it"):
        store.review("last")
    review = store.runs()[0].review
    assert review is not None
    assert review.labels == ("unreadable review",)
