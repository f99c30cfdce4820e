"""``ramify ask``: its options, and how they become an ``RLM`` and a question. ``asking.py`` runs it.

The parameters of ``ask`` are the one list of settings: the configuration file and the ``RAMIFY_*`` variables take the
same names and types (``settings.py``).
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import msgspec
import typer

from ramify.cli.exits import Exit, epilog
from ramify.cli.notes import Notes, write
from ramify.cli.settings import fill, unknown_variables
from ramify.errors import ConfigError

if TYPE_CHECKING:
    from ramify.engine.rlm import RLM
    from ramify.sources.base import Loaded
    from ramify.store.store import Store

NO_MODEL = """\
ramify: no model is set. With a provider's key: export OPENAI_API_KEY=…; ramify ask --model openai:gpt-5-mini …
  With a local server: --model ollama:llama3.2, vllm:NAME, or any other by its address: openai:NAME@http://host:port/v1
  Without either: scripts/demo shows a run with a scripted model, which you can also name: --model scripted:FILE"""

EPILOG = epilog()

NOT_SETTINGS = {"question", "paths", "answer_schema", "resume", "return"}
"""Parameters that belong to one question, and so to no file."""


def ask(
    question: Annotated[str, typer.Argument(help="What you want to know.")] = "",
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATH…", help="Files, folders, globs, archives, databases; - is standard input."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="PROVIDER:MODEL that drives the session.")] = None,
    sub_model: Annotated[
        list[str] | None,
        typer.Option(help="Model below the root; repeat it to offer more by name. [default: the model]"),
    ] = None,
    max_cost: Annotated[float | None, typer.Option(help="Dollars. [default: 5, where prices are known]")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="From question to answer. [default: 1800]")] = None,
    max_calls: Annotated[int | None, typer.Option(help="Requests to models. [default: 1000]")] = None,
    max_depth: Annotated[int | None, typer.Option(help="How deep sessions may nest. [default: 1]")] = None,
    max_turns: Annotated[int | None, typer.Option(help="Turns of each session. [default: 30]")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="In and out, in all. [default: 20000000]")] = None,
    max_reply_tokens: Annotated[int | None, typer.Option(help="Of one reply. [default: 8192]")] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="Requests at once. [default: 64]")] = None,
    answer_schema: Annotated[
        str | None, typer.Option(metavar="FILE|JSON", help="JSON schema that the answer must meet.")
    ] = None,
    cite: Annotated[bool | None, typer.Option("--cite/--no-cite", help="Ask for citations and check them.")] = None,
    scaffold: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Prompts: default, minimal, or a .toml or .json file.")
    ] = None,
    sandbox: Annotated[str | None, typer.Option(metavar="PROVIDER", help="Where code runs. [default: process]")] = None,
    allow_weaker: Annotated[
        bool | None,
        typer.Option("--allow-weaker/--no-allow-weaker", help="Accept a sandbox that isolates less, unwarned."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Of sampling. [default: the provider's]")] = None,
    direct: Annotated[
        bool | None,
        typer.Option("--direct/--no-direct", help="One plain call for what fits easily. [default: direct]"),
    ] = None,
    cache: Annotated[
        bool | None, typer.Option("--cache/--no-cache", help="Use stored replies to the same requests.")
    ] = None,
    store: Annotated[bool | None, typer.Option("--store/--no-store", help="Keep the run. [default: store]")] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Go on with a run that was cut off, as it began.")
    ] = None,
    json: Annotated[bool | None, typer.Option("--json/--no-json", help="Print one JSON object.")] = None,
    quiet: Annotated[
        bool | None, typer.Option("--quiet/--no-quiet", "-q", help="Nothing on stderr but errors.")
    ] = None,
    verbose: Annotated[bool | None, typer.Option("--verbose/--no-verbose", "-v", help="A line for each step.")] = None,
) -> int:
    """Answer QUESTION over everything that the PATHs name.

    Without a PATH, piped input is read; without either, the question is answered as it is. The answer goes to stdout,
    all else to stderr. Ctrl-C once asks for the answer with what there is; twice stops.

    Every option but --answer-schema and --resume may also be set as a key of the configuration file or as a variable:
    max-cost = 2, RAMIFY_MAX_COST=2.
    """
    from ramify.cli import asking

    given = dict(locals())
    given.pop("asking")
    if resume is not None:
        _refuse_settings(given)
    kinds = setting_kinds()
    settings = fill({name: given[name] for name in kinds}, kinds)
    notes = Notes(bool(settings.get("quiet")), bool(settings.get("verbose")))
    notes.take_warnings()
    for line in unknown_variables(kinds):
        notes.say(f"ramify: warning: {line}")
    if resume is not None:
        return asking.run_again(resume, notes, as_json=bool(settings.get("json")))
    if not question.strip():
        raise typer.BadParameter("say what you want to know: ramify ask QUESTION PATH…", param_hint="'QUESTION'")
    if not settings.get("model"):
        write(NO_MODEL)
        return Exit.ERROR
    asking.warm_up(settings["model"])
    schema = read_schema(answer_schema)
    kept = open_store(settings)
    rlm = make_rlm(settings, kept)
    loaded = load_sources(paths or [], notes)
    asked = asking.Asked(question, loaded, paths or [], schema, bool(settings.get("cite")), bool(settings.get("cache")))
    return asking.run(rlm, asked, notes, as_json=bool(settings.get("json")))


def setting_kinds() -> dict[str, Any]:
    """Setting -> its type."""
    return {name: kind for name, kind in get_type_hints(ask).items() if name not in NOT_SETTINGS}


def make_rlm(settings: dict[str, Any], store: Store | None) -> RLM:
    from ramify.clients.base import Sampling
    from ramify.engine.limits import Limits
    from ramify.engine.rlm import RLM
    from ramify.sandbox.base import SandboxSpec

    limits = Limits(**{name: value for name, value in settings.items() if name in Limits.__struct_fields__})
    spec = SandboxSpec(allow_weaker=bool(settings.get("allow_weaker")))
    if settings.get("sandbox"):
        spec = msgspec.structs.replace(spec, provider=settings["sandbox"])
    scaffold = read_scaffold(settings.get("scaffold"))
    if settings.get("direct") is False:
        scaffold = msgspec.structs.replace(scaffold, direct_chars=0)
    return RLM(
        settings["model"], sub_model=settings.get("sub_model") or None, limits=limits, scaffold=scaffold, sandbox=spec,
        store=store, sampling=Sampling(temperature=settings.get("temperature")),
    )  # fmt: skip


def open_store(settings: dict[str, Any]) -> Store | None:
    if settings.get("store") is False:
        if settings.get("cache"):
            raise ConfigError("--cache keeps replies in the store: leave out --no-store")
        return None
    from ramify.store.store import Store

    return Store()


def load_sources(paths: list[str], notes: Notes) -> Loaded | None:
    """What the paths name, or what is piped in; None where there is neither."""
    if not paths and not _is_piped():
        return None
    from ramify.sources.load import load

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
        raise ConfigError(f"the answer's schema in {given} is a {type(schema).__name__}: give a JSON object")
    return schema


def read_scaffold(given: str | None) -> Any:
    from ramify.engine.scaffold import Scaffold, scaffold_of

    if not given or not given.endswith((".toml", ".json")):
        return scaffold_of(given or None)
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
        raise ConfigError(f"{name if len(name) < 80 else name[:79] + '…'} does not parse: {error}") from None


def _is_piped() -> bool:
    """Whether something was piped or redirected in and has at least one byte; waits for that byte."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, ValueError, OSError):
        return False  # closed, or not a file
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return False
    return bool(sys.stdin.buffer.peek(1))  # type: ignore[union-attr]


def _refuse_settings(given: dict[str, Any]) -> None:
    """A resumed run goes on as it began: only what concerns the output may be said again."""
    named = {name for name, value in given.items() if value not in (None, [], "")}
    other = sorted(named - {"resume", "json", "quiet", "verbose"})
    if other:
        options = ", ".join(name if name in ("question", "paths") else f"--{name.replace('_', '-')}" for name in other)
        raise typer.BadParameter(f"the run goes on as it began: leave out {options}", param_hint="'--resume'")
