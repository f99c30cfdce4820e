"""``local:FOLDER`` and ``tiny`` as model names, from the public API to the ids in the tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ramify
from ramify import Limits, Sampling
from ramify.engine.scaffold import made_for
from ramify.errors import ConfigError
from ramify.inference.local import connect
from ramify.inference.local.local_client import LocalClient
from ramify.models.load import save_policy
from tests.inference.helpers import WINDOW, policy
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
    save_policy(policy(), tmp_path / "tiny")
    save_policy(made(GPT2), tmp_path / "other")
    (tmp_path / "other" / "chat_template.jinja").write_text("{{ messages }}")
    client = LocalClient(policy())
    named = [
        made_for(each)
        for each in (
            f"local:{tmp_path}/tiny",
            f"local:{tmp_path}/other",
            "local:/nowhere",
            "openai:m",
        )
    ]
    assert named == ["tiny", None, None, None]
    assert [made_for(each) for each in ("tiny", client, [client, "openai:m"], [], None)] == [
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
    with pytest.raises(ConfigError, match="'tiny' is not part of this installation"):
        connect("tiny", tmp_path)
    save_policy(policy(), tmp_path)
    client = connect("tiny", tmp_path)
    assert (client.name, client.window, made_for(client)) == ("tiny", WINDOW, "tiny")


def test_naming_a_model_imports_no_heavy_library() -> None:
    script = (
        "import sys; sys.modules['torch'] = None; import ramify\n"
        "from ramify.engine.scaffold import made_for\n"
        "from ramify.inference.local import connect\n"
        "made_for('local:/nowhere'); ramify.RLM('local:/nowhere')\n"
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
    assert "needs torch: pip install 'ramify[train]'" in done.stdout
