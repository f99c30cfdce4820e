"""An evaluation on disk: the plan in the first line and one outcome in each further line, so that
an interrupted evaluation can continue.

    {"type":"plan","model":"openai:gpt-5-mini","task":"ledger","split":"test","items":100,…}
    {"type":"outcome","item":"ledger/test/0","attempt":0,"reward":1.0,…}

One process writes at a time. An incomplete last line is cut off when the file is opened again.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ramify.errors import ConfigError, RunInUse, StoreError, UnknownRun
from ramify.evaluate.run import AttemptOutcome, Evaluation, EvaluationPlan
from ramify.store.private_files import EVALUATIONS, FILE_MODE, make_folder, write_all

_decoder = msgspec.json.Decoder(EvaluationPlan | AttemptOutcome)


class EvaluationRecords:
    """The recorded evaluations of a store."""

    def __init__(self, root: Path) -> None:
        self._folder = root / EVALUATIONS

    def create(self, plan: EvaluationPlan) -> EvaluationRecord:
        """Start the record of a new evaluation."""
        make_folder(self._folder)
        words = "-".join(filter(None, (plan.task.partition(":")[0].rpartition("/")[2], plan.split)))
        id = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}-{words}"
        return EvaluationRecord(self._folder / f"{id}.jsonl", plan)

    def reopen(self, id: str) -> EvaluationRecord:
        """Open the record of an earlier evaluation to continue it. Raises StoreError if it does not
        exist."""
        return EvaluationRecord(self.path(id))

    def load(self, id: str) -> Evaluation:
        return read(self.path(id))

    def path(self, id: str) -> Path:
        """The file that ``id`` refers to: an id, the unique beginning of one, ``last``, or a
        ``.jsonl`` file."""
        if id.endswith(".jsonl"):
            path = Path(id).expanduser()
            if not path.is_file():
                raise UnknownRun(f"the evaluation {path} does not exist")
            return path
        paths = sorted(self._folder.glob("*.jsonl"))
        matches = (
            paths[-1:]
            if id == "last"
            else [path for path in paths if path.stem.startswith(id)]
            if id
            else []
        )
        if len(matches) != 1:
            known = f"the last is {paths[-1].stem}" if paths else f"there is none in {self._folder}"
            many = f"{len(matches)} evaluations begin with" if matches else "found no evaluation"
            raise UnknownRun(f"{many} {id!r}: {known}")
        return matches[0]


class EvaluationRecord:
    """One evaluation's file, open for writing. Implements ``run.OutcomeRecord``."""

    def __init__(self, path: Path, plan: EvaluationPlan | None = None) -> None:
        """Create a file for ``plan``, or open the existing one. Raises StoreError if another
        process writes it."""
        self.path = path
        flags = os.O_RDWR | os.O_APPEND | (os.O_CREAT | os.O_EXCL if plan is not None else 0)
        try:
            self._fd = os.open(path, flags, FILE_MODE)
        except OSError as error:
            raise StoreError(f"the evaluation {path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise RunInUse(
                f"the evaluation {path.stem} is being written by another process: stop that one "
                "first"
            ) from None
        if plan is not None:
            self.plan = plan
            self.outcomes = list[AttemptOutcome]()
            self._write(plan)
        else:
            self._resume()

    @property
    def id(self) -> str:
        return self.path.stem

    def append(self, outcome: AttemptOutcome) -> None:
        self.outcomes.append(outcome)
        self._write(outcome)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _resume(self) -> None:
        data = self.path.read_bytes()
        complete = data.rfind(b"\n") + 1
        if complete < len(data):
            os.ftruncate(self._fd, complete)
        evaluation = _decoded(data[:complete], self.path)
        self.plan = evaluation.plan
        # Attempts that failed for reasons outside the model are repeated.
        self.outcomes = [outcome for outcome in evaluation.outcomes if outcome.reward is not None]

    def _write(self, entry: EvaluationPlan | AttemptOutcome) -> None:
        write_all(self._fd, msgspec.json.encode(entry) + b"\n", self.path)


def read(path: Path, problems: list[str] | None = None) -> Evaluation:
    """The evaluation in ``path`` as far as it got; of an attempt that was repeated, the last
    outcome. Raises StoreError for a damaged line; if ``problems`` is given, damaged lines are
    skipped and reported there instead."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"the evaluation {path} cannot be read: {error.strerror}") from None
    return _decoded(data[: data.rfind(b"\n") + 1], path, problems)


def _decoded(data: bytes, path: Path, problems: list[str] | None = None) -> Evaluation:
    entries = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            entries.append(_decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if problems is None or number == 1:
                raise StoreError(f"{path}, line {number}: {error}") from None
            problems.append(f"{path}, line {number} is damaged and was skipped: {error}")
    if not entries or not isinstance(entries[0], EvaluationPlan):
        raise StoreError(f"{path} is not an evaluation: its first line must be a plan")
    outcomes: dict[tuple[str, int], AttemptOutcome] = {}
    for entry in entries[1:]:
        if isinstance(entry, AttemptOutcome):
            outcomes[entry.item, entry.attempt] = entry
    return Evaluation(entries[0], tuple(outcomes.values()))


def same_plan(recorded: EvaluationPlan, wanted: EvaluationPlan) -> None:
    """Raise ConfigError, which names the first difference."""
    for name in EvaluationPlan.__struct_fields__:
        before, now = getattr(recorded, name), getattr(wanted, name)
        if before != now:
            raise ConfigError(
                f"the evaluation was started with {name} {before!r}, not {now!r}: start a new one"
            )


def unfinished(evaluation: Evaluation, num_items: int) -> int:
    """Number of attempts that remain to be made."""
    return num_items * evaluation.plan.attempts - len(evaluation.outcomes)


__all__: Sequence[str] = (
    "EvaluationRecord",
    "EvaluationRecords",
    "read",
    "same_plan",
    "unfinished",
)
