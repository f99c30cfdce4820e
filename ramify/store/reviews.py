"""Human reviews of runs, written after a run's end.

A review has verdicts, labels, a note and corrected scores, and is stored in a file beside the
journal.

    runs/RUN_ID.jsonl          the journal, which never contains a review
    runs/RUN_ID.review.json    {"RUN_ID": {"labels": ["wrong unit"], "rewards": {"correct": 0.0}}}
    rollouts/step-000010.jsonl and step-000010.review.json: one review per trajectory, by its id

Corrected scores replace the recorded ones in the viewer and when runs are read as training data
(``train/data/sft_data.py``). A verdict (right, wrong or not sure) belongs to one person. If all
people who are sure agree, their verdict also becomes the corrected score. Scores given by a program
and users' feedback about single replies are not part of a review: they are events of the journal
(``ScoreAdded``). A file of reviews is replaced as a whole, so a reader sees the reviews before a
change or after it.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Literal

import msgspec

from ramify.errors import ConfigError, StoreError
from ramify.store.durable_files import FILE_MODE, write_all

MAX_LABELS, MAX_LABEL, MAX_NOTE = 20, 60, 10_000
"""Maximum number of labels, and maximum characters of a label and of a note."""


Verdict = Literal["right", "wrong", "not sure"]
"""A person's judgement of whether an answer is correct."""
DISPUTED = "disputed"
"""Verdict on an answer about which people disagree."""
UNSCORED = "correct"
"""Name of the score that a verdict gives to a run without scores."""


class HumanRunReview(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The human review of one run: labels, verdicts, a note and corrected scores."""

    labels: tuple[str, ...] = ()
    note: str = ""
    rewards: dict[str, float] = {}
    """Corrected scores by name. They replace recorded scores of the same name."""
    verdicts: dict[str, Verdict] = {}
    """Person -> that person's verdict on the answer."""
    changed_at: float = 0.0
    """Unix time of the last change; 0 before the review is saved."""

    def __post_init__(self) -> None:
        """Check the lengths of the review's texts and the validity of its scores.

        Raises ConfigError if a text is too long, or if a score has no name or is not a finite
        number.
        """
        for label in self.labels:
            if not label.strip() or len(label) > MAX_LABEL:
                raise ConfigError(
                    f"a label must have 1 to {MAX_LABEL} characters, but got {label!r}"
                )
        if len(self.labels) > MAX_LABELS:
            raise ConfigError(
                f"a run can have at most {MAX_LABELS} labels, but got {len(self.labels)}"
            )
        if len(self.note) > MAX_NOTE:
            raise ConfigError(
                f"a note can have at most {MAX_NOTE:,} characters, but this one has "
                f"{len(self.note):,}"
            )
        for person in self.verdicts:
            if not person.strip() or len(person) > MAX_LABEL:
                raise ConfigError(
                    f"a person's name must have 1 to {MAX_LABEL} characters, but got {person!r}"
                )
        for name, value in self.rewards.items():
            if not name or not math.isfinite(value):
                raise ConfigError(
                    f"a score needs a name and a finite value, but got {name!r}={value}"
                )

    def is_empty(self) -> bool:
        return not (self.labels or self.note or self.rewards or self.verdicts)

    @property
    def combined_verdict(self) -> str:
        """The combined verdict of all reviewers, ignoring those who are not sure.

        ``disputed`` if the others differ, ``not sure`` if all are unsure, and empty if there are no
        verdicts.
        """
        sure = set(self.verdicts.values()) - {"not sure"}
        return DISPUTED if len(sure) > 1 else next(iter(sure or self.verdicts.values()), "")

    @property
    def labels_and_verdict(self) -> tuple[str, ...]:
        """The labels under which lists show and filter the run, including the combined verdict.

        The combined verdict of all people comes last, if there is one.
        """
        return (*self.labels, self.combined_verdict) if self.combined_verdict else self.labels

    def with_verdict(self, person: str, verdict: Verdict | None, reward: str) -> HumanRunReview:
        """Return a copy of this review in which ``person`` has given ``verdict``.

        If ``verdict`` is None, that person's verdict is removed.

        The corrected score named ``reward`` becomes 1 or 0 if all people who are sure agree. It is
        removed while they differ, or if no person is sure.
        """
        others = {name: each for name, each in self.verdicts.items() if name != person}
        review = msgspec.structs.replace(
            self, verdicts=others if verdict is None else {**others, person: verdict}
        )
        rewards = {name: value for name, value in self.rewards.items() if name != reward}
        if review.combined_verdict in _WORTH:
            rewards[reward] = _WORTH[review.combined_verdict]
        return msgspec.structs.replace(review, rewards=rewards)


_WORTH = {"right": 1.0, "wrong": 0.0}


class InterRaterAgreement(msgspec.Struct, frozen=True):
    """How closely two people agree in their verdicts on the same runs."""

    people: tuple[str, str]
    both: int
    """Number of runs on which both people gave a definite verdict, right or wrong."""
    same: int
    """Number of the runs in ``both`` on which the two verdicts are equal."""
    kappa: float | None
    """Cohen's kappa (1960): 1 for full agreement, 0 for agreement by chance. None if all verdicts
    of both people are equal, since chance then explains everything.
    """


def inter_rater_agreements(verdicts: Iterable[Mapping[str, Verdict]]) -> list[InterRaterAgreement]:
    """Return how closely each pair of reviewers agrees on the runs that both have judged.

    ``verdicts`` has one mapping per run, from person to verdict.
    """
    pairs: dict[tuple[str, str], Counter[tuple[Verdict, Verdict]]] = defaultdict(Counter)
    for each in verdicts:
        sure = sorted(person for person, verdict in each.items() if verdict in _WORTH)
        for first, second in combinations(sure, 2):
            pairs[first, second][each[first], each[second]] += 1
    return [_agreement(people, counts) for people, counts in sorted(pairs.items())]


def _agreement(
    people: tuple[str, str], counts: Counter[tuple[Verdict, Verdict]]
) -> InterRaterAgreement:
    both = counts.total()
    same = sum(num for (first, second), num in counts.items() if first == second)
    rights = [
        sum(num for said, num in counts.items() if said[side] == "right") / both for side in (0, 1)
    ]
    chance = rights[0] * rights[1] + (1 - rights[0]) * (1 - rights[1])
    kappa = None if chance == 1 else (same / both - chance) / (1 - chance)
    return InterRaterAgreement(people, both, same, kappa)


def review_file(path: Path) -> Path:
    """Return the path of the review file that belongs to a journal or a trajectory file."""
    return path.with_suffix(".review.json")


def read_reviews(path: Path) -> dict[str, HumanRunReview]:
    """Return the reviews of the runs in ``path``, a journal or a file of trajectories, by run id.

    Raises StoreError if they cannot be read.
    """
    file = review_file(path)
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, HumanRunReview])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StoreError(f"cannot read {file}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as error:
        raise StoreError(f"{file} is not a file of reviews: {error}; repair or delete it") from None


def read_reviews_for_listing(path: Path) -> Mapping[str, HumanRunReview]:
    """Return the human reviews of the runs in ``path``, even if the review file is damaged.

    The keys are run ids. Does not raise if the file of reviews is damaged.

    Instead, every run gets a review with the label ``unreadable review`` and the error as its note.
    """
    try:
        return defaultdict(HumanRunReview, read_reviews(path))
    except StoreError as error:
        damaged = HumanRunReview(("unreadable review",), str(error)[:MAX_NOTE])
        return defaultdict(lambda: damaged)


def write_review(path: Path, run_id: str, review: HumanRunReview) -> HumanRunReview:
    """Replace the review of a run, and return it with the time of the change.

    An empty review deletes the stored one. Raises StoreError if the file cannot be written.
    """
    file = review_file(path)
    review = msgspec.structs.replace(review, changed_at=time.time())
    with _lock_folder(path.parent):
        reviews = {**read_reviews(path), run_id: review}
        if review.is_empty():
            del reviews[run_id]
        if not reviews:
            file.unlink(missing_ok=True)
            return review
        _replace(file, msgspec.json.format(msgspec.json.encode(reviews), indent=1))
    return review


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder, so that no other process changes a review at the same time."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"cannot open {folder}: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _replace(file: Path, data: bytes) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        try:
            write_all(fd, data, temporary)
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):  # on a read-only disk, also if the file does not exist
            temporary.unlink()
        raise StoreError(f"cannot write {file}: {error.strerror}") from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
