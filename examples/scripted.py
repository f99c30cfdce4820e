"""Ask a recursive language model about Python's standard library: tens of megabytes, without a key
or a network.

The model is a script behind a real HTTP server on this machine that speaks the OpenAI API.
Everything else is as with a real model: the folder is read, sessions run the model's code,
sub-calls and child calls use HTTP, and the run is recorded. Only the replies are scripted; the
numbers are computed by the code in them.

    python examples/scripted.py
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from ramify import Message
from ramify.testing import ScriptedServer

QUESTION = (
    "How many public functions in asyncio lack a docstring, and in which module are most of them?"
)

LOOK = """\
The context is a dict of files. First, how large it is and what of it is asyncio.
```repl
names = sorted(name for name in context if name.startswith("asyncio/") and name.endswith(".py"))
print(f"{len(context):,} files, {sum(map(len, context.values())):,} characters; {len(names)} of them in asyncio")
print(context[names[1]][:200])
```"""

COUNT = """\
Counting is work for code; what the worst modules are for is work for a reader. I ask a child for each of the three worst.
```repl
import ast
def undocumented(source):
    tree = ast.parse(source)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    public = [n for n in ast.walk(tree) if isinstance(n, kinds) and not n.name.startswith("_")]
    return [n.name for n in public if not ast.get_docstring(n)]
missing = {name: undocumented(context[name]) for name in names}
total = sum(map(len, missing.values()))
worst = sorted(missing, key=lambda name: -len(missing[name]))[:3]
about = rlm_query_batched([f"What is this module for? ({name})" for name in worst], [context[name] for name in worst])
for name, line in zip(worst, about):
    print(f"{len(missing[name]):3} of them in {name}: {line}")
total
```"""

CHILD = """\
```repl
import ast
doc = ast.get_docstring(ast.parse(context)) or context[:400]
FINAL(llm_query("Say in one line what this module is for:\\n" + doc))
```"""

ANSWER = """\
```repl
FINAL(f"{total} public functions in asyncio have no docstring; most of them, {len(missing[worst[0]])}, in {worst[0]}.")
```"""


GOODBYE = """
The model was a script. The files, the code, its results and the counts were real.
With your own model:
  export OPENAI_API_KEY=…
  ramify ask "Which host failed first, and why?" logs/ --model openai:gpt-5-mini"""


def model(messages: tuple[Message, ...]) -> str:
    """Return the scripted reply for this point of the conversation."""
    # A request without a system message is a plain sub-call: reply with its first line.
    if messages[0].role != "system":
        return messages[-1].content.partition("\n")[2].strip().split("\n")[0]
    if "What is this module for?" in messages[1].content:
        return CHILD
    return {2: LOOK, 4: COUNT}.get(len(messages), ANSWER)


NOT_SOURCE = shutil.ignore_patterns(
    "site-packages", "dist-packages", "__pycache__", "lib-dynload", "config-*", "_bundled", "*.so"
)


async def main() -> int:
    stdlib = Path(sysconfig.get_path("stdlib"))
    with tempfile.TemporaryDirectory() as folder:
        # Copy the library without the installed packages beside it, so that the figures are
        # those of Python only.
        shutil.copytree(
            stdlib, Path(folder, stdlib.name), ignore=NOT_SOURCE, ignore_dangling_symlinks=True
        )
        # Delay each reply as a real model would, so that there is something to watch.
        async with ScriptedServer(model, latency_s=0.3) as server:
            shell = functools.partial(
                ramify, folder=folder, environment=environment(folder, server.url)
            )
            status = await shell("ask", QUESTION, f"{stdlib.name}/", "--model", "openai:demo")
            if status == 0:
                print(flush=True)
                status = await shell("show", "last")
    if status == 0:
        print(GOODBYE)
    return status


async def ramify(*words: str, folder: str, environment: dict[str, str]) -> int:
    """Print the command and run it as a user would."""
    print(f"$ ramify {shlex.join(words)}", flush=True)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ramify", *words, cwd=folder, env=environment
    )
    return await process.wait()


def environment(folder: str, url: str) -> dict[str, str]:
    """Return this process's environment without the user's settings, proxies and runs, so that the
    example does not depend on them or add to them."""
    settings = Path(folder, "config.toml")
    settings.touch()
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAMIFY_", "OPENAI_"))
    }
    own = {"RAMIFY_HOME": f"{folder}/runs", "RAMIFY_CONFIG": str(settings)}
    network = {"OPENAI_BASE_URL": url, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return inherited | own | network


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0]).parse_args()
    sys.exit(asyncio.run(main()))
