"""Options, environment variables and the configuration file: their precedence and their errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import ramify
from ramify.cli.ask import KINDS
from ramify.cli.settings import fill_missing_settings, named_models, unknown_variable_warnings
from ramify.errors import ConfigError
from tests.cli.helpers import Shell


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The configuration file."""
    path = tmp_path / "config.toml"
    path.write_text("")
    return path


def filled(config: Path, given: dict[str, Any] | None = None, **environ: str) -> dict[str, Any]:
    return fill_missing_settings(given or {}, KINDS, {"RAMIFY_CONFIG": str(config), **environ})


def test_options_override_variables_and_variables_override_file(config: Path) -> None:
    config.write_text(
        'model = "a:file"\nsub-model = "b:file"\nmax-cost = 2\nmax-calls = 7\ncite = true\n'
    )
    variables = {"RAMIFY_MODEL": "a:variable", "RAMIFY_MAX_COST": "1.5", "RAMIFY_QUIET": "1"}
    assert filled(config, {"model": "a:option", "max_calls": None}, **variables) == {
        "model": "a:option",
        "sub_model": ["b:file"],
        "max_cost": 1.5,
        "max_calls": 7,
        "cite": True,
        "quiet": True,
    }


def test_list_is_read_from_file_or_variable(config: Path) -> None:
    config.write_text('sub-model = ["a:x", "b:y"]\n')
    assert filled(config) == {"sub_model": ["a:x", "b:y"]}
    assert filled(config, RAMIFY_SUB_MODEL="c:z, d:w") == {"sub_model": ["c:z", "d:w"]}


def test_settings_tables_become_environment_variables(config: Path) -> None:
    config.write_text(
        '[prices]\npath = "prices.json"\n[runs]\npath = "/elsewhere"\nmax-bytes = 5\n'
    )
    environ = {"RAMIFY_CONFIG": str(config), "RAMIFY_HOME": "/given"}
    assert fill_missing_settings({}, KINDS, environ) == {}
    assert environ == {
        "RAMIFY_CONFIG": str(config),
        "RAMIFY_PRICES": str(config.parent / "prices.json"),
        "RAMIFY_HOME": "/given",
        "RAMIFY_STORE_MAX_BYTES": "5",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-csot = 2", "unknown key 'max-csot': did you mean 'max-cost'?"),
        ("max_cost = 2", "unknown key 'max_cost': did you mean 'max-cost'?"),
        (
            'max-cost = "two"',
            "max-cost = 'two' is not a number: write it as 2 or 0.5",
        ),
        ("max-calls = true", "max-calls = True is not a whole number: write it as 10"),
        ("resume = 'last'", "unknown key 'resume'"),
        ("[prices]\nfile = 'x'", "unknown key 'file' in [prices]: did you mean"),
        ("prices = 'x'", "prices must be a table: write [prices]"),
        ("[prices]\npath = 3", "[prices] path = 3 is invalid"),
        ("model = ", "is not valid TOML"),
    ],
)
def test_invalid_setting_in_file_is_named(config: Path, text: str, message: str) -> None:
    config.write_text(text)
    with pytest.raises(ConfigError) as caught:
        filled(config)
    assert str(config) in str(caught.value)
    assert message.removesuffix("did you mean") in str(caught.value)


def test_invalid_environment_variable_is_named(config: Path) -> None:
    with pytest.raises(ConfigError, match="RAMIFY_MAX_CALLS = 'lots' is not a whole number"):
        filled(config, RAMIFY_MAX_CALLS="lots")


def test_configuration_file_named_by_variable_must_exist(config: Path) -> None:
    config.unlink()
    with pytest.raises(
        ConfigError, match=r"RAMIFY_CONFIG names .*config\.toml, which is not a file"
    ):
        filled(config)


def test_unknown_variables_are_named() -> None:
    (line,) = unknown_variable_warnings(
        KINDS, {"RAMIFY_MAX_COSTS": "1", "RAMIFY_HOME": "/x", "OTHER": ""}
    )
    wanted = "RAMIFY_MAX_COSTS is not a variable that ramify reads: did you mean 'RAMIFY_MAX_COST'?"
    assert line == wanted
    (line,) = unknown_variable_warnings(KINDS, {"RAMIFY_QQQQQQQQ": "1"})
    assert "known: RAMIFY_ALLOW_PRIVATE, " in line  # the list helps if no name is near


def test_every_variable_that_the_package_reads_is_known() -> None:
    sources = Path(ramify.__file__).parent.rglob("*.py")
    named = {name for path in sources for name in re.findall(r"RAMIFY_[A-Z_]+\b", path.read_text())}
    assert {"RAMIFY_LOG", "RAMIFY_SERVE_KEY", "RAMIFY_VIEW_TOKEN"} < named
    assert list(unknown_variable_warnings(KINDS, dict.fromkeys(named, "x"))) == []


def test_command_reads_file_and_variables(shell: Shell) -> None:
    shell.write(
        "config/ramify/config.toml", f'model = "{shell.model(["from the file"])}"\nquiet = true\n'
    )
    assert shell.run("ask", "hm?") == (0, "from the file\n", "")
    other = shell.model(["from the variable"], "other.json")
    assert shell.run("ask", "hm?", RAMIFY_MODEL=other) == (0, "from the variable\n", "")
    done = shell.run("ask", "hm?", "--no-quiet", RAMIFY_MAX_COSTS="1")
    assert done.err.startswith("ramify: warning: RAMIFY_MAX_COSTS is not a variable")


def test_a_table_names_a_model_with_its_key(config: Path) -> None:
    config.write_text(
        '[models.mini]\nmodel = "openai:gpt-5-mini"\napi-key = "$TENANT_KEY"\nwindow = 9000\n'
        'base-url = "http://127.0.0.1:9/v1"\nprice = "$1 in, $2 out per million tokens"\n'
        '[models.mini.headers]\nX-Proxy = "$PROXY"\n[models.mini.sampling]\ntemperature = 0.5\n'
    )
    environ = {"RAMIFY_CONFIG": str(config), "TENANT_KEY": "sk-0123456789", "PROXY": "p-123456789"}
    model = named_models(environ)["mini"]
    assert model == ramify.Model(
        "openai:gpt-5-mini",
        alias="mini",
        api_key="sk-0123456789",
        base_url="http://127.0.0.1:9/v1",
        window=9000,
        price=ramify.Price(1.0, 2.0),
        headers={"X-Proxy": "p-123456789"},
        sampling=ramify.Sampling(temperature=0.5),
        environ=environ,
    )
    assert "sk-0" not in repr(model)
    assert filled(config) == {}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[models.a]\n", "names no model"),
        ('[models.a]\nmodel = "openai:m"\napi-kye = "x"\n', "unknown key 'api-kye': did you mean"),
        ('[models.a]\nmodel = "openai:m"\napi-key = "$NOWHERE"\n', "the variable NOWHERE is not"),
        ('[models.a]\nmodel = "openai:m"\nprice = 2\n', "has no unit"),
        ('[models.a]\nmodel = "openai:m"\n[models.a.sampling]\ntop-q = 1\n', "did you mean 'top_"),
        ('[models]\na = "openai:m"\n', "write one table for each model"),
        ('[models."a b"]\nmodel = "openai:m"\n', "not a short name"),
    ],
)
def test_a_wrong_table_of_a_model_is_one_line(config: Path, table: str, message: str) -> None:
    config.write_text(table)
    with pytest.raises(ConfigError, match=message) as error:
        named_models({"RAMIFY_CONFIG": str(config)})
    assert "\n" not in str(error.value)
    assert str(config) in str(error.value)


def test_a_misspelled_alias_suggests_the_right_one(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    name = shell.model(["seven"])
    path = shell.write("config/ramify/config.toml", f'[models.nano]\nmodel = "{name}"\n')
    for words in (["--model", "nanoo"], ["--model", name, "--sub-model", "Nano"]):
        done = shell.run("ask", "How many?", *words)
        assert (done.code, done.out) == (2, "")
        assert f"'{words[-1]}' is not defined in" in done.err
        assert "did you mean 'nano'?" in done.err
    other = shell.run("ask", "How many?", "--model", "gpt-5")
    assert "has no provider" in other.err, path


def test_a_model_of_the_file_is_asked_by_its_alias(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    name = shell.model(["seven", "eight"])
    shell.write("config/ramify/config.toml", f'[models.mini]\nmodel = "{name}"\n')
    done = shell.run("ask", "How many days has a week?", "-m", "mini")
    assert (done.code, done.out) == (0, "seven\n"), done.err
