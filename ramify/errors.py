"""Every error that Ramify raises, and the ``except`` clause to write.

    RamifyError
    ├── ConfigError         invalid option, model name, key, schema or limit: fix the call
    ├── SourceError         an input cannot be read
    ├── ModelError          a language model gave no usable reply
    │   ├── RateLimited         429, or 503 with a time to wait      (retried, fixable)
    │   ├── Unreachable         never sent: refused, no route, DNS   (retried, fixable)
    │   ├── ReplyLost           sent, but the reply did not arrive   (retried, fixable)
    │   ├── ServerFailed        a 5xx                                (retried, fixable)
    │   ├── BadReply            not the API: HTML, no choices        (retried, fixable)
    │   ├── ReplyCut            truncated at its length limit (``.text`` holds what arrived)
    │   ├── ReplyFiltered       stopped by a content filter, or refused by the model
    │   └── Refused             4xx: unknown model, prompt too long
    │       └── AccountRefused      the key was rejected, or its quota is spent (fixable)
    ├── SandboxError        a session could not be started, or failed
    │   └── SessionDied         the process behind a session ended
    ├── StoreError          a journal or blob cannot be read or written
    │   ├── DiskFull            a file could not be written          (fixable)
    │   ├── UnknownRun          no run or evaluation matches the name, or several do
    │   ├── RunInUse            another process is writing the run, evaluation or training folder
    │   └── ReplayDiverged      a replay sent a request that was not recorded
    ├── TrainError          training cannot continue: a loss or gradient is not finite
    └── LimitReached        a limit was reached; ``.stop`` says which

    try:
        result = rlm.completion(context, query)
    except ramify.RamifyError as error:
        print(error)            # one line: what failed, where, what was received, what to do

A fixable error is also a ``FixableError``: once a person has repaired the cause, the same run can
continue. A retried one is raised when the patience for its request is used up. Reaching a limit is
not an error for a run: it returns its best answer and its ``Stop``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches


class RamifyError(Exception):
    """Base class of all errors of this package. ``str(error)`` is one readable line.

    Example:
        except ramify.RamifyError as error:
            print(error)    # what failed, where, what was received, what to do
    """


class ConfigError(RamifyError):
    """An option, model name, key, schema or limit is invalid.

    >>> try:
    ...     ramify.RLM("opanai:gpt-5-mini").completion("How many days has May?")
    ... except ramify.ConfigError as error:
    ...     print(str(error)[:72])
    unknown provider 'opanai' in 'opanai:gpt-5-mini': did you mean 'openai'?
    """


class SourceError(RamifyError):
    """An input cannot be read. The message names it.

    >>> try:
    ...     ramify.load("no-such-folder/")
    ... except ramify.SourceError as error:
    ...     print(str(error).partition(":")[0])
    no-such-folder/ does not exist
    """


class FixableError(RamifyError):
    """A failure whose cause a person can repair: the network, a server, a key, a quota or a disk.
    The same run can then continue."""


class ModelError(RamifyError):
    """A language model gave no usable reply.

    Example:
        except ramify.ModelError as error:
            retry_later = error.transient
    """

    may_be_paid = False
    """True if the provider may have billed the attempt although it reported no usage."""
    transient = False
    """True if the same request may succeed when it is sent again."""
    waited_s = 0.0
    """Seconds for which the request was retried before this error was raised."""


class RateLimited(ModelError, FixableError):
    """The server asked the client to slow down.

    >>> inference.RateLimited("429", retry_after_s=1.5).retry_after_s    # seconds
    1.5
    """

    transient = True

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unreachable(ModelError, FixableError):
    """The request was never sent: connection refused, no route, or unknown host name.

    Example:
        inference.Unreachable("openai:m: connection refused")
    """

    transient = True


class ReplyLost(ModelError, FixableError):
    """The request was sent, but no complete reply arrived: dropped connection or timeout.

    Example:
        inference.ReplyLost("openai:m: no reply within 300 s")
    """

    transient = True
    may_be_paid = True


class ServerFailed(ModelError, FixableError):
    """The server answered with a 5xx status.

    Example:
        inference.ServerFailed("openai:m: 503, overloaded")
    """

    transient = True


class BadReply(ModelError, FixableError):
    """The server answered 200, but the body does not have the shape of the API.

    Example:
        inference.BadReply("openai:m: answered HTML instead of JSON")
    """

    transient = True
    may_be_paid = True


class ReplyCut(ModelError):
    """The reply was truncated at its length limit. ``text`` is what arrived.

    >>> inference.ReplyCut("cut at 8 tokens", "The first host").text
    'The first host'
    """

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


class ReplyFiltered(ModelError):
    """A content filter stopped the reply, or the model refused. ``text`` is what arrived.

    >>> inference.ReplyFiltered("stopped by a content filter", "I can").text
    'I can'
    """

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


class Refused(ModelError):
    """The server rejected the request: a 4xx other than 429.

    Example:
        inference.Refused("openai:m: 401, wrong key")
    """

    too_long = False
    """True if the request was rejected because the prompt does not fit the model's window."""


class AccountRefused(Refused, FixableError):
    """The server rejected the key, or the account has no quota left.

    Example:
        inference.AccountRefused("openai:m: 401, wrong key; check the key in OPENAI_API_KEY")
    """


class SandboxError(RamifyError):
    """A session could not be started, or violated its protocol.

    Example:
        ramify.open_sandbox(ramify.SandboxSpec(tier="A"))    # on a machine without namespaces
    """


class SessionDied(SandboxError):
    """The process behind a session ended. ``stdout`` is what the current cell printed so far."""

    def __init__(self, message: str, stdout: str = "") -> None:
        super().__init__(message)
        self.stdout = stdout


class WeakSandboxWarning(UserWarning):
    """Code written by a model runs without strong isolation. ``SandboxSpec(allow_weaker=True)``
    accepts this.

    Example:
        warnings.simplefilter("error", ramify.WeakSandboxWarning)    # refuse weak sandboxes
    """


class OldNameWarning(DeprecationWarning):
    """A setting was given under an old or alternative name. The command line shows the warning."""


class StoreError(RamifyError):
    """A journal or blob cannot be read or written.

    Example:
        ramify.Store("/read-only")    # a folder that cannot be written
    """


class DiskFull(StoreError, FixableError):
    """A file could not be written: the disk is full, or its folder cannot be written."""


class UnknownRun(StoreError):
    """A name matches no run or evaluation, or is a prefix of several."""


class RunInUse(StoreError):
    """Another process is writing the run, evaluation or training folder that is about to be
    written."""


class ReplayDiverged(StoreError):
    """A replayed run sent a model a request that its journal does not contain.

    Example:
        rlm.replay(run_id)    # raises it if the program asks another question than the recorded one
    """


class TrainError(RamifyError):
    """Training cannot continue: a loss or gradient is not finite. The message names the sequence
    and the dump.

    Example:
        except ramify.TrainError as error:
            print(error)    # names the sequence with the loss that is not finite
    """


class LimitReached(RamifyError):
    """A limit of the run was reached. ``stop`` is the ``Stop`` that names it."""

    def __init__(self, message: str, stop: str) -> None:
        super().__init__(message)
        self.stop = stop


class HostCallError(Exception):
    """Raised by the host while it handles a call from a session; the session raises it again
    inside.

    ``kind`` names the exception class in the session and ``data`` holds its attributes. Not a
    ``RamifyError``, because users of the library never see it.
    """

    def __init__(self, kind: str, message: str, data: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.data = dict(data or {})


def cannot_listen(host: str, port: int, error: OSError | OverflowError) -> ConfigError:
    """The error for a server that cannot start, naming the option to change."""
    if isinstance(error, OverflowError):
        return ConfigError(f"--port {port}: a port must be from 1 to 65535, or 0 for any free port")
    # A negative number comes from name resolution: the host name is unknown.
    if (error.errno or -1) < 0 or error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(
            f"cannot listen on {host}: {error.strerror}: give an address of this machine as --host"
        )
    return ConfigError(
        f"cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}): choose another --port"
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: ``"did you mean 'a'? known: a, b"``."""
    names: Sequence[str] = sorted(known)
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}known: {', '.join(names)}"
