"""Each provider has its own spec; stored configurations find it by the provider's name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify import RLM, DockerSpec, JailSpec, SandboxSpec, ScriptedClient
from ramify.errors import ConfigError, SandboxError
from ramify.sandbox.base import open_sandbox, provider_spec
from ramify.tasks import UnitTestScorer
from ramify.train.config import CHOICES, PolicySpec, RlSpec, Run, to_plain_data
from ramify.train.config_overrides import override
from ramify.train.lineage import changes
from ramify.train.recipe import with_defaults

FORMER = {
    "image": "",
    "tier": "B",
    "files_bytes": 16 << 20,
    "mounts": [],
    "cpu_s": 3600,
    "rollback": False,
    "pool": 2,
    "all_memory_bytes": 0,
}
"""What every stored configuration of an earlier version has."""


def run(**fields: Any) -> Run:
    return Run(policy=PolicySpec(path="somewhere"), rl=RlSpec(), **fields)


@pytest.mark.parametrize(
    ("given", "spec"),
    [
        ("jail", JailSpec()),
        ({"tier": "A", "mounts": [["/a", "/b"]]}, JailSpec(tier="A", mounts=(("/a", "/b"),))),
        ({"provider": "docker", "image": "x"}, DockerSpec(image="x")),
        (SandboxSpec(provider="docker", cell_s=3.0), DockerSpec(cell_s=3.0)),
        (JailSpec(provider="process", cell_s=3.0), SandboxSpec("process", cell_s=3.0)),
        ({"provider": "process", **FORMER}, SandboxSpec("process")),
        ({"provider": "jail", **FORMER, "pool": 5}, JailSpec(pool=5)),
        ({"provider": "nowhere.here"}, SandboxSpec("nowhere.here")),
    ],
)
def test_a_spec_is_completed_by_its_provider(given: Any, spec: SandboxSpec) -> None:
    found = provider_spec(given)
    assert (type(found), found) == (type(spec), spec)


@pytest.mark.parametrize(
    ("write", "advice"),
    [
        (lambda: SandboxSpec(tier="A"), r"no field 'tier'.*write JailSpec\(tier='A'\)$"),  # type: ignore[call-arg]
        (lambda: SandboxSpec("docker", image="x"), r"write DockerSpec\(image='x'\)$"),  # type: ignore[call-arg]
        (lambda: SandboxSpec("e2b", image="x"), r"write E2BSpec\(image='x'\)$"),  # type: ignore[call-arg]
        (lambda: JailSpec(image="x"), r"such as DockerSpec\(image='x'\)$"),  # type: ignore[call-arg]
        (lambda: JailSpec(teir="A"), "unknown keyword 'teir' of JailSpec: did you mean 'tier'"),  # type: ignore[call-arg]
        (lambda: JailSpec(tier="D"), "sandbox tier is 'D': give 'A', 'B' or 'C'"),
        (lambda: JailSpec(pool=-1), "sandbox pool is -1: it cannot be negative"),
        (lambda: provider_spec({"provider": "process", "pool": 3}), "does not support pool, only"),
        (lambda: provider_spec({"provider": "monty", "image": "x"}), "does not support image"),
        (lambda: provider_spec({"tier": 3}), "sandbox 'jail': Expected `str`, got `int`"),
        (lambda: provider_spec({"teir": "A"}), "unknown field `teir`.*did you mean 'tier'"),
        (lambda: RLM(ScriptedClient([]), sandbox=3), "sandbox is a int: give a ramify.SandboxSpec"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_field_says_what_to_write(write: Any, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        write()


def test_a_stored_run_keeps_the_spec_of_its_provider() -> None:
    for spec in (JailSpec(tier="A", pool=0), DockerSpec(image="x"), SandboxSpec("process")):
        stored = msgspec.json.decode(msgspec.json.encode(run(sandbox=spec)))
        assert msgspec.convert(stored, Run).sandbox == spec
        score = msgspec.json.encode(UnitTestScorer(sandbox=spec))
        assert msgspec.json.decode(score, type=UnitTestScorer).sandbox == spec


def test_overrides_reach_the_fields_of_a_provider() -> None:
    assert override(run(), ["sandbox.pool=7"], CHOICES).sandbox == JailSpec(pool=7)
    changes = ["sandbox.image=x", "sandbox.provider=docker", "sandbox.cell_s=5"]
    assert override(run(), changes, CHOICES).sandbox == DockerSpec(image="x", cell_s=5.0)
    with pytest.raises(ConfigError, match="no field 'image'"):
        override(run(), ["sandbox.image=x"], CHOICES)


def test_a_plugin_has_options_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_box.py").write_text(
        "from __future__ import annotations\n"
        "from ramify import SandboxSpec\n"
        "class BoxSpec(SandboxSpec, frozen=True):\n"
        "    provider: str = 'my_box'\n"
        "    color: str = 'red'\n"
        "def open_provider(spec: BoxSpec):\n"
        "    return Box(spec)\n"
        "class Box:\n"
        "    def __init__(self, spec):\n"
        "        self.warning = spec.color\n"
        "    async def open(self): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = provider_spec({"provider": "my_box:open_provider", "color": "blue"})
    assert open_sandbox(spec).warning == "blue"
    stored = msgspec.json.decode(msgspec.json.encode(run(sandbox=spec)))
    assert msgspec.convert(stored, Run).sandbox == spec
    assert open_sandbox(SandboxSpec("my_box:open_provider")).warning == "red"
    sys.modules.pop("my_box")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "return spec.image",
            "not every spec has image; annotate its parameter with a subclass of SandboxSpec",
        ),
        ("raise KeyError('BOX_URL')", "raised KeyError('BOX_URL')"),
        ("pass", "returned a NoneType: return a Sandbox"),
    ],
)
def test_a_plugin_that_opens_no_sandbox_is_answered_by_one_line(
    tmp_path: Path, body: str, says: str
) -> None:
    """Also one that was written when all providers had the same fields."""
    file = tmp_path / "box.py"
    file.write_text(f"def open_provider(spec):\n    {body}\n")
    with pytest.raises(SandboxError) as caught:
        open_sandbox(SandboxSpec(f"{file}:open_provider"))
    text = str(caught.value)
    assert says in text
    assert "its open_provider" in text
    assert "\n" not in text
    assert ("box.py:2" in text) == (body != "pass")


def test_former_fields_of_a_checkpoint_are_no_changes() -> None:
    """A resumed run lists what differs from its checkpoint."""
    now = to_plain_data(run(sandbox=SandboxSpec("process", cell_s=7.0)))
    stored = {**now, "sandbox": {**FORMER, "provider": "process", "cell_s": 5.0}}
    found = changes(with_defaults(stored), now)
    assert [(each.field, each.was, each.now) for each in found] == [("sandbox.cell_s", 5.0, 7.0)]
