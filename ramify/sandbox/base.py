"""The sandbox API, whose main object is a live Python session.

The engine uses this interface, and every sandbox provider implements it.

    engine ── Session.run(code, answer=…) ──> GuestTransport ──> guest/: one namespace
                     ^                                                         │
                     └────── answer(name, args, kwargs) <── llm_query(…) ──────┘  (same stream)

A provider mainly supplies a ``GuestTransport``, over which ``host/session.py`` communicates with
the code in the session. ``testing/sandbox_conformance`` is the test suite that a provider must pass
before it is documented.

A context, the input of a session, is encoded once: sessions are opened with it, a store keeps it by
its digest, and child runs share it. The encoded form of a large context is an anonymous memory
file, which the fork server maps; that of a small one is a bytes object, which is sent to the
session. A file-backed text (``FileBackedText``) is not copied: the encoded form refers to its file
by the file's hash, and sessions map the file. Contexts are decoded in ``providers/process.py``; the
codec is in ``guest/value_encoding.py``.
"""

from __future__ import annotations

import binascii
import contextlib
import inspect
import itertools
import mmap
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ramify.errors import (
    ConfigError,
    RamifyError,
    SandboxError,
    StrictKeywordsMeta,
    user_line_of_error,
)
from ramify.plugins import PluginRegistry, explain_conversion_error
from ramify.sandbox.file_reference import (
    FileReferenceReader,
    check_content_unchanged,
    hash_and_count_text,
)
from ramify.sandbox.guest.dataframes import arrow_table as arrow_table
from ramify.sandbox.guest.mapped_text import BLOCK_BYTES, TextOffsetIndex
from ramify.sandbox.guest.mapped_text import FileBackedText as FileBackedText
from ramify.sandbox.guest.message_frames import (
    has_aligned_buffers,
    pack_value,
    text_in_pieces,
    write_all,
)
from ramify.sandbox.guest.message_frames import unpack_value as unpack_value
from ramify.sandbox.guest.tables import BufferNdArray as BufferNdArray
from ramify.sandbox.guest.tables import ColumnValues as ColumnValues
from ramify.sandbox.guest.tables import Table as Table
from ramify.sandbox.guest.value_encoding import (
    FileTextReference,
    ValueDecoder,
    ValueEncoder,
    ValueEncodingError,
)
from ramify.sandbox.guest.value_encoding import ProtocolError as ProtocolError
from ramify.types.trajectory import Cell, FileReference

_serials = itertools.count()
_ALL_SEALS = 0x1 | 0x2 | 0x4 | 0x8
"""Seals that make a memory file immutable: they forbid further seals, shrinking, growing and
writing."""
LARGE_BYTES = 1 << 20
"""Minimum size in bytes of a context that counts as large. A session that uses a large context is
forked from a process that has already decoded it."""
_WRITTEN_BYTES = 1 << 20
"""Number of bytes of a context that are written at once."""
MAX_UNMAPPED_BYTES = 1 << 30
"""Maximum total size of files whose texts are copied into a context if a sandbox cannot map
files."""


class SharedContextValue:
    """A value, such as the input of a run, that is encoded once and shared by any number of
    sessions.

    Raises SandboxError if no session can hold a value of this type.
    """

    __slots__ = (
        "__weakref__",
        "_digest",
        "_fd",
        "chars",
        "files",
        "kind",
        "nbytes",
        "parts",
        "serial",
        "value",
    )

    def __init__(self, value: Any) -> None:
        files: dict[str, FileReferenceReader] = {}
        try:
            parts, chars = pack_value(value, files, defers=True)
        except ValueEncodingError as error:
            raise SandboxError(str(error)) from None
        self._set_content(value, parts, chars, files)

    def _set_content(
        self, value: Any, parts: list[Any], chars: int, files: Mapping[str, FileReferenceReader]
    ) -> None:
        self.files = tuple(files.values())
        """Files that hold the text of file-backed strings in the value."""
        self.serial = next(_serials)
        """Unique number of this object within the process. Unlike an address, it is never
        reused."""
        self.kind: str = type(value).__name__
        """Name of the value's Python type, as seen in a session without packages."""
        self.chars = chars
        """Total number of characters in all its strings."""
        self.nbytes = sum(map(len, parts))
        """Length of the encoded form in bytes."""
        self._digest: str | None = None
        self._fd = -1
        self.parts = parts
        """The encoded form as consecutive buffers and ASCII texts. The texts are the value's own,
        not copies."""
        if self.nbytes >= LARGE_BYTES or files:
            self._fd = anonymous_file("ramify-context")
            _write_parts(self._fd, parts)
            _seal(self._fd)
            # Linux before 6.7 maps a sealed file only like this.
            mapped = mmap.mmap(self._fd, self.nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
            self.parts = [mapped]
        if has_aligned_buffers(b"".join(parts[:2])):
            # Tables in it then no longer need the buffers of the caller, or copies of them.
            self.parts = [self.buffer()]
            value = unpack_value(self.parts[0], files)[0]
        self.value = value

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)

    @property
    def fd(self) -> int | None:
        """Return the file descriptor of a large context's encoded bytes, or None for a small
        context.

        The descriptor is valid as long as this object exists.
        """
        return self._fd if self._fd >= 0 else None

    @property
    def digest(self) -> str:
        """Return the SHA-256 hash of the encoded value in hexadecimal.

        It is computed on first use.
        """
        import hashlib

        if self._digest is None:
            digest = hashlib.sha256()
            for piece in self.pieces():
                digest.update(piece)
            self._digest = digest.hexdigest()
        return self._digest

    def pieces(self) -> Iterator[Any]:
        """Yield the encoded bytes of the context as a sequence of buffers."""
        return text_in_pieces(self.parts)

    def buffer(self) -> memoryview:
        """Return a read-only view of the context's encoded bytes.

        For a small value, each call makes a copy. Use ``pieces`` to avoid that.
        """
        if len(self.parts) == 1:
            return memoryview(self.parts[0]).toreadonly()
        data, at = bytearray(self.nbytes), 0
        for piece in self.pieces():
            data[at : at + len(piece)] = piece
            at += len(piece)
        return memoryview(data).toreadonly()

    @classmethod
    def from_encoded(
        cls, data: bytes | memoryview, references: Sequence[FileReference] = ()
    ) -> SharedContextValue:
        """Restore a context from its encoded bytes, for example those that a run has stored.

        Its digest is that of the original context. ``references`` lists the files that contain some
        of its texts. Raises SourceError with the file's name if one of them has changed.
        """
        files = {
            each.digest: FileReferenceReader(check_content_unchanged(each)) for each in references
        }
        try:
            value, chars = unpack_value(data, files)
        except ProtocolError as error:
            raise SandboxError(f"a stored context cannot be read: {error}") from None
        context = cls.__new__(cls)
        context._set_content(value, [data], chars, files)
        return context

    def resolve_text_references(self, value: Any) -> Any:
        """Replace each text reference in a session's value with the file-backed text it refers to.

        Raises LookupError if a referenced text is not in this context.
        """
        if isinstance(value, FileTextReference):
            return _mapped_texts(self.value)[value.digest]
        if isinstance(value, list | tuple):
            return type(value)(map(self.resolve_text_references, value))
        if isinstance(value, dict):
            return {key: self.resolve_text_references(item) for key, item in value.items()}
        return value

    def in_memory_copy(self) -> SharedContextValue:
        """Return a copy with all file-backed texts loaded into memory.

        It is for sandboxes that cannot map files. Raises SandboxError if the files are too large.
        """
        if not self.files:
            return self
        size = sum(map(len, self.files))
        if size > MAX_UNMAPPED_BYTES:
            raise SandboxError(
                f"the context has {size:,} bytes in files, which only the sandboxes jail and "
                f"process can map: use one of them, or give at most {MAX_UNMAPPED_BYTES:,} bytes"
            )
        return SharedContextValue(_load_mapped_texts(self.value))

    def to_jsonable(self) -> dict[str, Any]:
        """Return the value in a form that can be stored as JSON, for example in a run's journal.

        ``from_jsonable`` is the inverse.
        """
        encoder = ValueEncoder()
        packed: dict[str, Any] = {"value": encoder.encode(self.value)}
        if encoder.blobs:
            as_base64 = [binascii.b2a_base64(blob, newline=False) for blob in encoder.blobs]
            packed["blobs"] = [text.decode() for text in as_base64]
        return packed

    @staticmethod
    def from_jsonable(packed: Any) -> Any:
        """Restore a value from the output of ``to_jsonable``.

        Raises SandboxError if the data cannot be read.
        """
        try:
            blobs = [binascii.a2b_base64(blob) for blob in packed.get("blobs", ())]
            return ValueDecoder(blobs).decode(packed["value"])
        except (AttributeError, LookupError, TypeError, ValueError, ProtocolError) as error:
            raise SandboxError(f"a recorded value cannot be read: {error}") from None


def _write_parts(fd: int, parts: list[Any]) -> None:
    """Write an encoded value to a file descriptor in large chunks."""
    pieces, num_bytes = [], 0
    for piece in text_in_pieces(parts):
        pieces.append(piece)
        num_bytes += len(piece)
        if num_bytes >= _WRITTEN_BYTES:
            write_all(fd, pieces)
            pieces, num_bytes = [], 0
    write_all(fd, pieces)


def map_text_file(
    fd: int, path: str, on_bytes: Callable[[int], object] = lambda num_bytes: None
) -> FileBackedText:
    """Return an open file's text as a ``FileBackedText``, without loading it into memory.

    ``path`` is the file's path. The file is read once, and ``on_bytes`` is called with the number
    of bytes read so far.
    """
    reference, counts = hash_and_count_text(fd, path, BLOCK_BYTES, on_bytes)
    data = FileReferenceReader(reference, counts.start)
    return FileBackedText(
        TextOffsetIndex(data, counts.chars_at, counts.lines_at, counts.encoding, reference.digest)
    )


def is_file_backed(value: Any) -> bool:
    """Return True if a context is a file-backed text or a dict that contains one.

    A file-backed text is mapped, not loaded into memory.
    """
    if isinstance(value, Mapping):
        return any(isinstance(item, FileBackedText) for item in value.values())
    return isinstance(value, FileBackedText)


def _mapped_texts(value: Any) -> dict[str, FileBackedText]:
    """Return the file-backed texts in a context, keyed by the digests of their files."""
    if isinstance(value, FileBackedText):
        return {value.file.digest: value}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {digest: text for item in items for digest, text in _mapped_texts(item).items()}


def _load_mapped_texts(value: Any) -> Any:
    if isinstance(value, FileBackedText):
        return value.file.decode(value.file.read_bytes(0, value.file.num_bytes))
    if isinstance(value, dict):
        return {key: _load_mapped_texts(item) for key, item in value.items()}
    return [_load_mapped_texts(item) for item in value] if isinstance(value, list) else value


def anonymous_file(name: str) -> int:
    """Create an anonymous memory file and return its file descriptor.

    On platforms without memory files, it is an unlinked file on disk.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    import tempfile

    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())


def _seal(fd: int) -> None:
    """Make a memory file immutable if the platform supports it.

    No process may have the file mapped at that moment.
    """
    if hasattr(os, "memfd_create"):
        import fcntl

        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _ALL_SEALS)


Answer = Callable[[str, Sequence[Any], Mapping[str, Any]], Awaitable[Any]]
"""The host's handler for calls from a session: (name, args, kwargs) -> value. A ``HostCallError``
that it raises is raised again in the session."""


class SandboxCapabilities(msgspec.Struct, frozen=True):
    """The capabilities of a sandbox provider on this machine, such as isolating files or forking
    sessions.

    The default provider, the jail, verifies its isolation with trial attacks. Other providers
    report what their vendor promises, and ``testing/sandbox_conformance`` tests it.

    Example:
        if not sandbox.caps.fork: ...    # branches then need a new session
    """

    isolates_files: bool = False
    isolates_network: bool = False
    isolates_processes: bool = False
    limits_memory: bool = False
    interrupt: bool = False
    """True if an endless loop can be interrupted without losing the session's variables."""
    kill: bool = False
    """True if a session can be ended from outside without harming the host."""
    fork: bool = False
    """True if a live session can be forked while it is idle or waiting for the host."""
    starts_processes: bool = False
    """True if cells may start processes."""
    shares_context: bool = False
    """True if sessions with the same context share one copy of it in memory."""
    full_python: bool = True
    """True if the whole language and standard library of CPython are available."""


MIN_MEMORY_BYTES = 64 << 20


_FORMER_FIELDS: dict[str, Any] = {
    "image": "",
    "tier": "B",
    "files_bytes": 16 << 20,
    "mounts": (),
    "cpu_s": 3600,
    "rollback": False,
    "pool": 2,
    "all_memory_bytes": 0,
}
"""Fields that all providers had in an earlier version, with their defaults. Stored configurations
still contain them."""


class _SpecFields(StrictKeywordsMeta):
    """Metaclass that reports an unknown field in a sandbox configuration with a helpful error.

    If a given field belongs to another provider's configuration, the error says what to write
    instead.
    """

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        for name, value in fields.items():
            if name in _FORMER_FIELDS and name not in cls.__struct_fields__:
                owner: type[SandboxSpec] = JailSpec
                provider = fields.get("provider", args[0] if args else "")
                if name not in JailSpec.__struct_fields__ and provider:
                    owner = spec_class(provider)
                raise ConfigError(
                    f"{cls.__name__} has no field '{name}', as not all sandboxes support it: write "
                    + (
                        f"{owner.__name__}({name}={value!r})"
                        if name in owner.__struct_fields__
                        else f"the spec of a provider that has it, such as DockerSpec({name}="
                        f"{value!r})"
                    )
                )
        return super().__call__(*args, **fields)


class SandboxSpec(msgspec.Struct, metaclass=_SpecFields, frozen=True, forbid_unknown_fields=True):
    """The configuration of a sandbox: its provider, and the session limits that all providers
    support.

    Providers with more options have a subclass, such as ``JailSpec``.

    Example:
        SandboxSpec(provider="process", memory_bytes=1 << 30)
    """

    provider: str = "jail"
    """A name that ``ramify plugins sandbox`` lists, or the location of a function
    ``open_provider(spec)``, such as ``module:name`` or ``file.py:name``. The jail needs
    Linux. On other systems, name another provider that isolates, or set ``allow_weaker``."""
    memory_bytes: int = 2 << 30
    """Maximum address space in bytes that a session may allocate in addition to what it inherits
    when it is forked."""
    cell_s: float = 120.0
    """Maximum time in seconds that one cell may run, without the time spent waiting for models. In
    the jail and ``process`` providers, CPU time that other threads of the cell use during such
    waits counts, too."""
    grace_s: float = 0.5
    """Seconds that an interrupted cell has to stop before it is killed."""
    max_output_bytes: int = 1 << 20
    """Maximum output of one cell in bytes that the host keeps: its beginning and its end. The
    session itself keeps up to sixteen times as much."""
    packages: tuple[str, ...] = ()
    """Third-party packages that sessions may import, and that the provider imports in advance if it
    can. They must be installed on the host or in the image."""
    allow_weaker: bool = False
    """Accept weaker isolation than requested, with a warning: a weaker tier of the jail, or the
    ``process`` provider if no jail is available. If ``provider`` names a weak provider, this
    silences its warning."""

    def __post_init__(self) -> None:
        coerce_field_to_tuple(self, "packages")
        for name in ("memory_bytes", "cell_s", "grace_s", "max_output_bytes"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"sandbox {name} is {value!r}: give a positive number")
        if self.memory_bytes < MIN_MEMORY_BYTES:
            raise ConfigError(
                f"sandbox memory_bytes is {self.memory_bytes:,}, too little for a Python session: "
                f"give at least {MIN_MEMORY_BYTES:,}"
            )


def coerce_field_to_tuple(spec: SandboxSpec, name: str) -> None:
    """Convert a field that was given as a list to a tuple."""
    given = getattr(spec, name)
    if isinstance(given, list):
        items = tuple(tuple(item) if isinstance(item, list) else item for item in given)
        msgspec.structs.force_setattr(spec, name, items)


class JailSpec(SandboxSpec, frozen=True, forbid_unknown_fields=True):
    """The configuration of the jail, the default sandbox provider, which isolates sessions with
    features of the Linux kernel.

    Example:
        JailSpec(tier="A", mounts=(("/srv/data", "/data"),))
    """

    tier: str = "B"
    """Weakest isolation tier to accept. The jail uses the strongest tier that the machine supports.
    A: namespaces, so the host's files do not exist in the session. B: Landlock, so files cannot be
    opened. C: no system call that names a file is allowed."""
    files_bytes: int = 16 << 20
    """Maximum total size in bytes of the files in a session's folder, which exists only at tier A.
    0 means no folder."""
    mounts: tuple[tuple[str, str], ...] = ()
    """Read-only mounts as pairs (path on this machine, path inside the session). At tier B both
    paths must be equal, and tier C has no mounts."""
    cpu_s: int = 3600
    """Maximum CPU time of a session over its lifetime in seconds, summed over its threads."""
    rollback: bool = False
    """True to fork the session before each cell, and to return to that state if the cell must be
    killed. Sessions then cannot write files."""
    pool: int = 2
    """Number of sessions that are prepared in advance, so that a new run need not wait for one. 0
    prepares none."""
    all_memory_bytes: int = 0
    """Maximum memory in bytes of all sessions of a sandbox together. 0 means three quarters of the
    machine's memory. If the limit is exceeded, the largest session is ended."""

    def __post_init__(self) -> None:
        SandboxSpec.__post_init__(self)
        coerce_field_to_tuple(self, "mounts")
        if self.tier not in ("A", "B", "C"):
            raise ConfigError(f"sandbox tier is {self.tier!r}: give 'A', 'B' or 'C'")
        for name in ("files_bytes", "cpu_s", "pool", "all_memory_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"sandbox {name} is {getattr(self, name)!r}: it cannot be negative"
                )


if TYPE_CHECKING:
    AnySandboxSpec = SandboxSpec
else:
    AnySandboxSpec = Any
"""Type of a stored field with the spec of any provider. A decoder leaves it as it was stored, since
it cannot know a plug-in's spec: ``provider_spec`` completes it."""


class CellResult(msgspec.Struct, frozen=True):
    """The result of running one cell, which is a piece of code, in a session.

    Example:
        result = await session.run("1 + 1", answer=answer)
        result.cell.value    # "2"
    """

    cell: Cell
    """The record of the cell: its code, output and error. ``stdout`` is cut to
    ``max_output_bytes``; ``stdout_chars`` is its true length."""
    note: Any = None
    """Return values of the ``after_cell`` hooks of installed modules, as module name -> value."""
    interrupted: str | None = None
    """Reason why the host interrupted the cell: ``"time"``, or the argument of ``interrupt``. None
    if the cell ran to its end."""


class Session(Protocol):
    """A live Python session that runs pieces of code, called cells, one after another in the same
    namespace.

    Only one ``run`` may be active at a time. ``interrupt`` and ``close`` may be called at any time.

    Example:
        await session.set("x", 2)
        (await session.run("x + 1", answer=answer)).cell.value    # "3"
    """

    caps: SandboxCapabilities

    async def run(self, code: str, *, answer: Answer, timeout_s: float | None = None) -> CellResult:
        """Run a piece of code in the session and return its output.

        ``answer`` handles the code's calls to the host. If the code uses threads, ``answer`` may be
        called several times at once.

        ``timeout_s`` limits the time that the session works; time spent waiting for answers does
        not count. Raises SessionDied if the session crashed or had to be killed.
        """
        ...

    async def set(self, name: str, value: Any, *, reserved: bool = False) -> None:
        """Bind a name in the session to a value.

        A reserved name is restored after any cell that rebinds it. Raises SandboxError with the
        type's name if the value cannot be sent to a session.
        """
        ...

    async def get(self, name: str) -> Any:
        """Return the value of a name in the session.

        Raises HostCallError of the kind "NameError" if the name is unknown, or "TypeError" if the
        value cannot be sent.
        """
        ...

    async def install(self, module: str, source: str) -> None:
        """Run source code as a module in the session, and bind the names in its ``__all__`` as
        reserved names.

        If a cell rebinds such a name, it is restored afterwards.

        The module finds these names: ``call_host(name, *args, **kwargs)`` calls the host and raises
        ``SessionHostCallError`` (``.kind``, ``.data``); ``namespace`` is the notebook's dict;
        ``last_output()`` returns everything that the last cell printed; ``portable(x)`` returns a
        copy of ``x`` as the host would receive it, or raises TypeError. If the module defines
        ``after_cell()``, its return value goes to ``CellResult.note``. If ``namespace_is_live``
        exists and is false, ``namespace`` is only updated before ``after_cell``.
        """
        ...

    async def fork(self) -> Session:
        """Fork the session, so that two sessions continue independently of each other.

        Return a second session that continues from the same state and shares no mutable state with
        this one.

        A session can be forked while it is idle, or while its cell waits for the host (in another
        task's ``run``); in that case, call ``resume`` on the branch first. Raises SandboxError if
        ``caps.fork`` is false, or if threads, an event loop or open files would be lost or shared;
        the message says what to do. After a fork, files that the session has written are read-only
        in both sessions (``process``: both continue to use one folder).
        """
        ...

    async def resume(self, *, answer: Answer, timeout_s: float | None = None) -> CellResult:
        """Continue the cell that was running when this branch was forked, until it ends.

        Pending calls to the host are passed to ``answer`` again, so each branch can get different
        answers.
        """
        ...

    async def close_tree(self) -> None:
        """Close this session, the sessions from which it was forked, and all of their branches."""
        ...

    def interrupt(self, reason: str) -> None:
        """Interrupt the running cell by raising KeyboardInterrupt in its main thread.

        The session is killed if the cell does not stop within the grace time.
        """
        ...

    async def close(self) -> None:
        """End the session and every process that it started.

        Repeated calls have no effect.
        """
        ...


class PreparedContext(Protocol):
    """Interface of a context that is prepared once and then used by any number of sessions.

    ``SharedContextValue`` implements it.
    """

    @property
    def digest(self) -> str: ...


class Sandbox(Protocol):
    """A sandbox provider that is ready to open sessions on this machine.

    Each RLM has its own sandbox, which belongs to one event loop.

    Example:
        sandbox = ramify.open_sandbox(ramify.SandboxSpec())
        session = await sandbox.open()
    """

    caps: SandboxCapabilities
    warning: str | None
    """Warning to show before untrusted code runs here. None if the provider isolates sessions from
    the host."""

    async def open(self, *, context: PreparedContext | None = None, seed: str = "") -> Session:
        """Open a new session.

        If a context is given, the session has it under the reserved name ``context``.

        ``seed`` seeds the module ``random`` in the session, so that a replay draws the same
        numbers.
        """
        ...

    async def close(self) -> None:
        """End every session that is still open."""
        ...


SANDBOXES = PluginRegistry(
    "sandbox",
    "ramify.sandboxes",
    {
        "docker": "ramify.sandbox.providers.docker",
        "inprocess": "ramify.sandbox.providers.inprocess",
        "jail": "ramify.sandbox.providers.jail",
        "process": "ramify.sandbox.providers.process",
    },
)
"""Provider -> a function ``open_provider(spec) -> Sandbox``, or the module that defines it."""


def open_sandbox(spec: SandboxSpec) -> Sandbox:
    """Open the sandbox that a configuration describes.

    No process is started before the first session is opened.

    Raises ConfigError if the provider or a package is unknown, or if the provider does not support
    the given mounts. Raises SandboxError if this machine lacks a feature that the provider needs,
    or if a plug-in raises any other error.

    Example:
        sandbox = ramify.open_sandbox(ramify.SandboxSpec(provider="docker"))
    """
    open_provider = _provider(spec.provider)
    complete = provider_spec(spec)
    if spec.provider in SANDBOXES.ours:
        return open_provider(complete)
    where = f"sandbox '{spec.provider}': its open_provider"
    try:
        sandbox = open_provider(complete)
    except RamifyError:
        raise
    except Exception as error:  # code of a plug-in, which may raise anything
        cure = ""
        if (
            isinstance(error, AttributeError)
            and error.name in _FORMER_FIELDS
            and isinstance(error.obj, SandboxSpec)
        ):
            cure = (
                f": not every spec has {error.name}; annotate its parameter with a subclass of "
                "SandboxSpec that has it"
            )
        raise SandboxError(f"{where} raised {error!r}{user_line_of_error(error)}{cure}") from error
    if not callable(getattr(sandbox, "open", None)):
        raise SandboxError(f"{where} returned a {type(sandbox).__name__}: return a Sandbox")
    return sandbox


def expect_module(sandbox: Sandbox, module: str, source: str) -> None:
    """Tell a sandbox which Python module its next sessions will probably install.

    A provider that forks sessions can then run the module's code once for all of them. The code
    must therefore not start threads, call the host or draw random numbers.
    """
    expect = getattr(sandbox, "expect_module", None)
    if expect is not None:
        expect(module, source)


def isolation_warning(sandbox: Sandbox, spec: SandboxSpec) -> str | None:
    """Return a sandbox's isolation warning, or None if the configuration accepts weaker isolation.

    A warning of the jail is always returned, because ``allow_weaker`` accepts any tier and the
    warning says which one is in use.
    """
    return None if spec.allow_weaker and spec.provider != "jail" else sandbox.warning


def check_provider_exists(spec: SandboxSpec) -> None:
    """Raise ConfigError if a configuration's sandbox provider does not exist.

    Plug-ins are imported for this check, and built-in providers are not.
    """
    if spec.provider not in SANDBOXES.ours:
        _provider(spec.provider)


def provider_spec(given: SandboxSpec | Mapping[str, Any] | str) -> SandboxSpec:
    """Convert a sandbox configuration to the configuration class of its provider.

    ``given`` is a configuration, its stored fields, or the name of a provider. Missing fields get
    their defaults. Raises ConfigError for a field that the provider does not have.

    Example:
        provider_spec({"provider": "jail", "tier": "A"})    # JailSpec(tier="A")
    """
    stored: Any = {"provider": given} if isinstance(given, str) else given
    if isinstance(given, SandboxSpec):
        kind = spec_class(given.provider)
        is_ours = type(given).__module__.startswith("ramify.")
        if type(given) is kind or (isinstance(given, kind) and not is_ours):
            return given
        stored = {name: getattr(given, name) for name in given.__struct_fields__}
    if not isinstance(stored, Mapping):
        raise ConfigError(f"sandbox is a {type(stored).__name__}: give a ramify.SandboxSpec(…)")
    provider = stored.get("provider", SandboxSpec().provider)
    if not isinstance(provider, str):
        raise ConfigError(f"sandbox provider is {provider!r:.80}: give a name")
    kind = spec_class(provider)
    fields: dict[str, Any] = {}
    for name, value in stored.items():
        if name in _FORMER_FIELDS and name not in kind.__struct_fields__:
            if (tuple(value) if isinstance(value, list) else value) == _FORMER_FIELDS[name]:
                continue  # every stored configuration of an earlier version has it
            only = ", only 'jail' does" if name in JailSpec.__struct_fields__ else ""
            raise ConfigError(f"sandbox '{provider}' does not support {name}{only}: remove it")
        fields[name] = value
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"sandbox '{provider}': {explain_conversion_error(error, kind)}"
        ) from error


def spec_class(provider: str) -> type[SandboxSpec]:
    """Return the configuration class of a sandbox provider.

    It is the annotated parameter type of the provider's ``open_provider``. Returns ``SandboxSpec``
    if the annotation is missing or the provider is unknown.
    """
    if provider == "jail":
        return JailSpec  # without importing the jail
    try:
        open_provider = _provider(provider)
    except ConfigError:
        return SandboxSpec
    parameters = inspect.signature(open_provider).parameters
    try:
        parameters = inspect.signature(open_provider, eval_str=True).parameters
    except NameError as error:  # a type that is imported for type checkers only
        parameters = inspect.signature(open_provider).parameters
        if "SandboxSpec" not in str(next(iter(parameters.values())).annotation):
            raise ConfigError(
                f"sandbox '{provider}': a type in the signature of open_provider is not defined "
                f"at run time: {error}; import it outside TYPE_CHECKING"
            ) from error
    kind = next(iter(parameters.values())).annotation if parameters else None
    return kind if isinstance(kind, type) and issubclass(kind, SandboxSpec) else SandboxSpec


def _provider(name: str) -> Callable[[Any], Sandbox]:
    found = SANDBOXES.resolve(name)
    open_provider: Callable[[Any], Sandbox] = getattr(found, "open_provider", found)
    if not callable(open_provider):
        raise ConfigError(f"sandbox '{name}': the module has no open_provider(spec)")
    return open_provider


def digest_of(value: Any) -> str:
    """Return the digest that identifies a context value in journals and trajectories.

    Raises SandboxError if no session can hold a value of this type.
    """
    return SharedContextValue(value).digest
