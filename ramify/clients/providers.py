"""List the addresses, key variables and special request fields of the model providers.

A provider is the name before the colon in ``provider:model``.

All of them offer OpenAI's chat completions API. ``provider:model@http://host:port/v1`` sends the
same requests to any other server. The table in ``docs/models.md`` is generated from this one. To
add a provider, add an entry here, or in a package of yours (``ramify/plugins.py``).

Prices and context windows come from the packaged ``prices.json``. Unknown models have no price:
nothing is guessed. The file goes out of date, so each entry records when and from where its numbers
were taken. A file of the same format, passed explicitly or named by ``RAMIFY_PRICES``, overrides it
entry by entry:

    {"openai:gpt-5": {"input": 1.25, "cached": 0.125, "output": 10.0, "window": 272000,
                      "taken": "2026-11"}}

Prices are dollars per million tokens. ``also`` lists other names of the same entry. A date suffix
of a name is ignored. If long prompts cost more per token, the window ends at that length, so that
one price holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import msgspec

from ramify.clients.base import Price
from ramify.errors import ConfigError, did_you_mean
from ramify.http_client.urls_and_proxies import is_http_url
from ramify.lazy_pattern import lazy_pattern
from ramify.nearest_name import nearest_name
from ramify.plugins import PluginRegistry, is_object_location
from ramify.secret_redaction import register_secret
from ramify.trained_policy_settings import packaged_policy_names

_AT_URL = lazy_pattern(r"^(?P<model>.*)@(?P<url>https?://.+)$")
_LIKE_AN_ADDRESS = lazy_pattern(
    r"\w+:/.*|[^/]*:\d{2,5}(/.*)?|localhost.*|\d+(\.\d+){3}.*|.+/.*|https?.*"
)
RESPONSES_PATH = "/responses"
"""Ending of a base URL that selects the responses API."""
_AZURE_API_VERSION = "2024-10-21"


class ModelProviderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a provider's OpenAI-compatible server, and how its API differs from OpenAI's."""

    title: str
    url: str
    """Base URL; empty if every account has a different one."""
    url_variable: str
    """Environment variable that replaces the base URL."""
    key_variables: tuple[str, ...]
    """Environment variables that may hold the API key. The first one that is set is used."""
    local: bool = False
    """True if the server runs on the user's own machines, so that it needs no key and costs
    nothing."""
    key_header: str = "Authorization"
    """Header that carries the key. ``Authorization`` gets a ``Bearer`` prefix."""
    header_variables: dict[str, str] = {}
    """Additional headers, each sent if its environment variable is set."""
    limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Name of the request field that limits the length of a reply."""
    returns_ids: bool = False
    """True if the server supports ``return_token_ids`` and returns the token ids of the prompt
    and the reply."""
    reasoning_field: str = ""
    """Message field in which the reasoning of an earlier reply is sent back; empty if it must
    not be sent."""
    continue_fields: dict[str, bool] = {}
    """Request fields that make the server continue a last assistant message instead of answering
    it; empty if unsupported."""
    cache_key: bool = False
    """True if the server accepts ``prompt_cache_key``, which keeps requests with the same prefix
    together."""
    note: str = ""
    """Note to show in the documentation."""


PROVIDERS: dict[str, ModelProviderSpec] = {
    "openai": ModelProviderSpec(
        title="OpenAI, or any compatible server with `@URL`",
        url="https://api.openai.com/v1",
        url_variable="OPENAI_BASE_URL",
        key_variables=("OPENAI_API_KEY",),
        limit_field="max_completion_tokens",
        cache_key=True,
        note="another base URL gets `max_tokens` and needs no key",
    ),
    "azure": ModelProviderSpec(
        title="Azure OpenAI",
        url="",
        url_variable="AZURE_OPENAI_ENDPOINT",
        key_variables=("AZURE_OPENAI_API_KEY",),
        key_header="api-key",
        limit_field="max_completion_tokens",
        note="the model is the deployment; `OPENAI_API_VERSION` applies unless the endpoint ends "
        "in `/v1`",
    ),
    "openrouter": ModelProviderSpec(
        title="OpenRouter",
        url="https://openrouter.ai/api/v1",
        url_variable="OPENROUTER_BASE_URL",
        key_variables=("OPENROUTER_API_KEY",),
        reasoning_field="reasoning",
        note="`openrouter:maker/model`; its reported cost is used if the price is unknown",
    ),
    "portkey": ModelProviderSpec(
        title="Portkey",
        url="https://api.portkey.ai/v1",
        url_variable="PORTKEY_BASE_URL",
        key_variables=("PORTKEY_API_KEY",),
        key_header="x-portkey-api-key",
        header_variables={
            "x-portkey-provider": "PORTKEY_PROVIDER",
            "x-portkey-virtual-key": "PORTKEY_VIRTUAL_KEY",
            "x-portkey-config": "PORTKEY_CONFIG",
        },
        note="`portkey:@provider/model`, or set `PORTKEY_PROVIDER`, `PORTKEY_VIRTUAL_KEY` or "
        "`PORTKEY_CONFIG`",
    ),
    "vercel": ModelProviderSpec(
        title="Vercel AI Gateway",
        url="https://ai-gateway.vercel.sh/v1",
        url_variable="AI_GATEWAY_BASE_URL",
        key_variables=("AI_GATEWAY_API_KEY", "VERCEL_OIDC_TOKEN"),
        note="`vercel:maker/model`",
    ),
    "gemini": ModelProviderSpec(
        title="Gemini's compatible endpoint",
        url="https://generativelanguage.googleapis.com/v1beta/openai",
        url_variable="GEMINI_BASE_URL",
        key_variables=("GEMINI_API_KEY", "GOOGLE_API_KEY"),
    ),
    "deepseek": ModelProviderSpec(
        title="DeepSeek",
        url="https://api.deepseek.com/v1",
        url_variable="DEEPSEEK_BASE_URL",
        key_variables=("DEEPSEEK_API_KEY",),
    ),
    "groq": ModelProviderSpec(
        title="Groq",
        url="https://api.groq.com/openai/v1",
        url_variable="GROQ_BASE_URL",
        key_variables=("GROQ_API_KEY",),
    ),
    "mistral": ModelProviderSpec(
        title="Mistral",
        url="https://api.mistral.ai/v1",
        url_variable="MISTRAL_BASE_URL",
        key_variables=("MISTRAL_API_KEY",),
    ),
    "together": ModelProviderSpec(
        title="Together",
        url="https://api.together.xyz/v1",
        url_variable="TOGETHER_BASE_URL",
        key_variables=("TOGETHER_API_KEY",),
    ),
    "xai": ModelProviderSpec(
        title="xAI",
        url="https://api.x.ai/v1",
        url_variable="XAI_BASE_URL",
        key_variables=("XAI_API_KEY",),
    ),
    "vllm": ModelProviderSpec(
        title="vLLM",
        url="http://127.0.0.1:8000/v1",
        url_variable="VLLM_BASE_URL",
        key_variables=("VLLM_API_KEY",),
        local=True,
        returns_ids=True,
        continue_fields={"continue_final_message": True, "add_generation_prompt": False},
        note="returns token ids and log-probabilities",
    ),
    "sglang": ModelProviderSpec(
        title="SGLang",
        url="http://127.0.0.1:30000/v1",
        url_variable="SGLANG_BASE_URL",
        key_variables=("SGLANG_API_KEY",),
        local=True,
        continue_fields={"continue_final_message": True},
    ),
    "ollama": ModelProviderSpec(
        title="Ollama",
        url="http://127.0.0.1:11434/v1",
        url_variable="OLLAMA_BASE_URL",
        key_variables=("OLLAMA_API_KEY",),
        local=True,
        note="set its context length (`OLLAMA_CONTEXT_LENGTH`): it silently truncates longer "
        "prompts",
    ),
    "lmstudio": ModelProviderSpec(
        title="LM Studio",
        url="http://127.0.0.1:1234/v1",
        url_variable="LMSTUDIO_BASE_URL",
        key_variables=("LMSTUDIO_API_KEY",),
        local=True,
    ),
}

FREE = Price(0.0, 0.0)
ANTHROPIC_KEYS = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
"""Environment variables that may hold Anthropic's key. The first one that is set is used."""
IN_PROCESS = "local"
"""Name of the provider whose models run in this process: checkpoints (``local:FOLDER``) and the
packaged policies."""
CLIENTS = PluginRegistry(
    "provider",
    "ramify.providers",
    {
        **PROVIDERS,
        "anthropic": "ramify.clients.anthropic:AnthropicClient",
        "litellm": "ramify.clients.litellm:LiteLLMClient",
        "scripted": "ramify.testing.scripted_client:connect",
        "offline": "ramify.testing.offline_model:connect",
        IN_PROCESS: "ramify.inference.local:connect",
    },
)
"""Provider -> its ``ModelProviderSpec``, or a function ``(name, *, window, price, key, base_url) ->
Client`` that gets None for unknown options. It also gets the headers or the model's environment
variables if it has a parameter ``headers`` or ``environ``; a class may name a module in ``package``
that takes long to import."""
_loaded: set[str] = set()


async def import_client_modules(providers: Iterable[str]) -> None:
    """Import the given providers' client modules in a background thread.

    Some SDKs take half a minute to import on a busy machine, and would block the event loop. Import
    errors are reported when a client is created.
    """
    for provider in dict.fromkeys(providers):
        if provider not in PROVIDERS and provider not in _loaded:
            await asyncio.to_thread(_import_package, provider)
            _loaded.add(provider)


def _import_package(provider: str) -> None:
    with contextlib.suppress(ConfigError, ImportError):
        if package := getattr(CLIENTS.resolve(provider), "package", ""):
            importlib.import_module(package)


class ResolvedEndpoint(msgspec.Struct, frozen=True):
    """The URL, API key and headers for requests to a provider's server."""

    provider: ModelProviderSpec
    model: str
    url: str
    """Complete URL of the chat completions API."""
    headers: dict[str, str]
    """HTTP headers. They include the key, so they are never printed."""
    secret: str
    limit_field: str
    cache_key: bool

    def __post_init__(self) -> None:
        register_secret(self.provider.key_variables[0] or "key", self.secret)

    def __repr__(self) -> str:
        return f"Endpoint({self.model!r}, {self.url!r})"


def split_provider(name: str) -> tuple[str, str]:
    """Split a model's full name into the provider and the rest: ``openai:gpt-5`` becomes
    ``("openai", "gpt-5")``.

    ``my_clients.py:connect:m`` becomes ``("my_clients.py:connect", "m")``, and the name of a
    packaged policy becomes ``("local", name)``. Raises ConfigError for any other form."""
    if name in packaged_policy_names():
        return IN_PROCESS, name
    provider, colon, model = name.partition(":")
    before, is_url, _ = name.partition("://")
    if is_url and ":" not in before:  # gpt-5@http://…, openai/gpt-5@http://…
        colon = ""
    if "/" in provider and not provider.endswith(".py"):  # bedrock/claude-v2:0
        colon = ""
    if colon and is_object_location(provider):  # my_package.clients:connect:MODEL
        attribute, colon, model = model.partition(":")
        provider = f"{provider}:{attribute}"
    if not colon:
        intended = _with_provider(name)
        # Names with a slash are those of the Hub, which servers of many models take.
        example = f"openrouter:{name}" if "/" in name else f"openai:{name or 'gpt-5'}"
        advice = f"did you mean '{intended}'?" if intended else f"such as {example}"
        raise ConfigError(f"model '{name}' has no provider: write provider:model; {advice}")
    if not is_object_location(provider) and provider not in CLIENTS:
        raise ConfigError(
            f"unknown provider '{provider}' in '{name}': {did_you_mean(provider, CLIENTS)}"
        )
    if not model:
        raise ConfigError(f"'{name}' names no model: write {provider}:MODEL")
    return provider, model


def _with_provider(name: str) -> str | None:
    """Guess the full name, such as ``openai:gpt-5-mini``, of a model given without a provider.

    That is the result for both ``openai/gpt-5-mini`` and ``gpt-5-mini``. Returns None if nothing
    similar is known.
    """
    if name.startswith(("http://", "https://")):
        return f"openai:MODEL@{name}"
    if os.path.isdir(name) or name.startswith((".", "/", "~")):
        return f"{IN_PROCESS}:{name}"
    first, slash, rest = name.partition("/")
    if slash and "@" not in first and (provider := nearest_name(first, CLIENTS, cutoff=0.8)):
        return f"{provider}:{rest}"
    if policy := nearest_name(name, packaged_policy_names(), cutoff=0.7):
        return policy
    if provider := nearest_name(name, CLIENTS, cutoff=0.8):
        return f"{provider}:MODEL"
    model, at, url = name.partition("@")
    by_model = {full.partition(":")[2]: full for full in reversed(PriceTable.load().entries)}
    if close := nearest_name(model, by_model, cutoff=0.8):
        return f"{by_model[close]}{at}{url}"
    by_family = {known.partition("-")[0]: full for known, full in by_model.items()}
    if full := by_family.get(model.partition("-")[0]):  # claude-3-haiku
        return f"{full.partition(':')[0]}:{name}"
    return f"openai:{name}" if at and is_http_url(url) else None


def split_model_url(model: str) -> tuple[str, str | None]:
    """Split ``m@http://host/v1`` into the model name and the URL: ``("m", "http://host/v1")``.

    Without a URL, the whole text is the model, whose name may contain an ``@`` itself
    (``claude-sonnet-4@20250514``). Raises ConfigError if the text after the ``@`` resembles an
    address but is not a URL.
    """
    at = _AT_URL.match(model)
    if at:
        return at["model"], at["url"]
    before, _, tail = model.rpartition("@")
    if before and _LIKE_AN_ADDRESS.fullmatch(tail):
        raise ConfigError(
            f"'{tail}' in '{model}' is not a base URL: write the full URL, as in "
            f"{before}@http://host:8000/v1"
        )
    return model, None


class MissingApiKeyError(ConfigError):
    """Raised if a model at its provider's default address has no API key.

    ``name`` is the model's name.
    """

    def __init__(self, text: str, name: str, variable: str) -> None:
        super().__init__(text)
        self.name = name
        self.variable = variable
        """Environment variable in which the API key was expected."""


def missing_key_error(name: str, variable: str) -> MissingApiKeyError:
    """Return the error for a model without an API key.

    If the text after an ``@`` in the model's name could be a base URL, the error also shows the
    correct form.
    """
    before, _, tail = name.rpartition("@")
    is_other = before and not before.endswith(":")
    url = (
        f"; '{tail}' is not a base URL: the full form is {before}@http://host:8000/v1"
        if is_other
        else ""
    )
    text = f"{name}: no API key: set {variable} (export {variable}=…){url}"
    return MissingApiKeyError(text, name, variable)


def resolve_endpoint(
    name: str,
    *,
    key: str | None = None,
    base_url: str | None = None,
    headers: Mapping[str, str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ResolvedEndpoint:
    """Resolve a model's name to the URL, API key and headers for requests to its provider.

    The order of precedence is ``key`` and ``base_url``, then ``@URL`` in the name, then the
    environment. ``headers`` are added to each request.
    """
    provider_name, model = split_provider(name)
    provider: ModelProviderSpec = CLIENTS.resolve(provider_name)
    model, named_url = split_model_url(model)
    base_url = base_url or named_url
    if not model:
        raise ConfigError(f"'{name}' names no model before '@': write {provider_name}:MODEL@URL")
    url = (base_url or environ.get(provider.url_variable) or provider.url).rstrip("/")
    if not url:
        plain = name.partition("@")[0]
        raise ConfigError(
            f"{name}: no base URL: set {provider.url_variable}, or use {plain}@https://…"
        )
    if not is_http_url(url):
        place = "after the @" if base_url == named_url else f"in {provider.url_variable}"
        raise ConfigError(f"{name}: '{url}' is not a base URL: write it as https://host/v1 {place}")
    if "@" in url.partition("://")[2].partition("/")[0]:
        variable = provider.key_variables[0]
        raise ConfigError(
            f"{provider_name}:{model}: a base URL that contains a user or password would be "
            f"displayed and stored: remove them, and set {variable} if the server needs a key"
        )
    is_default_url = url == provider.url or provider_name == "azure"
    # Only the provider's own service requires a key: another base URL may not need one.
    secret = _key(name, provider, key, environ, needed=is_default_url and not provider.local)
    return ResolvedEndpoint(
        provider=provider,
        model=model,
        url=_azure_url(url, model, environ) if provider_name == "azure" else _chat_url(url),
        headers={**_headers(provider, secret, environ), **(headers or {})},
        secret=secret,
        limit_field=provider.limit_field if is_default_url else "max_tokens",
        cache_key=provider.cache_key and is_default_url,
    )


def _key(
    name: str,
    provider: ModelProviderSpec,
    key: str | None,
    environ: Mapping[str, str],
    *,
    needed: bool,
) -> str:
    value = key or next(
        (environ[variable] for variable in provider.key_variables if environ.get(variable)), ""
    )
    if not value and needed:
        variable = provider.key_variables[0]
        if os.environ.get(variable) and environ is not os.environ:
            raise ConfigError(
                f"{name}: no API key: {variable} was set after the model was created, and keys "
                "are read only then: create the RLM or the Model again"
            )
        raise missing_key_error(name, variable)
    if not value.isascii() or any(character.isspace() for character in value.strip()):
        raise ConfigError(
            f"{name}: the key in {provider.key_variables[0]} contains spaces or characters that "
            "no key has; copy it again"
        )
    return value.strip()


def _headers(
    provider: ModelProviderSpec, secret: str, environ: Mapping[str, str]
) -> dict[str, str]:
    headers = {
        header: environ[name].strip()
        for header, name in provider.header_variables.items()
        if environ.get(name)
    }
    for header, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise ConfigError(
                f"{provider.header_variables[header]} contains characters that are not allowed in "
                "an HTTP header; copy it again"
            )
    if secret:
        headers[provider.key_header] = (
            f"Bearer {secret}" if provider.key_header == "Authorization" else secret
        )
    return headers


def _chat_url(base: str) -> str:
    is_whole = base.endswith(("/chat/completions", RESPONSES_PATH))
    return base if is_whole else f"{base}/chat/completions"


def _azure_url(base: str, deployment: str, environ: Mapping[str, str]) -> str:
    if base.endswith("/v1"):
        return _chat_url(base)
    version = environ.get("OPENAI_API_VERSION") or _AZURE_API_VERSION
    root = base if base.endswith("/openai") else f"{base}/openai"
    return f"{root}/deployments/{quote(deployment, safe='')}/chat/completions?api-version={version}"


def providers_markdown_table() -> str:
    """Format the list of providers as the Markdown table of ``docs/models.md``."""
    rows = ["| name | what | base URL | changed by | key | notes |", "|---|---|---|---|---|---|"]
    for name, spec in PROVIDERS.items():
        keys = " or ".join(f"`{variable}`" for variable in spec.key_variables) + (
            " (optional)" if spec.local else ""
        )
        url = f"`{spec.url}`" if spec.url else "your own"
        rows.append(
            f"| `{name}` | {spec.title} | {url} | `{spec.url_variable}` | {keys} | {spec.note} |"
        )
    return "\n".join(rows) + "\n"


_DATE = lazy_pattern(r"[-@]20\d\d-?\d\d-?\d\d$")


class PriceEntry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The price and context window of one model in a price file."""

    input: float | None = None
    """Dollars per million input tokens. ``output``, ``cached`` and ``cache_write`` have the same
    unit."""
    output: float | None = None
    cached: float | None = None
    cache_write: float | None = None
    window: int | None = None
    """Context window: maximum tokens of the prompt and the reply together."""
    taken: str = ""
    """Month in which the numbers were recorded, such as ``2026-11``."""
    source: str = ""
    """Where the numbers were found."""
    also: tuple[str, ...] = ()

    @property
    def to_price(self) -> Price | None:
        if self.input is None or self.output is None:
            return None
        return Price(self.input, self.output, self.cached, self.cache_write)


class PriceTable:
    """A table of prices and context windows, indexed by the model's full name
    (``provider:model``)."""

    def __init__(self, entries: Mapping[str, PriceEntry]) -> None:
        self.entries = dict(entries)
        """Maps each model name to its entry. An entry with several names is listed under each of
        them."""
        for entry in entries.values():
            for name in entry.also:
                self.entries.setdefault(name, entry)

    @classmethod
    def load(cls, path: str | Path | None = None) -> PriceTable:
        """Load the packaged table of prices.

        Entries are overridden by the file at ``path``, or by default by the file that
        ``RAMIFY_PRICES`` names.
        """
        packaged = _read(Path(__file__).with_name("prices.json"))
        override = path or os.environ.get("RAMIFY_PRICES")
        return cls({**packaged, **_read(Path(override))} if override else packaged)

    def price(self, name: str) -> Price | None:
        entry = self._find(name)
        if entry is not None and entry.to_price is not None:
            return entry.to_price
        return FREE if is_self_hosted(name) or is_scripted_model(name) else None

    def context_window(self, name: str) -> int | None:
        """Return the context window of a model in tokens, or None if it is unknown."""
        entry = self._find(name)
        return entry.window if entry is not None else None

    def _find(self, name: str) -> PriceEntry | None:
        bare = name.partition("@http")[0]
        return (
            self.entries.get(name)
            or self.entries.get(bare)
            or self.entries.get(_DATE.sub("", bare))
        )


def is_in_process(name: str) -> bool:
    """Return True if ``name`` is a model that runs in this process: ``local:FOLDER`` or a packaged
    policy."""
    return name.startswith(f"{IN_PROCESS}:") or name in packaged_policy_names()


def is_scripted_model(name: str) -> bool:
    """Return True if a model's replies come from a script, so that they cost nothing."""
    return name.startswith(("scripted:", "offline:"))


def is_self_hosted(name: str) -> bool:
    """Return True if a model runs on the user's own machines, so that its tokens are free."""
    if is_in_process(name):
        return True
    prefix = name.partition(":")[0]
    is_installed = prefix not in CLIENTS.ours and not is_object_location(prefix)
    found = CLIENTS.get(prefix) if is_installed else PROVIDERS.get(prefix)
    return isinstance(found, ModelProviderSpec) and found.local


def _read(path: Path) -> dict[str, PriceEntry]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, PriceEntry])
    except OSError as error:
        raise ConfigError(
            f"price table {path}: {error.strerror}; set RAMIFY_PRICES to a file of prices"
        ) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"price table {path}: {error}; docs/models.md has the format") from None
