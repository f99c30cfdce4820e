"""``ramify serve-policy``: an OpenAI-compatible server for one local policy.

Not here: the server itself (see ramify/serve/policy.py).
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ramify.cli.parser import CommandSpec, ExitCode, OptionSpec, UsageError
from ramify.cli.progress_screen import ProgressScreen, form_of
from ramify.cli.stop_signals import on_stop
from ramify.cli.terminal_text import StderrNotes, write
from ramify.log_outputs import join_run
from ramify.logging import RoomLogger
from ramify.progress import report_progress

if TYPE_CHECKING:
    from ramify.inference.local.local_client import LocalClient
    from ramify.serve.policy import PolicyServer

_KEY = "RAMIFY_SERVE_KEY"
_log = RoomLogger("serve")


def serve_policy(
    words: list[str],
    host: str | None = None,
    port: int | None = None,
    api_key: str | None = None,
    name: str | None = None,
    slots: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    thinking: bool | None = None,
    weight_transfer: bool | None = None,
    weight_sync: str | None = None,
    weights_root: str | None = None,
) -> int:
    from ramify.inference.base import TINY, need_train_extra

    need_train_extra("serve-policy")
    if slots is not None and slots < 1:
        raise UsageError(f"--slots {slots}: give at least 1")
    if weights_root is not None and not Path(weights_root).is_dir():
        raise UsageError(f"--weights-root {weights_root}: no such folder")
    if api_key == "":
        raise UsageError("--api-key is empty: give a key, or remove it")
    if weight_sync:
        from ramify.inference.weight_sync import WEIGHT_SYNCS

        WEIGHT_SYNCS.of(weight_sync)
    folder = str(TINY) if words[0] == "tiny" else words[0].removeprefix("local:")

    join_run(f"engine at port {8000 if port is None else port}")
    notes = StderrNotes()
    notes.take_warnings()
    with ProgressScreen(notes, form_of(None, notes)):
        with report_progress("starting"):
            import torch

            from ramify.inference.local.local_client import LocalClient
            from ramify.models.load import load_policy
            from ramify.serve.policy import PolicyServer

        torch_dtype = None if dtype is None else getattr(torch, dtype, None)
        if dtype is not None and torch_dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UsageError(f"--dtype {dtype}: give float32, bfloat16 or float16")
        policy = load_policy(folder, torch_dtype, device, thinking=thinking)
    client = LocalClient(policy, slots=slots)
    server = PolicyServer(
        client,
        name=name or words[0],
        host=host or "127.0.0.1",
        port=8000 if port is None else port,
        key=api_key or os.environ.get(_KEY) or None,
        weight_transfer=bool(weight_transfer),
        weight_syncs=[weight_sync] if weight_sync else [],
        weights_root=Path(weights_root) if weights_root else None,
    )
    asyncio.run(_serve(server, client))
    return ExitCode.ANSWERED


async def _serve(server: PolicyServer, client: LocalClient) -> None:
    stopped = asyncio.Event()
    on_stop(stopped.set)
    async with server:
        write(f"{server.name} at {server.url} (Ctrl-C to stop)")
        _log.info("engine_ready", f"the engine answers at {server.url}", engine=server.url)
        await stopped.wait()
    await client.close()


COMMAND = CommandSpec(
    name="serve-policy",
    about="Serve a policy over an OpenAI-compatible API, with token ids and log-probabilities.",
    run=serve_policy,
    words="FOLDER",
    min_words=1,
    max_words=1,
    options=(
        OptionSpec(
            "host", str, "address to listen on (default: 127.0.0.1; others need a key)", "HOST"
        ),
        OptionSpec("port", int, "port to listen on; 0 picks a free one (default: 8000)"),
        OptionSpec("api_key", str, f"key that clients must send (default: ${_KEY})", "KEY"),
        OptionSpec("name", str, "model name in requests (default: FOLDER)"),
        OptionSpec(
            "slots", int, "maximum concurrent replies (default: 128 on a CPU, 256 on a GPU)"
        ),
        OptionSpec("device", str, "cpu, cuda or cuda:1 (default: a GPU if there is one)", "DEVICE"),
        OptionSpec(
            "dtype",
            str,
            "float32, bfloat16 or float16 (default: float32 on a CPU, else as stored)",
            "TYPE",
        ),
        OptionSpec(
            "weight_transfer",
            bool,
            "let clients replace the weights, as a trainer does (default: no)",
        ),
        OptionSpec(
            "weight_sync",
            str,
            "your own weight sync class that a trainer may use, as module:Class",
            "CLASS",
        ),
        OptionSpec(
            "weights_root",
            str,
            "load weight files only from below FOLDER (default: from anywhere)",
            "FOLDER",
        ),
        OptionSpec(
            "thinking",
            bool,
            "turn thinking of a hybrid model on or off (default: as in its template)",
        ),
    ),
    epilog=(
        "FOLDER is a checkpoint in Hugging Face format, a model in the Hugging Face cache, or tiny."
    ),
)
