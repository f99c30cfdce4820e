"""Converts Jupyter notebooks to Markdown: the cells in order, with the text of their outputs.

Outputs are important for many questions, but markitdown drops them all. Here only pictures and HTML
are left out, and a note says how many.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from ramify.sources.document_parts import DocumentPart, assemble
from ramify.sources.file_kinds import InputFile, decode
from ramify.sources.file_kinds import read as read_text
from ramify.sources.loaded_sources import SourceCollector

_TERMINAL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Matches the escape codes of terminal colours, which occur in tracebacks."""


class IpynbCell(msgspec.Struct):
    cell_type: str
    source: str | list[str] = ""
    outputs: list[dict[str, Any]] = []


class ParsedNotebook(msgspec.Struct):
    """The fields of a Jupyter notebook file that are needed to convert it.

    All other fields are ignored.
    """

    cells: list[IpynbCell]
    metadata: dict[str, Any] = {}


def read(file: InputFile, loading: SourceCollector) -> None:
    try:
        notebook = msgspec.json.decode(decode(file.data)[0], type=ParsedNotebook)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        read_text(file, loading)  # an old format, or damaged
        return
    about = notebook.metadata.get("language_info") or notebook.metadata.get("kernelspec") or {}
    language = str(about.get("name", "") if isinstance(about, dict) else "")
    left_out = [0]
    parts = [
        DocumentPart(f"cell {number}", _format_cell(cell, language, left_out))
        for number, cell in enumerate(notebook.cells, 1)
    ]
    text, places = assemble(parts, has_headings=True)
    text = text.encode("utf-8", "replace").decode()
    detail = f"notebook: {len(parts):,} cell{'s' * (len(parts) != 1)}"
    if left_out[0]:
        detail += f"; {left_out[0]:,} outputs without text left out"
    loading.count_bytes(len(text), file.name)
    loading.add(file.name, text, "notebook", len(file.data), detail, places)


def _format_cell(cell: IpynbCell, language: str, left_out: list[int]) -> str:
    source = _join_lines(cell.source)
    if cell.cell_type != "code":
        return source
    lines = [_fence_code(source, language)]
    for output in cell.outputs:
        texts = [text for text in _output_texts(output) if text.strip()]
        left_out[0] += not texts
        lines += [f"Output:\n{_fence_code(text)}" for text in texts]
    return "\n\n".join(lines)


def _output_texts(output: dict[str, Any]) -> Iterator[str]:
    if output.get("output_type") == "stream":
        yield _join_lines(output.get("text"))
    elif output.get("output_type") == "error":
        trace = output.get("traceback")
        lines = [each for each in trace if isinstance(each, str)] if isinstance(trace, list) else []
        named = f"{output.get('ename')}: {output.get('evalue')}"
        yield _TERMINAL.sub("", "\n".join(lines) or named)
    elif isinstance(data := output.get("data"), dict):
        for kind in ("text/markdown", "text/latex", "text/plain"):
            if text := _join_lines(data.get(kind)):
                yield text
                break


def _join_lines(text: Any) -> str:
    if isinstance(text, list):
        return "".join(each for each in text if isinstance(each, str))
    return text if isinstance(text, str) else ""


def _fence_code(text: str, language: str = "") -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.rstrip(chr(10))}\n{fence}"
