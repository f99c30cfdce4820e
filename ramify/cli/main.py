"""The command ``ramify``: which commands there are, and how every one of them ends.

    ramify ask | runs | show | replay | doctor

A command is imported when it is called, and nothing is imported that it does not use: starting up is a good part of a
short question's time. Errors are one line on stderr; exit codes are in ``exits.py``.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer
import typer.main

from ramify import __version__
from ramify.cli.exits import Exit
from ramify.cli.notes import error_line
from ramify.errors import RamifyError

COMMANDS = {name: f"ramify.cli.{name}" for name in ("ask", "runs", "show", "replay", "doctor")}
"""Command -> the module that has a function of that name, or a group ``app``."""
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main() -> None:
    """The entry point. Never returns."""
    gc.disable()  # start-up makes only what stays
    arguments = sys.argv[1:]
    sys.exit(_ended(lambda: _run(arguments)))


def build(names: list[str]) -> typer.Typer:
    """The application with the commands of ``names``."""
    app = typer.Typer(
        name="ramify", rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True,
        context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
        help="Answer questions over inputs of any size with recursive language models.",
    )  # fmt: skip
    app.callback()(_options)
    for name in names:
        module = importlib.import_module(COMMANDS[name])
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name, epilog=getattr(module, "EPILOG", None))(getattr(module, name))
    return app


def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"ramify {__version__}")
        raise typer.Exit


def _run(arguments: list[str]) -> int:
    is_completion = "_RAMIFY_COMPLETE" in os.environ
    named = arguments[0] if arguments else ""
    app = build([named] if named in COMMANDS and not is_completion else list(COMMANDS))
    if named != "ask":
        gc.enable()
    code = typer.main.get_command(app)(args=arguments, prog_name="ramify", standalone_mode=False)
    sys.stdout.flush()
    return code if isinstance(code, int) else Exit.ANSWERED


def _ended(run: Callable[[], int]) -> int:
    """The exit code of ``run``, whatever it raises; what went wrong is said in a line."""
    if os.environ.get("RAMIFY_DEBUG"):
        return run()
    try:
        return run()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains when it flushes at its end
        return Exit.BROKEN_PIPE
    except RamifyError as error:
        error_line(str(error))
        return Exit.ERROR
    except _UsageError as error:
        error_line(_usage_line(error))
        return Exit.USAGE
    except (KeyboardInterrupt, typer.Abort):
        return Exit.STOPPED
    except Exception as error:  # noqa: BLE001 -- a bug: said in a line, told whole where it is asked for
        error_line(f"internal error: {type(error).__name__}: {error}; run again with RAMIFY_DEBUG=1 for the traceback")
        return Exit.ERROR


def _usage_line(error: Exception) -> str:
    """Typer's own words, with the nearest option where there is one, and where to read on."""
    message = error.format_message()  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    return f"{message.rstrip('.')}; see {context.command_path if context else 'ramify'} --help"


if __name__ == "__main__":
    main()
