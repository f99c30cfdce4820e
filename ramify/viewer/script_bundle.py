"""Bundle the viewer's JavaScript modules into one script, or into one HTML file that opens offline.

No build step is needed.

A browser would load twenty modules six at a time, and only then the page's data. A page opened from
disk cannot import modules at all. Therefore ``main.js`` and everything that it imports become one
script, ``app.js``: the modules one after another, without their import lines. This requires that
the names in all modules are distinct, which a test checks. Modules that are imported on demand stay
separate files, and import from ``app.js``.

One run, or one matrix, can also be exported to an HTML file that works offline, with the script,
styles and data inside. The file's Content-Security-Policy allows only this script and this style
sheet, by their hashes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import StoreError
from ramify.viewer.provenance import provenance
from ramify.viewer.run_lookup import LocatedRun
from ramify.viewer.run_overview import run_overview
from ramify.viewer.shown_sources import source_excerpt, sources
from ramify.viewer.sibling_code import compare_sibling_code
from ramify.viewer.transcript import call_transcript, find_tokenizer_file, tokens
from ramify.viewer.watched_run import WatchedRun

STATIC = Path(__file__).parent / "static"
APP = "app.js"
_IMPORT = re.compile(r'^import (\w+|\{[^}]*\}) from "\./(.+?)";\n', re.MULTILINE)
"""Matches an import statement. The formatter puts an import of many names on several lines."""
ON_DEMAND = (
    "markdown.js",
    "latex.js",
    "languages.js",
    "report.js",
    "share.js",
    "sibling_code.js",
)
"""Modules that a run's page imports on demand, and that an exported file contains."""
_VENDOR_EXPORTS = re.compile(r"export\s*\{([^}]*)\};?")
_VENDOR_EXPORT = re.compile(
    r"export\s*(?:\{\s*(\w+) as default\s*\}|default (?!class\b)(\w+));?|export default (?=class\b)"
)


def app_script() -> str:
    """Return the source of ``app.js``: ``main.js`` preceded by all the modules that it imports."""
    return "".join(f"// --- {name}\n{source}\n" for name, source in _modules().items())


def early_script() -> str:
    """Return the script that runs before all others, because it is inlined in the page.

    It requests the run's data before the other scripts load, because the data takes longest to
    arrive.
    """
    return (STATIC / "early.js").read_text(encoding="utf-8")


def module_source(name: str) -> str:
    """Return the source of a JavaScript module that is imported on demand.

    Its imports are redirected to ``app.js``.
    """
    source = (STATIC / name).read_text(encoding="utf-8")
    return _IMPORT.sub(
        lambda match: match[0].replace(match[2], APP) if match[2] in _modules() else match[0],
        source,
    )


def csp_hash(text: str) -> str:
    """Return the hash of a script or style sheet for a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def _modules() -> dict[str, str]:
    done: dict[str, str] = {}
    _add("main.js", done)
    return done


def _add(name: str, done: dict[str, str]) -> None:
    """Add a JavaScript module to the bundle ``done``, after all modules that it imports."""
    source = (STATIC / name).read_text(encoding="utf-8")
    for names, other in _IMPORT.findall(source):
        if other in done:
            continue
        if other.startswith("vendor/"):
            done[other] = _wrap_vendor_module(names, (STATIC / other).read_text(encoding="utf-8"))
        else:
            _add(other, done)
    done[name] = _IMPORT.sub("", source)


def bundle_modules(on_demand: Sequence[str]) -> str:
    """Return the source of ``app.js`` combined with the modules ``on_demand``.

    A page would otherwise import these modules only when it needs them.
    """
    done = dict(_modules())
    main = done.pop("main.js")
    for name in on_demand:
        _add(name, done)
    done["main.js"] = main  # it begins to draw
    return "".join(f"// --- {name}\n{source}\n" for name, source in done.items())


def _wrap_vendor_module(name: str, source: str) -> str:
    """Convert a third-party JavaScript module to code that defines its exports as constants.

    ``name`` is the name in the page's import statement. Named exports are given in braces: ``{
    names }``.
    """
    if name.startswith("{"):
        exports = _VENDOR_EXPORTS.findall(source)[-1]
        pairs = (each.split(" as ") for each in exports.split(","))
        object = ", ".join(f"{pair[-1].strip()}: {pair[0].strip()}" for pair in pairs)
        body = _VENDOR_EXPORTS.sub(lambda _: f"return {{ {object} }};", source)
        return f"const {name} = (() => {{\n{body}\n}})();"
    body = _VENDOR_EXPORT.sub(_to_return_statement, source)
    return f"const {name} = (() => {{\n{body}\n}})();"


def _to_return_statement(match: re.Match[str]) -> str:
    value = match[1] or match[2]
    return f"return {value};" if value else "return "  # a class follows


MAX_TEXT = 100_000
"""Maximum characters of one text in the file. Longer texts are cut off."""


def offline_run_page(located: LocatedRun) -> bytes:
    """Return an HTML file that shows a run without a server.

    Raises StoreError if no part of the run can be read.
    """
    run = WatchedRun(located)
    run.refresh()
    if not run.tree.order and (problem := run.problem or run.damage):
        raise StoreError(problem)
    return offline_page(offline_run_data(run), ON_DEMAND)


def offline_page(data: dict[str, Any], on_demand: Sequence[str]) -> bytes:
    """Return an HTML file that contains ``data`` and the JavaScript modules that show it."""
    script, style = bundle_modules(on_demand), (STATIC / "style.css").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {csp_hash(script)}; style-src {csp_hash(style)}; img-src "
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
        f'<script type="application/json" id="ramify-data">{_encode_for_html(data)}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    ).encode("utf-8", "backslashreplace")


def offline_run_data(run: WatchedRun) -> dict[str, Any]:
    """Return all data of a run that the page would otherwise request from the server."""
    calls, token_views, links, siblings = {}, {}, {}, {}
    for node in run.tree.order:
        try:
            calls[node.id] = call_transcript(run, node.id, max_text=MAX_TEXT)
            links[node.id] = provenance(run, node.id)
            if node.outlier:
                siblings[node.id] = compare_sibling_code(run, node.id)
        except StoreError:  # damaged: the page shows that it is missing
            continue
        for index, turn in enumerate(run.call_detail(node.id).call.turns):
            if turn.reply.token_ids:
                token_views[f"{node.id}/{index}"] = tokens(
                    run, node.id, index, find_tokenizer_file(run, [node.model])
                )
    shown = run_overview(run)
    shown["head"]["alive"] = False
    return {
        "picture": shown,
        "calls": calls,
        "tokens": token_views,
        "provenance": links,
        "siblings": siblings,
        "sources": sources(run),
        "cited": _cited_texts(run, shown["head"]["citations"]),
    }


def _cited_texts(run: WatchedRun, citations: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the source text around each citation in an answer.

    Its key combines the name of the cited text and the first cited line, as in ``report.txt/12``.
    """
    found = {}
    for each in citations:
        name, line = each["source"], each["first_line"]
        try:
            found[f"{name}/{line}"] = source_excerpt(run, name, line)
        except StoreError:  # deleted, or too large: the page shows the citation alone
            continue
    return found


def _encode_for_html(value: Any) -> str:
    """Encode a value as JSON that is safe to embed in HTML, because it has no end tags or
    comments."""
    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(value))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
