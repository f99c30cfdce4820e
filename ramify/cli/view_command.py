"""The command ``ramify view``: serve the run viewer until Ctrl-C, or export one run as an offline
HTML file.

The server is in ``ramify/viewer/view_server.py``, and the exported page is made by
``ramify/viewer/script_bundle.py``.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ramify.cli.listen_options import client_access_key, listen_address, listen_options
from ramify.cli.parser import CliOptionSpec, ExitCode, SubcommandSpec, UsageError
from ramify.cli.stop_signals import add_stop_handler
from ramify.cli.terminal_text import write_stderr
from ramify.errors import ConfigError, StoreError
from ramify.training_run_recognition import is_viewable_folder, training_run_hint

if TYPE_CHECKING:
    from ramify.viewer.run_catalog import RunCatalog
    from ramify.viewer.view_server import ViewServer

PORT = 8765
_SWITCH_S = 5e-4
"""Python's thread switch interval in seconds for the viewer. A thread that reads a journal
delays the event loop by this much for each part of a page. With Python's default of 5 ms, the
delays of twenty parts add up."""
_TOKEN = "RAMIFY_VIEW_TOKEN"


def view(
    words: list[str],
    export: str | None = None,
    open: bool | None = None,
    **listening: Any,
) -> int:
    address = listen_address(listening, "view", PORT)
    token = client_access_key(listening, _TOKEN, "token")
    from ramify.cli.settings import open_configured_store
    from ramify.viewer.run_catalog import RunCatalog

    names = [word for word in words if not Path(word).expanduser().exists()]
    paths = [word for word in words if word not in names]
    library = RunCatalog([open_configured_store(), *paths] if names or not paths else paths)
    keys = [
        *(_key_of_name(library, name) for name in names),
        *(_key_of_file(library, path) for path in paths),
    ]
    if export is not None:
        return _export(library, [key for key in keys if key], export)
    from ramify.cli.rebuild_recorded_run import rebuild_rlm
    from ramify.http_server.machine_capacity import raise_descriptor_limit
    from ramify.viewer.view_server import ViewServer

    first = keys[0] if len(keys) == 1 else ""
    page = f"#/run/{quote(first, safe='')}" if first else ""
    if not page and len(words) == 1:
        page = _page_of_path(library, Path(words[0]).expanduser().resolve())
    server = ViewServer(
        library,
        address=address,
        token=token,
        first=first,
        rebuild=lambda started, store, keys: rebuild_rlm(started, store, keys=keys),
    )
    raise_descriptor_limit()
    sys.setswitchinterval(_SWITCH_S)
    asyncio.run(_serve(server, page, bool(open)))
    return ExitCode.ANSWERED


def _key_of_name(library: RunCatalog, name: str) -> str:
    """Find a run by name in the default store, and return its key in the viewer.

    Raises ConfigError if there is no such run.
    """
    try:
        return library.find(name).run.id
    except StoreError as error:
        if "/" in name or name.endswith(".jsonl"):
            raise ConfigError(f"no such file or folder: {name}") from None
        raise ConfigError(f"{name} is neither a file nor a folder, and {error}") from None


def _key_of_file(library: RunCatalog, path: str) -> str:
    """Return the viewer's key of the only run in a file.

    Returns an empty string for a folder, and if the file has several runs, or none yet. Raises
    ConfigError if the file contains something else, or if the folder has no runs, such as that of a
    policy.
    """
    from ramify.viewer.run_lookup import detect_file_kind, walk

    file = Path(path).expanduser().resolve()
    if not file.is_file():
        if not is_viewable_folder(Path(path)):
            raise ConfigError(f"{path} has no runs; {training_run_hint(Path(path))}")
        if (file / "config.json").is_file():
            raise ConfigError(f"{path} has no runs: it is a policy, for --model local:{path}")
        if not (file / "runs").is_dir() and not any(walk(file, _may_hold_runs)):
            raise ConfigError(
                f"{path} has no runs: there is no .jsonl file in it; ramify view without a path "
                "shows the runs of your store"
            )
        return ""
    kind = detect_file_kind(file)
    if " " in kind and file.stat().st_size:
        raise ConfigError(kind.replace(str(file), path))
    prefix = library.key_of_path(file) or ""
    if kind == "journal":
        return prefix
    rows = [row.key for row in library.runs() if row.key.startswith(prefix)]
    return rows[0] if len(rows) == 1 else ""


def _page_of_path(library: RunCatalog, path: Path) -> str:
    """Return the address of the page of a training run's folder, of the record of an evaluation, or
    of a folder of such records.

    Returns an empty string for anything else, which the list of runs shows.
    """
    from ramify.train.metrics import FILE as METRICS
    from ramify.viewer.run_lookup import detect_file_kind

    if (path / METRICS).is_file():
        return f"#/training/{quote(library.key_of_path(path) or '', safe='')}"
    if (path / "runs").is_dir():
        return ""
    records = [each for each in path.glob("*.jsonl") if each.is_file()] if path.is_dir() else [path]
    if not records or any(detect_file_kind(record) != "evaluation" for record in records):
        return ""
    if len(records) > 1:
        return "#/evaluation"
    return f"#/evaluation/{quote(library.key_of_path(records[0]) or '', safe='')}"


def _may_hold_runs(name: str) -> bool:
    """Return True if a file's name suggests recorded runs or a training run that has just
    started."""
    return name.endswith(".jsonl") or name == "run.log"


def _export(library: RunCatalog, keys: list[str], export: str) -> int:
    from ramify.viewer.script_bundle import offline_run_page

    if len(keys) != 1:
        raise UsageError(
            "--export writes one run: give it, as in ramify view last --export run.html"
        )
    html = offline_run_page(library.find(keys[0]))
    try:
        Path(export).expanduser().write_bytes(html)
    except OSError as error:
        raise ConfigError(f"cannot write {export}: {error.strerror}") from None
    write_stderr(f"{export}: {len(html) / 1e6:.1f} MB, opens in any browser without a network")
    return ExitCode.ANSWERED


async def _serve(server: ViewServer, first: str, is_opened: bool) -> None:
    stopped = asyncio.Event()
    add_stop_handler(stopped.set)
    async with server:
        socket = server.address.socket
        how = f" through the Unix socket {socket}" if socket is not None else ""
        write_stderr(f"open {server.url}{first}{how} (Ctrl-C to stop)")
        if is_opened:
            import webbrowser

            await asyncio.to_thread(webbrowser.open, server.url + first)
        await stopped.wait()


COMMAND = SubcommandSpec(
    name="view",
    about="""\
Browse runs in a web page: the call tree as it grows, the transcript of each call, training curves,
and two runs side by side.""",
    run=view,
    words="[PATH…]",
    max_words=None,
    options=(
        CliOptionSpec(
            "export", str, "write one run to an HTML file that works offline, and exit", "FILE"
        ),
        *listen_options(PORT, _TOKEN, "token"),
        CliOptionSpec("open", bool, "open the page in a browser", has_no=False),
    ),
    epilog="""\
PATH is a run's id or the start of one, last, a store, a journal, a file of trajectories, or a
folder of ramify train. Without a PATH, the runs of the default store are shown.""",
)
