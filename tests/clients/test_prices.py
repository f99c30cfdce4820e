import re

import pytest

from ramify.clients.base import Price
from ramify.clients.providers import PriceEntry, PriceTable
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.errors import ConfigError
from ramify.types.message import Usage

OWN = '{"openai:gpt-5": {"input": 2.0, "output": 4.0}, "vllm:m": {"window": 9, "also": ["vllm:n"]}}'


def test_price_of_usage_counts_cached_and_written_tokens():
    price = Price(input=3.0, output=15.0, cached=0.3, cache_write=3.75)
    assert price.of(
        Usage(1_000_000, 100_000, cached_tokens=500_000, cache_write_tokens=100_000)
    ) == pytest.approx(400_000 * 3e-6 + 500_000 * 0.3e-6 + 100_000 * 3.75e-6 + 100_000 * 15e-6)


def test_every_packaged_price_has_date_and_source():
    table = PriceTable.load()
    for name, entry in table.entries.items():
        assert entry.to_price is not None, name
        assert entry.window is not None, name
        assert re.fullmatch(r"20\d\d-\d\d", entry.taken), name
        assert entry.source, name
        assert entry.to_price.output >= entry.to_price.input > 0, name


def test_price_is_found_by_every_form_of_a_name():
    table = PriceTable(
        {"openai:m": PriceEntry(1.0, 2.0, window=100, also=("openrouter:openai/m",))}
    )
    names = ["openai:m", "openai:m-2025-08-07", "openai:m@https://proxy/v1", "openrouter:openai/m"]
    assert [table.price(name) for name in names] == [Price(1.0, 2.0)] * 4
    assert (table.price("openai:other"), table.context_window("openai:other")) == (None, None)
    assert table.price("vllm:anything") == Price(0.0, 0.0)


def test_user_price_file_overrides_packaged_prices(tmp_path, monkeypatch):
    path = tmp_path / "prices.json"
    path.write_text(OWN)
    monkeypatch.setenv("RAMIFY_PRICES", str(path))
    table = PriceTable.load()
    assert (table.price("openai:gpt-5"), table.price("vllm:m")) == (
        Price(2.0, 4.0),
        Price(0.0, 0.0),
    )
    assert (table.context_window("vllm:m"), table.context_window("vllm:n")) == (9, 9)
    assert table.price("openai:gpt-5-mini") is not None
    client = RateLimitedClientPool(prices=table, keys={"openai": "key-123"}).client("openai:gpt-5")
    assert client.price == Price(2.0, 4.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "truncated"), ('{"a:b": {"inptu": 1}}', "inptu"), (None, "No such file")],
)
def test_bad_price_file_is_named(tmp_path, text, says):
    path = tmp_path / "prices.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        PriceTable.load(path)
    assert str(path) in str(caught.value)
