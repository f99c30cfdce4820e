"""The entry point of the ``ramify`` command.

It selects and runs the subcommand, and turns errors into messages and exit codes.

A command's module is imported only when that command runs, because imports take much of the time of
a short question. An error is one line on stderr. The exit codes and the option parser are in
``parser.py``.
"""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import signal
import sys
from collections.abc import Collection

from ramify import __version__
from ramify.cli.parser import WRONG, ExitCode, SubcommandSpec, UsageError, unknown_option_message
from ramify.cli.terminal_text import discard_stdout, print_error, protect_terminal
from ramify.errors import RamifyError
from ramify.extras import EXTRA_COMMANDS
from ramify.nearest_name import nearest_name
from ramify.pip_install_command import install_command

COMMANDS = {
    "ask": ("ramify.cli.ask", "answer a question over files, folders, databases or a pipe"),
    "plan": ("ramify.cli.plan_command", "show a plan for a question with its cost, and run it"),
    "calibrate": (
        "ramify.cli.calibrate_leaf_size_command",
        "measure a model's accuracy against the size of a text, for plans",
    ),
    "map": ("ramify.cli.map_command", "ask a question of every row of a table"),
    "prompt": ("ramify.cli.ask", "print the prompt of a question, and send nothing"),
    "eval": ("ramify.cli.eval", "evaluate a model on a task"),
    "demos": (
        "ramify.cli.demonstrations_command",
        "ask a model for demonstrations of a task, once",
    ),
    "train": ("ramify.cli.train", "train a policy from a recipe"),
    "init": ("ramify.cli.init_task_command", "write a new task, its expert and its recipe"),
    **EXTRA_COMMANDS,
    "publish": (
        "ramify.cli.publish_command",
        "write a trained policy and its model card to a folder or the Hugging Face hub",
    ),
    "serve": ("ramify.cli.serve", "serve recursive runs over an OpenAI-compatible API"),
    "mcp": (
        "ramify.cli.serve",
        "run an MCP server that answers questions over files",
    ),
    "serve-policy": ("ramify.cli.serve_policy", "serve a policy over an OpenAI-compatible API"),
    "view": ("ramify.cli.view_command", "browse runs, training curves and comparisons, live"),
    "runs": ("ramify.cli.runs_command", "list stored runs"),
    "runs check": ("ramify.cli.runs_command", "find damage in stored runs"),
    "runs repair": ("ramify.cli.runs_command", "cut a damaged run before the damage"),
    "runs rm": ("ramify.cli.runs_command", "delete stored runs"),
    "runs review": ("ramify.cli.runs_command", "label a run, or correct its scores"),
    "runs score": ("ramify.cli.runs_command", "score recorded conversations, to train from"),
    "runs prune": ("ramify.cli.runs_command", "delete old runs"),
    "show": ("ramify.cli.show", "print the turns, code and answers of a run"),
    "replay": ("ramify.cli.show", "re-run a run's code against its recorded replies"),
    "plugins": ("ramify.cli.plugins_command", "list everything that can be chosen by name"),
    "doctor": ("ramify.cli.doctor", "check API keys, sandbox, extras, store and configuration"),
}
"""Command name -> (its module, its one-line description)."""


def main() -> None:
    """Run the subcommand that ``sys.argv`` names, and exit the process with its exit code.

    This function never returns.
    """
    # Nearly every object made during start-up lives on, so collecting would be wasted time.
    # Commands with more to do enable it again.
    gc.disable()
    for name in ("stdout", "stderr"):  # None if the caller closed it, as with >&-
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 -- stays open until exit
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal cannot show must not end a run.
            stream.reconfigure(errors="backslashreplace")
    protect_terminal()
    arguments = sys.argv[1:]
    code = run(arguments)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to interrupt
    gc.freeze()  # the interpreter would scan everything twice at its end: a second after PyTorch
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one subcommand and return its exit code.

    An exception is printed as one line on stderr.
    """
    try:
        # Until this point, Ctrl-C ends the process at once (``ramify.__main__``).
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return _run(arguments)
    except BrokenPipeError:
        discard_stdout()
        return ExitCode.BROKEN_PIPE
    except UsageError as error:
        name = split(arguments)[0]
        print_error(f"{error} (see ramify {f'{name} ' if name in COMMANDS else ''}--help)")
        return ExitCode.USAGE
    except KeyboardInterrupt:
        return ExitCode.STOPPED
    except Exception as error:
        if os.environ.get("RAMIFY_DEBUG"):
            raise
        print_error(
            str(error) if isinstance(error, RamifyError) else _describe_unexpected_error(error)
        )
        is_wrong = isinstance(error, WRONG) or _missing_extra(error)
        return ExitCode.USAGE if is_wrong else ExitCode.ERROR


def load_subcommand(name: str) -> SubcommandSpec:
    """Import the module of a subcommand, and return the subcommand's specification.

    The help text ends with related commands, such as ``runs check`` for ``runs``.
    """
    module = importlib.import_module(COMMANDS[name][0])
    specs: tuple[SubcommandSpec, ...] = getattr(module, "COMMANDS", None) or (module.COMMAND,)
    spec = next(spec for spec in specs if spec.name == name)
    if lines := _format_commands(subcommands(name)):
        spec = spec._replace(epilog="\n".join([*filter(None, [spec.epilog]), "see also:", *lines]))
    return spec


def subcommands(name: str) -> list[str]:
    return [known for known in COMMANDS if known.startswith(f"{name} ")]


def _format_commands(names: Collection[str]) -> list[str]:
    """Format the names of commands with their one-line descriptions, one command per line."""
    width = max(map(len, names), default=0)
    return [f"  {name:<{width}}  {COMMANDS[name][1]}" for name in names]


def help_text() -> str:
    """Return the text of ``ramify --help``."""
    lines = _format_commands(COMMANDS)
    return "\n".join(
        [
            "usage: ramify COMMAND …",
            "",
            "Answer questions over inputs of any size with recursive language models.",
            "",
            *lines,
            "",
            "ramify COMMAND --help lists a command's options; ramify --version prints the version.",
        ]
    )


def _run(arguments: list[str]) -> int:
    name, options = split(arguments)
    if name in COMMANDS:
        spec = load_subcommand(name)
        if name != "ask":
            gc.freeze()  # as ``ask`` does: start-up's objects live on
            gc.enable()
        code = spec.call(options)
    elif name == "help" and options:
        return _run([*options, "--help"])
    elif name in ("", "--help", "-h", "help"):
        print(help_text())
        code = ExitCode.ANSWERED if name else ExitCode.USAGE
    elif name == "--version":
        print(f"ramify {__version__}")
        code = ExitCode.ANSWERED
    elif name.startswith("-"):
        raise UsageError(unknown_option_message(name, ("--help", "--version")))
    else:
        longer = subcommands(name)
        if longer and options[:1] in (["--help"], ["-h"]):
            print("\n".join([f"usage: ramify {name} COMMAND …", "", *_format_commands(longer)]))
            return ExitCode.ANSWERED
        close = "' or '".join(longer) if longer else nearest_name(name, COMMANDS)
        hint = f"did you mean '{close}'?" if close else f"to ask a question: ramify ask {name!r} …"
        raise UsageError(f"unknown command '{name[:40]}': {hint}")
    sys.stdout.flush()
    return code


def split(arguments: list[str]) -> tuple[str, list[str]]:
    """Split command-line arguments into the name of the subcommand and its own arguments.

    The name of a subcommand may have two words.
    """
    two = " ".join(arguments[:2])
    return (
        (two, arguments[2:])
        if two in COMMANDS and len(arguments) > 1
        else ("".join(arguments[:1]), arguments[1:])
    )


_EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "tokenizers", "safetensors", "numpy"), "train"),
    "simpy": "cluster",
}
"""Module -> optional extra that installs it, for commands that need the module to run at all."""


def _missing_extra(error: Exception) -> str:
    """Return the optional extra that provides the module that ``error`` reports as missing.

    Empty if ``error`` has another cause.
    """
    return _EXTRAS.get(error.name or "", "") if isinstance(error, ModuleNotFoundError) else ""


def _describe_unexpected_error(error: Exception) -> str:
    """Describe in one line an exception that no command has caught.

    An OSError, such as a full disk or a read-only folder, is not reported as an internal error.
    """
    if isinstance(error, OSError) and error.strerror:
        if error.errno == errno.ENOSPC and not error.filename:
            discard_stdout()
            return f"cannot write to stdout: {error.strerror}"
        problem = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        return f"{problem}; set RAMIFY_DEBUG=1 to see the traceback"
    if isinstance(error, ModuleNotFoundError) and (extra := _missing_extra(error)):
        return f"this needs {error.name}: {install_command(extra)}"
    return (
        f"{_place_in_plugin(error) or 'internal error'}: {type(error).__name__}: {error}; set "
        "RAMIFY_DEBUG=1 to see the traceback"
    )


def _place_in_plugin(error: Exception) -> str:
    """Return the line of user code, such as a recipe's loss function, that raised an error.

    Returns an empty string if Ramify itself raised the error.
    """
    import sysconfig
    import traceback

    ours = os.path.dirname(os.path.dirname(__file__))
    libraries = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(ours):
            return ""
        if not frame.filename.startswith(libraries):
            return f"{frame.filename}, line {frame.lineno}, in {frame.name}"
    return ""


if __name__ == "__main__":
    main()
