"""An MCP server with the single tool ``ask``, which answers questions about files.

It needs the extra ``mcp``.

    client ── ask(question, paths) ──> read files below the roots ──> run ──> answer
                                                                       └──> progress meanwhile

A path that leaves the roots, through ``..`` or a link, is rejected: the operator decides what may
be read, while a model on the client's side chooses the paths. The command line is in
``cli/serve.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
from collections.abc import Sequence
from typing import Annotated, Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, TextContent
from pydantic import Field

from ramify import __version__
from ramify.engine.answer_serialization import to_jsonable
from ramify.engine.rlm import RLM
from ramify.engine.run_result import why_unanswered
from ramify.errors import ConfigError, RamifyError
from ramify.serve.answer_request import ProgressTextCollector
from ramify.sources.load_sources import load
from ramify.sources.loaded_sources import LoadedContext
from ramify.types.trajectory import Stop

_PATIENCE_S = 15.0
"""Maximum time between two progress messages, in seconds."""
_ABOUT = """\
Answer a question over files and folders, however large: a recursive language model reads them \
with code and with calls of its own. Give one whole question, with all that it needs to be \
understood; the answer is the text. Use it where files are too many or too long to read. \
May be read: {roots}"""


def server(rlm: RLM, roots: Sequence[str]) -> MCPServer[Any]:
    """Create an MCP server with the tool ``ask``.

    The caller must enter ``rlm`` as a context manager.

    Raises ConfigError if one of the roots, the folders and files that may be read, does not exist.
    """
    real = [os.path.realpath(os.path.expanduser(root)) for root in roots]
    for name, root in zip(roots, real, strict=True):
        if not os.path.exists(root):
            raise ConfigError(f"{name} does not exist: give existing folders or files")
    app: MCPServer[Any] = MCPServer("ramify", version=__version__, log_level="ERROR")

    @app.tool(name="ask", description=_ABOUT.format(roots=", ".join(real)), structured_output=False)
    async def ask(
        question: Annotated[str, Field(description="what is to be answered")],
        ctx: Context[Any, Any],
        paths: Annotated[
            list[str] | None,
            Field(description="files, folders or globs, relative to a root or absolute; none: all"),
        ] = None,
        answer_schema: Annotated[
            dict[str, Any] | None, Field(description="JSON schema that the answer must meet")
        ] = None,
    ) -> CallToolResult:
        try:
            inside = (
                [matches for path in paths for matches in find_paths_in_roots(path, real)]
                if paths
                else real
            )
            loaded = await asyncio.to_thread(load, inside)
            return await _answer_question(rlm, ctx, loaded, question, answer_schema)
        except RamifyError as error:
            raise ToolError(str(error)) from None

    return app


async def run_stdio(rlm: RLM, roots: Sequence[str]) -> None:
    """Run the MCP server over standard input and output until the input ends."""
    app = server(rlm, roots)
    async with rlm:
        await rlm.prepare()
        await app.run_stdio_async()


def find_paths_in_roots(path: str, roots: Sequence[str]) -> list[str]:
    """Return the real paths of the files and folders that ``path`` names.

    It may contain wildcards. Paths outside the roots, the folders that may be read, are left out.
    Raises ConfigError if nothing is found inside the roots.
    """
    for root in roots:
        place = os.path.join(root, path)  # ``path`` itself if it is absolute
        matches = [place] if os.path.lexists(place) else []
        if not matches and any(char in path for char in "*?["):
            matches = sorted(glob.glob(place, recursive=True))
        inside = [
            os.path.realpath(each) for each in matches if _is_inside(os.path.realpath(each), roots)
        ]
        if inside:
            return inside
        if matches:
            raise ConfigError(
                f"{path} is outside what may be read ({', '.join(roots)}): name something inside it"
            )
    raise ConfigError(
        f"{path} does not exist in {', '.join(roots)}: check the name, or leave paths out to read "
        "all"
    )


def _is_inside(real: str, roots: Sequence[str]) -> bool:
    return any(real == root or real.startswith(root.rstrip(os.sep) + os.sep) for root in roots)


async def _answer_question(
    rlm: RLM,
    ctx: Context[Any, Any],
    loaded: LoadedContext,
    question: str,
    schema: dict[str, Any] | None,
) -> CallToolResult:
    watch = ProgressTextCollector()
    try:
        watch.begin(rlm.start(loaded, question, answer_type=schema, on_event=watch.add_event))
        count = 0
        async with contextlib.aclosing(watch.stream_texts(_PATIENCE_S)) as texts:
            async for text in texts:
                count += 1
                await ctx.report_progress(count, message=text.strip() or None)
        result = await watch.result()
    finally:
        await watch.cancel_run()
    if result.answer is None:
        raise ToolError(f"{why_unanswered(result)} (run {result.run_id})")
    about = {
        "answer": to_jsonable(result.answer),
        "stop": str(result.stop),
        "run": result.run_id,
        "cost": result.cost,
        "not_loaded": [str(problem) for problem in loaded.problems],
    }
    text = (
        result.response
        if result.stop is Stop.FINAL
        else f"{result.response}\n\n(Cut short: {result.stop}.)"
    )
    return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=about)
