"""Checkpoints of a training run: whole or not there, the last few and the best kept, and a check
that they fit.

    OUT/checkpoints/step-000040/      policy/  (Hugging Face layout)   backend and random states   state.json
                                      checksums.json of all these files, which are compared before they are loaded
    OUT/checkpoints/.step-000045.tmp  being written; a kill leaves it, and the next save removes it
    OUT/checkpoints/abandoned/        those after one that the run went back to, kept for comparison

Decides names, atomicity (a folder is written aside, synced and renamed), which ones stay, and what
must be equal for a resume. Leaves out what the parts hold: whoever owns one writes and reads it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import ConfigError, StoreError
from ramify.models import checksums
from ramify.store.journal import this_process
from ramify.train.guards import GuardState
from ramify.train.lock import holder
from ramify.train.redacted import is_cut
from ramify.train.renamed_fields import with_new_names

Write = Callable[[Path], Callable[[], None] | None]
"""Writes one part to a path; what it returns, if anything, waits for the end of that."""
FOLDER = "checkpoints"
ABANDONED = "abandoned"
_STATE = "state.json"
_OLD = ".old.tmp"
SCHEMA_VERSION = 1


class CheckpointState(msgspec.Struct, kw_only=True):
    """Where a run stands, in plain data."""

    step: int
    """Optimizer steps done, over all stages."""
    stage: int = 0
    """Index of the stage that the next step belongs to."""
    stage_step: int = 0
    """Steps of that stage that are done."""
    next_item: int = 0
    """Running number of the first item that was never begun; dynamic sampling uses up more than a
    step's share."""
    first_item: int = 0
    """Running number of the first item of the run."""
    pending: list[int] = []
    """Numbers of items that were begun and not learnt from yet: a run that goes on from here begins
    with them."""
    version: int = 0
    """Of the policy: how often its weights were published."""
    seconds: float = 0.0
    """Of training so far, over all resumptions."""
    cpu_s: float = 0.0
    """Processor time of the process, likewise."""
    score: float | None = None
    """Of these weights on the validation stream, what ``best`` goes by; None where they were not
    evaluated, or too few attempts could be judged."""
    stopped: str = ""
    """Why the stage was ended before its last step; empty where it was not."""
    memory: dict[str, float] = {}
    """What the stage's algorithm remembers of the steps done."""
    guard: GuardState = msgspec.field(default_factory=GuardState)
    """What the run's guard remembers of the stage."""
    config: dict[str, Any] = {}
    """Of the run, as plain data, without secrets."""
    checksums: str = ""
    """File with the checksums of all others; empty: written before there were any."""
    schema_version: int = SCHEMA_VERSION


class CheckpointStore:
    """The checkpoints of one run's folder."""

    def __init__(self, out: Path, keep_last: int = 2, keep_best: int = 1) -> None:
        if keep_last < 1 or keep_best < 0:
            raise ConfigError(
                f"checkpoint keep_last={keep_last} must be at least 1, keep_best={keep_best} at "
                "least 0"
            )
        self.folder = out / FOLDER
        self._keep_last, self._keep_best = keep_last, keep_best
        self._rest: BackgroundWork | None = None

    def save(self, state: CheckpointState, parts: Mapping[str, Write]) -> Path:
        """Write a checkpoint: each part writes itself to the path of its name. Returns where it
        will stand: a part that goes on by itself returns what waits for its end, and the checkpoint
        is there once that has come (``settle``).

        Raises StoreError where the disk refuses, this time or the last; what was there before
        stays."""
        self.settle()
        final = self.folder / f"step-{state.step:06d}"
        fresh = self.folder / f".{final.name}.tmp"
        try:
            self._sweep()
            fresh.mkdir(parents=True)
            waits = [
                wait for name, write in parts.items() if (wait := write(fresh / name)) is not None
            ]
        except OSError as error:
            raise StoreError(f"checkpoint {final} cannot be written: {error}") from error
        told = msgspec.json.format(
            msgspec.json.encode(msgspec.structs.replace(state, checksums=checksums.FILE))
        )
        if waits:
            self._rest = BackgroundWork(lambda: self._finish(fresh, final, told, waits))
        else:
            self._finish(fresh, final, told)
        return final

    def settle(self) -> None:
        """Return once no checkpoint is being written. Raises StoreError where the last one could
        not be."""
        rest, self._rest = self._rest, None
        if rest is not None:
            rest.wait()

    def _finish(
        self, fresh: Path, final: Path, state: bytes, waits: Sequence[Callable[[], None]] = ()
    ) -> None:
        try:
            for wait in waits:
                wait()
            _write_privately(fresh / _STATE, state)
            checksums.write(fresh)
            _sync(fresh)
            old = final.with_name(f".{final.name}{_OLD}")
            if final.exists():  # a stage begins where the last one ended
                final.rename(old)
            fresh.rename(final)
            _sync_folder(self.folder)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise StoreError(f"checkpoint {final} cannot be written: {error}") from error
        self._drop_old()

    def all(self) -> list[Path]:
        """Whole checkpoints, oldest first; the one that is being written is waited for."""
        self.settle()
        return self._whole()

    def _whole(self) -> list[Path]:
        return sorted(
            (path for path in self.folder.glob("step-*") if (path / _STATE).is_file()), key=_step_of
        )

    def abandon_after(self, step: int) -> list[Path]:
        """Set those of later steps aside, into ``abandoned``, since the run goes back to ``step``:
        none of them can be its latest or best any more. Returns where they lie; what lay there
        under the same name is replaced."""
        later = [path for path in self.all() if _step_of(path) > step]
        aside = self.folder / ABANDONED
        for path in reversed(
            later
        ):  # a kill in between leaves the beginning of the branch, not holes in it
            aside.mkdir(exist_ok=True)
            shutil.rmtree(aside / path.name, ignore_errors=True)
            path.rename(aside / path.name)
        return [aside / path.name for path in later]

    def latest(self) -> Path | None:
        return next(reversed(self.all()), None)

    def best(self) -> Path | None:
        """The one with the highest score, the earliest of equals, but the policy that rollouts
        began with only where all others did worse; None where none was scored."""
        self.settle()
        return next(iter(self._ranked()), None)

    def _ranked(self) -> list[Path]:
        states = {path: _decoded(path) for path in self._whole()}
        scored = {
            path: (-state.score, not state.stage_step)
            for path, state in states.items()
            if state.score is not None
        }
        return sorted(scored, key=lambda path: scored[path])

    def _drop_old(self) -> None:
        kept = {*self._whole()[-self._keep_last :], *self._ranked()[: self._keep_best]}
        for path in self._whole():
            if path not in kept:
                dying = path.with_name(
                    f".{path.name}.tmp"
                )  # so that a kill never leaves half a checkpoint
                path.rename(dying)
                shutil.rmtree(dying)

    def recover(self) -> None:
        """Put back a checkpoint that was to be replaced, where a kill came before the new one
        stood."""
        for old in self.folder.glob(f".step-*{_OLD}"):
            whole = old.with_name(old.name.removesuffix(_OLD).removeprefix("."))
            if not whole.exists():
                old.rename(whole)

    def _sweep(self) -> None:
        self.recover()
        for path in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(path, ignore_errors=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


class BackgroundWork:
    """Work that goes on in a thread of its own, which the process does not end without."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ramify-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when it is done; raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 (raised again by who waits)
            self._error = error


def read_state(checkpoint: Path) -> CheckpointState:
    """Where the run stood. Raises StoreError for what is no checkpoint, one of a later version, or
    a damaged one."""
    state = _decoded(checkpoint)
    verify(checkpoint, _STATE)
    state.config = with_new_names(state.config)
    return state


def verify(checkpoint: Path, under: str = "") -> None:
    """Compare the files of ``checkpoint`` whose path begins with ``under`` with the checksums that
    were written with them.

    Raises StoreError that names the first damaged file and the checkpoint to take instead. One that
    was written before there were checksums is taken as it is."""
    has_checksums = bool(_decoded(checkpoint).checksums)
    checksums.check(checkpoint, under, lambda: _instead_of(checkpoint))
    if has_checksums and not (checkpoint / checksums.FILE).is_file():
        raise StoreError(f"{checkpoint / checksums.FILE} is missing; {_instead_of(checkpoint)}")


def _instead_of(checkpoint: Path) -> str:
    """Advice for someone whose checkpoint is damaged."""
    others = [path for path in checkpoint.parent.glob("step-*") if (path / _STATE).is_file()]
    older = [path for path in others if path.name < checkpoint.name]
    again = "start again in another folder"
    return (
        f"resume from an older checkpoint (--resume {max(older)}), or {again}" if older else again
    )


def _decoded(checkpoint: Path) -> CheckpointState:
    path = checkpoint / _STATE
    try:
        state = msgspec.json.decode(path.read_bytes(), type=CheckpointState)
    except (OSError, msgspec.DecodeError) as error:
        raise StoreError(
            f"{checkpoint} is not a checkpoint: {error}; {_instead_of(checkpoint)}"
        ) from error
    if state.schema_version > SCHEMA_VERSION:
        raise StoreError(
            f"{checkpoint} was written by a later version of ramify (schema {state.schema_version})"
        )
    return state


def find(path: Path) -> Path:
    """The checkpoint that a user means by ``path``: one itself, or the latest of a run's folder.
    Raises ConfigError."""
    if (path / _STATE).is_file():
        return path
    checkpoints = CheckpointStore(path)
    if holder(path) in (None, this_process()):  # a live run replaces its own checkpoints
        checkpoints.recover()
    latest = checkpoints.latest()
    if latest is None:
        raise ConfigError(
            f"nothing to resume in {path}: give a run's folder (with {FOLDER}/step-…) or a "
            "checkpoint"
        )
    return latest


def check_config(
    state: CheckpointState, config: Mapping[str, Any], free: tuple[str, ...] = ()
) -> None:
    """Raise ConfigError, naming the first difference, where a checkpoint is of another config.
    Fields that ``free`` begins may differ, and nobody knows of those that were cut out."""
    for name, was, now in differences(state.config, config):
        if not name.startswith(free) and not is_cut(was) and not is_cut(now):
            raise ConfigError(
                f"the checkpoint at step {state.step} is of another config: {name} was "
                f"{_short(was)} and is now "
                f"{_short(now)}; resume with the config it was made with, or start anew in another "
                "folder"
            )


def differences(was: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, value before, value now) for each leaf that differs; a missing one is None."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in [*was, *(key for key in now if key not in was)]:
            yield from differences(
                was.get(key), now.get(key), f"{name}.{key}" if name else str(key)
            )
    elif was != now:
        yield name, was, now


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _write_privately(path: Path, data: bytes) -> None:
    """For the owner's eyes: it has options that somebody gave."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def _sync(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _sync_folder(path)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems do not sync folders
            os.fsync(handle)
    finally:
        os.close(handle)
