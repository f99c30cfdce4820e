"""Export of one run to an HTML file that works offline, with the script, styles and data inside.

The file's Content-Security-Policy allows only this script and this style sheet, by their hashes.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ramify.errors import StoreError
from ramify.viewer.page_script import STATIC, app, hashed
from ramify.viewer.picture import picture
from ramify.viewer.run_locations import LocatedRun
from ramify.viewer.transcript import tokenizer_of, tokens, transcript
from ramify.viewer.watched_run import WatchedRun

MAX_TEXT = 100_000
"""Maximum characters of one text in the file; the rest is cut."""


def page(located: LocatedRun) -> bytes:
    """Content of the HTML file. Raises StoreError if nothing of the run can be read."""
    run = WatchedRun(located)
    run.refresh()
    if not run.tree.order and (problem := run.problem or run.damage):
        raise StoreError(problem)
    script, style = app(), (STATIC / "style.css").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {hashed(script)}; style-src {hashed(style)}; img-src "
        "data:; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="dark light">\n'
        f"<title>Ramify</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<header id="top"></header>\n<main id="page" tabindex="-1"></main>\n'
        f'<script type="application/json" id="ramify-data">{_harmless(data(run))}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    ).encode("utf-8", "backslashreplace")


def data(run: WatchedRun) -> dict[str, Any]:
    """All data that the page would otherwise request from the server."""
    calls, token_views = {}, {}
    for node in run.tree.order:
        try:
            calls[node.id] = transcript(run, node.id, max_text=MAX_TEXT)
        except StoreError:  # damaged: the page shows that it is missing
            continue
        for index, turn in enumerate(run.whole(node.id).call.turns):
            if turn.reply.token_ids:
                token_views[f"{node.id}/{index}"] = tokens(
                    run, node.id, index, tokenizer_of(run, [node.model])
                )
    shown = picture(run)
    shown["head"]["alive"] = False
    return {"picture": shown, "calls": calls, "tokens": token_views}


def _harmless(value: Any) -> str:
    """JSON that an HTML parser cannot mistake for an end tag or a comment."""
    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(value))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
