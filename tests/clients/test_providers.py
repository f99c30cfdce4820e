"""Model names, base URLs and keys of providers; and the table of providers in the documentation."""

import asyncio
import sys
import threading
from pathlib import Path

import pytest

from ramify.clients.providers import (
    PROVIDERS,
    import_client_modules,
    providers_markdown_table,
    resolve_endpoint,
    split_model_url,
    split_provider,
)
from ramify.errors import ConfigError

ENV = {
    "OPENAI_API_KEY": "key",
    "AZURE_OPENAI_API_KEY": "key",
    "PORTKEY_API_KEY": "key",
    "PORTKEY_PROVIDER": "openai",
}
BEARER = {"Authorization": "Bearer key"}


@pytest.mark.parametrize(
    ("name", "environ", "url", "headers", "limit"),
    [
        (
            "openai:gpt-5",
            ENV,
            "https://api.openai.com/v1/chat/completions",
            BEARER,
            "max_completion_tokens",
        ),
        ("openai:m@http://h:1/v1/", {}, "http://h:1/v1/chat/completions", {}, "max_tokens"),
        (
            "openai:m",
            {**ENV, "OPENAI_BASE_URL": "https://p/v1"},
            "https://p/v1/chat/completions",
            BEARER,
            "max_tokens",
        ),
        (
            "azure:mine",
            {**ENV, "AZURE_OPENAI_ENDPOINT": "https://n.openai.azure.com/"},
            "https://n.openai.azure.com/openai/deployments/mine/chat/completions?api-version=2024-10-21",
            {"api-key": "key"},
            "max_completion_tokens",
        ),
        (
            "azure:mine",
            {
                **ENV,
                "AZURE_OPENAI_ENDPOINT": "https://n.openai.azure.com",
                "OPENAI_API_VERSION": "2025-01-01",
            },
            "https://n.openai.azure.com/openai/deployments/mine/chat/completions?api-version=2025-01-01",
            {"api-key": "key"},
            "max_completion_tokens",
        ),
        (
            "azure:mine@https://n.openai.azure.com/openai/v1",
            ENV,
            "https://n.openai.azure.com/openai/v1/chat/completions",
            {"api-key": "key"},
            "max_completion_tokens",
        ),
        (
            "portkey:@maker/model",
            ENV,
            "https://api.portkey.ai/v1/chat/completions",
            {"x-portkey-provider": "openai", "x-portkey-api-key": "key"},
            "max_tokens",
        ),
        ("vllm:org/m", {}, "http://127.0.0.1:8000/v1/chat/completions", {}, "max_tokens"),
        (
            "vllm:m",
            {"VLLM_BASE_URL": "http://g", "VLLM_API_KEY": "key"},
            "http://g/chat/completions",
            BEARER,
            "max_tokens",
        ),
        (
            "gemini:g",
            {"GOOGLE_API_KEY": "key"},
            PROVIDERS["gemini"].url + "/chat/completions",
            BEARER,
            "max_tokens",
        ),
    ],
)
def test_model_name_resolves_to_endpoint(name, environ, url, headers, limit):
    endpoint = resolve_endpoint(name, environ=environ)
    assert (endpoint.url, endpoint.headers, endpoint.limit_field) == (url, headers, limit)


@pytest.mark.parametrize(
    ("name", "environ", "says"),
    [
        *(
            (name, {}, f"model '{name}' has no provider: write provider:model; {advice}")
            for name, advice in {
                "gpt-5": "did you mean 'openai:gpt-5'?",
                "./trained": "did you mean 'local:./trained'?",
                "/no/such/folder": "did you mean 'local:/no/such/folder'?",
                "gpt5-mini": "did you mean 'openai:gpt-5-mini'?",
                "claude-instant": "did you mean 'anthropic:claude-instant'?",
                "openai/gpt-5-mini": "did you mean 'openai:gpt-5-mini'?",
                "antropic/claude-opus-5": "did you mean 'anthropic:claude-opus-5'?",
                "openrouter/openai/gpt-5": "did you mean 'openrouter:openai/gpt-5'?",
                "ollama/llama3.2": "did you mean 'ollama:llama3.2'?",
                "openai/m@http://h/v1": "did you mean 'openai:m@http://h/v1'?",
                "m@http://h/v1": "did you mean 'openai:m@http://h/v1'?",
                "http://h:1/v1": "did you mean 'openai:MODEL@http://h:1/v1'?",
                "openai": "did you mean 'openai:MODEL'?",
                "tinny": "did you mean 'tiny'?",
                "meta-llama/Llama-3": "such as openrouter:meta-llama/Llama-3",
                "own-model": "such as openai:own-model",
            }.items()
        ),
        (
            "opnai:gpt-5",
            {},
            "unknown provider 'opnai' in 'opnai:gpt-5': did you mean 'openai'? known: anthropic, "
            "azure",
        ),
        ("openai:", {}, "'openai:' names no model: write openai:MODEL"),
        (
            "openai:@http://h/v1",
            {},
            "'openai:@http://h/v1' names no model before '@': write openai:MODEL@URL",
        ),
        (
            "openai:m",
            {},
            "openai:m: no API key: set OPENAI_API_KEY (export OPENAI_API_KEY=…)",
        ),
        (
            "vllm:m@http://user:secret@host/v1",
            {},
            "vllm:m: a base URL that contains a user or password would be displayed and stored: "
            "remove them, and set VLLM_API_KEY",
        ),
        (
            "azure:m",
            ENV,
            "azure:m: no base URL: set AZURE_OPENAI_ENDPOINT, or use azure:m@https://…",
        ),
        (
            "azure:m@nothing",
            ENV,
            "azure:m@nothing: no base URL: set AZURE_OPENAI_ENDPOINT, or use azure:m@https://…",
        ),
        (
            "openai:m@gpu:8000",
            {},
            "'gpu:8000' in 'm@gpu:8000' is not a base URL: write the full URL, as in "
            "m@http://host:8000/v1",
        ),
        ("ollama:m@ftp://host", {}, "'ftp://host' in 'm@ftp://host' is not a base URL"),
        ("vllm:m@localhost", {}, "'localhost' in 'm@localhost' is not a base URL"),
        (
            "openai:m@nothing",
            {},
            "openai:m@nothing: no API key: set OPENAI_API_KEY (export OPENAI_API_KEY=…); 'nothing' "
            "is not a base URL: the full form is openai:m@http://host:8000/v1",
        ),
        *(
            (
                f"vllm:m@{url}",
                {},
                f"vllm:m@{url}: '{url}' is not a base URL: write it as https://host/v1 after the @",
            )
            for url in (
                "http://h:99999",
                "http://h:abc/v1",
                "http://h:0/v1",
                "http://[::1/v1",
                "http://:80/v1",
                "http://h/v 1",
            )
        ),
        (
            "gpt-5-mini",
            {},
            "model 'gpt-5-mini' has no provider: write provider:model; did you mean 'openai:gpt-5-m",
        ),
        (
            "vllm:m",
            {"VLLM_BASE_URL": "gpu:8000"},
            "vllm:m: 'gpu:8000' is not a base URL: write it as https://host/v1",
        ),
    ],
)
def test_unresolvable_model_name_is_explained(name, environ, says):
    with pytest.raises(ConfigError) as caught:
        resolve_endpoint(name, environ=environ)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_model_name_may_contain_colons():
    assert split_provider("ollama:qwen3:8b") == ("ollama", "qwen3:8b")


@pytest.mark.parametrize("name", PROVIDERS)
def test_every_provider_resolves(name):
    provider = PROVIDERS[name]
    environ = dict.fromkeys(provider.key_variables, "key") | {
        provider.url_variable: "https://host/v1"
    }
    assert resolve_endpoint(f"{name}:m", environ=environ).url == "https://host/v1/chat/completions"


def test_provider_table_is_in_the_documentation():
    page = Path(__file__).parents[2] / "docs" / "models.md"
    assert providers_markdown_table() in page.read_text(encoding="utf-8"), (
        "write the table of providers.table() into docs/models.md"
    )


@pytest.mark.parametrize(
    "model", ["claude-sonnet-4@20250514", "llama3@latest", "@openai-prod/gpt-5", "m@v1.5"]
)
def test_model_name_may_contain_an_at_sign(model):
    assert split_model_url(model) == (model, None)


def test_slow_packages_are_imported_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_sdk.py").write_text(
        "import threading, time\ntime.sleep(0.5)\nthread = threading.current_thread()\n"
    )
    client = tmp_path / "slow_client.py"
    client.write_text("class Slow:\n    package = 'slow_sdk'\n")

    async def ticks() -> int:
        loading = asyncio.create_task(
            import_client_modules([f"{client}:Slow", "openai", "no_such"])
        )
        count = 0
        while not loading.done():
            await asyncio.sleep(0.01)
            count += 1
        await loading
        return count

    assert asyncio.run(ticks()) > 5
    assert sys.modules["slow_sdk"].thread is not threading.main_thread()
    del sys.modules["slow_sdk"]
