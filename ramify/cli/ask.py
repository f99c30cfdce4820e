"""Define the options of the command ``ramify ask``, and create an ``RLM`` and a question from them.

``SETTINGS`` is the only list of settings: the command line, the configuration file and the
``RAMIFY_*`` variables take their names and types from it. ``ask_runner.py`` runs the question, and
``settings.py`` reads the configuration file.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.cli.parser import (
    CliOptionSpec,
    ExitCode,
    SubcommandSpec,
    UsageError,
    exit_codes_epilog,
    parse_size,
)
from ramify.cli.predict_session_need import SMALL_BYTES
from ramify.cli.progress_display import OPTION, ProgressDisplay, choose_display_form
from ramify.cli.settings import fill_missing_settings, named_models, unknown_variable_warnings
from ramify.cli.telemetry import span_export_context
from ramify.cli.terminal_text import StderrMessageWriter, write_stderr
from ramify.errors import ConfigError
from ramify.logging import hold_warnings_for_next_run

if TYPE_CHECKING:
    from ramify.engine.mcp_tools import McpTools
    from ramify.engine.rlm import RLM
    from ramify.sandbox.base import SandboxSpec
    from ramify.sources.loaded_sources import LoadedContext
    from ramify.store.base import RunStore
    from ramify.store.folder_store import Store

NO_MODEL = """\
ramify: no model is set. With an API key: OPENAI_API_KEY=… ramify ask --model openai:gpt-5-mini …
  With a local server: --model ollama:llama3.2, vllm:NAME or openai:NAME@http://host:port/v1
  With neither: --model tiny, a packaged policy for ledger questions (scripts/demo trains one)"""

LOCAL_SANDBOXES = ("inprocess", "ipython", "jail", "process")
"""Sandboxes that can use the packages installed on this machine."""
_JSON_TYPES = ("string", "number", "integer", "boolean", "array", "object")
_PATIENCE_S = 1.0
"""Seconds to wait for piped input before printing a notice."""

SETTINGS = (
    CliOptionSpec("model", str, "model that drives the session, as provider:model", "MODEL", "-m"),
    CliOptionSpec(
        "sub_model",
        list,
        "model for sub-calls (default: the same model); repeat to offer several by name",
        "MODEL",
    ),
    CliOptionSpec("max_cost", float, "maximum cost in dollars (default: 5, if prices are known)"),
    CliOptionSpec("max_seconds", float, "maximum time to answer, in seconds (default: 1800)"),
    CliOptionSpec("max_calls", int, "maximum number of model requests (default: 1000)"),
    CliOptionSpec("max_depth", int, "maximum nesting depth of sessions (default: 1)"),
    CliOptionSpec(
        "max_turns",
        int,
        "maximum turns per session, before one more for a final reply (default: 30, or what a "
        "local policy was trained with)",
    ),
    CliOptionSpec("max_tokens", int, "maximum total tokens, input plus output (default: 20000000)"),
    CliOptionSpec("max_reply_tokens", int, "maximum tokens per reply (default: 8192)"),
    CliOptionSpec("max_sub_reply_tokens", int, "maximum tokens per reply to llm_query"),
    CliOptionSpec(
        "max_reasoning_tokens",
        int,
        "maximum hidden reasoning tokens per reply, on top of --max-reply-tokens",
    ),
    CliOptionSpec("max_concurrency", int, "maximum concurrent model requests (default: 64)"),
    CliOptionSpec(
        "patience", float, "seconds to keep retrying a failing model; 0: not at all (default: 600)"
    ),
    CliOptionSpec(
        "branches",
        int,
        "sample N continuations of the first turn and take the majority answer (default: 1)",
    ),
    CliOptionSpec("cite", bool, "ask for citations and verify them"),
    CliOptionSpec(
        "scaffold",
        str,
        "prompts and reply format: a name (`ramify plugins scaffold` lists them), or a .toml or "
        ".json file",
        "NAME|FILE",
    ),
    CliOptionSpec("instructions", str, "instructions that are added to every prompt", "FILE|TEXT"),
    CliOptionSpec(
        "examples",
        str,
        "example questions with their answers, added to every prompt: a .jsonl or .json file",
        "FILE",
    ),
    CliOptionSpec("sandbox", str, "sandbox that runs the model's code (default: jail)"),
    CliOptionSpec(
        "tier", str, "weakest jail tier to accept: A (strongest), B or C (default: B)", "A|B|C"
    ),
    CliOptionSpec("allow_weaker", bool, "accept weaker isolation, or none if no jail is available"),
    CliOptionSpec("memory", str, "memory limit per session (default: 2GiB)", "SIZE"),
    CliOptionSpec(
        "package", list, "installed Python package that sessions may import; repeat for more"
    ),
    CliOptionSpec(
        "mount",
        list,
        "file or folder that sessions may read, and its path in the sandbox, which is the same "
        "unless given; repeat for more",
        "PATH[:PLACE]",
    ),
    CliOptionSpec(
        "mcp",
        list,
        "MCP server (command or URL) whose tools sessions can call; repeat for more",
        "COMMAND",
    ),
    CliOptionSpec(
        "max_bytes",
        str,
        "maximum bytes to read (default: 1GiB in memory; no limit for large texts that stay in "
        "their files)",
        "SIZE",
    ),
    CliOptionSpec(
        "allow_private",
        bool,
        "allow URLs that resolve to private addresses, such as this machine's",
    ),
    CliOptionSpec(
        "strict", bool, "stop if one of several files cannot be read, instead of warning"
    ),
    CliOptionSpec("temperature", float, "sampling temperature (default: the provider's)"),
    CliOptionSpec(
        "direct",
        bool,
        "answer with one plain call if the input is small enough (default: yes; --no-direct is "
        "--mode free)",
    ),
    CliOptionSpec(
        "cache",
        bool,
        "reuse the replies that earlier runs recorded for the same requests",
    ),
    CliOptionSpec("store", bool, "store the run (default: yes)"),
    CliOptionSpec("json", bool, "print one JSON object"),
    CliOptionSpec("quiet", bool, "print only errors to stderr", short="-q"),
    CliOptionSpec(
        "verbose", bool, "print a line to stderr for each step; -vv prints more", short="-v"
    ),
    OPTION,
)
OF_SOURCES = ("max_bytes", "allow_private", "strict")
"""Settings that control how sources are read."""
LIMITS = (
    "max_cost",
    "max_seconds",
    "max_calls",
    "max_turns",
    "max_tokens",
    "max_reply_tokens",
    "max_concurrency",
    "patience",
)
"""Settings that limit a run. A resumed run may change them."""
_ALLOWED_WITH_RESUME = {
    *("json", "quiet", "verbose", "progress", "allow_weaker", "model", "sub_model"),
    *LIMITS,
}
"""Settings that may be given together with ``--resume``."""
MODE = CliOptionSpec(
    "mode",
    str,
    "how to answer: free (a session), plan (a ready plan, as `ramify plan` picks it), direct (one "
    "plain call, for input without tools such as sql) or auto (picks one of them, by rules or by "
    "asking the model once); default: direct for a small input, else free",
    "auto|free|plan|direct",
)
OF_ONE_QUESTION = (
    CliOptionSpec(
        "dry_run",
        bool,
        "print the prompt, what would be loaded and what it would cost; send nothing",
        has_no=False,
    ),
    MODE,
    CliOptionSpec("answer_schema", str, "JSON schema that the answer must match", "FILE|JSON"),
    CliOptionSpec(
        "resume",
        str,
        "continue a suspended, killed or failed run, or one whose limit you now raise; --model "
        "changes its model",
        "RUN",
    ),
    CliOptionSpec(
        "from", int, "with --resume: fork a new run that continues from this turn", "TURN"
    ),
    CliOptionSpec("call", str, "with --from: the call of that turn (default: the root)", "ID"),
    CliOptionSpec("code", str, "with --from: code to run in place of that turn's reply", "FILE"),
    CliOptionSpec(
        "prompt", str, "with --from: text in place of that prompt's last message", "FILE"
    ),
)
MODES = ("auto", "free", "plan", "direct")
_OF_SESSIONS = (
    *("max_depth", "max_turns", "branches", "sandbox", "tier", "allow_weaker", "memory"),
    *("package", "mount", "mcp"),
)
"""Settings that apply only to sandbox sessions."""
_OF_PROMPTS = ("cite", "scaffold", "instructions", "examples")
"""Settings that change the prompts of sessions and of plain model calls."""
NOT_OF_MODE = {
    "plan": (*_OF_SESSIONS, *_OF_PROMPTS),
    "direct": (*_OF_SESSIONS, "sub_model"),
}
"""Answer mode -> settings of ``ask`` that do not apply in that mode."""
KINDS: dict[str, Any] = {
    option.name: list[str] if option.kind is list else option.kind for option in SETTINGS
}
"""Setting name -> its type."""


def ask(
    words: list[str],
    answer_schema: str | None = None,
    resume: str | None = None,
    dry_run: bool | None = None,
    mode: Any = None,
    **given: Any,
) -> int:
    _check_mode(mode, resume, bool(dry_run), given)
    turn = given.pop("from", None)
    edit = {name: given.pop(name, None) for name in ("call", "code", "prompt")}
    if turn is not None and resume is None:
        raise UsageError("--from needs a run: give --resume RUN too")
    if turn is None and (name := next((name for name in edit if edit[name] is not None), "")):
        raise UsageError(f"--{name} needs --from TURN: add it")
    if resume is not None and dry_run:
        raise UsageError("--dry-run applies only to a new question: remove --resume")
    if resume is not None:
        _refuse_settings(words, answer_schema, given)
    settings = fill_missing_settings(given, KINDS)
    hold_warnings_for_next_run()
    notes = make_message_writer(settings, KINDS)
    form = choose_display_form(settings.get("progress"), notes)
    if resume is not None:
        from ramify.cli.ask_runner import continue_run

        for name in ("code", "prompt"):
            edit[name] = edit[name] and _read(edit[name], f"the {name}").decode()
        fork = None if turn is None else (turn - 1, edit)
        with span_export_context(notes), ProgressDisplay(notes, form) as screen:
            return continue_run(
                resume,
                screen,
                as_json=bool(settings.get("json")),
                allow_weaker=bool(settings.get("allow_weaker")),
                limits=limit_fields({name: given[name] for name in LIMITS}),
                models={n: given[n] for n in ("model", "sub_model") if given[n] is not None},
                fork=fork,
            )
    if not words or not words[0].strip():
        raise UsageError("no question: ramify ask QUESTION PATH…")
    _refuse_a_path(words[0], words[1:])
    if not settings.get("model"):
        write_stderr(NO_MODEL)
        return ExitCode.USAGE
    if mode in NOT_OF_MODE:
        settings = {n: value for n, value in settings.items() if n not in NOT_OF_MODE[mode]}
    if dry_run:
        settings |= {"direct": False} if mode == "free" else {}
        return show_prompt(words, answer_schema, settings, notes, is_dry_run=True)
    with span_export_context(notes), ProgressDisplay(notes, form) as screen:
        return _ask(_decoded_text(words[0]), words[1:], answer_schema, settings, screen, mode)


def _check_mode(
    mode: str | None, resume: str | None, is_dry_run: bool, given: Mapping[str, Any]
) -> None:
    """Raise UsageError if ``--mode`` is unknown or conflicts with ``--resume`` or another
    option."""
    if mode is None:
        return
    if resume is not None:
        raise UsageError("--resume continues the run in its own mode: remove --mode")
    check_mode(mode, given)
    if is_dry_run and mode != "free":
        raise UsageError(
            f"--dry-run shows the prompt of a session, and --mode {mode} has none: remove one of "
            "them, or see a plan with ramify plan"
        )


def check_mode(mode: str, given: Mapping[str, Any]) -> None:
    """Raise UsageError if ``--mode`` has an unknown value or does not support another given
    option."""
    if mode not in MODES:
        raise UsageError(f"--mode {mode} is unknown: give {', '.join(MODES)}")
    if given.get("direct") is not None:
        raise UsageError("--mode and --direct set the same thing: give only --mode")
    without = NOT_OF_MODE.get(mode, ())
    options = [each for each in SETTINGS if given.get(each.name) is not None]
    if refused := [each.long for each in options if each.name in without]:
        raise UsageError(
            f"--mode {mode} has no session: remove {', '.join(refused)}, or give --mode free"
        )


def make_message_writer(settings: dict[str, Any], kinds: Mapping[str, Any]) -> StderrMessageWriter:
    """Create the object that writes a command's messages to stderr.

    It also receives the warnings of this process.

    The first messages warn about environment variables whose names look like misspelled settings.
    ``kinds`` contains the settings that exist.
    """
    notes = StderrMessageWriter(bool(settings.get("quiet")), bool(settings.get("verbose")))
    notes.show_warnings_and_logs()
    for line in unknown_variable_warnings(kinds):
        notes.warning(line)
    return notes


def run_prompt_command(
    words: list[str],
    answer_schema: str | None = None,
    depth: int | None = None,
    tokenizer: str | None = None,
    tokens: bool | None = None,
    **given: Any,
) -> int:
    """Run ``ramify prompt``: print the initial prompt for a question, without sending it to a
    model."""
    settings = fill_missing_settings(given, KINDS)
    notes = StderrMessageWriter(bool(settings.get("quiet")), bool(settings.get("verbose")))
    notes.show_warnings_and_logs()
    if not words[0].strip():
        raise UsageError("no question: ramify prompt QUESTION PATH…")
    if tokens and tokenizer is None:
        raise UsageError("--tokens needs a tokenizer: give --tokenizer FOLDER too")
    _refuse_a_path(words[0], words[1:])
    if not settings.get("model"):
        write_stderr(NO_MODEL.replace("ramify ask", "ramify prompt"))
        return ExitCode.USAGE
    return show_prompt(
        words,
        answer_schema,
        settings,
        notes,
        depth=depth or 0,
        tokenizer=tokenizer,
        as_tokens=bool(tokens),
    )


def show_prompt(
    words: list[str],
    answer_schema: str | None,
    settings: dict[str, Any],
    notes: StderrMessageWriter,
    **options: Any,
) -> int:
    """Print the initial prompt for a question.

    Additional keyword arguments are passed to ``prompt_preview_printer.show``.
    """
    from ramify.cli import prompt_preview_printer

    with connect_mcp_tools(settings) as tools:
        rlm = make_rlm(settings, sandbox_spec(settings), None, tools)
        # A dry run prints what was loaded itself.
        quiet = StderrMessageWriter(quiet=True) if options.get("is_dry_run") else notes
        loaded = load_sources(words[1:], quiet, settings)
        return prompt_preview_printer.show(
            rlm,
            _decoded_text(words[0]),
            loaded,
            answer_type=read_schema(answer_schema),
            cite=bool(settings.get("cite")),
            as_json=bool(settings.get("json")),
            is_free=_is_free(settings),
            **options,
        )


def _refuse_a_path(question: str, paths: list[str]) -> None:
    """Raise UsageError if the question is a file name or a URL.

    The user probably forgot the question, and the model would see only the name.
    """
    is_url = "://" in question and not any(map(str.isspace, question))
    if (os.path.exists(question) or is_url) and not any(map(os.path.exists, paths)):
        from ramify.sources.url_recognition import redact_url_for_display

        shown = redact_url_for_display(question) if is_url else question
        raise UsageError(
            f"{shown} is {'an address' if is_url else 'a file or folder'}, and the question comes "
            f"first: ramify ask QUESTION {shown}"
        )
    refuse_question_without_quotes(question, paths)


def refuse_question_without_quotes(
    question: str, paths: list[str], command: str = "ramify ask"
) -> None:
    """Raise UsageError if the first paths are probably words of the question, which lacks
    quotes."""
    if any(map(str.isspace, question)):
        return
    words = list(itertools.takewhile(_is_word_without_file, paths))
    if not words:
        return
    import shlex

    from ramify.nearest_name import nearest_name

    if len(words) == 1 and nearest_name(words[0], os.listdir()):
        return
    asked = shlex.join([" ".join([question, *words]), *paths[len(words) :]])
    raise UsageError(
        f"{words[0]} does not exist: if it belongs to the question, put the question in quotes: "
        f"{command} {asked}"
    )


def _is_word_without_file(path: str) -> bool:
    word = path.rstrip("?.!,")
    is_word = word != "-" and not any(char in word for char in "/.*?[~\\")
    return is_word and not os.path.exists(path)


def _decoded_text(argument: str) -> str:
    """Decode a command-line argument as UTF-8 or Windows-1252 if the locale could not decode it.

    It is read as UTF-8, or as Windows-1252 if that fails, in the same way as files.
    """
    try:
        argument.encode()
        return argument
    except UnicodeEncodeError:
        raw = os.fsencode(argument)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("cp1252", "replace")


def _ask(
    question: str,
    paths: list[str],
    answer_schema: str | None,
    settings: dict[str, Any],
    screen: ProgressDisplay,
    mode: Any,
) -> int:
    spec = sandbox_spec(settings)
    needs_session = mode == "free" or _needs_session(paths, settings)
    has_session = mode in (None, "free") and needs_session
    _warm_up(settings["model"], spec if has_session else None)
    from ramify.cli import ask_runner
    from ramify.engine.question import RunOptions

    schema = read_schema(answer_schema)
    with connect_mcp_tools(settings) as tools:
        rlm = make_rlm(settings, spec, open_store(settings), tools)
        check_models_ready(settings)
        note_offline_models(settings, screen.notes)
        loaded = load_sources(paths, screen.notes, settings)
        cite, cache = bool(settings.get("cite")), bool(settings.get("cache"))
        options = RunOptions(
            answer_type=schema,
            cite=cite,
            cache=cache,
            direct=settings.get("direct") is not False,
            mode=mode,
        )
        asked = ask_runner.QuestionRunRequest(question, loaded, options)
        return ask_runner.run(rlm, asked, screen, as_json=bool(settings.get("json")))


def connect_mcp_tools(
    settings: dict[str, Any],
) -> contextlib.AbstractContextManager[McpTools | None]:
    """Connect to the MCP servers that the setting ``mcp`` names, for the duration of a ``with``
    block.

    The block receives their tools, or None if no server is named.
    """
    if not settings.get("mcp"):
        return contextlib.nullcontext()
    from ramify.engine.mcp_tools import McpTools

    return McpTools(*settings["mcp"])


def _warm_up(model: str, spec: SandboxSpec | None) -> None:
    """Start the sandbox and load TLS certificates in the background, so that the run starts sooner.

    The sandbox server starts in its own process. A thread loads the certificate authorities, which
    mostly runs without the GIL.
    """
    from ramify.clients.providers import IN_PROCESS, PROVIDERS, resolve_endpoint, split_provider
    from ramify.sandbox.prewarm import prewarm_sandbox

    if spec is not None:
        prewarm_sandbox(spec)
    named = named_models().get(model)
    if named is not None:  # it has its own key and address
        provider, is_plain = named.provider, (named.base_url or "").startswith("http:")
    else:
        provider = split_provider(model)[0]
        is_plain = provider in PROVIDERS and resolve_endpoint(model).url.startswith("http:")
    if provider not in ("scripted", "offline", IN_PROCESS) and not is_plain:
        import threading

        # Not a daemon: OpenSSL crashes if the process ends while certificates are read.
        threading.Thread(target=_read_authorities).start()


def _read_authorities() -> None:
    from ramify.http_client.tls import tls_context

    with contextlib.suppress(ConfigError):  # the first request reports it
        tls_context()


def sandbox_spec(settings: dict[str, Any]) -> SandboxSpec:
    from ramify.sandbox.base import JailSpec, SandboxSpec, check_provider_exists, provider_spec

    fields: dict[str, Any] = {
        name: settings[name] for name in ("tier", "allow_weaker") if settings.get(name) is not None
    }
    if memory := settings.get("memory"):
        fields["memory_bytes"] = parse_size(memory, "--memory")
    if mounts := settings.get("mount"):
        fields["mounts"] = [parse_mount(mount) for mount in mounts]
    if provider := settings.get("sandbox"):
        fields["provider"] = provider
    check_provider_exists(SandboxSpec(**({"provider": provider} if provider else {})))
    spec = provider_spec({**fields, "packages": list(settings.get("package") or ())})
    # A session is opened only if the question needs one, and a wrong value is an error before.
    places = spec.mounts if isinstance(spec, JailSpec) else ()
    if absent := next((path for path, _ in places if not os.path.exists(path)), None):
        raise ConfigError(
            f"sandbox mounts: '{absent}' does not exist on this machine: correct the path"
        )
    if spec.packages and spec.provider in LOCAL_SANDBOXES:
        from ramify.sandbox.host.importable_packages import locate

        locate(spec.packages)
    return spec


def parse_mount(given: str) -> tuple[str, str]:
    """Split the value of ``--mount`` into the path on this machine and the path inside the session.

    An example is ``data:/data``. The path on this machine is made absolute. If there is only one
    path, it is used for both.
    """
    path, colon, place = given.rpartition(":")
    path = os.path.abspath(os.path.expanduser(path if colon else given))
    return path, place if colon else path


def _needs_session(paths: list[str], settings: dict[str, Any]) -> bool:
    """Return True if the question will probably need a sandbox session rather than one direct
    model call."""
    if settings.get("direct") is False or settings.get("branches", 1) != 1 or settings.get("mcp"):
        return True
    if len(paths) == 1 and os.path.isfile(paths[0]):
        return os.path.getsize(paths[0]) > SMALL_BYTES
    return bool(paths)


def make_rlm(
    settings: dict[str, Any],
    spec: SandboxSpec,
    store: RunStore | None,
    tools: Mapping[str, Any] | None = None,
    mode: Any = None,
) -> RLM:
    from ramify.clients.base import Sampling
    from ramify.clients.providers import is_in_process
    from ramify.engine.limits import Limits
    from ramify.engine.prompt_scaffold import trained_policy_settings
    from ramify.engine.rlm import RLM

    temperature = settings.get("temperature")
    if temperature is not None and not 0 <= temperature < math.inf:
        raise ConfigError(f"temperature={temperature:g} is out of range: give 0 or more")
    named = named_models()
    given = _model_names(settings)
    for name in given:
        if is_in_process(name):
            from ramify.inference.local import check_local_model_available

            check_local_model_available(name)
    model, *sub_models = (named.get(name, name) for name in given)
    limits = Limits(**{**trained_policy_settings(model).limits, **limit_fields(settings)})
    name = model if isinstance(model, str) else model.name
    scaffold = read_scaffold(settings.get("scaffold"), name)
    if settings.get("direct") is False:
        scaffold = msgspec.structs.replace(scaffold, direct_chars=0)
    return RLM(
        model,
        sub_model=sub_models or None,
        limits=limits,
        scaffold=scaffold,
        sandbox=spec,
        store=store,
        sampling=Sampling(temperature=temperature),
        instructions=read_instructions(settings.get("instructions")),
        examples=read_examples(settings.get("examples")),
        branches=settings.get("branches", 1),
        tools=tools,
        direct=settings.get("direct") is not False,
        mode=mode,
    )


def check_prices_known(settings: Mapping[str, Any], max_cost: float | None) -> None:
    """Raise UsageError if a maximum cost is set but a model has no known price.

    Models of third-party providers are accepted, because their clients may know the price.
    """
    from ramify.clients.providers import CLIENTS, PriceTable

    if max_cost is None or not math.isfinite(max_cost):
        return
    named, table = named_models(), PriceTable.load()
    for given in _model_names(settings):
        model = named.get(given)
        name = given if model is None else model.name
        price = (model.price if model is not None else None) or table.price(name)
        provider = name.partition(":")[0]
        if price is None and provider in CLIENTS.ours and provider != "litellm":
            raise UsageError(
                f"--max-cost {max_cost:g} cannot be enforced: {given} has no known price; remove "
                "--max-cost, or add the price to a table (RAMIFY_PRICES, docs/models.md)"
            )


def _model_names(settings: Mapping[str, Any]) -> tuple[str, ...]:
    return settings["model"], *(settings.get("sub_model") or ())


def _is_free(settings: Mapping[str, Any]) -> bool:
    """Return True if all models of a run are known to cost nothing."""
    from ramify.clients.providers import FREE, PriceTable

    table = PriceTable.load()
    models = _model_names(settings)
    return not named_models().keys() & {*models} and all(table.price(m) == FREE for m in models)


def check_models_ready(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if a model cannot be asked, so that a command need not begin.

    It may have no API key or no known price, its script may be unreadable, or its server on this
    machine may not be running. If ``patience`` is set, servers are not checked, since the run
    waits for them.
    """
    from ramify.clients.model_config import Model, check_api_key_exists
    from ramify.clients.providers import CLIENTS, is_scripted_model

    named = named_models()
    models = [named.get(name) or Model(name) for name in _model_names(settings)]
    for model in models:
        check_api_key_exists(model)
        if is_scripted_model(model.name):  # its file may be missing or wrong
            CLIENTS.resolve(model.provider)(model.name)
    check_prices_known(settings, settings.get("max_cost"))
    if settings.get("patience") is None:
        from ramify.cli.local_model_servers import check_local_servers

        check_local_servers(models)


def note_offline_models(settings: Mapping[str, Any], notes: StderrMessageWriter) -> None:
    """Print a notice for each chosen model whose replies are only simulated."""
    for name in dict.fromkeys(_model_names(settings)):
        if name.startswith("offline:"):
            notes.say(
                f"{name} only simulates a model: nothing is paid, and it knows only the questions "
                "of the built-in suites"
            )


def limit_fields(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are fields of ``Limits`` and are not None."""
    from ramify.engine.limits import Limits

    named = {**settings, "patience_s": settings.get("patience")}
    fields = Limits.__struct_fields__
    return {name: v for name, v in named.items() if name in fields and v is not None}


def open_store(settings: dict[str, Any]) -> RunStore | None:
    if settings.get("store") is False:
        if settings.get("cache"):
            raise ConfigError("--cache needs the store: remove --no-store")
        return None
    from ramify.store.store_opening import open_store

    return open_store()


def open_folder_store(settings: dict[str, Any], command: str) -> Store | None:
    """Open the store of runs for a command that keeps additional files in the store's folder.

    Returns None if the settings disable the store. Raises ConfigError if the store is not a folder.
    """
    if settings.get("store") is False:
        return None
    from ramify.store.store_opening import require_folder_store

    return require_folder_store(command)


def load_sources(
    paths: list[str], notes: StderrMessageWriter, settings: dict[str, Any]
) -> LoadedContext | None:
    """Load the given files, folders and URLs, or standard input if none are given.

    Returns None if no source was given and standard input is empty.
    """
    size = settings.get("max_bytes")
    max_bytes = None if size is None else parse_size(size, "--max-bytes")
    if not paths and not _is_piped(notes):
        return None
    from ramify.sources.load_sources import load

    for path in paths:
        if os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
            notes.say(f"reading the pipe {path} until it closes")
    loaded = load(
        paths or ["-"],
        stdin=sys.stdin.buffer,
        max_bytes=max_bytes,
        strict=bool(settings.get("strict")),
        allow_private=bool(settings.get("allow_private")),
    )
    from ramify.cli.loaded_sources_summary import source_table

    for line in source_table(loaded):
        notes.say(line)
    return loaded


def read_schema(given: str | None) -> dict[str, Any] | None:
    if not given:
        return None
    is_inline = given.lstrip().startswith("{")
    if not is_inline and not os.path.exists(os.path.expanduser(given)):
        from ramify.nearest_name import nearest_name

        kind = nearest_name(given, _JSON_TYPES) or "integer"
        raise ConfigError(
            f"the answer's schema {given:.200} cannot be read: there is no such file; correct the "
            f"""path, or give the schema itself, such as '{{"type": "{kind}"}}'"""
        )
    schema = _decode_file(
        given.encode() if is_inline else _read(given, "the answer's schema"), given
    )
    if not isinstance(schema, dict):
        raise ConfigError(
            f"the answer's schema in {given} is a {type(schema).__name__}: give a JSON object"
        )
    return schema


def read_scaffold(given: str | None, model: str) -> Any:
    from ramify.engine.prompt_scaffold import Scaffold, scaffold_of

    if not given or not given.endswith((".toml", ".json")):
        return scaffold_of(given or None, model)
    data = _read(given, "the scaffold")
    try:
        return msgspec.convert(_decode_file(data, given), Scaffold)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the scaffold {given}: {error}") from None


def read_instructions(given: str | None) -> str:
    """Return the user's instructions, read from a file if ``given`` is the name of one.

    They are given either as text or as the name of a file.
    """
    if not given:
        return ""
    if "\n" not in given and os.path.isfile(os.path.expanduser(given)):
        text = _read(given, "the instructions").decode("utf-8", "replace")
        if not text.strip():
            raise ConfigError(f"the instructions {given} are empty")
        return text
    if " " not in given.strip() and os.path.isdir(os.path.expanduser(given)):
        raise ConfigError(f"the instructions {given} are a folder: give a file or a text")
    if " " not in given.strip() and Path(given).suffix in (".md", ".txt", ".rst"):
        raise ConfigError(f"the instructions {given} cannot be read: there is no such file")
    return given


def read_examples(given: str | None) -> list[Any]:
    """Read example questions and answers from a ``.jsonl`` file, or from a ``.json`` file that
    contains a list."""
    if not given:
        return []
    data = _read(given, "the examples")
    if given.endswith(".jsonl"):
        lines = [line for line in data.splitlines() if line.strip()]
        examples: Any = [
            _decode_file(line, f"{given}, example {num}") for num, line in enumerate(lines, 1)
        ]
    else:
        examples = _decode_file(data, given)
    if not isinstance(examples, list):
        raise ConfigError(
            f"the examples file {given} holds a {type(examples).__name__}: give a list of objects "
            "with question and answer, or .jsonl"
        )
    if not examples:
        raise ConfigError(f"the examples {given} are empty: give at least one, or omit the option")
    return examples


def _read(path: str, what: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from None


def _decode_file(data: bytes, name: str) -> Any:
    try:
        if name.endswith(".toml"):
            import tomllib

            return tomllib.loads(data.decode())
        return msgspec.json.decode(data)
    except ValueError as error:  # base of the decoding errors of msgspec, tomllib and Unicode
        raise ConfigError(
            f"{name if len(name) < 80 else name[:79] + '…'} does not parse: {error}"
        ) from None


def _is_piped(notes: StderrMessageWriter) -> bool:
    """Return True if standard input is a pipe or a file with at least one byte.

    Waits until a byte arrives or the pipe is closed.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, ValueError, OSError):
        return False  # closed, or not a file
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return False
    import select

    if not select.select([sys.stdin], [], [], _PATIENCE_S)[0]:
        notes.say("reading standard input; to ask without a context, close it: < /dev/null")
    if sys.stdin.buffer.peek(1):  # type: ignore[union-attr]
        return True
    notes.say("standard input is empty, so the question has no context")
    return False


def _refuse_settings(words: list[str], answer_schema: str | None, given: dict[str, Any]) -> None:
    """Raise UsageError if ``--resume`` is combined with a setting that a resumed run cannot change.

    Settings about output and this machine are allowed.
    """
    options = [option for option in SETTINGS if given[option.name] is not None]
    refused = [each.long for each in options if each.name not in _ALLOWED_WITH_RESUME]
    refused += ["--answer-schema"] if answer_schema else []
    if words or refused:
        raise UsageError(
            "--resume continues the run with its original settings: remove "
            f"{', '.join(['QUESTION'] * bool(words) + refused)}"
        )


OF_A_PROMPT = (
    CliOptionSpec("answer_schema", str, "JSON schema that the answer must match", "FILE|JSON"),
    CliOptionSpec("depth", int, "prompt of a child at this depth (default: 0, the root)"),
    CliOptionSpec(
        "tokenizer", str, "count the tokens and apply the chat template of this model", "FOLDER"
    ),
    CliOptionSpec("tokens", bool, "with --tokenizer: print the token ids", has_no=False),
)

_ASK = SubcommandSpec(
    "ask",
    """\
Answer QUESTION over the content of each PATH: a file, folder, glob, archive or database, or - for
standard input. Without a PATH, piped input is read. Without either, the question has no context.

The answer goes to stdout, everything else to stderr. Press Ctrl-C once for the best answer so far,
twice to stop. The options up to --progress can also be set in the configuration file or as an
environment variable: max-cost = 2, RAMIFY_MAX_COST=2.""",
    ask,
    "QUESTION PATH…",
    max_words=None,
    options=(*SETTINGS, *OF_ONE_QUESTION),
    epilog=exit_codes_epilog(),
)
_PROMPT = SubcommandSpec(
    "prompt",
    """\
Print exactly what a model would be sent for QUESTION over the content of each PATH, as text or as
the tokens of a tokenizer. Nothing is sent, so no API key is needed.""",
    run_prompt_command,
    "QUESTION PATH…",
    min_words=1,
    max_words=None,
    options=(*SETTINGS, *OF_A_PROMPT),
)
COMMANDS = (_ASK, _PROMPT)
