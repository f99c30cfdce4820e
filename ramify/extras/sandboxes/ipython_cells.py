"""Guest code of the provider ``ipython``: it runs inside a session and passes code cells to
IPython.

The session still decides where output goes, how errors and the value of the last expression are
shown, and which names are reserved. IPython handles magics, ``!commands``, ``In`` and ``Out``,
``_`` and ``__``, ``obj?``, and a trailing ``;`` that suppresses the value. This file is installed
as a module in the session and needs only IPython and the session's own code.
"""

# mypy: disable-error-code="misc, attr-defined, no-untyped-call, import-not-found, import-untyped"
# The machine that type-checks this file may not have IPython.

from __future__ import annotations

import builtins
import os
import warnings
from typing import TYPE_CHECKING, Any

from IPython.core import compilerop, interactiveshell
from IPython.core.displayhook import DisplayHook
from IPython.core.inputtransformer2 import leading_empty_lines
from traitlets.config import Config

if TYPE_CHECKING:
    from ramify.sandbox.guest.notebook import GuestNotebook, remember_source, safe_repr

    notebook: GuestNotebook
else:
    from ramify_guest.notebook import remember_source, safe_repr

    notebook = notebook  # noqa: F821  (the guest defines it in its modules)


class FixedCellNameCompiler(compilerop.CachingCompiler):
    """An IPython compiler that names code cells as other sandboxes do, for identical tracebacks."""

    name = "<cell>"

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        return self.name


class CellDisplayHook(DisplayHook):
    """A display hook that keeps the value of a cell's last expression as a string.

    Nothing is printed.
    """

    text: str | None = None

    def compute_format_data(self, result: Any) -> tuple[dict[str, str], dict[str, Any]]:
        self.text = safe_repr(result)
        return {"text/plain": self.text}, {}

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        pass

    def finish_displayhook(self) -> None:
        pass


class HeadlessIPythonShell(interactiveshell.InteractiveShell):
    """An IPython shell without a terminal, a profile, or a history on disk."""

    displayhook_class = CellDisplayHook
    compiler_class = FixedCellNameCompiler
    system = interactiveshell.InteractiveShell.system_raw

    def showtraceback(self, *args: Any, **options: Any) -> None:
        """Do nothing, because the session formats errors itself."""

    def showsyntaxerror(self, *args: Any, **options: Any) -> None:
        pass

    def showindentationerror(self) -> None:
        pass


def make_shell() -> HeadlessIPythonShell:
    folder = os.path.join(os.path.dirname(os.environ["HOME"]), "ipython")
    config = Config()
    config.HistoryManager.enabled = False
    shell: HeadlessIPythonShell = HeadlessIPythonShell.instance(
        config=config, user_module=notebook.module, user_ns=notebook.namespace, ipython_dir=folder
    )
    shell.loop_runner = notebook.run_coroutine
    # Removing empty lines would shift the line numbers in errors.
    shell.input_transformer_manager.cleanup_transforms.remove(leading_empty_lines)
    # The guest shows errors, so IPython need not read whole files for its own tracebacks.
    vars(shell.InteractiveTB)["structured_traceback"] = lambda *_, **__: []
    restore_exit_builtins()
    return shell


def restore_exit_builtins() -> None:
    """Restore Python's built-in ``exit`` and ``quit``.

    IPython replaces them with versions that need a terminal.
    """
    for name in ("exit", "quit"):
        notebook.namespace[name] = getattr(builtins, name)


def run_cell(source: str, name: str) -> tuple[str | None, str | None]:
    """Run a code cell of the session in IPython.

    Returns the text of its last value and the text of its error. Either may be None.
    """
    shell.compile.name = name
    shell.displayhook.text = None
    if "_oh" not in notebook.namespace:  # a cell has cleared its globals
        shell.init_user_ns()
        restore_exit_builtins()
    result = shell.run_cell(source, store_history=True)
    remember_source(name, source)
    error = result.error_before_exec or result.error_in_exec
    if error is not None:
        return None, notebook.format_error(error)
    return shell.displayhook.text, None


warnings.filterwarnings("ignore", message="To exit: use")
shell = make_shell()
notebook.hidden |= {interactiveshell.__file__, compilerop.__file__}
notebook.evaluate = run_cell
__all__: list[str] = []
