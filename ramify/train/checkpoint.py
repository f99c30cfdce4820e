"""Manage a training run's folder, including its checkpoints and its lock.

Checkpoints are written atomically, and only the newest and the best ones are kept.

    OUT/checkpoints/step-000040/      policy/ (Hugging Face layout), backend and random states,
                                      state.json, and checksums.json, verified before loading
    OUT/checkpoints/.step-000045.tmp  being written; after a kill, the next save removes it
    OUT/checkpoints/abandoned/        checkpoints after one that the run went back to
    OUT/.lock                         held by ``flock`` for the duration of the run; names the
                                      process that holds it: {"pid":4711,"host":"gpu-3"}

A checkpoint is written under another name, synced and renamed. One process writes to the folder,
and a second one is rejected at once. The system frees the lock when its holder exits, in whatever
way, so that a killed run can be resumed. Only the process that owns a run takes the lock: not its
ranks, engines or rollout workers, nor a supervisor that restarts it. The parts of a checkpoint are
read and written by their owners, and ``lineage.py`` checks what must be equal for a resume.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import ConfigError, RunInUse, StoreError
from ramify.logging import ComponentLogger
from ramify.models import folder_file_checksums
from ramify.store.journal import WriterProcessId, this_process
from ramify.train.config_overrides import migrate_config
from ramify.train.config_redaction import check_field_bounds
from ramify.train.training_guard import TrainingGuardState

_log = ComponentLogger("train")
Write = Callable[[Path], Callable[[], None] | None]
"""A function that writes one part of a checkpoint to a path. If writing continues in the
background, it returns a function that waits for it."""
FOLDER = "checkpoints"
ABANDONED = "abandoned"
_STATE = "state.json"
_OLD = ".old.tmp"
SCHEMA_VERSION = 1


class CheckpointedProgress(msgspec.Struct, kw_only=True):
    """The progress of a training run, stored in each checkpoint as plain data."""

    step: int
    """Optimizer steps completed, over all stages."""
    stage: int = 0
    """Index of the stage that the next step belongs to."""
    stage_step: int = 0
    """Completed steps of that stage."""
    next_item: int = 0
    """Index of the first item that has never been started. Dynamic sampling can start more items
    than the steps need."""
    first_item: int = 0
    """Index of the run's first item."""
    pending: list[int] = []
    """Indices of items that have been started but not learned from. A run that resumes here begins
    with them."""
    version: int = 0
    """Version of the policy: the number of times that its weights were published to the engine."""
    seconds: float = 0.0
    """Seconds of training so far, over all resumptions."""
    cpu_s: float = 0.0
    """CPU time of the process in seconds, over all resumptions."""
    score: float | None = None
    """Validation score of these weights, which decides ``best``. None if they were not evaluated,
    or if too few attempts could be scored."""
    stopped: str = ""
    """Why the stage ended before its last step; empty if it did not."""
    scored_since: int = 0
    """First step whose score can be compared with current ones, because the conditions of scoring
    have not changed since."""
    is_due: bool = False
    """Whether the evaluation after this step was cut off, so that a resumed run begins with it."""
    memory: dict[str, float] = {}
    """State of the stage's algorithm."""
    memories: dict[str, dict[str, float]] = {}
    """Name of another policy -> state of its algorithm."""
    guard: TrainingGuardState = msgspec.field(default_factory=TrainingGuardState)
    """State of the guard against collapse and divergence in this stage."""
    lr_scale: float = 1.0
    """Factor by which the learning rates of this stage are multiplied. It is below 1 after a
    rollback."""
    config: dict[str, Any] = {}
    """The run's configuration as plain data, without secrets."""
    checksums: str = ""
    """Name of the file with the checksums of all other files; empty in old checkpoints without
    checksums."""
    schema_version: int = SCHEMA_VERSION

    def algorithm_state(self, policy: str) -> dict[str, float]:
        """Return the state of the algorithm that trains one policy.

        ``policy`` is its name in ``Run.policies``, or empty for the main policy, ``Run.policy``.
        """
        return self.memories.get(policy, {}) if policy else self.memory


class CheckpointStore:
    """The checkpoints of a training run, stored in the run's folder."""

    def __init__(self, out: Path, keep_last: int = 2, keep_best: int = 1) -> None:
        check_field_bounds("schedule", least=1, keep_last=keep_last)
        check_field_bounds("schedule", least=0, keep_best=keep_best)
        self.folder = out / FOLDER
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._background: BackgroundThread | None = None

    def save(self, state: CheckpointedProgress, parts: Mapping[str, Write]) -> Path:
        """Write a checkpoint of the training run and return its path.

        ``parts`` maps each file or folder name in the checkpoint to a function that writes it. If
        such a function continues in the background, the checkpoint is complete once
        ``wait_for_write`` returns.

        Raises StoreError if this write or the previous background write failed; earlier checkpoints
        stay.
        """
        self.wait_for_write()
        final = self.folder / f"step-{state.step:06d}"
        temporary = self.folder / f".{final.name}.tmp"
        try:
            self._sweep()
            temporary.mkdir(parents=True)
            waits = [
                wait
                for name, write in parts.items()
                if (wait := write(temporary / name)) is not None
            ]
        except OSError as error:
            raise StoreError(f"checkpoint {final} cannot be written: {error}") from error
        except RuntimeError as error:
            if "inline_container" not in str(error) and "PytorchStreamWriter" not in str(error):
                raise
            # How torch.save reports a write that failed, on a full disk for example.
            free = shutil.disk_usage(self.folder).free / 2**20
            raise StoreError(
                f"checkpoint {final} cannot be written: torch.save failed ({free:.0f} MiB are "
                "free on its disk)"
            ) from error
        state_json = msgspec.json.format(
            msgspec.json.encode(
                msgspec.structs.replace(state, checksums=folder_file_checksums.FILE)
            )
        )
        if waits:
            self._background = BackgroundThread(
                lambda: self._finish(temporary, final, state_json, waits)
            )
        else:
            self._finish(temporary, final, state_json)
        return final

    def wait_for_write(self) -> None:
        """Wait until no checkpoint is being written.

        Raises StoreError if the last write failed.
        """
        background, self._background = self._background, None
        if background is not None:
            background.wait()

    def _finish(
        self, temporary: Path, final: Path, state: bytes, waits: Sequence[Callable[[], None]] = ()
    ) -> None:
        try:
            for wait in waits:
                wait()
            _write_privately(temporary / _STATE, state)
            folder_file_checksums.write(temporary)
            _sync(temporary)
            old = final.with_name(f".{final.name}{_OLD}")
            if final.exists():  # e.g. a stage begins at the step where the last one ended
                final.rename(old)
            temporary.rename(final)
            _sync_folder(self.folder)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise StoreError(f"checkpoint {final} cannot be written: {error}") from error
        _log.info("checkpoint", f"saved {final}", step=_step_of(final), path=final)
        self._drop_old()

    def all(self) -> list[Path]:
        """Return the complete checkpoints, oldest first.

        Waits first if one is being written.
        """
        self.wait_for_write()
        return self._completed_checkpoints()

    def _completed_checkpoints(self) -> list[Path]:
        return sorted(
            (path for path in self.folder.glob("step-*") if (path / _STATE).is_file()), key=_step_of
        )

    def abandon_after(self, step: int) -> list[Path]:
        """Move all checkpoints after ``step`` to the folder ``abandoned``, because the run returns
        to ``step``.

        They no longer count as its latest or best. Returns their new paths. Folders of the same
        name in ``abandoned`` are replaced.
        """
        later = [path for path in self.all() if _step_of(path) > step]
        aside = self.folder / ABANDONED
        # Newest first: a kill in between must not leave a gap in the branch.
        for path in reversed(later):
            aside.mkdir(exist_ok=True)
            shutil.rmtree(aside / path.name, ignore_errors=True)
            path.rename(aside / path.name)
        return [aside / path.name for path in later]

    def latest(self) -> Path | None:
        return next(reversed(self.all()), None)

    def best(self) -> Path | None:
        """Return the checkpoint with the highest validation score, or None if none has a score.

        Among equal scores the earliest wins. The policy from before the first step of a stage is
        chosen only if all others are worse.
        """
        self.wait_for_write()
        return next(iter(self._rank_checkpoints()), None)

    def _rank_checkpoints(self) -> list[Path]:
        states = {path: _read_progress(path) for path in self._completed_checkpoints()}
        since = max((state.scored_since for state in states.values()), default=0)
        scored = {
            path: (-state.score, not state.stage_step)
            for path, state in states.items()
            if state.score is not None and state.scored_since == since
        }
        return sorted(scored, key=lambda path: scored[path])

    def _drop_old(self) -> None:
        keep = {
            *self._completed_checkpoints()[-self._keep_last :],
            *self._rank_checkpoints()[: self._keep_best],
        }
        for path in self._completed_checkpoints():
            if path not in keep:
                # Renamed first, so that a kill never leaves half a checkpoint.
                dying = path.with_name(f".{path.name}.tmp")
                path.rename(dying)
                shutil.rmtree(dying)

    def restore_interrupted_replacement(self) -> None:
        """Restore an old checkpoint if the process was killed while replacing it."""
        for old in self.folder.glob(f".step-*{_OLD}"):
            whole = old.with_name(old.name.removesuffix(_OLD).removeprefix("."))
            if not whole.exists():
                old.rename(whole)

    def _sweep(self) -> None:
        self.restore_interrupted_replacement()
        for path in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(path, ignore_errors=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


class BackgroundThread:
    """Runs a function in a background thread.

    The process does not exit before the function has returned.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ramify-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the function has returned.

        Raises the function's exception, if it raised one.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 (raised again by wait)
            self._error = error


def read_state(checkpoint: Path) -> CheckpointedProgress:
    """Read the training progress stored in a checkpoint.

    Fields that an older version wrote get their present names. Raises StoreError if the folder is
    not a checkpoint, is damaged, or was written by a later version.
    """
    state = _read_progress(checkpoint)
    verify(checkpoint, _STATE)
    state.config = migrate_config(state.config)
    return state


def verify(checkpoint: Path, under: str = "") -> None:
    """Check the files of a checkpoint against their stored checksums.

    ``under`` restricts the check to paths that begin with it.

    Raises StoreError, which names the first damaged file and the checkpoint to use instead. An old
    checkpoint without checksums is accepted.
    """
    has_checksums = bool(_read_progress(checkpoint).checksums)
    folder_file_checksums.check(checkpoint, under, lambda: _instead_of(checkpoint))
    if has_checksums and not (checkpoint / folder_file_checksums.FILE).is_file():
        raise StoreError(
            f"{checkpoint / folder_file_checksums.FILE} is missing; {_instead_of(checkpoint)}"
        )


def _instead_of(checkpoint: Path) -> str:
    """Return advice for a user whose run cannot resume from a damaged checkpoint.

    It names an older checkpoint to resume from, if there is one.
    """
    others = [path for path in checkpoint.parent.glob("step-*") if (path / _STATE).is_file()]
    older = [path for path in others if path.name < checkpoint.name]
    again = "start again in another folder"
    return (
        f"resume from an older checkpoint (--resume {max(older)}), or {again}" if older else again
    )


def _read_progress(checkpoint: Path) -> CheckpointedProgress:
    path = checkpoint / _STATE
    try:
        state = msgspec.json.decode(path.read_bytes(), type=CheckpointedProgress)
    except (OSError, msgspec.DecodeError) as error:
        raise StoreError(
            f"{checkpoint} is not a checkpoint: {error}; {_instead_of(checkpoint)}"
        ) from error
    if state.schema_version > SCHEMA_VERSION:
        raise StoreError(
            f"{checkpoint} was written by a newer version of ramify (schema "
            f"{state.schema_version}): upgrade ramify"
        )
    return state


def resolve_checkpoint(path: Path) -> Path:
    """Return the checkpoint that ``path`` refers to.

    If ``path`` is the folder of a run, return its latest checkpoint. Raises ConfigError if there is
    none.
    """
    if (path / _STATE).is_file():
        return path
    checkpoints = CheckpointStore(path)
    if find_lock_holder(path) in (None, this_process()):  # a live run replaces its own checkpoints
        checkpoints.restore_interrupted_replacement()
    latest = checkpoints.latest()
    if latest is None:
        problem = (
            f"nothing to resume in {path}: give a run's folder (with {FOLDER}/step-…) or a "
            "checkpoint"
        )
        runs = [each for each in path.parents if any(each.glob(f"{FOLDER}/step-*"))]
        raise ConfigError(f"{problem}, such as {runs[0]}" if runs else problem)
    return latest


def _write_privately(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, because it contains the user's options."""
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


FILE = ".lock"
_PATIENCE_S = 0.5
"""Seconds to keep trying for the lock. A reader that checks whether a run is live holds the lock
very briefly."""
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


@contextlib.contextmanager
def hold_run_lock(out: Path) -> Iterator[None]:
    """Hold the lock of the run's folder ``out``, so that no other process writes to the folder.

    A missing folder is created, and removed again if nothing was written to it. Raises RunInUse,
    which names the holder, if another process has the lock.
    """
    missing: list[Path] = []
    path = out / FILE
    try:
        missing += [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
        fd = _acquire_lock(path)
    except OSError as error:
        _remove(missing)
        raise ConfigError(
            f"cannot write to the run's folder {out} ({error.strerror}): give another one with "
            "--out DIR"
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        # Explicitly, since a forked child may still hold the descriptor.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
        _remove(missing)


def find_lock_holder(out: Path) -> WriterProcessId | None:
    """Return the process that currently writes to the run's folder ``out``, or None if there is
    none."""
    path = out / FILE
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return _holder_in(path) if error.errno in _TAKEN else None
    finally:
        os.close(fd)
    return None


def _acquire_lock(path: Path) -> int:
    """Lock the file ``path`` and write the id of this process to it.

    Returns the file descriptor that holds the lock.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _wait(fd, path)
        if os.fstat(fd).st_nlink > 0:
            os.ftruncate(fd, 0)
            os.pwrite(fd, msgspec.json.encode(this_process()), 0)
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)  # removed between opening and locking, so it no longer locks the folder
    return _acquire_lock(path)


def _wait(fd: int, path: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _TAKEN:
                text = (
                    f"{path.parent} does not support locks ({error.strerror}): a second run can "
                    "write to it at the same time"
                )
                return _log.issue_python_warning(text, stacklevel=2)
            if time.monotonic() > deadline:
                raise RunInUse(
                    f"the run's folder {path.parent} is being written by {_holder_in(path)}: "
                    "wait for it, stop it, or give another folder with --out DIR"
                ) from None
        time.sleep(0.02)


def _holder_in(path: Path) -> WriterProcessId:
    try:
        return msgspec.json.decode(path.read_bytes(), type=WriterProcessId)
    except (OSError, msgspec.DecodeError):
        return WriterProcessId(0, "an unknown host")


def _remove(folders: list[Path]) -> None:
    """Remove the given folders from first to last, as long as they are empty.

    Stops at the first one that is not empty.
    """
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()
