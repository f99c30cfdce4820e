"""A live Python session somewhere, whatever holds it: the protocol that the engine uses and every
provider meets.

    engine ── Session.run(code, answer=…) ──> Door (a byte stream) ──> guest/: one namespace
                     ^                                                    │
                     └───── answer(name, args, kwargs) <── llm_query(…) ──┘   over the same stream

A provider is little more than a ``Transport``; ``session.py`` speaks the guest's wire over it.
``run_conformance.py`` is the suite that every provider passes before it is documented.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec

from ramify.errors import ConfigError, RamifyError, nearest
from ramify.types.trajectory import Cell

Answer = Callable[[str, Sequence[Any], Mapping[str, Any]], Awaitable[Any]]
"""The host's side of a call from a session: (name, args, kwargs) -> value. A ``HostCallError``
rises in the session."""


class SandboxCapabilities(msgspec.Struct, frozen=True):
    """What a provider does on this machine. The jail has tried out what it claims, by attacking its
    own walls; others claim what Docker, a cloud or Monty promises, which ``run_conformance.py``
    puts to the test where they run."""

    isolates_files: bool = False
    isolates_network: bool = False
    isolates_processes: bool = False
    limits_memory: bool = False
    interrupt: bool = False
    """An endless loop can be stopped with its variables kept."""
    kill: bool = False
    """A session can be ended from outside without harm to the host."""
    fork: bool = False
    """A live session can be forked, idle or waiting for the host."""
    starts_processes: bool = False
    """Cells may start processes of their own."""
    shares_context: bool = False
    """Sessions over the same context share its memory."""
    full_python: bool = True
    """All of the language and its standard library, as CPython has them."""


MIN_MEMORY_BYTES = 64 << 20


class SandboxSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which sessions a run gets."""

    provider: str = "jail"
    """One of ``PROVIDERS``, or the dotted name of a module with an ``open_provider(spec)`` of its
    own. Where there is no jail (it needs Linux), one that isolates has to be named, or less
    accepted."""
    memory_bytes: int = 2 << 30
    """Address space that one session may add to what it is forked with."""
    cell_s: float = 120.0
    """Most time that one cell may work; waiting for models is not counted."""
    grace_s: float = 0.5
    """From an interrupt to a kill."""
    max_output_bytes: int = 1 << 20
    """Kept of one cell's output for the host, head and tail; the session keeps up to sixteen times
    as much."""
    packages: tuple[str, ...] = ()
    """Third-party packages of the host that sessions may import; imported ahead of time where the
    provider can."""
    image: str = ""
    """Where sessions run in a container or a cloud: an image (e2b: a template, daytona: a snapshot
    or image) that has python3 of version 3.11 or later, and ``packages``. Empty: the provider's
    plain Python."""
    tier: str = "B"
    """Of the jail: the weakest accepted. A: namespaces, the host's files are not there; B:
    Landlock, they cannot be opened; C: no system call that names a file. The strongest that this
    machine has is taken."""
    files_bytes: int = 16 << 20
    """Most that a session may write into its folder; 0: it has none. In the jail, tier A."""
    mounts: tuple[tuple[str, str], ...] = ()
    """(file or folder of this machine, where sessions see it), read-only. In the jail; at tier B
    both must be the same, at tier C there are none."""
    cpu_s: int = 3600
    """Processor time of a session's whole life, its threads together. In the jail."""
    rollback: bool = False
    """Keep a fork from before each cell, and go on with it where the cell had to be killed.
    Sessions then write no files. In the jail."""
    pool: int = 2
    """Sessions kept ready. In the jail."""
    all_memory_bytes: int = 0
    """Most that all sessions of a sandbox may use together; 0: three quarters of what the machine
    has. The one that uses most is ended when it is more. In the jail."""
    allow_weaker: bool = False
    """Accept a weaker tier, or ``process`` where there is no jail at all; that is said in a
    warning. A weak provider that is named goes without its warning."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "cell_s", "grace_s", "max_output_bytes"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"sandbox {name} is {value!r}: give a positive number")
        if self.memory_bytes < MIN_MEMORY_BYTES:
            raise ConfigError(
                f"sandbox memory_bytes is {self.memory_bytes:,}, in which no Python session runs: "
                f"give at least {MIN_MEMORY_BYTES:,}"
            )
        if self.tier not in ("A", "B", "C"):
            raise ConfigError(f"sandbox tier is {self.tier!r}: give 'A', 'B' or 'C'")
        for name in ("files_bytes", "cpu_s", "pool", "all_memory_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"sandbox {name} is {getattr(self, name)!r}: it cannot be negative"
                )


class CellResult(msgspec.Struct, frozen=True):
    """What one cell did."""

    cell: Cell
    """``stdout`` up to ``max_output_bytes``, ``stdout_chars`` its true length."""
    note: Any = None
    """What the installed modules' ``after_cell`` hooks returned: module name -> value."""
    interrupted: str | None = None
    """Why the host interrupted the cell: ``"time"``, or what ``interrupt`` was given. None if it
    ran to its end."""


class Session(Protocol):
    """One live Python namespace. Not safe for concurrent ``run``; ``interrupt`` and ``close`` may
    come at any time."""

    caps: SandboxCapabilities

    async def run(self, code: str, *, answer: Answer, timeout_s: float | None = None) -> CellResult:
        """Execute a cell; its calls to the host go to ``answer``, several at once if the code uses
        threads.

        ``timeout_s`` counts only while the session works. Raises SessionDied where it had to be
        killed or fell over."""
        ...

    async def set(self, name: str, value: Any, *, reserved: bool = False) -> None:
        """Bind ``name``. A reserved name is put back after every cell that rebinds it. Raises
        SandboxError for a value that the codec does not carry, naming its type."""
        ...

    async def get(self, name: str) -> Any:
        """The value of ``name``. Raises HostCallError("NameError", …) or ("TypeError", …) as the
        session would."""
        ...

    async def install(self, module: str, source: str) -> None:
        """Execute ``source`` as a module in the session and bind the names of its ``__all__`` as
        reserved names.

        In it ``call_host(name, *args, **kwargs)`` calls the host, ``HostError`` (``.kind``,
        ``.data``) is what it raises, ``namespace`` is the notebook's dict, ``last_output()`` all
        that the last cell printed, ``portable(x)`` a copy of ``x`` as the host would get it, or
        TypeError. ``after_cell()``, where there is one, gives ``CellResult.note``. Where
        ``namespace_is_live`` is there and false, ``namespace`` is brought up to date before
        ``after_cell`` only."""
        ...

    async def fork(self) -> Session:
        """A branch: a second session that goes on from here, sharing nothing that either can
        change.

        While the session is idle, or while its cell waits for the host (in another task's ``run``);
        then the branch first has to ``resume``. Raises SandboxError where ``caps.fork`` is false,
        and while threads, an event loop or open files would be lost or shared, with the remedy.
        From then on the files that the session wrote are read-only in both (``process``: both go on
        in one folder)."""
        ...

    async def resume(self, *, answer: Answer, timeout_s: float | None = None) -> CellResult:
        """In a branch forked in the middle of a cell: go on with the cell to its end. What the cell
        was waiting for is asked of ``answer`` anew, so that branches may be answered
        differently."""
        ...

    async def close_tree(self) -> None:
        """Close this session, those that it was forked from, and all their branches."""
        ...

    def interrupt(self, reason: str) -> None:
        """Stop the running cell: KeyboardInterrupt in its main thread, a kill after the grace
        time."""
        ...

    async def close(self) -> None:
        """End the session and everything it started. Idempotent."""
        ...


class PreparedContext(Protocol):
    """A context prepared once for any number of sessions; see ``sandbox.context.SharedContext``."""

    @property
    def digest(self) -> str: ...


class Sandbox(Protocol):
    """A provider on this machine, ready to open sessions. One per RLM and event loop."""

    caps: SandboxCapabilities
    warning: str | None
    """What a user must know before running hostile code here; None for an isolating provider."""

    async def open(self, *, context: PreparedContext | None = None, seed: str = "") -> Session:
        """A fresh session, with ``context`` bound as the reserved name ``context`` where given.

        ``seed`` seeds ``random`` there, so that a replay draws the same numbers."""
        ...

    async def close(self) -> None:
        """End every session that is still open."""
        ...


PROVIDERS = {
    "daytona": "ramify.sandbox.cloud.daytona",
    "docker": "ramify.sandbox.docker",
    "e2b": "ramify.sandbox.cloud.e2b",
    "inprocess": "ramify.sandbox.inprocess",
    "ipython": "ramify.sandbox.ipython",
    "jail": "ramify.sandbox.jail.provider",
    "modal": "ramify.sandbox.cloud.modal",
    "monty": "ramify.sandbox.monty",
    "prime": "ramify.sandbox.cloud.prime",
    "process": "ramify.sandbox.process",
}
"""Provider -> the module whose ``open_provider(spec)`` makes it; loaded when it is asked for."""


def launch(spec: SandboxSpec) -> None:
    """Begin to start what the next sandbox of ``spec`` needs, where its provider can: for a caller
    that has other things to do meanwhile. Says nothing of what is wrong with ``spec``;
    ``open_sandbox`` does."""
    module = PROVIDERS.get(spec.provider)
    begin = getattr(importlib.import_module(module), "launch", None) if module else None
    if begin is not None:
        with contextlib.suppress(RamifyError, OSError):
            begin(spec)


def open_sandbox(spec: SandboxSpec) -> Sandbox:
    """The sandbox that ``spec`` describes. Nothing is started before its first session.

    Raises ConfigError for an unknown provider or package, or mounts where none can be shown;
    SandboxError where this machine cannot hold it, with what is missing."""
    sandbox = cast(Sandbox, importlib.import_module(module_of(spec)).open_provider(spec))
    is_jail = (
        spec.provider == "jail" and sandbox.caps.isolates_files
    )  # and not what stands in for one
    if spec.mounts and not is_jail:
        name = "process" if spec.provider == "jail" else spec.provider
        raise ConfigError(
            f"sandbox '{name}' shows sessions no mounts, only 'jail' does: leave them out"
        )
    return sandbox


def said_aloud(sandbox: Sandbox, spec: SandboxSpec) -> str | None:
    """The warning of ``sandbox``, unless its weakness was both named and accepted. Who accepts less
    than the jail has not said how much less."""
    return None if spec.allow_weaker and spec.provider != "jail" else sandbox.warning


def module_of(spec: SandboxSpec) -> str:
    """The module that holds the provider. Raises ConfigError for an unknown one, or a module that
    has none."""
    module = PROVIDERS.get(spec.provider)
    if module is not None:
        return module
    if "." not in spec.provider:
        raise ConfigError(f"unknown sandbox '{spec.provider}': {nearest(spec.provider, PROVIDERS)}")
    try:
        has_door = hasattr(importlib.import_module(spec.provider), "open_provider")
    except ImportError as error:
        raise ConfigError(f"sandbox '{spec.provider}' cannot be imported: {error}") from error
    if not has_door:
        raise ConfigError(f"sandbox '{spec.provider}' is a module without open_provider(spec)")
    return spec.provider


def digest_of(value: Any) -> str:
    """The digest by which journals and trajectories know ``value`` as a context. Raises
    SandboxError for what no session can hold."""
    digest: str = importlib.import_module("ramify.sandbox.context").SharedContext(value).digest
    return digest
