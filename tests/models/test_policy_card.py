"""``policy.json`` of a policy's folder: damaged files, files of another version, and the folder of a
run, which has another file of this name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ramify.engine.prompt_scaffold import scaffold_of
from ramify.errors import ConfigError
from ramify.models.model_config_files import local_model_folder
from ramify.trained_policy_settings import FILE, PolicyRolloutSettings, read_policy_settings


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "Input data was truncated"),
        (b'{"scaffold": "\xff"}', "can't decode byte"),
        (b'{"max_turn": 3}', "unknown field `max_turn`: did you mean 'max_turns'"),
        (b'{"version": 2, "scaffold": "bare"}', "unknown field `version`"),
        (b'{"max_turns": 0}', ">= 1"),
        (b'{"max_depth": -1}', ">= 0"),
        (b'{"max_reply_tokens": -8}', ">= 1"),
    ],
)
def test_damaged_card_is_named_and_nothing_in_it_is_ignored(
    tmp_path: Path, content: bytes, says: str
) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        scaffold_of(None, f"local:{tmp_path}")
    text = str(caught.value)
    assert says in text
    assert str(tmp_path / FILE) in text
    assert "correct the file, or remove it" in text


def test_card_that_cannot_be_read_does_not_count_as_absent(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_policy_settings(tmp_path)


def test_chat_template_in_another_encoding_is_that_of_another_model(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    assert read_policy_settings(tmp_path) == PolicyRolloutSettings()


def test_unknown_scaffold_of_a_card_is_reported_with_the_card(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"scaffold": "of_a_package"}))
    with pytest.raises(ConfigError, match=r"unknown scaffold 'of_a_package'.*policy\.json names"):
        scaffold_of(None, f"local:{tmp_path}")
    assert scaffold_of("bare", f"local:{tmp_path}").name == "bare"


def test_folder_of_a_run_is_answered_with_the_folder_of_its_policy(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"checkpoint": "step-000007", "step": 7}))
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    assert read_policy_settings(tmp_path) == PolicyRolloutSettings()
    with pytest.raises(ConfigError, match=r"the policy of this run is .*/policy$"):
        local_model_folder(tmp_path)
