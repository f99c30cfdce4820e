"""Loads a context from files, folders, glob patterns, ``-`` (standard input), databases, archives,
PDFs and URLs.

    one file or standard input   the text itself
    several, a folder, a zip …   a dict from name to text, sorted by name

A path that does not exist raises SourceError with advice, before anything is read. A source that
cannot be read becomes a ``UnreadableSource`` if there are others, and raises SourceError if it is
the only one. The kinds of files and their readers are defined in ``file_kinds.py``.
"""

from __future__ import annotations

import functools
import io
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set, ValuesView
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ramify.errors import SourceError, with_checked_options
from ramify.nearest_name import nearest_name
from ramify.progress import track_progress
from ramify.sources.database_urls import is_database_url, without_password
from ramify.sources.file_kinds import InputFile, read_file, read_regular
from ramify.sources.loaded_sources import (
    MAX_FILE_S,
    MORE,
    LoadedContext,
    LoadedSourceInfo,
    SourceCollector,
    UnreadableSource,
    UnreadableSourceError,
    join_names_abbreviated,
)
from ramify.sources.mapped_files import read_mapped
from ramify.sources.url_recognition import (
    is_remote,
    redact_url_for_display,
    reloadable_redacted_url,
)

__all__ = ["LoadedContext", "LoadedSourceInfo", "UnreadableSource", "load"]

MAX_BYTES = 1 << 30
"""Default limit in bytes on everything that is read into memory or unpacked."""
MAPPED_BYTES = 64 << 20
"""Total size of all sources in bytes above which texts are file-backed instead of loaded into
memory."""
WRITER_S = 1.0
"""Seconds to wait for another program to start writing to a named pipe."""
_STDIN = "-"
_BLOCK_BYTES = 1 << 20
_MANY = 3


@with_checked_options
def load(
    paths: Sequence[str | Path],
    *,
    stdin: BinaryIO | None = None,
    max_bytes: int | None = None,
    max_file_s: float = MAX_FILE_S,
    strict: bool = False,
    mapped_bytes: int = MAPPED_BYTES,
    allow_private: bool = False,
) -> LoadedContext:
    """Load all sources that ``paths`` name and return them as a context.

    Raises SourceError with advice.

    At most ``max_bytes`` are read (default: 1 GiB in memory, and any number in file-backed texts).
    If the texts together are larger than ``mapped_bytes``, they are not loaded into memory but
    file-backed, as ``FileBackedText``. ``max_file_s`` is the time limit for parsing one document,
    in seconds. If ``strict``, one of several files that cannot be read is an error, too.
    ``allow_private`` lets web addresses lead to private ones, such as those of this machine.
    """
    names = _path_names(paths)
    if not names:
        raise SourceError("nothing to read: name a file, a folder, or '-' for standard input")
    expanded = [match for name in names for match in _expand(name)]
    # Files are recognized when they are read; standard input can be read only once.
    after = expanded.index(_STDIN) + 1 if _STDIN in expanded else 0
    expanded = expanded[:after] + [path for path in expanded[after:] if path != _STDIN]
    is_alone = len(expanded) == 1
    servers = [path for path in expanded if is_database_url(path)]
    remote = [path for path in expanded if is_remote(path)]
    expanded = [path for path in expanded if not (is_database_url(path) or is_remote(path))]
    labels = _labels(expanded) if expanded else []
    with track_progress("reading", unit="bytes") as work:
        loading = SourceCollector(
            MAX_BYTES if max_bytes is None else max_bytes,
            max_file_s,
            work,
            strict=strict,
            mapped_bytes=mapped_bytes,
            counts_mapped=max_bytes is not None,
        )
        for path, label in zip(expanded, labels, strict=True):
            _read_path(path, label, is_alone, stdin, loading)
        single = len(expanded) == 1 and not servers and not os.path.isdir(expanded[0])
        if remote:
            single = _read_remote(remote, not (expanded or servers), allow_private, loading)
        for url in servers:
            _read_server(url, is_alone, loading)
    if not (expanded or remote):
        single = len(servers) == 1
    names = list(map(redacted_name, names))
    loaded = _finish(loading, names, single)
    paths = [
        name if name == _STDIN or "://" in name else str(Path(name).expanduser().absolute())
        for name in names
    ]
    options = {"allow_private": allow_private or None, "max_bytes": max_bytes}
    origin = {"paths": paths} | {name: v for name, v in options.items() if v is not None}
    return msgspec.structs.replace(loaded, origin=origin)


def _path_names(paths: Any) -> list[str]:
    """Return one path or a collection of paths as a list of strings.

    Raises SourceError for a value that is neither a path nor a collection of paths, such as a
    DataFrame or an open file.
    """
    several = isinstance(paths, Sequence | Set | ValuesView | Iterator) and not (
        isinstance(paths, str | bytes | io.IOBase)
    )
    given = list(paths) if several else [paths]
    for path in given:
        if not isinstance(path, str | os.PathLike):
            raise SourceError(
                f"load reads paths and addresses, and got a value of the type "
                f"{type(path).__name__}: give the value itself to completion, as its context"
            )
    return list(map(os.fspath, given))


def _read_server(url: str, is_alone: bool, loading: SourceCollector) -> None:
    from ramify.sources.database_servers import add_database_description

    try:
        add_database_description(url, loading)
    except UnreadableSourceError as error:
        if is_alone:
            raise SourceError(f"{without_password(url)} {error}") from None
        loading.report_problem(without_password(url), str(error))


def redacted_name(name: str) -> str:
    """Return a source's name without passwords, logins and keys, for recording in a run."""
    return reloadable_redacted_url(name) if is_remote(name) else without_password(name)


def reload_recorded_tools(run: str, sources: Mapping[str, Any]) -> dict[str, Any]:
    """Recreate the tools, such as ``sql``, that a recorded run got from its sources.

    Raises SourceError if a source no longer exists.

    ``sources`` is what ``LoadedContext.recorded_sources`` returned for that run.
    """
    names, paths = sources.get("tools"), sources.get("paths", [])
    if not names:
        return {}
    used = f"run {run} used {', '.join(names)} over"
    if _STDIN in paths:
        raise SourceError(
            f"{used} standard input or an open file, which is gone: ask the question again"
        )
    options = {name: sources[name] for name in ("allow_private", "max_bytes") if name in sources}
    try:
        loaded = load(paths, **options).tools
    except SourceError as error:
        raise SourceError(f"{used} {join_names_abbreviated(paths)}: {error}") from None
    return {name: loaded[name] for name in names if name in loaded}


def _read_remote(
    urls: list[str], is_alone: bool, allow_private: bool, loading: SourceCollector
) -> bool:
    """Download the files at the given URLs, and add their contents to the context.

    Returns True if the URLs are a single file.
    """
    from ramify.sources.remote_files import fetch_files

    files = fetch_files(urls, loading, is_alone=is_alone, allow_private=allow_private)
    single = is_alone and len(urls) == 1 and any(each.is_named for each in files)
    for file in files:
        _read_path(str(file.path), file.label, single, None, loading, file.shown)
    return single


def _expand(name: str) -> list[str]:
    """Expand one path argument or glob pattern to the list of paths that it names.

    A glob pattern that the shell did not expand can match several. Raises SourceError if nothing
    matches.
    """
    if name == _STDIN:
        return [name]
    if not name.strip():
        raise SourceError("a path is empty: name a file, a folder, or '-' for standard input")
    if is_database_url(name) or is_remote(name):
        return [name]
    if "://" in name:
        schemes = ", ".join(f"{each}://" for each in ("https", "s3", "gs", "az", "hf"))
        raise SourceError(
            f"{redact_url_for_display(name)} is not an address that can be read: give one "
            f"of {schemes}, or "
            "fetch it first and pipe it: … | ramify ask … -"
        )
    name = os.path.expanduser(name)
    if os.path.exists(name):
        return [name]
    if os.path.islink(name):
        raise SourceError(
            f"{name} is a broken link to {os.readlink(name)}: name a file that exists"
        )
    if not any(char in name for char in "*?["):
        _check_exists(name)
        return [name]
    import glob

    matches = sorted(glob.glob(name, recursive=True))
    if "**" in name:
        matches = [path for path in matches if not os.path.isdir(path)]
    if not matches:
        raise SourceError(f"{name} matches nothing: check the pattern, or name the folder itself")
    return matches


def _check_exists(path: str) -> None:
    """Raise SourceError if ``path`` does not exist or is not a valid path."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(f"{path} does not exist: {_nearest_name_hint(path)}") from None
    except PermissionError:
        pass  # It may exist, and is a problem when it is read.
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SourceError(f"{path[:200]!r} is not a path: {reason}") from None


def _labels(paths: list[str]) -> list[str]:
    """Return the label of each path, from which the names of its texts in the context are derived.

    A short, plain path is its own label. Otherwise the label is the path relative to the common
    folder of all paths.
    """
    if len(paths) == 1:
        return [
            "stdin"
            if paths[0] == _STDIN
            else ""
            if os.path.isdir(paths[0])
            else os.path.basename(paths[0])
        ]
    files = [os.path.normpath(path) for path in paths if path != _STDIN]
    if any(os.path.isabs(path) or path.startswith("..") for path in files):
        absolute = [os.path.abspath(path) for path in files]
        common = os.path.commonpath([os.path.dirname(path) for path in absolute])
        files = [os.path.relpath(path, common) for path in absolute]
    labels = iter(files)
    return ["stdin" if path == _STDIN else next(labels).replace(os.sep, "/") for path in paths]


def _read_path(
    path: str,
    label: str,
    is_alone: bool,
    stdin: BinaryIO | None,
    loading: SourceCollector,
    shown: str = "",
) -> None:
    """Read the file, folder or other source at one path, and add its contents to the context.

    Error messages use the name ``shown`` instead of the path, if it is given.
    """
    shown = shown or ("standard input" if path == _STDIN else path)
    try:
        if path == _STDIN:
            stream = stdin if stdin is not None else sys.stdin.buffer
            with loading.discarding_oversized_file():
                data = _drain(stream, shown, loading)
                if not data and not is_alone:
                    raise UnreadableSourceError("is empty")
                read_file(InputFile(label, data, is_named=True), loading)
        elif os.path.isdir(path):
            from ramify.sources.folder import read_folder

            read_folder(Path(path), f"{label}/" if label not in ("", ".") else "", loading)
        else:
            with loading.discarding_oversized_file():
                _read_one(path, label, loading)
    except UnreadableSourceError as error:
        if is_alone:
            raise SourceError(
                f"{shown} {error.reason}: {error.remedy or 'convert it to text first'}"
            ) from None
        loading.report_problem(label or shown, str(error))
    except FileNotFoundError:
        if is_alone:
            raise SourceError(f"{shown} disappeared before it was read: ask again") from None
        loading.report_problem(label or shown, "disappeared before it was read")
    except OSError as error:
        if is_alone:
            raise SourceError(
                f"{shown} cannot be read: {error.strerror}; check its permissions"
            ) from None
        loading.report_problem(label or shown, f"cannot be read: {error.strerror}")


def _read_one(path: str, label: str, loading: SourceCollector) -> None:
    real = os.path.realpath(path)
    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode):
        if real in loading.seen:
            return
        loading.seen.add(real)
        if read_mapped(path, label, loading, flags=0):
            return
        data = read_regular(path, path, loading, flags=0)
    elif stat.S_ISFIFO(mode):
        data = _read_pipe(path, loading)
    else:  # a device
        with open(path, "rb") as stream:
            data = _drain(stream, path, loading)
    place = Path(path) if stat.S_ISREG(mode) else None
    read_file(InputFile(label, data, place, is_named=True), loading)


def _read_pipe(path: str, loading: SourceCollector) -> bytes:
    """Read a named pipe to its end, for example one that a shell has created.

    The shell creates such a pipe for <(zcat log.gz), for example.
    """
    # A blocking open would wait for a writer indefinitely.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb", buffering=0) as stream:
        head = _first_block(fd)
        os.set_blocking(fd, True)
        loading.count_bytes(len(head), path, is_part=True)
        return head + _drain(stream, path, loading)


def _first_block(fd: int) -> bytes:
    """Wait until a program writes to a pipe, and return the first bytes.

    The result is empty if the writing program has finished, or has not written anything yet.

    Raises UnreadableSourceError if no program writes to it within ``WRITER_S``.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    until = time.monotonic() + WRITER_S
    while time.monotonic() < until:
        was_written_to = bool(poll.poll(10))
        try:
            block = os.read(fd, _BLOCK_BYTES)
        except BlockingIOError:
            return b""
        if block or was_written_to:
            return block
    raise UnreadableSourceError("is a pipe without a writer", "start the program that writes to it")


def _drain(stream: BinaryIO, name: str, loading: SourceCollector) -> bytes:
    data = bytearray()
    # One read at a time: a terminal reports its end (Ctrl-D) only once.
    read = getattr(stream, "read1", stream.read)
    while block := read(_BLOCK_BYTES):
        data += block
        loading.count_bytes(len(block), name, is_part=True)
    return bytes(data)


def _finish(loading: SourceCollector, names: list[str], single: bool) -> LoadedContext:
    chars = sum(item.chars for item in loading.items)
    if chars == 0 and not loading.pictures:
        shown = join_names_abbreviated(
            ["standard input" if name == _STDIN else name for name in names]
        )
        raise SourceError(f"{shown} {_why_empty(loading, single)}")
    items = sorted(loading.items, key=lambda item: item.name)
    values: dict[str, Any] = {**loading.texts, **loading.picture_values}
    texts = {item.name: values[item.name] for item in items}
    context = (
        values[items[0].name] if single and len(items) == 1 and "/" not in items[0].name else texts
    )
    dialect = "SQLite" if _single_database(loading) else "DuckDB"
    from ramify.sources.text_search import build_context_search_tools

    return LoadedContext(
        context,
        items,
        loading.problems,
        loading.left_out,
        {**_tools(loading), **build_context_search_tools(context)},
        dialect,
        loading.pictures,
        loading.needs_session,
    )


def _single_database(loading: SourceCollector) -> str | None:
    """Return the name of the database that holds all loaded tables, or None if there is no such
    database.

    Queries can then use the dialect of that database, because they cannot join it with other
    tables.
    """
    databases = [*loading.databases, *loading.servers]
    is_single = len(databases) == 1 and all(each.file in databases for each in loading.tables)
    return databases[0] if is_single else None


def _why_empty(loading: SourceCollector, single: bool) -> str:
    if single and loading.items:
        return "is empty: name something that has text in it"
    reasons = [str(problem) for problem in loading.problems[:_MANY]]
    is_too_large = any(reason.endswith(MORE) for reason in reasons)
    reasons = [reason.removesuffix(f": {MORE}") for reason in reasons]
    if num_more := len(loading.problems) - len(reasons):
        reasons.append(f"and {num_more:,} more")
    reasons += [f"{len(names)} left out, {reason}" for reason, names in loading.left_out.items()]
    why = "; ".join(reasons) or "no files, or only empty ones"
    if is_too_large:
        return f"has no text that fits the limits ({why}): {MORE}"
    return f"has no text to read ({why}): name a source that has text"


def _tools(loading: SourceCollector) -> dict[str, Any]:
    pages: dict[str, Any] = {}
    if loading.pdfs:
        from ramify.sources.pdf_page_pictures import PdfPagePictures

        pages["page_picture"] = PdfPagePictures(loading.pdfs, loading.max_file_s).page_picture
    if not (loading.databases or loading.servers or loading.tables):
        return pages
    from ramify.sources.session_tables import SessionTables
    from ramify.sources.sqlite_process import query_with_timeout

    databases: dict[str, Callable[..., list[tuple[Any, ...]]]] = {
        name: functools.partial(query_with_timeout, path)
        for name, path in loading.databases.items()
    }
    databases |= loading.servers
    default = _single_database(loading)
    session = SessionTables(loading.tables, databases, default, loading.kept_tables)
    tables = {"tables": session.table_descriptions} if loading.tables else {}
    return {"sql": session.sql, **tables, **pages}


def _nearest_name_hint(path: str) -> str:
    named, name = os.path.split(path.rstrip("/"))
    folder = named or "."
    try:
        names = os.listdir(folder)
    except OSError:
        return (
            f"nor does the folder {folder}"
            if not os.path.exists(folder)
            else f"{folder} cannot be listed"
        )
    close = nearest_name(name, sorted(names))
    if close:
        return f"did you mean {os.path.join(named, close)}?"
    return f"check its name, or look into {folder if named else 'this folder'}"
