"""Secrets in logs, journals and output: none is written, in whatever form it was given."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

import ramify
from ramify import RLM, Store
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.log_handlers import RUN_LOG, FileLogHandler
from ramify.logging import ComponentLogger, attached_handler
from ramify.secret_redaction import SecretRedactor
from ramify.serve.api_keys import ApiKey, ServerApiKeys
from tests.clients.helpers import Says
from tests.log_records import KEY, SANDBOX


@pytest.mark.parametrize(
    "text",
    [
        f"https://me:{KEY}@host/v1",
        f"https://host/v1?api_key={KEY}&x=1",
        f"{{'Authorization': 'Bearer {KEY}'}}",
        f"x-api-key: {KEY}",
        f'{{"error": "Incorrect API key provided: {KEY}"}}',
        f"OPENAI_API_KEY={KEY}",
        f"password='{KEY}'",
        f"sk-{KEY}",
    ],
)
def test_secrets_are_redacted_in_every_output(
    text: str, tmp_path: Path, records: list[logging.LogRecord]
) -> None:
    log, file = ComponentLogger("engine"), FileLogHandler(tmp_path / "log")

    def fail() -> None:
        try:
            raise ValueError(text)
        except ValueError as error:
            raise OSError(f"while asking: {text}") from error

    with attached_handler(file):
        log.warning("retry", text, url=text, api_key=KEY, given={"a": [text]})
        logging.getLogger("ramify.plugin").warning("a plug-in says %s", text)
        try:
            fail()
        except OSError as error:
            log.error("failed", "it failed", error=error)
    written = (tmp_path / "log").read_text()
    assert len(written.splitlines()) == 3
    assert KEY not in written
    ours = [record for record in records if record.name == "ramify.engine"]
    seen = [f"{logging.Formatter().format(record)} {vars(record)}" for record in ours]
    assert not [each for each in seen if KEY in each]


def test_secret_from_environment_is_redacted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MY_OWN_TOKEN", "a plain passphrase")
    with attached_handler(FileLogHandler(tmp_path / "log")):
        ComponentLogger("engine").info("x", "it said: a plain passphrase")
    assert "it said: «redacted MY_OWN_TOKEN»" in (tmp_path / "log").read_text()


ODD_KEY = '7-4/+%q"=zk' + "-0123456789" * 4


def key_forms(key: str) -> list[str]:
    return [key, quote(key, safe=""), json.dumps(key)[1:-1], key[:16], key[-16:]]


def test_key_passed_in_code_is_redacted_in_every_form(
    tmp_path: Path, records: list[logging.LogRecord]
) -> None:
    """A server echoes the key wherever it can; no output may contain it."""
    store = Store(tmp_path)
    echo = f"{'x' * 270} {ODD_KEY} https://host/{quote(ODD_KEY, safe='')}?a={ODD_KEY} {ODD_KEY!r}"
    body = json.dumps({"error": {"message": echo}}).encode()

    async def main() -> BaseException:
        with attached_handler(FileLogHandler(tmp_path / RUN_LOG)):
            replies = [(500, body, {"x-key": ODD_KEY}), (400, body, {})]
            async with Says(lambda _: replies.pop(0)) as server:
                pool = {"keys": {"openai": ODD_KEY}, "base_urls": {"openai": server.root}}
                client = RateLimitedClientPool(**pool).client("openai:m")
                async with RLM(client, sandbox=SANDBOX, store=store) as rlm:
                    with pytest.raises(ramify.ModelError) as caught:
                        await rlm.acompletion(f"say {ODD_KEY}", "?")
                try:
                    raise OSError(f"{ODD_KEY!r}") from caught.value
                except OSError as error:
                    ComponentLogger("engine").error("failed", f"no {ODD_KEY}", error=error)
                await client.close()
            return caught.value

    failure = asyncio.run(main())
    journal = next(tmp_path.rglob("*.jsonl")).read_text()
    texts = [(tmp_path / RUN_LOG).read_text(), journal, str(failure)]
    texts += [f"{logging.Formatter().format(record)} {vars(record)}" for record in records]
    assert "500" in texts[0]
    assert [form for form in key_forms(ODD_KEY) if any(form in text for text in texts)] == []


@pytest.mark.parametrize("before", ["", "u:", "me:", "user:"])
@pytest.mark.parametrize("after", ["", "\n", "@x"])
@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_secret_is_found_in_base64(
    before: str, after: str, encode: Callable[[bytes], bytes]
) -> None:
    secrets = SecretRedactor({"MY_KEY": ODD_KEY}, {})
    encoded = encode(f"{before}{ODD_KEY}{after}".encode()).decode()
    assert secrets.contains_secret(f'{{"text":"{encoded}"}}'.encode())
    shown = secrets.redact(encoded)
    assert "«redacted MY_KEY»" in shown
    left = shown.replace("«redacted MY_KEY»", "")
    assert len(left) <= len(encoded) - len(ODD_KEY) * 4 // 3 + 3


@pytest.mark.parametrize(
    "encode",
    [
        json.dumps,
        lambda text: json.dumps(text, ensure_ascii=False),
        lambda text: json.dumps(text).replace("/", "\\/"),
        lambda text: json.dumps(json.dumps(text, ensure_ascii=False), ensure_ascii=False),
    ],
)
def test_secret_is_found_in_json(encode: Callable[[str], str]) -> None:
    secret = 'pass/word "é" \\ 12345'
    secrets = SecretRedactor({"MY_KEY": secret}, {})
    assert encode(secret).count("12345") == 1
    assert "12345" not in secrets.redact(encode(secret))


def test_server_keys_are_redacted(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"an-odd-one").hexdigest()
    keys = ServerApiKeys({"a": ApiKey(key="anotherodd"), "b": ApiKey(sha256=digest)})
    assert keys.bearer_keys is not None
    assert keys.bearer_keys.caller_of_key("an-odd-one") == "b"
    with attached_handler(FileLogHandler(tmp_path / "log")):
        ComponentLogger("serve").info("x", "keys: anotherodd, an-odd-one")
    assert "keys: «redacted key of a», «redacted key of b»" in (tmp_path / "log").read_text()
