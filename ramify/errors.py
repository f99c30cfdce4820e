"""Every error that Ramify raises, and the ``except`` a user should write.

    RamifyError
    ├── ConfigError         a wrong option, model name, key, schema or limit: fix the call
    ├── SourceError         something to read that cannot be read
    ├── ModelError          a language model gave no usable reply
    │   ├── RateLimited         429 or 503 with a time to wait       (tried again)
    │   ├── Unreachable         never sent: refused, no route, DNS   (tried again)
    │   ├── ReplyLost           sent, but the reply did not arrive   (tried again; may have been paid)
    │   ├── ServerFailed        a 5xx                                (tried again)
    │   ├── BadReply            not the API: HTML, no choices        (not tried again)
    │   ├── ReplyCut            ended at its length limit, unfinished (``.text`` is what arrived)
    │   ├── ReplyFiltered       stopped by a content filter, or the model refused
    │   └── Refused             4xx: key, quota, unknown model, prompt too long
    ├── SandboxError        a session could not be had, or broke
    │   └── SessionDied         the process behind a session ended
    ├── StoreError          a journal or blob that cannot be read or written
    │   ├── UnknownRun          no run or evaluation has that name, or several do
    │   ├── RunInUse            another process is writing that run, evaluation or training folder
    │   └── ReplayDiverged      a replay asked something that was not recorded
    ├── TrainError          training cannot go on: a loss or gradient that is not finite
    └── LimitReached        a limit was reached; ``.stop`` says which

    try:
        result = rlm.completion(context, query)
    except ramify.RamifyError as error:
        print(error)            # one line: what, where, what was got, what to do

A run that meets its limits is not an error: it returns its best answer and its ``Stop``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches


class RamifyError(Exception):
    """The root of all errors of this package. ``str(error)`` is one line for a person."""


class ConfigError(RamifyError):
    """A wrong option, model name, key, schema or limit."""


class SourceError(RamifyError):
    """Something to read that cannot be read; the message names it."""


class ModelError(RamifyError):
    """A language model gave no usable reply."""

    may_be_paid = False
    """Whether the provider may have charged for the attempt although no usage was reported."""
    transient = False
    """Whether the same request may succeed when it is sent again."""


class RateLimited(ModelError):
    """The server asked to slow down."""

    transient = True

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unreachable(ModelError):
    """The request never left: connection refused, no route, name not found."""

    transient = True


class ReplyLost(ModelError):
    """The request was sent and its reply did not arrive whole: dropped connection, timeout."""

    transient = True
    may_be_paid = True


class ServerFailed(ModelError):
    """The server answered with a 5xx."""

    transient = True


class BadReply(ModelError):
    """The server answered 200 with something that is not the API's shape."""

    may_be_paid = True


class ReplyCut(ModelError):
    """The reply ended at its length limit, unfinished. ``text`` is what arrived."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


class ReplyFiltered(ModelError):
    """A content filter stopped the reply, or the model refused. ``text`` is what arrived."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


class Refused(ModelError):
    """The server refused the request: a 4xx other than 429."""

    too_long = False
    """Whether the reason was that the prompt does not fit the model's window."""


class SandboxError(RamifyError):
    """A session could not be had, or broke its protocol."""


class SessionDied(SandboxError):
    """The process behind a session ended. ``stdout`` is what it had printed in the cell so far."""

    def __init__(self, message: str, stdout: str = "") -> None:
        super().__init__(message)
        self.stdout = stdout


class WeakSandboxWarning(UserWarning):
    """Code of a model runs where it could do harm; ``SandboxSpec(allow_weaker=True)`` says that
    this is accepted."""


class OldNameWarning(DeprecationWarning):
    """A setting is given under a name that it has elsewhere or had; the command line shows it."""


class StoreError(RamifyError):
    """A journal or a blob that cannot be read or written."""


class UnknownRun(StoreError):
    """A name that is of no run or evaluation, or that several begin with."""


class RunInUse(StoreError):
    """Another process is writing what this one would write: a run, an evaluation or a training
    folder."""


class ReplayDiverged(StoreError):
    """A replayed run asked a model something other than what its journal recorded."""


class TrainError(RamifyError):
    """Training cannot go on: a loss or gradient that is not finite. The message names the sequence
    and the dump."""


class LimitReached(RamifyError):
    """A limit of the run was reached. ``stop`` is the ``Stop`` that names it."""

    def __init__(self, message: str, stop: str) -> None:
        super().__init__(message)
        self.stop = stop


class HostCallError(Exception):
    """Raised by the host while it answers a call from a session; it rises again inside the session.

    ``kind`` names the exception class there; ``data`` holds its attributes.
    Not a ``RamifyError``: no user of the library meets it.
    """

    def __init__(self, kind: str, message: str, data: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.data = dict(data or {})


def cannot_listen(host: str, port: int, error: OSError | OverflowError) -> ConfigError:
    """Why a server does not start, and which option to change."""
    if isinstance(error, OverflowError):
        return ConfigError(f"--port {port}: ports go from 1 to 65535, and 0 takes a free one")
    if (
        error.errno or -1
    ) < 0 or error.errno == errno.EADDRNOTAVAIL:  # a name that nobody knows, or of another machine
        return ConfigError(
            f"cannot listen on {host}: {error.strerror}: give an address of this machine as --host"
        )
    return ConfigError(
        f"cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}): choose another --port"
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of an error about an unknown name: ``"did you mean 'a'? known: a, b"``."""
    names: Sequence[str] = sorted(known)
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}known: {', '.join(names)}"
