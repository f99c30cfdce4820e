"""Define all exceptions that Ramify raises, and helpers that write their messages.

    RamifyError
    ├── ConfigError         invalid option, model name, key, schema or limit: fix the call
    ├── SourceError         an input cannot be read
    ├── ModelError          a language model gave no usable reply
    │   ├── RateLimited          429, or 503 with a time to wait    (retried)
    │   ├── Unreachable          never sent: refused, no route, DNS (retried)
    │   ├── ReplyLostError       sent, but the reply did not arrive (retried; may be billed)
    │   ├── ServerStatusError    a 5xx                              (retried)
    │   ├── MalformedResponse    not the API: HTML, no choices      (retried; may be billed)
    │   ├── ReplyTruncatedError  truncated at its length limit (``.text`` holds what arrived)
    │   ├── ReplyFiltered        stopped by a content filter, or refused by the model
    │   └── RequestRefusedError  4xx: key, quota, unknown model, prompt too long
    ├── SandboxError        a session could not be started, or failed
    │   └── SessionDied         the process behind a session ended
    ├── RunSuspendedError      the run waits for a person; ``.resume()`` continues it
    ├── EventLoopBlockedError  code blocked the run's event loop past the run's deadline
    ├── StoreError             a journal or blob cannot be read or written
    │   ├── UnknownRun          no run or evaluation matches the name, or several do
    │   ├── RunInUse            another process is writing the run, evaluation or training folder
    │   └── ReplayDiverged      a replay sent a request that was not recorded
    ├── TrainError          training cannot continue: a loss or gradient is not finite
    └── LimitReached        a limit was reached; ``.stop`` says which

    try:
        result = rlm.completion(context, query)
    except ramify.RamifyError as error:
        print(error)            # one line: what failed, where, what was received, what to do

Reaching a limit is not an error for a run: it returns its best answer and its ``Stop``. A failure
that a person can fix (see ``is_fixable_by_user``) suspends a stored run.
"""

from __future__ import annotations

import errno
import functools
import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec

from ramify.argument_types import first_mismatch
from ramify.nearest_name import nearest_name
from ramify.terminal_sanitizer import replace_unprintable, strip_control_characters


class RamifyError(Exception):
    """Base class of all errors that this package raises for its users.

    ``str(error)`` is one readable line.

    Example:
        except ramify.RamifyError as error:
            print(error)    # what failed, where, what was received, what to do
    """

    def __init__(self, *args: object) -> None:
        """Create an error whose message is safe to print on a terminal.

        Control characters are removed, because the message may quote text from a server.
        """
        super().__init__(
            *(strip_control_characters(arg) if isinstance(arg, str) else arg for arg in args)
        )


class RunSuspendedError(RamifyError):
    """Raised when a stored run is suspended until a user fixes the cause of a failure.

    ``run_id`` names the run, and ``resume()`` continues the run and returns its result. Recorded
    replies are not paid for again.

    Example:
        except ramify.RunSuspendedError as error:
            input(f"{error}\\nPress Enter when it is fixed.")
            result = error.resume()
    """

    def __init__(self, message: str, run_id: str, resume: Callable[[], Any]) -> None:
        super().__init__(message)
        self.run_id = run_id
        self.resume = resume
        """Function that resumes the run and blocks until the result is available. In a coroutine,
        use ``await rlm.aresume(error.run_id)``."""


class EventLoopBlockedError(RamifyError):
    """Raised when code blocks the event loop past the run's deadline and a watchdog ends the run.

    The message names the line that blocked the loop. ``run_id`` is empty if the run is not stored.

    Example:
        rlm.completion(text, query, on_event=lambda event: time.sleep(1e9))    # blocks the loop
    """

    def __init__(self, message: str, run_id: str = "") -> None:
        super().__init__(message)
        self.run_id = run_id


class ConfigError(RamifyError):
    """Raised if an option, model name, key, schema or limit is invalid.

    >>> try:
    ...     ramify.RLM("opanai:gpt-5-mini").completion("How many days has May?")
    ... except ramify.ConfigError as error:
    ...     print(str(error)[:72])
    unknown provider 'opanai' in 'opanai:gpt-5-mini': did you mean 'openai'?
    """


class SourceError(RamifyError):
    """Raised if an input, such as a file or folder, cannot be read.

    The message is one printable line that names the input.

    >>> try:
    ...     ramify.load("no-such-folder/")
    ... except ramify.SourceError as error:
    ...     print(str(error).partition(":")[0])
    no-such-folder/ does not exist
    """

    def __init__(self, message: str) -> None:
        super().__init__(replace_unprintable(message))


class ModelError(RamifyError):
    """Raised if a language model gave no usable reply.

    Each cause has its own subclass.

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


class RateLimited(ModelError):
    """Raised if the server asked the client to slow down (429, or 503 with a ``Retry-After``
    header).

    >>> inference.RateLimited("429", retry_after_s=1.5).retry_after_s    # seconds
    1.5
    """

    transient = True

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unreachable(ModelError):
    """Raised if a request could not be sent, for example because the connection was refused.

    Other causes are a missing route and an unknown host name.

    Example:
        inference.Unreachable("openai:m: connection refused")
    """

    transient = True
    reason = ""
    """The cause without the address, such as ``connection refused``; empty if only the message
    states the cause."""


class ReplyLostError(ModelError):
    """Raised if a request was sent but no complete reply arrived, because of a dropped connection
    or a timeout.

    Example:
        inference.ReplyLostError("openai:m: no reply within 300 s")
    """

    transient = True
    may_be_paid = True


class ServerStatusError(ModelError):
    """Raised if the server answered with a 5xx status.

    Example:
        inference.ServerStatusError("openai:m: 503, overloaded")
    """

    transient = True


class MalformedResponse(ModelError):
    """Raised if the server answered with status 200 but its body does not have the format of the
    API.

    Example:
        inference.MalformedResponse("openai:m: answered HTML instead of JSON")
    """

    transient = True
    may_be_paid = True


class ReplyTruncatedError(ModelError):
    """Raised if a reply was truncated at its length limit.

    ``text`` is the part that arrived.

    >>> inference.ReplyTruncatedError("cut at 8 tokens", "The first host").text
    'The first host'
    """

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


class ReplyFiltered(ModelError):
    """Raised if a content filter stopped the reply or the model refused to answer.

    ``text`` is the part that arrived.

    >>> inference.ReplyFiltered("stopped by a content filter", "I can").text
    'I can'
    """

    is_refusal = False
    """True if the model itself refused, False if a filter stopped the reply."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


class RequestRefusedError(ModelError):
    """Raised if the server rejected the request with a 4xx status other than 429.

    Example:
        inference.RequestRefusedError("openai:m: 401, wrong key")
    """

    too_long = False
    """True if the prompt does not fit the model's window."""
    needs_key = False
    """True if the API key is wrong, or if its quota or credit is used up."""


class SandboxError(RamifyError):
    """Raised if a sandboxed Python session cannot be started or violates its protocol.

    Example:
        ramify.open_sandbox(ramify.JailSpec(tier="A"))    # on a machine without namespaces
    """


class SessionDied(SandboxError):
    """Raised if the process that runs a sandboxed Python session has ended.

    ``stdout`` is what the current code had printed by then.
    """

    def __init__(self, message: str, stdout: str = "") -> None:
        super().__init__(message)
        self.stdout = stdout


class WeakSandboxWarning(UserWarning):
    """Warns that model-written code runs without strong isolation.

    ``SandboxSpec(allow_weaker=True)`` accepts such a sandbox.

    Example:
        warnings.simplefilter("error", ramify.WeakSandboxWarning)    # refuse weak sandboxes
    """


class DeprecatedSettingNameWarning(DeprecationWarning):
    """Warns that a setting was passed under an old or alternative name.

    The command line shows this warning.
    """


class StoreError(RamifyError):
    """Raised if a journal or a stored file (blob) cannot be read or written.

    Example:
        ramify.Store("/read-only")    # a folder that cannot be written
    """


class UnknownRun(StoreError):
    """Raised if a name matches no run or evaluation, or is a prefix of several."""


class RunInUse(StoreError):
    """Raised if another process is writing to the same run, evaluation or training folder."""


class ReplayDiverged(StoreError):
    """Raised if a replayed run sends an unrecorded request, or if its settings differ from the
    record.

    Example:
        rlm.replay(run_id)    # raises it if the program asks a question that was not recorded
    """


class TrainError(RamifyError):
    """Raised if training cannot continue, for example because a loss or gradient is not finite.

    In that case, the message names the sequence and the file with its dumped data.

    Example:
        except ramify.TrainError as error:
            print(error)    # names the sequence with the loss that is not finite
    """


class LimitReached(RamifyError):
    """Raised if a limit of the run was reached.

    ``stop`` is the ``Stop`` value of that limit.
    """

    def __init__(self, message: str, stop: str) -> None:
        super().__init__(message)
        self.stop = stop
        self.is_shared = False
        """True if the limit belongs to a budget that several runs share."""


class HostCallError(Exception):
    """Raised in the host process when a host function called by session code fails.

    The session then raises a corresponding exception inside that code.

    ``kind`` names the exception class in the session and ``data`` holds its attributes. Not a
    ``RamifyError``, because users of the library never see it.
    """

    def __init__(self, kind: str, message: str, data: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.data = dict(data or {})


def is_fixable_by_user(error: BaseException | None) -> bool:
    """Return True if the user can fix the cause of ``error`` and then continue the run.

    Examples are a network failure, a used-up quota, a wrong key or a full disk.
    """
    if isinstance(error, StoreError):
        return not isinstance(error, UnknownRun | RunInUse | ReplayDiverged)
    if isinstance(error, EventLoopBlockedError):
        return True
    if isinstance(error, LimitReached):
        return error.is_shared
    is_refused_key = isinstance(error, RequestRefusedError) and error.needs_key
    return is_refused_key or (isinstance(error, ModelError) and error.transient)


def listen_error(host: str, port: int, error: OSError | OverflowError) -> ConfigError:
    """Return the error to raise when a server cannot listen on its address.

    The message names the command-line option to change.
    """
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


_MAX_LISTED = 40
"""Maximum number of known names that an error message lists if it also suggests the nearest one."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name, such as ``"did you mean 'a'? known:
    a, b"``.

    A long list is left out if a name is near. Letter case is ignored.
    """
    if not isinstance(known, set | frozenset):
        known = list(known)
    if not known:
        return "there are none"
    close = nearest_name(name, known)
    if close and len(known) > _MAX_LISTED:
        return f"did you mean '{close}'?"
    hint = f"did you mean '{close}'? " if close else ""
    return f"{hint}known: {', '.join(sorted(known))}"


if TYPE_CHECKING:
    from msgspec import StructMeta
else:
    StructMeta = type(msgspec.Struct)  # older versions of msgspec do not name it


class StrictKeywordsMeta(StructMeta):
    """Metaclass that rejects wrong arguments of structs that users create, such as ``Sampling``.

    An unknown field raises an error with the nearest known name, as in ``unknown keyword
    'temprature' of Sampling: did you mean 'temperature'?`` A value that does not have the field's
    annotated type raises one that says what to give.
    """

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        given = {**dict(zip(cls.__struct_fields__, args, strict=False)), **fields}
        check_types(cls, given, cls.__name__)
        try:
            return super().__call__(*args, **fields)
        except TypeError:
            check_keywords(cls.__name__, fields, cls.__struct_fields__)
            raise


def check_keywords(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError if any keyword argument in ``given`` is not among the ``known`` ones.

    The message names ``owner``, the class or function that received the keywords.
    """
    names = list(known)
    for keyword in given:
        if keyword not in names:
            raise ConfigError(
                f"unknown keyword '{keyword}' of {owner}: {did_you_mean(keyword, names)}"
            )


def check_types(owner: Any, given: Mapping[str, Any], name: str = "") -> None:
    """Raise ConfigError if a given value does not have the type that its name is annotated with.

    ``owner`` is the class or function that has the annotations. The message begins with ``name``.
    """
    wrong = first_mismatch(owner, given.items())
    if wrong is None:
        return
    where = f"{name}: " if name else ""
    if wrong.choices:
        advice = did_you_mean(wrong.value, wrong.choices)
        raise ConfigError(f"{where}unknown {wrong.place} {wrong.value!r:.80}: {advice}")
    raise ConfigError(f"{where}{wrong}")


_Parameters = ParamSpec("_Parameters")
_Returned = TypeVar("_Returned")


def with_checked_options(
    function: Callable[_Parameters, _Returned],
) -> Callable[_Parameters, _Returned]:
    """Return a function that raises ConfigError if an option is unknown, has a wrong type, or is
    given by position.

    The options of a function are its keyword-only parameters.
    """
    options = tuple(function.__kwdefaults__ or ())
    names = function.__code__.co_varnames[: function.__code__.co_argcount]

    @functools.wraps(function)
    def checked(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Returned:
        if len(args) > len(names):
            raise ConfigError(
                f"{function.__name__} was given {len(args)} values without a keyword, and takes "
                f"{len(names)} ({', '.join(names)}): give several of one kind as a list, and "
                f"options by name, such as {options[0]}=…"
            )
        check_keywords(function.__name__, kwargs, [*names, *options])
        given = {name: kwargs[name] for name in options if name in kwargs}
        check_types(function, given, function.__name__)
        return function(*args, **kwargs)

    return checked


def user_line_of_error(error: BaseException) -> str:
    """Return the line of the user's code that raised ``error``, in the form ``, at score.py:12
    (score)``.

    Lines in this package and in the standard library are skipped. A line in an installed package is
    used only if no other line is left. The text is empty if no line remains.
    """
    ours, standard = str(Path(__file__).parent), str(Path(traceback.__file__).parent)
    frames = [
        frame
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if not frame.filename.startswith((ours, standard, "<frozen "))
    ]
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    for frame in own or frames:
        return f", at {frame.filename}:{frame.lineno} ({frame.name})"
    return ""
