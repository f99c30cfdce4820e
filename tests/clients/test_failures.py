import json
import time
from datetime import UTC, datetime
from email.utils import format_datetime

import pytest

from ramify.clients.chat_json import error_from_status, redact_secrets, retry_after_s, seconds_until
from ramify.errors import MalformedResponse


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("2", 2.0),
        ("0.5", 0.5),
        ("20ms", 0.02),
        ("1s", 1.0),
        ("6m0.5s", 360.5),
        ("1h2m", 3720.0),
        ("soon", None),
        ("", None),
    ],
)
def test_durations_are_parsed(value, seconds):
    assert seconds_until(value) == pytest.approx(seconds)


def test_dates_become_seconds_from_now():
    at = datetime.fromtimestamp(time.time() + 60, UTC)
    for value in (
        format_datetime(at, usegmt=True),
        at.isoformat(),
        str(at.timestamp()),
        str(at.timestamp() * 1000),
    ):
        assert seconds_until(value) == pytest.approx(60, abs=2), value


@pytest.mark.parametrize(
    ("headers", "body", "wait"),
    [
        ({"retry-after-ms": "250", "retry-after": "9"}, b"", 0.25),
        (
            {
                "x-ratelimit-remaining-requests": "0",
                "x-ratelimit-reset-requests": "2s",
                "x-ratelimit-remaining-tokens": "5",
                "x-ratelimit-reset-tokens": "9s",
            },
            b"",
            2.0,
        ),
        (
            {},
            b'{"error": {"details": [{"@type": "google.rpc.RetryInfo", "retryDelay": "34s"}]}}',
            34.0,
        ),
        ({}, b"{}", None),
    ],
)
def test_retry_delay_is_read_from_headers_or_body(headers, body, wait):
    assert retry_after_s(headers, body) == wait


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("bad key sk-proj-abcdefghij", "bad key sk-***"),
        ("Bearer abcdefghijkl is wrong", "Bearer *** is wrong"),
        ("mine-is-unusual here", "*** here"),
        ("the key provided is missing", "the key provided is missing"),
    ],
)
def test_keys_are_redacted(text, left):
    assert redact_secrets(text, ["mine-is-unusual"]) == left


@pytest.mark.parametrize("body", ["{}", '{{"error": {{"message": {}}}}}', "<title>{}</title>"])
def test_error_has_no_control_characters_of_the_server(body):
    text = "no \x1b]52;c;aGk=\x07\x9b2J\u202e\x00quota"
    sent = body.format(json.dumps(text) if "error" in body else text).encode()
    error = str(error_from_status("openai:m", 400, {}, sent))
    assert error.isprintable()
    assert "no quota" in error
    assert str(MalformedResponse(f"moved to {text}")) == "moved to no quota"
