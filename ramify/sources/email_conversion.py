"""Converts e-mail to text.

The standard library reads eml and mbox files, and python-oxmsg reads Outlook's msg files. This runs
in the process of ``document_process.py``.

A message becomes its headers and its plain text, or its HTML as Markdown if it has no plain text.
An attachment is read as a file of its kind; ``documents.py`` decides which attachments are read.
"""

from __future__ import annotations

import email
import email.policy
import importlib.util
import io
import re
from collections.abc import Iterable
from email.message import EmailMessage
from typing import Any

from ramify.sources.document_parts import DocumentPart, assemble
from ramify.sources.document_process import ConvertedDocument
from ramify.sources.loaded_sources import UnreadableSourceError

_HEADERS = ("From", "To", "Cc", "Date", "Subject")
_FROM_LINE = re.compile(rb"^From [^\n]*\n", re.MULTILINE)
"""Matches the line that begins each message of an mbox file."""
Attachments = list[tuple[str, bytes]]


def convert_eml(data: bytes) -> ConvertedDocument:
    text, _, attachments = _message(data)
    if not text:
        raise UnreadableSourceError("is a message without headers and text", "check that it is one")
    return ConvertedDocument(text, _detail("message", len(attachments)), members=attachments)


def convert_mbox(data: bytes) -> ConvertedDocument:
    before, *messages = _FROM_LINE.split(data)
    if before.strip() or not messages:
        raise UnreadableSourceError("is not a mailbox", "its first line must begin with 'From '")
    parts, members = [], []
    for number, message in enumerate(messages, 1):
        text, subject, attachments = _message(message)
        parts.append(DocumentPart(f"message {number}", text, subject))
        members += [(f"message {number}/{name}", content) for name, content in attachments]
    text, places = assemble(parts, has_headings=False)
    detail = f"mailbox: {len(parts):,} message{'s' * (len(parts) != 1)}"
    return ConvertedDocument(text, _detail(detail, len(members)), places, members)


def convert_msg(data: bytes) -> ConvertedDocument:
    from oxmsg import Message

    message = Message.load(io.BytesIO(data))
    headers = {name.title(): value for name, value in message.message_headers.items()}
    people = ", ".join(
        f"{each.name} <{each.email_address}>" if each.name else each.email_address
        for each in message.recipients
    )
    found = {
        "From": (message.sender or "").replace('"', ""),
        "To": headers.get("To", people),
        "Cc": headers.get("Cc", ""),
        "Date": headers.get("Date", str(message.sent_date or "")),
        "Subject": message.subject or "",
    }
    attachments, left_out = [], []
    for each in message.attachments:
        name, content = each.file_name or "attachment", each.file_bytes
        if each.attached_by_value and content is not None:
            attachments.append((name, content))
        else:
            left_out.append(name)
    body = message.body or _from_html(message.html_body or "")
    text = _format_message(found, body, [*(name for name, _ in attachments), *left_out])
    notes = f"; not read: {', '.join(left_out)}" if left_out else ""
    return ConvertedDocument(
        text, _detail("message", len(attachments)) + notes, members=attachments
    )


def _message(data: bytes) -> tuple[str, str, Attachments]:
    """Convert an e-mail message to text, and return it with its subject and attachments."""
    message = email.message_from_bytes(data, policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    headers = {name: _header(message, name) for name in _HEADERS}
    attachments = [_attachment(each) for each in _attached_parts(message)]
    plain = message.get_body(("plain",))
    body = _content(plain)
    if not body.strip():
        body = _from_html(_content(message.get_body(("html",))))
    return (
        _format_message(headers, body, [name for name, _ in attachments]),
        headers["Subject"],
        attachments,
    )


def _attached_parts(message: EmailMessage) -> Iterable[Any]:
    if message.get_content_maintype() == "multipart":
        return [each for each in message.iter_attachments() if isinstance(each, EmailMessage)]
    # The message consists of a single file.
    is_text = message.get_content_type() in ("text/plain", "text/html")
    return [] if is_text else [message]


def _attachment(part: EmailMessage) -> tuple[str, bytes]:
    kind = part.get_content_type()
    name = _file_name(part)
    if kind == "message/rfc822":
        inner: Any = part.get_payload()
        attached = inner[0] if isinstance(inner, list) and inner else None
        if attached is None:
            return name or "message.eml", b""
        return name or f"{_header(attached, 'Subject') or 'message'}.eml", attached.as_bytes()
    data = part.get_payload(decode=True)
    return name or f"attachment.{part.get_content_subtype()}", data if isinstance(
        data, bytes
    ) else b""


def _file_name(part: EmailMessage) -> str:
    try:
        return part.get_filename("") or ""
    except (ValueError, LookupError):  # a damaged header
        return ""


def _header(message: Any, name: str) -> str:
    """Return the value of an e-mail header on one line, with single spaces between words.

    A damaged header that cannot be parsed is returned unchanged.
    """
    try:
        value = message.get(name, "")
    except (ValueError, LookupError, TypeError, AttributeError):
        raw = dict(message.raw_items())
        value = raw.get(name, "")
    return " ".join(str(value).split())


def _content(part: Any) -> str:
    if part is None:
        return ""
    try:
        found = part.get_content()
    except (LookupError, ValueError):  # an unknown charset or a damaged encoding
        raw = part.get_payload(decode=True)
        found = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else ""
    return found if isinstance(found, str) else ""


def _from_html(html: str) -> str:
    if not html.strip() or importlib.util.find_spec("markitdown") is None:
        return html
    from ramify.sources.office_documents import html_to_markdown

    return html_to_markdown(html)


def _format_message(headers: dict[str, str], body: str, attachments: list[str]) -> str:
    lines = [f"{name}: {value}" for name, value in headers.items() if value]
    if attachments:
        lines.append(f"Attachments: {', '.join(' '.join(name.split()) for name in attachments)}")
    body = body.replace("\r\n", "\n").strip()
    return "\n".join([*lines, "", body]).strip()


def _detail(what: str, num_attachments: int) -> str:
    if not num_attachments:
        return what
    return f"{what}, {num_attachments:,} attachment{'s' * (num_attachments != 1)}"
