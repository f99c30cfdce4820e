"""Describe a model in one object: its name, API key, address, price and sampling settings.

    ramify.RLM(ramify.Model("openai:gpt-5-mini", api_key=key_of_tenant, alias="mini"))

    [models.mini]                                   the same in the settings file
    model = "openai:gpt-5-mini"
    api-key = "$TENANT_KEY"

The key and the other variables of a provider are read from the environment once, when the object is
created. Later changes of the environment do not affect it, so one program can serve several
tenants. The key never appears in the object's ``repr``, in an error or in the journal. The object
cannot be pickled or given to a session.

``providers.py`` lists the providers, ``rate_limited_requests.py`` sends the requests, and
``engine/resources.py`` chooses the model for each depth.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from ramify.clients.base import Price, Sampling
from ramify.clients.providers import (
    ANTHROPIC_KEYS,
    CLIENTS,
    IN_PROCESS,
    PROVIDERS,
    ModelProviderSpec,
    ResolvedEndpoint,
    missing_key_error,
    resolve_endpoint,
    split_model_url,
    split_provider,
)
from ramify.errors import ConfigError, check_keywords
from ramify.http_client.urls_and_proxies import is_http_url
from ramify.lazy_pattern import lazy_pattern
from ramify.secret_redaction import register_secret

_GAP = lazy_pattern(r"\s*(?:[,;+]|and\b)?\s*")
_ANTHROPIC = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL")
_WITHOUT_KEY = ("scripted", "offline", IN_PROCESS)
_ALIAS = lazy_pattern(r"[^\s:'\"`]{1,64}")
_HEADER = lazy_pattern(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PRICE_FORM = "'$0.25 in, $2 out per million tokens', or ramify.Price(input=0.25, output=2)"
_AMOUNT = lazy_pattern(
    r"\$\s*(?P<dollars>\d+(?:\.\d+)?)\s*(?:(?:/|per\s)\s*1?\s*(?P<unit>M|million|K|thousand)\b"
    r"(?:\s*tokens)?)?\s*(?P<kind>input|in|output|out|cached|cache[ _-]write)\b",
    re.IGNORECASE,
)
_UNIT = lazy_pattern(
    r"[\s,;]*(?:(?:/|per\s)\s*1?\s*(?P<unit>M|million|K|thousand)\b(?:\s*tokens)?)?\s*",
    re.IGNORECASE,
)
_FIELDS = {
    "in": "input",
    "out": "output",
    "cache write": "cache_write",
    "cache-write": "cache_write",
}


class Model:
    """A language model to use: its name, address, API key, price and settings.

    >>> ramify.Model("openai:gpt-5-mini", api_key="sk-0123456789", alias="mini")
    Model('openai:gpt-5-mini', alias='mini')
    """

    __slots__ = (
        "_environ",
        "_headers",
        "_key",
        "alias",
        "base_url",
        "name",
        "price",
        "provider",
        "sampling",
        "stream",
        "vision",
        "window",
    )

    name: str
    """Name in the form ``provider:model``, followed by ``@URL`` if another base URL was given."""
    provider: str
    """The part of the name before the colon."""
    base_url: str | None
    """Base URL; None means the provider's default."""
    alias: str | None
    """Short name by which session code chooses the model. If None, it is derived from the
    model's name."""
    window: int | None
    """Context window: tokens of the prompt and the reply together. None means the value in the
    price table."""
    price: Price | None
    """Prices in dollars per million tokens; None means those in the price table."""
    sampling: Sampling | None
    """Sampling settings of this model. Each field that is set overrides the run's sampling."""
    vision: bool | None
    """Whether the model reads images; None if that is unknown."""
    stream: bool
    """False disables streaming. By default, replies are streamed if the server supports it."""

    def __init__(
        self,
        name: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        alias: str | None = None,
        window: int | None = None,
        price: Price | str | None = None,
        headers: Mapping[str, str] | None = None,
        sampling: Sampling | None = None,
        vision: bool | None = None,
        stream: bool = True,
        environ: Mapping[str, str] = os.environ,
        **unknown: Any,
    ) -> None:
        """Create a model from its name, such as ``openai:gpt-5-mini``, and its settings.

        Raises ConfigError if a setting is invalid.

        ``price`` is a ``Price`` or a string such as ``"$0.25 in, $2 out per million tokens"``. The
        provider's environment variables are read from ``environ`` now, and not again later.
        """
        check_keywords("Model", unknown, Model.__init__.__kwdefaults__ or ())
        if not isinstance(name, str):
            raise ConfigError(f"the model is a {type(name).__name__}: give 'provider:model'")
        self.provider = split_provider(name)[0]
        self._environ = _provider_variables(self.provider, environ)
        self.name = _with_url(name, self.provider, base_url)
        self.base_url = base_url
        self._key = _checked_key(self.name, self.provider, api_key)
        self._headers = dict(_checked_headers(self.name, headers))
        self.alias = _checked_alias(self.name, alias)
        if window is not None and (type(window) is not int or window < 1):
            raise ConfigError(f"{self.name}: window={window!r:.40} is not a number of tokens")
        self.window = window
        self.price = _price_of(self.name, price)
        if sampling is not None and not isinstance(sampling, Sampling):
            raise ConfigError(
                f"{self.name}: sampling is a {type(sampling).__name__}: give a ramify.Sampling(…)"
            )
        self.sampling = sampling
        if vision is not None and not isinstance(vision, bool):
            raise ConfigError(f"{self.name}: vision={vision!r:.40}: give True or False")
        self.vision = vision
        if not isinstance(stream, bool):
            raise ConfigError(f"{self.name}: stream={stream!r:.40}: give True or False")
        self.stream = stream

    def secrets(self) -> tuple[str | None, Mapping[str, str], Mapping[str, str]]:
        """Return the secrets of this model: its API key, headers and provider's environment
        variables.

        The model's client sends them.
        """
        return self._key, self._headers, self._environ

    def with_key(self, api_key: str) -> Model:
        """Return a copy of this model with another API key."""
        names = ("alias", "window", "price", "sampling", "vision", "stream")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        headers = self._headers or None
        return Model(self.name, api_key=api_key, headers=headers, environ=self._environ, **given)

    def settings(self) -> dict[str, Any]:
        """Return all settings except the name as plain data, without secrets, for a run's
        journal."""
        given = {
            "alias": self.alias,
            "window": self.window,
            "price": self.price,
            "sampling": self.sampling,
            "vision": self.vision,
            "headers": sorted(self._headers) or None,
            "stream": None if self.stream else False,
        }
        return {name: value for name, value in given.items() if value is not None}

    def merge_sampling(self, run: Sampling) -> Sampling:
        """Combine a run's sampling settings with those of this model.

        The model's settings take precedence. The stop sequences of both apply, and so does the
        smaller ``max_tokens``.
        """
        own, default = self.sampling, Sampling()
        if own is None:
            return run
        fields = {
            field: value
            for field in own.__struct_fields__
            if (value := getattr(own, field)) != getattr(default, field)
        }
        fields["extra"] = {**run.extra, **own.extra}
        fields["stop"] = tuple(dict.fromkeys([*run.stop, *own.stop]))
        fields["max_tokens"] = min(run.max_tokens, fields.get("max_tokens", run.max_tokens))
        return msgspec.structs.replace(run, **fields)

    def __repr__(self) -> str:
        given = [f", {k}={_short_repr(v)}" for k, v in self.settings().items() if k != "headers"]
        return f"Model({self.name!r}{''.join(given)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Model) and self._field_values() == other._field_values()

    def __hash__(self) -> int:
        return hash(self.name)

    def _field_values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field) for field in self.__slots__)

    def __setattr__(self, field: str, value: Any) -> None:
        if hasattr(self, field):
            raise AttributeError(f"a Model is immutable: make a new one with {field}=…")
        object.__setattr__(self, field, value)

    def __copy__(self) -> Model:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Model:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Model may hold a key, so it cannot be pickled: give its name")


def endpoint_of(model: Model) -> ResolvedEndpoint | None:
    """Return where requests to a model of a known provider go, or None for other providers.

    Raises ConfigError if its API key is missing or its URL is wrong.
    """
    if model.provider not in PROVIDERS:
        return None
    key, headers, environ = model.secrets()
    return resolve_endpoint(
        model.name, key=key, base_url=model.base_url, headers=headers, environ=environ
    )


def check_api_key_exists(model: Model) -> None:
    """Raise ConfigError if a model lacks an API key that its provider needs, or its URL is wrong.

    Call this before anything slow begins. LiteLLM and providers from other packages find keys
    themselves, and are not checked.
    """
    key, _, environ = model.secrets()
    if (
        endpoint_of(model) is None
        and model.provider == "anthropic"
        and not key
        and not any(map(environ.get, ANTHROPIC_KEYS))
    ):
        raise missing_key_error(model.name, ANTHROPIC_KEYS[0])


def check_aliases(models: Sequence[Any]) -> None:
    """Raise ConfigError if the alias of one model is also a name of another.

    Client objects in the list are skipped, because they have no alias.
    """
    distinct: list[Any] = []
    for model in models:
        if not any(model is other or model == other for other in distinct):
            distinct.append(model)
    for model in distinct:
        if not isinstance(model, Model) or model.alias is None:
            continue
        for other in distinct:
            names = (other.name, bare_name(other.name), getattr(other, "alias", None))
            if other is not model and model.alias in names:
                raise ConfigError(
                    f"the alias '{model.alias}' stands for two models, {model.name} and "
                    f"{other.name}: give each a different alias"
                )


def bare_name(name: str) -> str:
    """Return a model's name without provider and URL: ``Qwen/Qwen3-8B`` for
    ``vllm:Qwen/Qwen3-8B@http://host/v1``."""
    return name.partition("@http")[0].partition(":")[2] or name


def _short_repr(value: Any) -> str:
    """Return the ``repr`` of a value in a short form.

    For a struct, only the fields that differ from their defaults are shown.
    """
    if not isinstance(value, msgspec.Struct):
        return repr(value)
    defaults = dict(
        zip(reversed(value.__struct_fields__), reversed(value.__struct_defaults__), strict=False)
    )
    fields = {name: getattr(value, name) for name in value.__struct_fields__}
    given = [f"{k}={v!r}" for k, v in fields.items() if k not in defaults or v != defaults[k]]
    return f"{type(value).__name__}({', '.join(given)})"


def _provider_variables(provider: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the environment variables that a provider's client reads."""
    names: Sequence[str] = _ANTHROPIC if provider == "anthropic" else ()
    found = PROVIDERS.get(provider) if provider in CLIENTS.ours else CLIENTS.resolve(provider)
    if isinstance(found, ModelProviderSpec):
        names = (
            found.url_variable,
            *found.key_variables,
            *found.header_variables.values(),
            "OPENAI_API_VERSION",
        )
    return {name: environ[name] for name in names if environ.get(name)}


def _with_url(name: str, provider: str, base_url: str | None) -> str:
    """Append a base URL to a model's name: ``provider:model@URL``.

    Raises ConfigError if the URL is invalid.
    """
    if base_url is None:
        return name
    if provider in _WITHOUT_KEY:
        raise ConfigError(f"{name}: a model of '{provider}' has no server: omit base_url")
    if not isinstance(base_url, str) or not is_http_url(base_url):
        raise ConfigError(
            f"{name}: base_url={base_url!r:.80} is not a URL: write it as https://host/v1"
        )
    if "@" in base_url.partition("://")[2].partition("/")[0]:
        raise ConfigError(
            f"{name}: base_url contains a user or password, which would be displayed and stored: "
            "give api_key or headers instead"
        )
    if split_model_url(split_provider(name)[1])[1] is not None:
        raise ConfigError(f"{name}: the name already has a URL: remove it, or remove base_url")
    return f"{name}@{base_url.rstrip('/')}" if provider in CLIENTS.ours else name


def _checked_key(name: str, provider: str, key: str | None) -> str | None:
    if key is None:
        return None
    if provider in _WITHOUT_KEY:
        raise ConfigError(f"{name}: a model of '{provider}' needs no key: omit api_key")
    if not isinstance(key, str) or not key.strip():
        raise ConfigError(f"{name}: api_key is empty or not a text: give the key, or omit it")
    key = key.strip()
    if not key.isascii() or any(character.isspace() for character in key):
        raise ConfigError(f"{name}: api_key has spaces or characters that no key has")
    register_secret(f"key of {bare_name(name)}", key)
    return key


def _checked_headers(name: str, headers: Mapping[str, str] | None) -> Iterator[tuple[str, str]]:
    if headers is not None and not isinstance(headers, Mapping):
        raise ConfigError(f"{name}: headers is a {type(headers).__name__}: give a dict of strings")
    for header, value in (headers or {}).items():
        if not isinstance(header, str) or not _HEADER.fullmatch(header):
            raise ConfigError(f"{name}: {header!r:.60} is not the name of an HTTP header")
        if not isinstance(value, str) or not (value.isascii() and value.isprintable()):
            raise ConfigError(f"{name}: the value of header {header} is not printable ASCII text")
        register_secret(f"header {header}", value)
        yield header, value


def _checked_alias(name: str, alias: str | None) -> str | None:
    if alias is not None and not (isinstance(alias, str) and _ALIAS.fullmatch(alias)):
        raise ConfigError(
            f"{name}: alias={alias!r:.80} is not a short name: give at most 64 characters without "
            "spaces, colons and quotes"
        )
    return alias


def _price_of(name: str, given: Any) -> Price | None:
    """Parse the ``price`` argument of the model called ``name``.

    A bare number is rejected as ambiguous, because providers quote prices per thousand or per
    million tokens.
    """
    if given is None or isinstance(given, Price):
        return given
    if not isinstance(given, str):
        raise ConfigError(f"{name}: price={given!r:.60} has no unit: give {_PRICE_FORM}")
    amounts, position = list[re.Match[str]](), 0
    while amount := _AMOUNT.match(given, position):
        amounts.append(amount)
        position = amount.end()
        gap = _GAP.match(given, position)
        position = gap.end() if gap else position
    end = _UNIT.fullmatch(given, position)
    common = end["unit"] if end else None
    fields: dict[str, float] = {}
    for amount in amounts:
        unit = (amount["unit"] or common or "").lower()
        if not unit:
            raise ConfigError(f"{name}: price={given!r:.60} has no unit: give {_PRICE_FORM}")
        kind = amount["kind"].lower().replace("_", " ")
        scale = 1000 if unit in ("k", "thousand") else 1
        fields[_FIELDS.get(kind, kind)] = scale * float(amount["dollars"])
    if not end or not {"input", "output"} <= fields.keys():
        raise ConfigError(f"{name}: price={given!r:.60} is not understood: give {_PRICE_FORM}")
    return Price(**fields)
