"""Provide the harness that lets Ramify run ``verifiers`` environments in its own process.

It is the library's own chat program, run in this process.

The library's ``null`` harness starts this program in a new process for each segment of a rollout,
in an environment that ``uv`` installs. Here the same code runs in the event loop of the run. The
conversation is the same, but a rollout needs no extra process, no network and no ``uv``. The
program sends requests to the model and calls the tools of the task. It adds no tools and executes
no code.

Which harness an agent of an environment gets is decided in ``verifiers_episodes.py``.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import ssl
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import Any

from ramify.tasks.verifiers import verifiers_v1

HARNESS_ID = "ramify_chat"
"""Module name by which the verifiers library finds the chat harness."""


@functools.cache
def register_chat_harness() -> str:
    """Register the in-process chat harness with the ``verifiers`` library, and return its id."""
    vf = verifiers_v1()
    null = importlib.import_module("verifiers.v1.harnesses.null")
    launch = importlib.import_module("verifiers.v1.harnesses.utils.launch")
    program = compile(launch.CHAT_PROGRAM_SOURCE, "<chat program of verifiers>", "exec")

    class InProcessChatHarness(null.NullHarness):  # type: ignore[misc,name-defined]
        """A harness that runs the chat program of ``verifiers`` in this process instead of a new
        one."""

        async def setup(self, runtime: Any) -> None:
            """Do nothing, because a chat program in this process needs no setup."""

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
            tool_interception_url: str | None = None,
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            servers = {
                name: {"url": url, "timeout": self.config.tool_timeout}
                for name, url in mcp_urls.items()
            }
            arguments = {
                "base_url": endpoint,
                "api_key": secret,
                "model": ctx.model,
                "system_prompt": system or "",
                "prompt": prompt if isinstance(prompt, str) else "",
                "mcp_config": json.dumps({"mcpServers": servers}) if servers else "",
                "tool_interception_url": tool_interception_url or "",
                **dict.fromkeys(("bash", "compaction", "edit", "search"), False),
                "summarize_at_tokens": None,
                "serper_key": "",
            }
            with tempfile.TemporaryDirectory(prefix="ramify-verifiers-") as folder:
                arguments["initial_messages_file"] = _write_messages(folder, prompt)
                return await _run(arguments)

    async def _run(arguments: dict[str, Any]) -> Any:
        """Run the chat program of the ``verifiers`` library once in this process.

        Its exit code and errors are returned as if it had run in a separate process.
        """
        names: dict[str, Any] = {"__name__": "chat_program"}
        exec(program, names)
        make, clients = names["DefaultAsyncHttpxClient"], []

        def connected(**_: Any) -> Any:
            clients.append(make(verify=_certificates()))
            return clients[-1]

        names["DefaultAsyncHttpxClient"] = connected
        names["parse_args"] = lambda: argparse.Namespace(**arguments)
        code, problem = 0, ""
        try:
            await names["main"]()
        except SystemExit as exit:
            code, problem = exit.code if isinstance(exit.code, int) else 1, traceback.format_exc()
        except Exception:  # noqa: BLE001 -- as the end of a process, which the library judges
            code, problem = 1, traceback.format_exc()
        finally:
            for client in clients:  # those of a process end with it
                await client.aclose()
        return vf.ProgramResult(exit_code=code, stdout="", stderr=problem)

    module = types.ModuleType(HARNESS_ID)
    module.__dict__.update(
        InProcessChatHarness=InProcessChatHarness, __all__=["InProcessChatHarness"]
    )
    sys.modules[HARNESS_ID] = module
    return HARNESS_ID


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Load the system's trusted certificate authorities into a TLS context.

    It is cached, because reading them takes a fifth of a second.
    """
    return ssl.create_default_context()


def _write_messages(folder: str, prompt: Any) -> str:
    """Write a prompt's messages to a file in ``folder``, and return the file's path.

    Return an empty string if the prompt is plain text or missing.
    """
    if prompt is None or isinstance(prompt, str):
        return ""
    to_wire = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire
    path = Path(folder, "messages.json")
    path.write_text(json.dumps([to_wire(message) for message in prompt]), "utf-8")
    return str(path)
