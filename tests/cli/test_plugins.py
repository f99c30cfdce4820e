"""Plugins from installed packages, modules and files, and the errors for wrong names."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.engine.prompt_scaffold import Scaffold, scaffold_of
from ramify.errors import ConfigError
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.plugins import PluginRegistry, load_file, registries
from ramify.sandbox.base import SandboxSpec, open_sandbox
from ramify.tasks.base import task_of
from ramify.testing.scripted_client import ScriptedClient
from ramify.train.advantages import ALGORITHMS
from ramify.train.losses.total_loss import LossSpec
from ramify.train.signals.judge import build_judge
from tests.cli.helpers import SESSION_SCRIPT, Shell

ACME = '''
"""Everything that a Ramify plugin package can offer."""

from collections.abc import Iterator

import msgspec
from ramify.clients.providers import ModelProviderSpec
from ramify.testing.scripted_client import ScriptedClient
from ramify.engine.prompt_scaffold import Scaffold
from ramify.sandbox.providers.process import open_provider as open_process
from ramify.tasks.base import Item, generated
from ramify.tasks.base import DatasetTask
from ramify.train.advantages import ALGORITHMS

CLOUD = ModelProviderSpec(title="Acme Cloud", url="http://127.0.0.1:9", url_variable="ACME_URL",
                     key_variables=("ACME_KEY",), local=True)
TERSE = Scaffold(name="terse")
DrGRPO = ALGORITHMS.resolve("dr_grpo")


def colors(num: int = 3) -> DatasetTask:
    """Count colors.

    More about it."""
    def make(rng):
        words = rng.choices(["teal", "coral"], k=num)
        return Item("how many teal?", " ".join(words), gold=words.count("teal"))

    return DatasetTask("colors", generated("colors", make), lambda answer, item: float(answer == item.gold))


def open_provider(spec):
    """A box."""
    sandbox = open_process(spec)
    sandbox.warning = "the box of Acme is open"
    return sandbox


def connect(name, *, window, price, key, base_url):
    """Echoes."""
    text = name.rpartition(":")[2]
    return ScriptedClient(lambda messages: f"```repl\\nFINAL({text!r})\\n```", name=name)


class Doubled(DrGRPO, frozen=True, kw_only=True, tag="doubled"):
    """Dr.GRPO under another name."""
    times: float = 2.0


class Lenient(msgspec.Struct):
    """Judges nothing."""
    async def judge(self, view): ...
'''
ENTRY_POINTS = """
[ramify.tasks]
colors = acme_plugins:colors
[ramify.sandboxes]
box = acme_plugins:open_provider
jail = acme_plugins:open_provider
[ramify.providers]
echo = acme_plugins:connect
cloud = acme_plugins:CLOUD
[ramify.algorithms]
doubled = acme_plugins:Doubled
mistagged = acme_plugins:Doubled
[ramify.scaffolds]
terse = acme_plugins:TERSE
twin = acme_plugins:TERSE
"""
BROKEN = """
[ramify.tasks]
absent = broken_plugins:nothing
needs = broken_plugins.needs:task
stops = broken_plugins.stops:task
[ramify.scaffolds]
twin = broken_plugins:TWIN
"""


def install(site: Path, name: str, version: str, entry_points: str, **modules: str) -> None:
    """Write an installed package, as ``pip install --target`` leaves it."""
    package = site / name.replace("-", "_")
    package.mkdir(parents=True)
    for module, text in modules.items():
        (package / f"{module}.py").write_text(text)
    info = site / f"{package.name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages that this process and ``shell`` can import."""
    install(tmp_path / "site", "acme-plugins", "1.2", ENTRY_POINTS, __init__=ACME)
    install(
        tmp_path / "site",
        "broken-plugins",
        "0.1",
        BROKEN,
        __init__="from ramify.engine.prompt_scaffold import Scaffold\nTWIN = Scaffold(name='twin')\n",
        needs="import no_such_library",
        stops="import sys; sys.exit('enough')",
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield tmp_path / "site"
    for name in [name for name in sys.modules if name.startswith(("acme_plug", "broken_plug"))]:
        del sys.modules[name]
    for found in registries():
        assert isinstance(found, PluginRegistry)
        found.reset()


@pytest.fixture
def machine(shell: Shell, site: Path) -> Shell:
    shell.env["PYTHONPATH"] += f":{site}"
    return shell


def test_installed_plugins_are_listed(machine: Shell) -> None:
    done = machine.run("plugins", "--json")
    assert (done.code, done.err) == (0, "")
    entries = [json.loads(line) for line in done.out.splitlines()]
    assert [list(entry.values()) for entry in entries if entry["origin"] != "ramify"] == [
        ["provider", "cloud", "acme-plugins 1.2", "Acme Cloud", ""],
        ["provider", "echo", "acme-plugins 1.2", "Echoes", ""],
        ["sandbox", "box", "acme-plugins 1.2", "A box", ""],
        [
            "sandbox",
            "jail",
            "acme-plugins 1.2",
            "",
            "is ramify's own, which is used: choose acme_plugins:open_provider, or rename the entry",
        ],
        ["scaffold", "terse", "acme-plugins 1.2", "", ""],
        ["scaffold", "twin", "acme-plugins 1.2", "", TWINS],
        ["scaffold", "twin", "broken-plugins 0.1", "", TWINS],
        [
            "task",
            "absent",
            "broken-plugins 0.1",
            "",
            "'broken_plugins' has no attribute 'nothing'",
        ],
        ["task", "colors", "acme-plugins 1.2", "Count colors", ""],
        [
            "task",
            "needs",
            "broken-plugins 0.1",
            "",
            "No module named 'no_such_library'",
        ],
        ["task", "stops", "broken-plugins 0.1", "", "SystemExit('enough')"],
        ["algorithm", "doubled", "acme-plugins 1.2", "Dr.GRPO under another name", ""],
        [
            "algorithm",
            "mistagged",
            "acme-plugins 1.2",
            "",
            "algorithm 'mistagged' (acme_plugins:Doubled) must be a msgspec.Struct with tag_field='name', "
            "tag='mistagged', so that a checkpoint can name it",
        ],
    ]
    lines = machine.run("plugins", "task").out.splitlines()
    assert [line.split("\t")[1] for line in lines][-4:] == ["absent", "colors", "needs", "stops"]
    assert "task\tneeds\tbroken-plugins 0.1\tbroken: No module" in lines[-2]
    losses = machine.run("plugins", "policy", "loss").out
    assert losses == machine.run("plugins", "policy loss").out
    assert {line.split("\t")[0] for line in losses.splitlines()} == {"policy loss"}
    assert machine.run("plugins", "taks").err.startswith(
        "ramify: unknown kind 'taks': did you mean 'task'? known: algorithm, "
    )


TWINS = (
    "is in 2 packages, acme-plugins 1.2 (acme_plugins:TERSE) and broken-plugins 0.1 "
    "(broken_plugins:TWIN): uninstall one, or give module:name"
)


def test_installed_plugins_are_found_by_name(machine: Shell) -> None:
    text = machine.write("text.txt", "some text")
    done = machine.run("ask", "--sandbox", "box", "-m", "echo:hello", "--no-direct", "say it", text)
    assert (done.code, done.out) == (0, "hello\n"), done.err
    assert "the box of Acme is open" in done.err
    done = machine.run(
        *("eval", "colors", "-m", "echo:2", "--sandbox", "box", "--allow-weaker", "--n", "2")
    )
    assert (done.code, "colors" in done.out + done.err) == (0, True), done.err
    done = machine.run("ask", "-m", "cloud:m", "say it", "--patience", "0.1")
    assert (done.code, "cloud:m" in done.err) == (5, True), done.err


def test_installed_plugins_are_used_in_training(machine: Shell) -> None:
    recipe = machine.write("small.py", "from tests.train.small import small as run\n")
    done = machine.run(
        *("train", recipe, "--out", "out", "--plain", "warmup=null", "sft.num=4", "rl.steps=1"),
        *("threads=1", "task.name=colors", "task.options.num=40", "task.validate=false"),
        *("rl.algorithm=doubled", "rl.algorithm.times=3", "sandbox.provider=box"),
    )
    assert done.code == 0, done.err
    again = machine.run("train", "--resume", "out", "--quiet")
    assert (again.code, again.err) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["eval", "colours"], "unknown task 'colours': did you mean 'colors'? known: absent, "),
        (
            ["eval", "needs"],
            "task 'needs' of the package broken-plugins 0.1 (broken_plugins.needs:task) cannot be "
            "loaded: No module named 'no_such_library'\n",
        ),
        (
            ["eval", "stops"],
            "task 'stops' of the package broken-plugins 0.1 (broken_plugins.stops:task) cannot be "
            "loaded: SystemExit('enough')\n",
        ),
        (["eval", "needle", "--scaffold", "twin"], f"scaffold 'twin' {TWINS}\n"),
        (["ask", "q", "--sandbox", "bix"], "unknown sandbox 'bix': did you mean 'box'? known: "),
    ],
)
def test_wrong_plugin_name_gets_one_line_error(
    machine: Shell, arguments: list[str], error: str
) -> None:
    done = machine.run(*arguments, "-m", machine.model(SESSION_SCRIPT))
    assert (done.code, done.err.startswith(f"ramify: {error}")) == (2, True), done.err
    assert done.err.count("\n") == 1


def test_installed_plugins_are_found_from_python(site: Path) -> None:
    assert task_of("colors", num=1).name == "colors"
    assert "colors" in list(registries_by_kind()["task"])
    assert scaffold_of("terse").name == "terse"
    doubled = ALGORITHMS.build({"name": "doubled", "times": 3})
    assert ALGORITHMS.build(msgspec.to_builtins(doubled)) == doubled
    with pytest.raises(ConfigError, match=r"algorithm 'doubled': .* unknown field `tims`"):
        ALGORITHMS.build({"name": "doubled", "tims": 3})
    jail = registries_by_kind()["sandbox"].resolve("jail")
    assert jail.__name__ == "ramify.sandbox.providers.jail"


def test_a_description_says_more_than_the_kind_and_the_name() -> None:
    for entry in registries_by_kind()["sandbox"].entries():
        assert len(entry.about) > len(f"The sandbox provider ``{entry.name}``, which ")


def registries_by_kind() -> dict[str, PluginRegistry]:
    return {found.kind: found for found in registries() if isinstance(found, PluginRegistry)}


@pytest.mark.parametrize("kind", registries_by_kind())
def test_every_plugin_kind_loads_from_file_or_module(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = registries_by_kind()[kind]
    (tmp_path / "own_things.py").write_text(
        "from own_parts import PART\nclass Thing: part = PART\n"
    )
    (tmp_path / "own_parts.py").write_text("PART = 7\n")
    monkeypatch.chdir(tmp_path)
    assert registry.resolve("own_things.py:Thing").part == 7
    assert registry.resolve("./own_things.py:Thing.part") == 7
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.resolve("own_things:Thing").part == 7
    for name, problem in [
        ("nowhere.py:Thing", rf"{kind} 'nowhere\.py:Thing': file .*/nowhere\.py does not exist"),
        (
            "own_things.py:Thin",
            rf"{kind} 'own_things\.py:Thin' cannot be loaded: own_things\.py has no",
        ),
        ("no.such:Thing", rf"{kind} 'no\.such:Thing' cannot be loaded: No module named 'no'"),
        ("", rf"unknown {kind} '': known: "),
    ]:
        with pytest.raises(ConfigError, match=problem):
            registry.resolve(name)
    near = next(iter(registry))
    with pytest.raises(ConfigError, match=rf"unknown {kind} '{near}x': did you mean '{near}"):
        registry.resolve(f"{near}x")
    for module in ("own_things", "own_parts"):
        sys.modules.pop(module, None)


def test_plugins_are_loaded_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(ACME)
    monkeypatch.chdir(tmp_path)
    assert task_of("mine.py:colors", num=2).name == "colors"
    sandbox = open_sandbox(SandboxSpec(provider="mine.py:open_provider", allow_weaker=True))
    assert sandbox.warning == "the box of Acme is open"
    assert RateLimitedClientPool().client("mine.py:connect:m").name == "mine.py:connect:m"
    assert RateLimitedClientPool().client("mine.py:CLOUD:m").name == "mine.py:CLOUD:m"
    assert isinstance(scaffold_of("mine.py:TERSE"), Scaffold)
    assert type(build_judge("mine.py:Lenient")).__name__ == "Lenient"
    with pytest.raises(
        ConfigError, match=r"sandbox 'mine\.py:TERSE': the module has no open_provid"
    ):
        open_sandbox(SandboxSpec(provider="mine.py:TERSE"))
    with pytest.raises(ConfigError, match=r"scaffold 'mine\.py:colors' is a function, not a Scaff"):
        scaffold_of("mine.py:colors")
    with pytest.raises(ConfigError, match=r"engine=mine\.py:CLOUD: give inference\.urls, or infer"):
        InferenceSpec(engine="mine.py:CLOUD")
    with pytest.raises(ConfigError, match="unknown engine 'vlm': did you mean 'vllm'"):
        InferenceSpec(engine="vlm")
    with pytest.raises(ConfigError, match="unknown correction 'token_tes': did you mean 'token_t"):
        LossSpec(corrections=("token_tes",))


def test_changed_plugin_file_is_reloaded(tmp_path: Path) -> None:
    path = tmp_path / "changing.py"
    path.write_text("VALUE = 1\n")
    first = load_file(path)
    assert load_file(path) is first
    path.write_text("VALUE = 22\n")
    assert load_file(path).VALUE == 22


def test_builtin_names_do_not_search_installed_packages(machine: Shell) -> None:
    """A command that uses only built-in names does not import ``importlib.metadata``."""
    script = (
        "import sys; sys.argv = ['ramify', 'ask', 'q', '-m', sys.argv[1]]\n"
        "import atexit; atexit.register(lambda: print('importlib.metadata' in sys.modules))\n"
        "from ramify.__main__ import main; main()\n"
    )
    machine.write("run.py", script)
    import subprocess

    done = subprocess.run(
        [sys.executable, "run.py", machine.model(SESSION_SCRIPT)],
        cwd=machine.folder,
        env=machine.env,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr
    assert ScriptedClient.__name__ not in done.stderr
