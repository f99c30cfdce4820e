"""Every code block of the pages is run or states why not; other claims of the pages are checked."""

import ast
import asyncio
import inspect
import logging
import os
import re
import subprocess

import msgspec
import pytest
import yaml

import ramify
from ramify.clients.providers import PriceTable
from ramify.evaluate.attempt import attempt
from ramify.tasks.mixture import TaskMixturePart
from ramify.testing.scripted_client import ScriptedClient
from tests.docs import world
from tests.docs.pages import ALL, PAGES, ROOT, Block, prose, script

RUN = [block for block in ALL if not block.why_not]
SHELL = [block for block in RUN if block.language == "bash"]
PYTHON = sorted({block.page for block in RUN if block.language == "python"})
JSON = [block for block in RUN if block.language == "json"]
NAMED_RUN = "20260301-142501"
"""A run that the pages show as an example."""


@pytest.fixture(scope="module")
def url():
    with world.scripted() as served:
        yield served


@pytest.fixture
def reader(tmp_path, url, monkeypatch):
    """The environment of a reader whose folder has the files that the pages name."""
    world.furnish(tmp_path)
    found = world.environment(tmp_path, url)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as Python does with the reader's folder
    for name in os.environ.keys() - found.keys():
        monkeypatch.delenv(name)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


def test_every_block_is_run_or_states_a_reason():
    known = ("bash", "python", "json", "toml")  # toml: tests/cli/test_docs.py has the only one
    assert [block.place for block in RUN if block.language not in known] == []
    assert {block.page for block in RUN} == {
        "README.md",
        "agents.md",
        "algorithms.md",
        "ask.md",
        "cli.md",
        "environments.md",
        "evaluate.md",
        "library.md",
        "map.md",
        "models.md",
        "objectives.md",
        "plans.md",
        "plugins.md",
        "quickstart.md",
        "sandbox.md",
        "scale.md",
        "signals.md",
        "suites.md",
        "tasks.md",
        "traffic.md",
        "watching.md",
    }


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.place)
def test_shell_block_runs(block: Block, reader):
    """Run each line separately, so that a failure names it, after one run that can be shown,
    resumed and deleted."""
    first = [
        "ramify",
        "ask",
        "--model",
        "openai:m",
        "--no-direct",
        "Which host failed first?",
        "server.log",
        "--quiet",
    ]
    subprocess.run(first, env=reader, check=True, timeout=200)
    (run,) = (
        os.listdir(f"{reader['RAMIFY_HOME']}/runs")
        if os.path.isdir(f"{reader['RAMIFY_HOME']}/runs")
        else ["?"]
    )
    reader["RAMIFY_MODEL"] = (
        "openai:gpt-5-mini"  # most examples leave the model to the configuration
    )
    for line in block.code.splitlines():
        line = line.replace(NAMED_RUN, run.removesuffix(".jsonl")).replace(".venv/bin/", "")
        if line.startswith("export "):
            continue  # a key; the reader has one
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            env=reader,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, f"{block.place}: {line}\n{done.stderr}"
        assert done.stdout.strip() or "runs" in line, f"{block.place}: {line} says nothing"


@pytest.mark.parametrize("page", PYTHON)
def test_python_blocks_of_page_run(page, reader):
    """The blocks of a page in order, in one namespace, as a reader would paste them."""
    if page == "environments.md":
        pytest.importorskip("verifiers")
    namespace = {"__name__": "__main__"}
    for block in RUN:
        if (block.page, block.language) == (page, "python"):
            padded = (
                "\n" * (block.line - 1) + block.code
            )  # so that a traceback has the page's lines
            code = compile(padded, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            started = eval(code, namespace)
            if inspect.iscoroutine(started):
                asyncio.run(started)
    if page == "evaluate.md":
        assert [outcome.error for outcome in namespace["found"].outcomes] == [""] * 4
    elif page == "map.md":
        assert [row["answer"] for row in namespace["result"].table] == ["web-3", "web-3"]
    elif page == "watching.md":
        ours = logging.getLogger("ramify.clients")
        assert ours.level == logging.INFO
        ours.setLevel(logging.NOTSET)  # as it was
    elif page == "agents.md":
        assert namespace["run"]().task.options["items"][3] == {"question": "3 + 3 = ?", "answer": 6}
        task = namespace["task"]
        rlm = ramify.RLM(ScriptedClient(lambda messages: "5"))
        played = asyncio.run(attempt(rlm, task, task.splits["train"][0]))
        assert played.rewards == {"correct": 1.0}
    elif page == "signals.md":
        assert list(namespace["rl"].signals) == ["process", "teacher"]
    elif page == "traffic.md":
        assert namespace["rl"].signals["next"].hints.only == "failed"
    elif page == "tasks.md":
        assert namespace["task"].name == "dataset"
    elif page == "environments.md":
        start = asyncio.run(namespace["task"].prepare(namespace["splits"]["test"][3]))
        assert start.about.startswith("row 0, column 0: S\n`step(action)` does one action")
        assert namespace["sums"].splits["train"][8].question == "10 + 2?"
    elif page == "scale.md":
        assert namespace["placement"].rollouts.count == 8
        assert namespace["services"]["judge"].variable == "VLLM_BASE_URL"
    elif page == "plugins.md":
        assert namespace["task"].name == "colors"
    elif page == "suites.md":
        assert namespace["TEAL"].read("How many words are 'teal' here?", "teal mint teal") == "2"
        assert namespace["item"].id == "niah/test/0"
    elif page == "objectives.md":
        assert namespace["rl"].steps == 200
    elif page == "plans.md":
        assert namespace["result"].response == "web-3"
        assert namespace["counted"].answer == {"disk": 2, "other": 1}
    elif page == "algorithms.md":
        # Remove what the page registered, so that later tests do not find it.
        for table, name in (
            ("ALGORITHMS", "median"),
            ("POLICY_LOSSES", "bounded"),
            ("CREDITS", "deep"),
        ):
            assert name in namespace[table]
            namespace[table].reset()
    else:
        assert namespace["result"].response == "web-3"


@pytest.mark.parametrize("block", JSON, ids=lambda block: block.place)
def test_json_block_loads(block: Block, tmp_path):
    """A price table, the parts of a mixture, or a script."""
    path = tmp_path / "shown.json"
    path.write_text(block.code)
    if isinstance(msgspec.json.decode(block.code), list):
        client = ScriptedClient.load(str(path))
        assert client.name == f"scripted:{path}"
        sandbox = ramify.SandboxSpec(provider="inprocess", allow_weaker=True)
        with ramify.RLM(client, sandbox=sandbox) as rlm:
            result = rlm.completion("six times seven", "How many characters?", direct=False)
        # What the script gives, or what its code counted.
        assert (result.stop, result.answer in (42, 15)) == (ramify.Stop.FINAL, True)
    elif "task" in block.code:
        assert len(msgspec.json.decode(block.code, type=dict[str, TaskMixturePart])) == 4
    else:
        table = PriceTable.load(path)
        price = table.price("openai:gpt-5-mini")
        assert (price.input, price.output) == (0.25, 2.0)


def test_navigation_lists_every_page_once():
    """A page outside the navigation is built and searched, but no reader comes by it."""

    def entries(node):
        if isinstance(node, str):
            return [node]
        children = node.values() if isinstance(node, dict) else node
        return [entry for child in children for entry in entries(child)]

    listed = entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    pages = [path.name for path in (ROOT / "docs").glob("*.md")]
    recipes = [f"recipes/{path.stem}.md" for path in (ROOT / "recipes").glob("*.py")]
    tutorials = [f"tutorials/{path.stem}.md" for path in (ROOT / "examples").glob("*.ipynb")]
    namespaces = [f"api/{name}.md" for name in script("site_pages").NAMESPACES]
    made = ["changelog.md", "recipes/index.md"]
    assert sorted(listed) == sorted([*pages, *recipes, *tutorials, *namespaces, *made])


def test_every_public_name_is_documented():
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in ramify.__all__ if not re.search(rf"\b{name}\b", pages)] == []


def test_examples_import_only_public_names():
    """Pages, tutorials, recipes and examples import nothing deeper than, say, ``ramify.train``."""
    folders = [*PAGES, *ROOT.glob("examples/*"), *ROOT.glob("recipes/*.py")]
    deep = {
        path.name: found
        for path in folders
        if path.is_file() and path.name not in ("log.md", "log-archive.md", "renames.md")
        if (found := re.findall(r"(?:from|import) ramify\.\w+\.\w+", path.read_text("utf-8")))
    }
    assert deep == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_has_no_local_paths_or_placeholders(page):
    """Pages describe what exists: no paths of one machine, no tools that made them, no promises."""
    text = prose(page)
    unwanted = r"(?i)/(?:root|work|home|tmp|Users|opt)/\w|\bpypi\.\w+\.\w|\bTODO\b|\bFIXME\b|\bcoming soon\b|Claude Code"
    assert re.findall(unwanted, text) == []
