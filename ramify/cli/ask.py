"""``ramify ask``: its options, and how they become an ``RLM`` and a question. ``ask_runner.py``
runs it.

``SETTINGS`` is the one list of settings: the command line, the configuration file and the
``RAMIFY_*`` variables take their names and types from it.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.cli.exit_codes import ExitCode, epilog
from ramify.cli.parse_units import parse_size
from ramify.cli.parser import CommandSpec, OptionSpec, UsageError
from ramify.cli.progress_screen import OPTION, ProgressScreen, form_of
from ramify.cli.settings import fill, unknown_variables
from ramify.cli.stderr_notes import StderrNotes, write
from ramify.cli.telemetry import exporting
from ramify.errors import ConfigError, nearest

if TYPE_CHECKING:
    from ramify.engine.mcp_tools import McpTools
    from ramify.engine.rlm import RLM
    from ramify.sandbox.base import SandboxSpec
    from ramify.sources.base import LoadedContext
    from ramify.store.store import Store

NO_MODEL = """\
ramify: no model is set. With a provider's key: export OPENAI_API_KEY=…; ramify ask --model openai:gpt-5-mini …
  With a local server: --model ollama:llama3.2, vllm:NAME, or any other by its address: openai:NAME@http://host:port/v1
  Without either: --model tiny, a small policy of the package, answers about ledgers alone (scripts/demo trains such a one)"""

_SMALL_BYTES = 32_000
"""Of a file that is likely to be answered by one direct call."""
_PATIENCE_S = 1.0
"""Of waiting for piped input without a word."""

SETTINGS = (
    OptionSpec("model", str, "provider:model that drives the session", "MODEL", "-m"),
    OptionSpec(
        "sub_model",
        list,
        "model below the root (default: the model); repeat it to offer more by name",
        "MODEL",
    ),
    OptionSpec("max_cost", float, "dollars (default: 5, where prices are known)"),
    OptionSpec("max_seconds", float, "from question to answer (default: 1800)"),
    OptionSpec("max_calls", int, "requests to models (default: 1000)"),
    OptionSpec("max_depth", int, "how deep sessions may nest (default: 1)"),
    OptionSpec("max_turns", int, "turns of each session (default: 30)"),
    OptionSpec("max_tokens", int, "in and out, in all (default: 20000000)"),
    OptionSpec("max_reply_tokens", int, "of one reply (default: 8192)"),
    OptionSpec("max_concurrency", int, "requests at once (default: 64)"),
    OptionSpec(
        "patience", float, "seconds to try again while a model cannot be reached (default: 300)"
    ),
    OptionSpec(
        "branches",
        int,
        "first turns to go on from, each to an answer; most of them win (default: 1)",
    ),
    OptionSpec("cite", bool, "ask for citations and check them"),
    OptionSpec(
        "scaffold",
        str,
        "prompts: default, minimal, tiny, bare, retool, or a .toml or .json file",
        "NAME|FILE",
    ),
    OptionSpec("sandbox", str, "where code runs (default: jail)"),
    OptionSpec("tier", str, "of the jail, the weakest accepted: A, B or C (default: B)", "A|B|C"),
    OptionSpec("allow_weaker", bool, "accept less isolation, or none where there is no jail"),
    OptionSpec("memory", str, "of one session (default: 2GiB)", "SIZE"),
    OptionSpec("package", list, "of this Python, which sessions may import; repeat it for more"),
    OptionSpec(
        "mount",
        list,
        "file or folder that sessions may read, where they see it; repeat it",
        "PATH:PLACE",
    ),
    OptionSpec(
        "mcp",
        list,
        "MCP server whose tools sessions get, a command or an address; repeat it for more",
        "COMMAND",
    ),
    OptionSpec("temperature", float, "of sampling (default: the provider's)"),
    OptionSpec("direct", bool, "answer by one plain call what fits easily (default: yes)"),
    OptionSpec(
        "cache",
        bool,
        "keep replies in a cache, and use those that earlier runs with --cache kept for the same "
        "requests",
    ),
    OptionSpec("store", bool, "keep the run (default: yes)"),
    OptionSpec("json", bool, "print one JSON object"),
    OptionSpec("quiet", bool, "nothing on stderr but errors", short="-q"),
    OptionSpec("verbose", bool, "a line on stderr for each step", short="-v"),
    OPTION,
)
_SAID_AGAIN = ("--json", "--quiet", "--verbose", "--progress", "--allow-weaker")
"""What may be said again where a run goes on."""
OF_ONE_QUESTION = (
    OptionSpec("answer_schema", str, "JSON schema that the answer must meet", "FILE|JSON"),
    OptionSpec("resume", str, "go on with a run that was cut off, as it began", "RUN"),
)
KINDS: dict[str, Any] = {
    option.name: list[str] if option.kind is list else option.kind for option in SETTINGS
}
"""Setting -> its type."""


def ask(
    words: list[str], answer_schema: str | None = None, resume: str | None = None, **given: Any
) -> int:
    if resume is not None:
        _refuse_settings(words, answer_schema, given)
    settings = fill(given, KINDS)
    notes = StderrNotes(bool(settings.get("quiet")), bool(settings.get("verbose")))
    notes.take_warnings()
    for line in unknown_variables(KINDS):
        notes.say(f"ramify: warning: {line}")
    form = form_of(settings.get("progress"), notes)
    if resume is not None:
        from ramify.cli.ask_runner import run_again

        allow_weaker = bool(settings.get("allow_weaker"))
        with exporting(notes), ProgressScreen(notes, form) as screen:
            return run_again(
                resume, screen, as_json=bool(settings.get("json")), allow_weaker=allow_weaker
            )
    if not words or not words[0].strip():
        raise UsageError("say what you want to know: ramify ask QUESTION PATH…")
    if not settings.get("model"):
        write(NO_MODEL)
        return ExitCode.USAGE
    with exporting(notes), ProgressScreen(notes, form) as screen:
        return _ask(words[0], words[1:], answer_schema, settings, screen)


def _ask(
    question: str,
    paths: list[str],
    answer_schema: str | None,
    settings: dict[str, Any],
    screen: ProgressScreen,
) -> int:
    spec = sandbox_spec(settings)
    _warm_up(settings["model"], spec if _needs_session(paths, settings) else None)
    from ramify.cli import ask_runner

    schema = read_schema(answer_schema)
    with mcp_tools(settings) as tools:
        rlm = make_rlm(settings, spec, open_store(settings), tools)
        loaded = load_sources(paths, screen.notes)
        cite, cache = bool(settings.get("cite")), bool(settings.get("cache"))
        asked = ask_runner.AskRequest(question, loaded, paths, schema, cite, cache)
        return ask_runner.run(rlm, asked, screen, as_json=bool(settings.get("json")))


def mcp_tools(settings: dict[str, Any]) -> contextlib.AbstractContextManager[McpTools | None]:
    """The tools of the MCP servers that were named, connected; None where none was."""
    if not settings.get("mcp"):
        return contextlib.nullcontext()
    from ramify.engine.mcp_tools import McpTools

    return McpTools(*settings["mcp"])


def _warm_up(model: str, spec: SandboxSpec | None) -> None:
    """Begin to start the sandbox's server, in its own process, and to import what a model's client
    needs for TLS (much of that is reading certificates, without Python's lock), while this thread
    imports the rest and reads files."""
    from ramify.clients.providers import IN_PROCESS, PROVIDERS, resolve, split_name
    from ramify.sandbox.base import launch

    if spec is not None:
        launch(spec)
    provider = split_name(model)[0]
    is_plain = provider in PROVIDERS and resolve(model).url.startswith("http:")
    if provider not in ("scripted", *IN_PROCESS) and not is_plain:
        import threading

        threading.Thread(target=__import__, args=("ramify.clients.https",), daemon=True).start()


def sandbox_spec(settings: dict[str, Any]) -> SandboxSpec:
    from ramify.sandbox.base import PROVIDERS, SandboxSpec

    given = settings.get("sandbox") or SandboxSpec().provider
    if given not in PROVIDERS:
        raise ConfigError(f"unknown sandbox '{given}': {nearest(given, PROVIDERS)}")
    more = {
        name: settings[name] for name in ("tier", "allow_weaker") if settings.get(name) is not None
    }
    if memory := settings.get("memory"):
        more["memory_bytes"] = parse_size(memory, "--memory")
    return SandboxSpec(
        provider=given,
        packages=tuple(settings.get("package") or ()),
        mounts=tuple(read_mount(each) for each in settings.get("mount") or ()),
        **more,
    )


def read_mount(given: str) -> tuple[str, str]:
    """``"data:/data"`` -> (its path here, its place there); without a place, the same as here."""
    path, colon, place = given.rpartition(":")
    path = os.path.abspath(os.path.expanduser(path if colon else given))
    return path, place if colon else path


def _needs_session(paths: list[str], settings: dict[str, Any]) -> bool:
    """Whether the question will hardly be answered by one direct call."""
    if settings.get("direct") is False or settings.get("branches", 1) != 1 or settings.get("mcp"):
        return True
    if len(paths) == 1 and os.path.isfile(paths[0]):
        return os.path.getsize(paths[0]) > _SMALL_BYTES
    return bool(paths)


def make_rlm(
    settings: dict[str, Any],
    spec: SandboxSpec,
    store: Store | None,
    tools: Mapping[str, Any] | None = None,
) -> RLM:
    from ramify.clients.base import Sampling
    from ramify.engine.limits import Limits
    from ramify.engine.rlm import RLM

    temperature = settings.get("temperature")
    if temperature is not None and not 0 <= temperature < math.inf:
        raise ConfigError(
            f"temperature={temperature:g} is none that can be sampled at: give 0 or more"
        )
    given = {name: value for name, value in settings.items() if name in Limits.__struct_fields__}
    if settings.get("patience") is not None:
        given["patience_s"] = settings["patience"]
    limits = Limits(**given)
    scaffold = read_scaffold(settings.get("scaffold"), settings["model"])
    if settings.get("direct") is False:
        scaffold = msgspec.structs.replace(scaffold, direct_chars=0)
    return RLM(
        settings["model"],
        sub_model=settings.get("sub_model") or None,
        limits=limits,
        scaffold=scaffold,
        sandbox=spec,
        store=store,
        sampling=Sampling(temperature=temperature),
        branches=settings.get("branches", 1),
        tools=tools,
    )


def open_store(settings: dict[str, Any]) -> Store | None:
    if settings.get("store") is False:
        if settings.get("cache"):
            raise ConfigError("--cache keeps replies in the store: leave out --no-store")
        return None
    from ramify.store.store import Store

    return Store()


def load_sources(paths: list[str], notes: StderrNotes) -> LoadedContext | None:
    """What the paths name, or what is piped in; None where there is neither."""
    if not paths and not _is_piped(notes):
        return None
    from ramify.sources.load_sources import load

    for path in paths:
        if os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
            notes.say(f"reading {path}, a pipe, until it is closed")
    loaded = load(paths or ["-"], stdin=sys.stdin.buffer)
    for line in loaded.describe():
        notes.say(line)
    return loaded


def read_schema(given: str | None) -> dict[str, Any] | None:
    if not given:
        return None
    is_inline = given.lstrip().startswith("{")
    schema = _decoded(given.encode() if is_inline else _read(given, "the answer's schema"), given)
    if not isinstance(schema, dict):
        raise ConfigError(
            f"the answer's schema in {given} is a {type(schema).__name__}: give a JSON object"
        )
    return schema


def read_scaffold(given: str | None, model: str) -> Any:
    from ramify.engine.scaffold import Scaffold, scaffold_of

    if not given or not given.endswith((".toml", ".json")):
        return scaffold_of(given or None, model)
    data = _read(given, "the scaffold")
    try:
        return msgspec.convert(_decoded(data, given), Scaffold)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the scaffold {given}: {error}") from None


def _read(path: str, what: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from None


def _decoded(data: bytes, name: str) -> Any:
    try:
        if name.endswith(".toml"):
            import tomllib

            return tomllib.loads(data.decode())
        return msgspec.json.decode(data)
    except ValueError as error:  # msgspec's, tomllib's and Unicode's errors are ones
        raise ConfigError(
            f"{name if len(name) < 80 else name[:79] + '…'} does not parse: {error}"
        ) from None


def _is_piped(notes: StderrNotes) -> bool:
    """Whether something was piped or redirected in and has at least one byte; waits for that
    byte."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, ValueError, OSError):
        return False  # closed, or not a file
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return False
    import select

    if not select.select([sys.stdin], [], [], _PATIENCE_S)[0]:
        notes.say("reading standard input; for a question without a context, close it: < /dev/null")
    return bool(sys.stdin.buffer.peek(1))  # type: ignore[union-attr]


def _refuse_settings(words: list[str], answer_schema: str | None, given: dict[str, Any]) -> None:
    """A resumed run goes on as it began: only what concerns the output and this machine may be said
    again."""
    named = [option.long for option in SETTINGS if given[option.name] is not None]
    other = [name for name in named if name not in _SAID_AGAIN]
    other += ["--answer-schema"] if answer_schema else []
    if words or other:
        raise UsageError(
            "--resume: the run goes on as it began; leave out "
            f"{', '.join(['QUESTION'] * bool(words) + other)}"
        )


COMMAND = CommandSpec(
    "ask",
    """\
Answer QUESTION over everything that the PATHs name: files, folders, globs, archives, databases; - is
standard input. Without a PATH, piped input is read; without either, the question is answered as it is.

The answer goes to stdout, all else to stderr. Ctrl-C once asks for the answer with what there is; twice
stops. Every option but --answer-schema and --resume may also be set as a key of the configuration file
or as a variable: max-cost = 2, RAMIFY_MAX_COST=2.""",
    ask,
    "QUESTION PATH…",
    max_words=None,
    options=(*SETTINGS, *OF_ONE_QUESTION),
    epilog=epilog(),
)
