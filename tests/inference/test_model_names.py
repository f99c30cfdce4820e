"""``local:FOLDER`` and ``tiny`` as model names, from the public API to the ids in the tree; what a
policy's folder says about it."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ramify
from ramify import Limits, Sampling
from ramify.engine.prompt_scaffold import trained_scaffold_name
from ramify.errors import ConfigError
from ramify.inference.local import connect
from ramify.inference.local.local_client import LocalClient
from ramify.models.load import load_policy, save_policy
from ramify.trained_policy_settings import PolicyRolloutSettings, packaged_policy_names
from tests.inference.helpers import policy
from tests.models.test_load import GPT2, made


def test_run_with_a_local_model_keeps_every_id(tmp_path: Path) -> None:
    save_policy(policy(), tmp_path)
    name = f"local:{tmp_path}"
    limits, sampling = Limits(max_turns=3), Sampling(max_tokens=20, temperature=1.0, seed=5)
    with ramify.RLM(name, limits=limits, sampling=sampling, sandbox="jail") as rlm:
        result = rlm.completion("red;3\nblue;4\n", "count rows of 'red'")
    tree = result.trajectory
    assert tree.root.model == name
    assert tree.conversation(tree.root)[0].content == "count rows of 'red'\nlen 13"
    path = tree.path(tree.root)
    assert path is not None
    assert path.logprobs is not None
    assert sum(path.sampled) == result.usage.output_tokens
    turns = tree.root.turns
    assert [turn.reused_ids for turn in turns] == [0, *(turn.num_ids for turn in turns[:-1])]
    assert result.cost == 0.0


def test_scaffold_that_a_model_was_made_for_is_detected(tmp_path: Path) -> None:
    save_policy(policy(), tmp_path / "scratch")
    (tmp_path / "before").mkdir()
    shutil.copy(tmp_path / "scratch" / "chat_template.jinja", tmp_path / "before")
    own = policy()
    own.card = PolicyRolloutSettings("bare", max_turns=3)
    save_policy(own, tmp_path / "own")
    save_policy(made(GPT2), tmp_path / "other")
    (tmp_path / "other" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "other" / "policy.json").unlink()
    client = LocalClient(policy())
    named = [
        trained_scaffold_name(each)
        for each in (
            f"local:{tmp_path}/scratch",
            f"local:{tmp_path}/before",
            f"local:{tmp_path}/own",
            f"local:{tmp_path}/other",
            "local:/nowhere",
            "openai:m",
        )
    ]
    assert named == ["tiny", "tiny", "bare", None, None, None]
    assert [
        trained_scaffold_name(each) for each in ("tiny", client, [client, "openai:m"], [], None)
    ] == [
        "tiny",
        "tiny",
        "tiny",
        None,
        None,
    ]


def test_unresolvable_model_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found no folder '/nowhere'"):
        connect("local:/nowhere")
    with pytest.raises(ConfigError, match="'local:' names no model"):
        ramify.RLM("local:").completion("text", "question")


def test_packaged_policy_is_connected_by_name(tmp_path: Path) -> None:
    client = connect("tiny")
    assert (client.name, client.window, trained_scaffold_name(client)) == ("tiny", 512, "tiny")


def test_limits_of_a_policy_are_defaults_and_a_broken_card_is_named(tmp_path: Path) -> None:
    made_to_stop = policy()
    made_to_stop.card = PolicyRolloutSettings("bare", max_turns=3, max_reply_tokens=20)
    save_policy(made_to_stop, tmp_path)
    with ramify.RLM(f"local:{tmp_path}") as rlm:
        assert (rlm.limits.max_turns, rlm.limits.max_reply_tokens) == (3, 20)
    with ramify.RLM(f"local:{tmp_path}", limits=Limits(max_depth=0)) as rlm:
        assert rlm.limits == Limits(max_depth=0)
    assert load_policy(tmp_path).card == made_to_stop.card
    (tmp_path / "policy.json").write_text('{"scaffold": 3}')
    with pytest.raises(ConfigError, match=r"policy\.json: Expected `str \| null`"):
        ramify.RLM(f"local:{tmp_path}")


def test_no_module_but_its_scaffold_and_its_task_knows_a_packaged_policy() -> None:
    package, names = Path(ramify.__file__).parent, packaged_policy_names()
    assert names == ("tiny",)
    knowing = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert knowing == {"engine/prompt_scaffold.py"}


def test_naming_a_model_imports_no_heavy_library() -> None:
    script = (
        "import sys; sys.modules['torch'] = None; import ramify\n"
        "from ramify.engine.prompt_scaffold import trained_scaffold_name\n"
        "from ramify.inference.local import connect\n"
        "trained_scaffold_name('local:/nowhere'); ramify.RLM('local:/nowhere')\n"
        "import importlib.util; found = importlib.util.find_spec\n"
        "assert not {'transformers', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "del sys.modules['torch']; sys.path[:] = [each for each in sys.path if 'site-packages' not "
        "in each]\n"
        "try: connect('local:/nowhere')\n"
        "except ramify.ConfigError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert re.search(r"needs torch: pip install .*\[train\]'", done.stdout)
