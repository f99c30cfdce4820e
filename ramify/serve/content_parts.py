"""The parts of a message's content, as chat completions and responses write them: texts and files,
and nothing else.

A file travels inside the request, as base64. One that was uploaded before (``file_id``) or stands
on the web (``file_url``) is refused: this server keeps no files and fetches nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ramify.serve.answer_request import AttachedFile, ChatMessage
from ramify.serve.web import RequestRejected

Role = Literal["system", "developer", "user", "assistant", "tool"]


class _File(msgspec.Struct):
    filename: str | None = None
    file_data: str | None = None
    file_id: str | None = None


class ContentPart(msgspec.Struct):
    """One part, in either API's words."""

    type: str
    text: str | None = None
    refusal: str | None = None
    file: _File | None = None
    filename: str | None = None
    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None

    def read(self, where: str) -> str | AttachedFile:
        """The text, or the file. Raises Rejected for anything else."""
        match self.type:
            case "text" | "input_text" | "output_text":
                if self.text is None:
                    raise RequestRejected(
                        f"a part of type {self.type} has no text", param=f"{where}.text"
                    )
                return self.text
            case "refusal":
                return self.refusal or ""
            case "file":
                if self.file is None:
                    raise RequestRejected("a part of type file has no file", param=f"{where}.file")
                return _attached(self.file.filename, self.file.file_data, f"{where}.file")
            case "input_file":
                return _attached(self.filename, self.file_data, where)
            case _:
                raise RequestRejected(
                    f"content of type {self.type!r:.60} is not supported: give text or files",
                    param=f"{where}.type",
                )


Content = str | list[ContentPart] | None


def said(
    role: Role, content: Content, where: str, more: str = "", result_of: str = ""
) -> ChatMessage:
    """One message; ``more`` is text that stands beside its content, ``result_of`` the tool whose
    result it is."""
    if isinstance(content, str):
        parts: list[str | AttachedFile] = [content]
    else:
        parts = [part.read(f"{where}.content[{index}]") for index, part in enumerate(content or ())]
    head = [f"(result of {result_of})"] if result_of else []
    return ChatMessage(
        "system" if role == "developer" else role, (*head, *parts, *([more] if more else []))
    )


def _attached(name: str | None, data: str | None, where: str) -> AttachedFile:
    if not data:
        raise RequestRejected(
            "a file must come with its content: give file_data as base64 (this server keeps no "
            "files and fetches none)",
            param=f"{where}.file_data",
        )
    return AttachedFile(name or "file", data, f"{where}.file_data")
