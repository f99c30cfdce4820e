"""The code blocks of the Markdown pages.

A block is run if possible. For one that cannot run (it installs, needs a key, or serves until it is
stopped), a comment in the line before its fence gives the reason::

    <!-- not run here: it installs -->

Not here: the syntax of blocks that are not run, and broken links; see ``scripts/check_docs.py``.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(
    r"(?:^<!-- not run here: ([^\n]+?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


class Block(msgspec.Struct, frozen=True):
    """One fenced block."""

    page: str
    line: int
    """Number of its first line of code, from 1."""
    language: str
    code: str
    why_not: str
    """Reason why it is not run; empty if it is run."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page.name, text.count("\n", 0, found.start(3)) + 1, found[2], found[3], found[1] or ""
        )
        for found in _FENCE.finditer(text)
    ]


ALL = [block for page in PAGES for block in blocks(page)]


def prose(page: Path) -> str:
    """Return the page without its code and link targets."""
    return re.sub(r"\]\([^)]*\)", "]", _FENCE.sub("", page.read_text(encoding="utf-8")))


def script(name: str) -> Any:
    """Load ``scripts/NAME.py`` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
