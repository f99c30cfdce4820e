"""Checks the Markdown pages: links lead somewhere, code parses, CONTRIBUTING stays short.

Decides nothing about what the pages say. Blocks marked ``python`` are compiled, ``json`` and ``toml`` are parsed, and
``bash`` or ``sh`` blocks are given to ``bash -n``; nothing is run, and links to the web are not followed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MAX_LINES = {"CONTRIBUTING.md": 79}


def main() -> int:
    tracked = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    faults = [fault for name in tracked.stdout.splitlines() for fault in check_page(ROOT / name)]
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


def check_page(page: Path) -> list[str]:
    """What is wrong with one page, one line each."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    faults = [
        f"{name}: link to {target}, which does not exist"
        for target in LINK.findall(BLOCK.sub("", text))
        if not re.match(r"[a-z]+:|#", target) and not (page.parent / target.partition("#")[0]).exists()
    ]
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start()) + 1
        code = re.sub(rf"^{block[1]}", "", block[3], flags=re.MULTILINE)
        if error := parse_error(block[2], code):
            faults.append(f"{name}:{line}: {block[2]} block does not parse: {error}")
    num_lines = len(text.splitlines())
    if num_lines > MAX_LINES.get(name, num_lines):
        faults.append(f"{name}: {num_lines} lines; keep it to {MAX_LINES[name]}")
    return faults


def parse_error(language: str, code: str) -> str:
    """Why ``code`` does not parse; empty where it does, or where the language is not checked."""
    try:
        match language:
            case "python" | "py":
                compile(code, "block", "exec")
            case "json":
                json.loads(code)
            case "toml":
                tomllib.loads(code)
            case "bash" | "sh":
                subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()
    except (SyntaxError, ValueError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
