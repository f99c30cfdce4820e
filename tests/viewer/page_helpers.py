"""What the tests of the pages share."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.viewer.browser import NARROW, WIDE

SIZES = pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "390"])


HACKED = "[window.hacked, document.querySelectorAll('#evil, img, iframe, main script').length]"


def text(page: Any, selector: str) -> str:
    return str(page.locator(selector).first.inner_text())


class Gate:
    """Holds back replies to prompts whose first line has one of these words, until it is opened."""

    def __init__(self, *words: str) -> None:
        self._words, self._open = words, threading.Event()
        self.reached = threading.Event()

    async def __call__(self, asked: str) -> None:
        if any(word in asked.partition("\n")[0] for word in self._words):
            self.reached.set()
            while not self._open.is_set():
                await asyncio.sleep(0.005)

    def open(self) -> None:
        self._open.set()
