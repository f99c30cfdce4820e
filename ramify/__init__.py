"""Ramify: answer questions over inputs of any size with recursive language models, and train them.

    >>> import ramify
    >>> rlm = ramify.RLM("openai:gpt-5-mini")
    >>> rlm.completion(open("huge.log").read(), "Which host failed first, and why?").response

The public names are here (asking) and in seven namespaces; deeper paths are private and may move:

    ramify.plans        fixed programs over bounded leaves, and their cost in dollars beforehand
    ramify.tasks        write a task and a reward
    ramify.evaluate     measure a model or a method on a task
    ramify.train        train a policy; recipes, algorithms, losses, signals, trackers
    ramify.inference    model clients, and engines whose weights can change
    ramify.testing      scripted models, and the conformance suite of sandboxes
    ramify.ray          a question as a stage of a pipeline of Ray Data

Names are loaded when they are first used, so that ``import ramify`` stays fast and needs no
optional package.
"""

from __future__ import annotations

import importlib
import logging as _logging
import sys as _sys
from os.path import exists as _exists

TYPE_CHECKING = False  # not from typing, which takes longer to import than all else here
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

# Applications decide where records go; without one, they go nowhere.
_logging.getLogger("ramify").addHandler(_logging.NullHandler())

__version__ = "0.1.0"


def _is_module(path: str) -> bool:
    return _exists(f"{path}.py") or _exists(path)


def lazy_namespace(
    package: str, folder: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` that import a package's public names
    lazily.

    Each name is imported only when it is first used. The public names are the imports in
    ``folder/__init__.pyi``. That file is the only list of them: type checkers and editors read it,
    and so does this function. The line ``from ramify import train as train`` there names a package.
    """
    with open(f"{folder}/__init__.pyi", encoding="utf-8") as file:
        homes = _modules_by_name(file.read())

    def get(name: str) -> Any:
        home = homes.get(name)
        if home is None and name[:1] != "_":
            new = _module("ramify.deprecated_public_names").resolve_deprecated_name(package, name)
            if new is not None:
                return get(new)
        # ``from ramify import secret_redaction`` asks for a module here before Python imports it.
        if home is None and (name[:1] == "_" or _is_module(f"{folder}/{name}")):
            raise AttributeError(
                f"module '{package}' has no attribute '{name}'", name=name, obj=_module(package)
            )
        if home is None:
            advice = _module("ramify.public_name_advice").public_name_advice(package, name)
            if _is_from_import(_sys._getframe(1)):
                # Python would replace the message of an AttributeError with its own.
                raise ImportError(f"cannot import name '{name}' from '{package}'{advice}")
            # Without ``obj``, Python adds no second suggestion to this one.
            raise AttributeError(f"module '{package}' has no attribute '{name}'{advice}", name=name)
        try:
            value = _module(f"{home}.{name}") if home == package else getattr(_module(home), name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "ramify":
                raise
            how = _module("ramify.pip_install_command").install_command("train")
            raise ModuleNotFoundError(
                f"{package}.{name} needs {error.name}: {how}", name=error.name
            ) from error
        setattr(_module(package), name, value)
        return value

    names = sorted(homes)
    return get, lambda: sorted({*vars(_module(package)), *names}), names


def _is_from_import(frame: FrameType) -> bool:
    """Return True if the current instruction of ``frame`` is ``from … import NAME``."""
    opcode = frame.f_code.co_code[frame.f_lasti]
    return bool(_module("opcode").opname[opcode] == "IMPORT_FROM")


def _modules_by_name(stub: str) -> dict[str, str]:
    """Map each name imported in a stub file to the module that defines it.

    The result looks like ``{"RLM": "ramify.engine.rlm", …}``.
    """
    homes = {}
    for statement in stub.split("\nfrom ramify")[1:]:
        home, _, rest = statement.partition(" import ")
        names = rest[1:].partition(")")[0] if rest.startswith("(") else rest.partition("\n")[0]
        for name in names.split(","):
            if name.strip():
                homes[name.split()[0]] = f"ramify{home}"
    return homes


_module = importlib.import_module
__getattr__, __dir__, __all__ = lazy_namespace(__name__, __path__[0])
