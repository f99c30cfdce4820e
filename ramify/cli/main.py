"""The command ``ramify``: which commands there are, and how every one of them ends.

A command's module is imported when it is called, and nothing is imported that it does not use:
starting up is a good part of a short question's time. Errors are one line on stderr; exit codes are
in ``exit_codes.py``.
"""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import signal
import sys
from difflib import get_close_matches

from ramify import __version__
from ramify.cli.exit_codes import WRONG, ExitCode
from ramify.cli.parser import CommandSpec, UsageError, unknown_option
from ramify.cli.stderr_notes import error_line
from ramify.errors import RamifyError

COMMANDS = {
    "ask": ("ramify.cli.ask", "answer a question over files, folders, databases or a pipe"),
    "eval": ("ramify.cli.eval", "evaluate a model on a task"),
    "train": ("ramify.cli.train", "carry out a recipe: train a policy"),
    "cluster plan": (
        "ramify.cli.cluster",
        "print where a recipe's processes would go, their memory and a step's time",
    ),
    "cluster simulate": (
        "ramify.cli.simulate_command",
        "predict how a measured run would do on other devices",
    ),
    "serve": ("ramify.cli.serve", "serve recursive runs as an OpenAI-compatible API"),
    "mcp": (
        "ramify.cli.mcp_command",
        "offer questions over files as a tool of the Model Context Protocol",
    ),
    "serve-policy": ("ramify.cli.serve_policy", "serve a policy as an OpenAI-compatible API"),
    "view": ("ramify.cli.view_command", "show runs, training and comparisons on a page, live"),
    "runs": ("ramify.cli.runs_command", "list stored runs"),
    "runs rm": ("ramify.cli.runs_command", "delete stored runs"),
    "runs prune": ("ramify.cli.runs_command", "delete old runs"),
    "show": ("ramify.cli.show", "show what happened in a run"),
    "replay": ("ramify.cli.replay_command", "run a run's code again against its recorded replies"),
    "doctor": ("ramify.cli.doctor", "show keys, sandbox, extras, store and configuration"),
}
"""Command -> the module that holds it, and what it does."""


def main() -> None:
    """What the command does, whatever was typed. Never returns."""
    # nearly all that start-up makes stays; who has more to do than that turns it on again
    gc.disable()
    for name in ("stdout", "stderr"):  # None where the caller closed it, as by >&-
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 -- open to the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # what the terminal has no sign for must not end a run
    arguments = sys.argv[1:]
    code = run(arguments)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # all is done and said
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """The exit code of the command, whatever it raises; what went wrong is said in a line."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ``ramify.__main__`` had none
        return _run(arguments)
    except BrokenPipeError:
        _give_up_stdout()
        return ExitCode.BROKEN_PIPE
    except UsageError as error:
        name = split(arguments)[0]
        error_line(f"{error} (see ramify {f'{name} ' if name in COMMANDS else ''}--help)")
        return ExitCode.USAGE
    except KeyboardInterrupt:
        return ExitCode.STOPPED
    except Exception as error:
        if os.environ.get("RAMIFY_DEBUG"):
            raise
        error_line(str(error) if isinstance(error, RamifyError) else _unforeseen(error))
        return ExitCode.USAGE if isinstance(error, WRONG) else ExitCode.ERROR


def command(name: str) -> CommandSpec:
    module = importlib.import_module(COMMANDS[name][0])
    found: tuple[CommandSpec, ...] = getattr(module, "COMMANDS", None) or (module.COMMAND,)
    return next(each for each in found if each.name == name)


def overview() -> str:
    """What ``ramify --help`` says."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: ramify COMMAND …",
            "",
            "Answer questions over inputs of any size with recursive language models.",
            "",
            *lines,
            "",
            "ramify COMMAND --help says more; ramify --version says which version this is.",
        ]
    )


def _run(arguments: list[str]) -> int:
    name, rest = split(arguments)
    if name in COMMANDS:
        found = command(name)
        if name != "ask":
            gc.enable()
        code = found.call(rest)
    elif name in ("", "--help", "-h", "help"):
        print(overview())
        code = ExitCode.ANSWERED if name else ExitCode.USAGE
    elif name == "--version":
        print(f"ramify {__version__}")
        code = ExitCode.ANSWERED
    elif name.startswith("-"):
        raise UsageError(unknown_option(name, ("--help", "--version")))
    else:
        longer = [each for each in COMMANDS if each.startswith(f"{name} ")]
        close = ["' or '".join(longer)] if longer else get_close_matches(name, COMMANDS, n=1)
        hint = (
            f"did you mean '{close[0]}'?" if close else f"to ask a question: ramify ask {name!r} …"
        )
        raise UsageError(f"there is no command '{name[:40]}': {hint}")
    sys.stdout.flush()
    return code


def split(arguments: list[str]) -> tuple[str, list[str]]:
    """The command, of one or two words, and the rest."""
    two = " ".join(arguments[:2])
    return (
        (two, arguments[2:])
        if two in COMMANDS and len(arguments) > 1
        else ("".join(arguments[:1]), arguments[1:])
    )


def _give_up_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains when it flushes at its end


def _unforeseen(error: Exception) -> str:
    """A line for what nobody caught; a disk that is full and a folder that may not be written are
    no bugs of ours."""
    if isinstance(error, OSError) and error.strerror:
        if error.errno == errno.ENOSPC and not error.filename:
            _give_up_stdout()
        what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        return f"{what}; RAMIFY_DEBUG=1 shows what was being done"
    return f"internal error: {type(error).__name__}: {error}; run it with RAMIFY_DEBUG=1 for the traceback"


if __name__ == "__main__":
    main()
