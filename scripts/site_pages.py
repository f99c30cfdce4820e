"""Pages of the site that are made from other files: a hook of MkDocs, named in ``mkdocs.yml``.

    examples/NAME.ipynb  -> tutorials/NAME.md   cells and the outputs that are stored with them
    recipes/NAME.py      -> recipes/NAME.md     its docstring and its code
    a public namespace   -> api/NAME.md         each exported name, by mkdocstrings
    CHANGELOG.md         -> changelog.md
    docs/renames.tsv     -> rows of renames.md

A link in any page names a file of the repository, so that it also works outside the site;
``on_page_markdown`` turns it into a link to the page made from that file. Nothing is executed here:
``tests/docs/test_notebooks.py`` runs the notebooks.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
NAMESPACES = [
    "ramify",
    "ramify.tasks",
    "ramify.evaluate",
    "ramify.train",
    "ramify.inference",
    "ramify.testing",
    "ramify.plans",
    "ramify.ray",
]
_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
_SOURCES: dict[str, str] = {}
"""Page -> the file of the repository that it is made from."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from other files."""
    made = {
        "changelog.md": ("CHANGELOG.md", (ROOT / "CHANGELOG.md").read_text("utf-8")),
        "recipes/index.md": ("recipes", recipe_list()),
    }
    for path in sorted(ROOT.glob("examples/*.ipynb")):
        made[f"tutorials/{path.stem}.md"] = (f"examples/{path.name}", notebook_page(path))
    for path in sorted(ROOT.glob("recipes/*.py")):
        made[f"recipes/{path.stem}.md"] = (f"recipes/{path.name}", recipe_page(path))
    for name in NAMESPACES:
        made[f"api/{name}.md"] = (f"ramify/{name}", namespace_page(name))
    for uri, (source, content) in made.items():
        _SOURCES[uri] = source
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to files of the repository lead to the pages made from them."""
    uri = page.file.src_uri
    if uri == "renames.md":
        markdown = markdown.replace("<!-- renames.tsv -->", rename_table())
    pages = {source: made for made, source in _SOURCES.items()}
    folder = posixpath.dirname(_SOURCES.get(uri, f"docs/{uri}"))

    def led(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        if target not in pages and (uri not in _SOURCES or not target.startswith("docs/")):
            return match[1]
        made = pages.get(target, target.removeprefix("docs/"))
        return posixpath.relpath(made, posixpath.dirname(uri) or ".")

    return _LINK.sub(led, markdown)


def notebook_page(path: Path) -> str:
    """Cells of a notebook as Markdown, with the text and the pictures that they printed."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif source:
            parts.append(_fenced(source, "python"))
            parts += _shown(cell["outputs"])
    name = path.relative_to(ROOT).as_posix()
    parts.append(f"---\n\nThis page is the notebook `{name}`; tests execute it.")
    return "\n\n".join(parts) + "\n"


def _shown(outputs: list[dict[str, Any]]) -> list[str]:
    """What a cell printed, in one block, and its pictures."""
    printed, pictures = "", []
    for output in outputs:
        data = output.get("data", {})
        if "image/png" in data:
            image = "".join(data["image/png"]).strip()
            pictures.append(f"![output](data:image/png;base64,{image})")
        elif output.get("name") != "stderr":
            printed += "".join(output.get("text") or data.get("text/plain") or "")
    return [_fenced(printed, "text")] * bool(printed.strip()) + pictures


def _fenced(code: str, language: str) -> str:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", code)), default=0))
    return f"{fence}{language}\n{code.rstrip()}\n{fence}"


def recipe_page(path: Path) -> str:
    code = path.read_text("utf-8")
    return f"# {path.name}\n\n{_first_sentence(code)}\n\n{_fenced(code, 'python')}\n"


def recipe_list() -> str:
    rows = [
        f"- [{path.name}](recipes/{path.name}): {_first_sentence(path.read_text('utf-8'))}"
        for path in sorted(ROOT.glob("recipes/*.py"))
    ]
    return (
        "# Recipes\n\nA recipe is a Python file whose `run()` returns a `Run`. These are in the "
        "folder `recipes/`.\n\n" + "\n".join(rows) + "\n"
    )


def _first_sentence(code: str) -> str:
    docstring = ast.get_docstring(ast.parse(code)) or ""
    return " ".join(re.split(r"\n\n|:\n", docstring)[0].split())


def rename_table() -> str:
    """Rows of ``docs/renames.tsv``, as a table sorted by the old name."""
    lines = (ROOT / "docs/renames.tsv").read_text("utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    cells = [f"| `{old}` | `{new}` | {kind} | {where} |" for kind, where, old, new in rows]
    head = ["| before | now | kind | where |", "|---|---|---|---|"]
    return "\n".join([*head, *sorted(cells, key=str.lower)])


def namespace_page(name: str) -> str:
    """The docstring of a public namespace and every name that it exports."""
    module = importlib.import_module(name)
    parts = [f"# {name}", inspect.getdoc(module) or ""]
    for each in sorted(module.__all__):
        if inspect.ismodule(getattr(module, each)):
            parts.append(f"## {each}\n\nThe namespace [{name}.{each}]({name}.{each}.md).")
        else:
            parts.append(f"::: {name}.{each}")
    return "\n\n".join(parts) + "\n"
