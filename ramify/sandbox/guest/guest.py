"""The main loop of the guest, the code in the sandbox that runs cells.

It answers the host's requests until the host closes the connection, and sends the calls that cells
make to the host.

This module defines what each request does, and what happens before and after a cell. Any thread of
a running cell may call the host, and an interrupt never leaves a frame half sent. The work itself
is done by the other modules of the package (see its docstring). The host decides which of its
functions can be called.
"""

from __future__ import annotations

import os
from typing import Any

from .channel import (
    DROPPED,
    DeferrableInterrupts,
    GuestChannel,
    HostMessageWaiter,
    MessageFrameDispatcher,
)
from .interpreter_state import AddressSpaceLimits, BuiltinsSnapshot, complete_builtins
from .message_frames import copy_as_sent_to_host, encode_cell_done, unpack_value
from .notebook import GuestNotebook, cut, format_error, safe_error_message
from .output import CellOutputSender, FileOutputSpool, InProcessOutputSpool
from .session_forking import GuestForkOperations, SessionForker
from .value_encoding import (
    REFERRING_CALL,
    ProtocolError,
    ValueEncoder,
    ValueEncodingError,
    ValueLimitError,
)


class SessionHostCallError(Exception):
    """Raised in a cell if its call to the host fails.

    ``kind`` is the name of the exception class that the host reported, and ``data`` holds that
    exception's attributes.
    """

    def __init__(self, kind: str, message: str, data: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.data = data or {}


SessionHostCallError.__module__ = "builtins"  # so that a traceback shows the name without a module


class HostCaller:
    """Sends a session's function calls to the host and waits for the results.

    Each call gets a number.
    """

    __slots__ = ("_channel", "_inbox", "_interrupts", "_last_id", "_output")

    def __init__(
        self,
        channel: GuestChannel,
        inbox: MessageFrameDispatcher,
        interrupts: DeferrableInterrupts,
        output: CellOutputSender,
    ) -> None:
        self._channel = channel
        self._inbox = inbox
        self._interrupts = interrupts
        self._output = output
        self._last_id = 0

    def call_host(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the host by name and return its result.

        Any thread of a running cell may do this. Raises SessionHostCallError if the call fails,
        TypeError if an argument has an unsupported type, and ValueError if the arguments exceed a
        limit.
        """
        if not self._channel.is_session_process():
            raise SessionHostCallError(
                "RuntimeError",
                f"{name}() was called in a forked process; call it in the session itself",
            )
        # The host gets the cell's output so far before the call itself.
        self._output.flush()
        ticket = HostMessageWaiter()
        before = self._interrupts.begin_deferring()
        try:
            self._post(name, [list(args), kwargs], ticket)
            self._inbox.wait(ticket)
        except ValueEncodingError as error:
            raise TypeError(str(error)) from None
        except ValueLimitError as error:
            raise ValueError(f"{name}: {error}") from None
        finally:
            self._inbox.unregister_waiter(ticket)
            self._interrupts.end_deferring(before)
        if ticket.frame is DROPPED:
            raise SessionHostCallError(
                "RuntimeError", f"{name}() was still waiting when its cell ended"
            )
        header, blobs = ticket.frame
        if header["op"] == "err":
            raise SessionHostCallError(
                header["kind"], header["message"], self._channel.decode_value(header, blobs)
            )
        return self._channel.decode_value(header, blobs)

    def _post(self, name: str, arguments: Any, ticket: HostMessageWaiter) -> None:
        channel = self._channel
        files: dict[str, Any] | None = {} if name == REFERRING_CALL else None
        encoder = ValueEncoder(defers=channel.shared_buffers is not None, bounded=True, files=files)
        value = encoder.encode(arguments)
        with channel.sending:
            if not channel.is_open:
                raise SessionHostCallError(
                    "RuntimeError", f"{name}() was called after its cell had ended"
                )
            self._last_id += 1
            parts = channel.frame(
                {"op": "call", "id": self._last_id, "name": name, "value": value}, encoder
            )
            self._inbox.register_waiter(self._last_id, ticket)
            channel.write(parts)


class SandboxGuest:
    """The part of a session that runs in the sandbox and executes cells at the host's request.

    Create it and call ``serve`` in the same thread.
    """

    __slots__ = (
        "_branches",
        "_calls",
        "_cells",
        "_channel",
        "_inbox",
        "_interpreter",
        "_memory",
        "_owns_process",
        "interrupts",
        "notebook",
        "output",
    )

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        spool: FileOutputSpool | InProcessOutputSpool,
        *,
        max_output_bytes: int,
        owns_process: bool,
        memory_limits: tuple[int, int] | None = None,
        can_fork: bool = False,
        shared_buffers: Any = None,
        apart: GuestForkOperations | None = None,
    ) -> None:
        """Create a guest that communicates with the host over two open file descriptors.

        ``memory_limits``: address space in bytes while a cell runs, and the slightly larger one for
        the guest itself, so that it can still report when a cell has used up all its memory.
        ``can_fork``: the connection is a socket over which the host can send the descriptors for a
        branch. ``shared_buffers``: a ``HostGuestSharedMemory``, if host and guest share one.
        ``apart``: how to fork, if both processes need a new connection.
        """
        self.interrupts = DeferrableInterrupts()
        self._channel = GuestChannel(
            read_fd,
            write_fd,
            takes_fds=can_fork and apart is None,
            shared_buffers=shared_buffers,
        )
        self.output = CellOutputSender(spool, self._channel, self.interrupts, max_output_bytes)
        self._memory = AddressSpaceLimits(memory_limits)
        self.notebook = GuestNotebook(self.interrupts, self._memory, owns_process=owns_process)
        self._branches = SessionForker(self._channel, spool, self.notebook, apart)
        self._inbox = MessageFrameDispatcher(
            self._channel, self.interrupts, self._branches.fork, ends_process=owns_process
        )
        self._calls = HostCaller(self._channel, self._inbox, self.interrupts, self.output)
        self._owns_process = owns_process
        self._cells = 0
        if owns_process:
            complete_builtins()
        self._interpreter = BuiltinsSnapshot()

    # -- serving

    def record_own_process(self, memory_limits: tuple[int, int] | None) -> None:
        """Record the id and the memory limits of the process in which the guest now runs.

        The process may have been forked since the guest was created.
        """
        self._channel.pid = os.getpid()
        self._memory.limits = memory_limits

    def serve(self, *, rehearse: bool = False) -> None:
        """Answer the host's requests until it closes the connection.

        With ``rehearse``, first run an empty cell to warm up while no caller is waiting.
        """
        self._mend_guest_state()
        self._mend_process()
        self._channel.send({"op": "hello", "pid": self._channel.pid})
        if rehearse:
            self._run_warmup_cell()
        while True:
            try:
                header, blobs = self._inbox.next_command()
            except (EOFError, OSError):
                break
            except KeyboardInterrupt:
                continue  # it arrived after its cell had ended
            self._handle(header, blobs)
            self._branches.reap()
        self.notebook.close_event_loop()

    def _run_warmup_cell(self) -> None:
        """Run an empty cell in advance, so that the first real cell of a forked session is faster.

        Writing to the memory pages now makes the kernel copy them before the first real cell. These
        are the copy-on-write pages that cells write to. The cell leaves nothing behind, and no
        report is sent to the host.
        """
        channel, (unread, unsent) = self._channel, os.pipe()
        wire, channel.write_fd = channel.write_fd, unsent
        modules, self.notebook.modules = self.notebook.modules, {}  # their hooks count cells
        self._cells = -1
        try:
            self._handle({"op": "run", "id": 0, "code": "None", "seed": ""}, [])
        finally:
            self.notebook.modules = modules
            channel.write_fd = wire
            os.close(unread)
            os.close(unsent)

    def _handle(self, header: dict[str, Any], blobs: list[memoryview]) -> None:
        op, id = header["op"], header["id"]
        if "seed" in header:
            import random

            random.seed(header["seed"])
        if op == "run":
            self._run(id, header["code"])
            return
        if op == "seed":
            return
        try:
            if op == "set":
                self.notebook.bind(
                    header["name"], self._channel.decode_value(header, blobs), header["reserved"]
                )
            elif op == "context":
                value, _ = unpack_value(blobs[0], packages=header.get("packages", ()))
                self.notebook.bind("context", value, True)
            elif op == "install":
                self.install_module(header["module"], header["source"], blobs[0] if blobs else None)
            elif op == "get":
                self._send_value(id, self.notebook.get(header["name"]))
                return
            else:
                raise ProtocolError(f"an unknown request {op!r}")
            self._channel.send({"op": "ok", "id": id})
        except BaseException as error:  # noqa: BLE001  (the host decides what to do about it)
            self._send_failed(
                id, error, format_error(error) if op == "install" else safe_error_message(error)
            )

    def _send_value(self, id: int, value: Any) -> None:
        encoder = ValueEncoder(bounded=True)
        self._channel.send({"op": "value", "id": id, "value": encoder.encode(value)}, encoder)

    def _send_failed(self, id: int, error: BaseException, message: str) -> None:
        kind = type(error).__name__
        kind = (
            "TypeError"
            if isinstance(error, ValueEncodingError)
            else "ValueError"
            if isinstance(error, ValueLimitError)
            else kind
        )
        self._channel.send(
            {"op": "failed", "id": id, "kind": kind, "message": cut(message, 20_000)}
        )

    def install_module(self, module: str, source: str, code: Any = None) -> None:
        """Execute a module's source and bind its names in the session.

        ``code`` is the compiled module, if there is one.
        """
        host_names = {
            "call_host": self._calls.call_host,
            "SessionHostCallError": SessionHostCallError,
            "last_output": self.output.last_cell_output,
            "portable": copy_as_sent_to_host,
        }
        self.notebook.install_module(module, source, host_names, code)

    # -- a cell

    def _run(self, id: int, code: str) -> None:
        self._cells += 1
        self.output.begin_cell()
        self._channel.is_open = True
        value = error = None
        self._memory.apply_cell_limit()
        try:
            value, error = self.notebook.execute(code, f"<cell {self._cells}>")
        except BaseException as late:  # noqa: BLE001  (an interrupt that hit between the cell and its report)
            error = type(late).__name__
        self.interrupts.is_live = False
        self._memory.lift_cell_limit()
        self.interrupts.reset()
        if not self._channel.is_session_process():
            self._leave_fork(error)
        self._end_cell(id, value, error)

    def _leave_fork(self, error: str | None) -> None:
        """Exit a child process that a cell has forked, because it has reached the end of the cell.

        Only the original process continues as the session. ``error`` is the cell's error, which is
        written to the output.
        """
        if error:
            self.output.spool.write(error.encode("utf-8", "backslashreplace"))
        os._exit(1 if error else 0)

    def _end_cell(self, id: int, value: str | None, error: str | None) -> None:
        """Finish a cell: run after-cell hooks, restore reserved names, and send output and
        result."""
        self._mend_guest_state()
        channel, output = self._channel, self.output
        with channel.sending:
            parts = output.take_frames(final=True)
        output.save_ended_cell_output()  # so that the hooks can read it
        note, encoder, has_hooks = None, None, self.notebook.has_after_cell_hooks
        if has_hooks:
            encoder = ValueEncoder(bounded=True)
            note, error = self.notebook.run_after_cell_hooks(encoder, error)
        restored = self.notebook.restore_names()
        with channel.sending:
            if has_hooks:
                parts += output.take_frames(final=True)
            channel.is_open = False
            self._inbox.drop_calls()
            done = (id, value, error, restored, output.chars)
            channel.write(parts + self._build_report_frame(done, note, encoder))
        # After the report, so that the host need not wait for it.
        self._mend_process()

    def _build_report_frame(self, done: Any, note: Any, encoder: ValueEncoder | None) -> Any:
        """Build the message that tells the host that a cell has ended.

        It includes the results of after-cell hooks, if there are any. ``done`` holds the cell's id,
        value, error, restored names and number of printed characters.
        """
        if note is not None:
            fields = zip(("id", "value", "error", "restored", "chars"), done, strict=True)
            try:
                return self._channel.frame({"op": "done", **dict(fields), "note": note}, encoder)
            except ValueLimitError as limit:
                # What the cell left for the host is over a limit: report it as the cell's error.
                done = (*done[:2], done[2] or f"ValueError: {limit}", *done[3:])
        return self._channel.frame_from_encoded_header(encode_cell_done(*done))

    def _mend_guest_state(self) -> None:
        """Repair the interpreter state that the guest needs, in case a cell has damaged it.

        This covers the builtins, the namespace and the standard streams. The guest needs them to
        finish the cell.
        """
        self._interpreter.mend_builtins()
        self.notebook.mend_namespace()
        if self._owns_process:
            self._interpreter.mend_streams(self.notebook.module, self.output)

    def _mend_process(self) -> None:
        """Restore the output descriptors and the SIGINT handler that a cell may have replaced."""
        if self._owns_process:
            self._interpreter.restore_fds_and_sigint(self.output, self.on_interrupt)

    def on_interrupt(self, *_: object) -> None:
        """Handle SIGINT by raising KeyboardInterrupt in the cell as soon as that is safe.

        A child process that a cell forked exits instead.
        """
        if not self._channel.is_session_process():
            os._exit(130)
        if self.interrupts.may_raise():
            raise KeyboardInterrupt
