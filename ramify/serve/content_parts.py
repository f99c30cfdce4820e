"""Content parts of a message, in the formats of both APIs: text and files only.

A file must be inside the request, in base64. A file that was uploaded before (``file_id``) or that
is on the web (``file_url``) is rejected, because this server stores no files and downloads nothing.
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
    """One part of a message, with the fields of both APIs."""

    type: str
    text: str | None = None
    refusal: str | None = None
    file: _File | None = None
    filename: str | None = None
    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None

    def read(self, where: str) -> str | AttachedFile:
        """Return the text or the file. Raises RequestRejected for any other kind of part."""
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


def chat_message(
    role: Role, content: Content, where: str, more: str = "", result_of: str = ""
) -> ChatMessage:
    """Convert a message of either API.

    ``more`` is text to add after the content. ``result_of`` names the tool whose result it is.
    """
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
            "the content of the file is missing: give file_data in base64 (this server stores no "
            "files and downloads none)",
            param=f"{where}.file_data",
        )
    return AttachedFile(name or "file", data, f"{where}.file_data")
