"""The command ``ramify serve-policy``: start an OpenAI-compatible server for one local policy.

The server itself is in ``ramify/serve/policy_server.py``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramify.cli.listen_options import (
    client_access_key,
    listen_address,
    listen_options,
    print_server_address,
)
from ramify.cli.parser import CliOptionSpec, ExitCode, SubcommandSpec, UsageError
from ramify.cli.progress_display import ProgressDisplay, choose_display_form
from ramify.cli.stop_signals import add_stop_handler
from ramify.cli.terminal_text import StderrMessageWriter
from ramify.cli.traffic_recording_options import (
    RECORD_OPTIONS,
    open_recorder,
    parse_recording_options,
)
from ramify.logging import ComponentLogger, join_parent_run_log
from ramify.progress import track_progress

if TYPE_CHECKING:
    from ramify.inference.local.local_client import LocalClient
    from ramify.serve.policy_server import PolicyServer
    from ramify.serve.traffic_recorder import ServedTrafficRecorder

PORT = 8000
_log = ComponentLogger("serve")


def serve_policy(
    words: list[str],
    name: str | None = None,
    slots: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    thinking: bool | None = None,
    weight_transfer: bool | None = None,
    weight_sync: str | None = None,
    weights_root: str | None = None,
    enable_return_routed_experts: bool | None = None,
    **more: Any,
) -> int:
    from ramify.inference.base import require_train_extra
    from ramify.trained_policy_settings import packaged_policy_folder

    require_train_extra("serve-policy")
    if slots is not None and slots < 1:
        raise UsageError(f"--slots {slots}: give at least 1")
    if weights_root is not None and not Path(weights_root).is_dir():
        raise UsageError(f"--weights-root {weights_root}: no such folder")
    if weight_sync:
        from ramify.inference.weight_sync import WEIGHT_SYNCS

        WEIGHT_SYNCS.resolve(weight_sync)
    address = listen_address(more, "serve-policy", PORT)
    key = client_access_key(more)
    recording = parse_recording_options(more)
    folder = str(packaged_policy_folder(words[0]) or words[0].removeprefix("local:"))

    join_parent_run_log(f"engine at port {address.port}")
    notes = StderrMessageWriter()
    notes.show_warnings_and_logs()
    with ProgressDisplay(notes, choose_display_form(None, notes)):
        with track_progress("starting"):
            import torch

            from ramify.http_server.machine_capacity import raise_descriptor_limit
            from ramify.inference.local.local_client import LocalClient
            from ramify.models.load import load_policy
            from ramify.serve.policy_server import PolicyServer

        torch_dtype = None if dtype is None else getattr(torch, dtype, None)
        if dtype is not None and torch_dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UsageError(f"--dtype {dtype}: give float32, bfloat16 or float16")
        policy = load_policy(folder, torch_dtype, device, thinking=thinking)
    raise_descriptor_limit()
    client = LocalClient(policy, slots=slots)
    if enable_return_routed_experts:
        client.report_routes()
    recorder = (
        None if recording is None else open_recorder(more["record"], recording, policy, notes)
    )
    server = PolicyServer(
        client,
        name=name or words[0],
        address=address,
        key=key,
        weight_transfer=bool(weight_transfer),
        weight_syncs=[weight_sync] if weight_sync else [],
        weights_root=Path(weights_root) if weights_root else None,
        recorder=recorder,
    )
    asyncio.run(_serve(server, client, recorder, "" if key else server.key))
    return ExitCode.ANSWERED


async def _serve(
    server: PolicyServer, client: LocalClient, recorder: ServedTrafficRecorder | None, new_key: str
) -> None:
    stopped = asyncio.Event()
    add_stop_handler(stopped.set)
    async with server:
        print_server_address(server.name, server.url, server.address, new_key)
        _log.info("engine_ready", f"the engine answers at {server.url}", engine=server.url)
        await stopped.wait()
    if recorder is not None:
        await recorder.close()
    await client.close()


COMMAND = SubcommandSpec(
    name="serve-policy",
    about="Serve a policy over an OpenAI-compatible API, with token ids and log-probabilities.",
    run=serve_policy,
    words="FOLDER",
    min_words=1,
    max_words=1,
    options=(
        *listen_options(PORT),
        CliOptionSpec("name", str, "model name in requests (default: FOLDER)"),
        CliOptionSpec(
            "slots", int, "maximum concurrent replies (default: 128 on a CPU, 256 on a GPU)"
        ),
        CliOptionSpec(
            "device", str, "cpu, cuda or cuda:1 (default: a GPU if there is one)", "DEVICE"
        ),
        CliOptionSpec(
            "dtype",
            str,
            "float32, bfloat16 or float16 (default: float32 on a CPU, else as stored)",
            "TYPE",
        ),
        CliOptionSpec(
            "weight_transfer",
            bool,
            "let clients replace the weights, as a trainer does (default: no)",
        ),
        CliOptionSpec(
            "weight_sync",
            str,
            "your own weight sync class that a trainer may use, as module:Class",
            "CLASS",
        ),
        CliOptionSpec(
            "weights_root",
            str,
            "load weight files only from below FOLDER (default: from anywhere)",
            "FOLDER",
        ),
        CliOptionSpec(
            "enable_return_routed_experts",
            bool,
            "report which experts a mixture-of-experts model uses for each token (default: no)",
        ),
        CliOptionSpec(
            "thinking",
            bool,
            "turn thinking of a hybrid model on or off (default: as in its template)",
        ),
        *RECORD_OPTIONS,
    ),
    epilog=(
        "FOLDER is a checkpoint in Hugging Face format, a model in the Hugging Face cache, or the "
        "small model tiny."
    ),
)
