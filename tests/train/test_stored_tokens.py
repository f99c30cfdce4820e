"""Stored conversations are tokenized once: a later run, also a new one, finds their token ids."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify import Store
from ramify.engine.prompt_scaffold import scaffold_of
from ramify.models.chat_renderer import renderer_of
from ramify.models.tokenizer_training import train_tokenizer
from ramify.store.durable_files import TOKENIZED
from ramify.tasks.base import task_of
from ramify.train.config import PolicySpec, TaskSpec
from ramify.train.data.sft_data import TrajectoryTokenizer, read, rendering_key
from ramify.train.data.tokenization_cache import TokenizedCallCache
from ramify.train.sft_training_data import (
    DemonstrationSet,
    demonstrate,
    demonstrations_of,
    tokenise_demonstrations,
)
from ramify.types.message import Message
from tests.docs.world import scripted
from tests.train.small import assemble, small

TASK, SCAFFOLD = task_of("ledger", rows=(4, 6)), scaffold_of("tiny")
TOKENIZER = train_tokenizer(["print(context[:40]) FINAL(0) count rows of 'red'"] * 2, 261)
RENDERER = renderer_of(TOKENIZER)


class CountingRenderer:
    """Counts the messages that it renders. Implements ``sft_data.ConversationRenderer``."""

    def __init__(self) -> None:
        self.num_messages = 0

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return RENDERER.stop_ids

    def prompt(self, messages: Sequence[Message], tools: Any = ()) -> list[int]:
        self.num_messages += len(messages)
        return RENDERER.prompt(messages, tools)

    def extend(self, messages: Sequence[Message], *, after: Sequence[int]) -> list[int]:
        self.num_messages += len(messages)
        return RENDERER.extend(messages, after=after)

    def parse(self, ids: Sequence[int]) -> Message:
        return RENDERER.parse(ids)


def answer(messages: tuple[Message, ...]) -> str:
    return "print(context[:40])" if len(messages) == 1 else "FINAL(0)"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A model whose demonstrations are kept."""
    with scripted(answer) as url:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        yield "openai:gpt-5-mini"


def store_of(model: str, folder: Path, num: int) -> Path:
    demonstrate(TASK, model, num, SCAFFOLD, store=folder)
    return folder


def rendered(folder: Path, tools: Sequence[Any] = ()) -> tuple[int, list[Any]]:
    """(messages rendered to tokenize the store beyond those of an empty one, the trajectories)"""
    shown = [DemonstrationSet(list(read(folder)), folder / TOKENIZED)]
    renderer, empty = CountingRenderer(), CountingRenderer()
    tokenise_demonstrations([DemonstrationSet([], folder / TOKENIZED)], TOKENIZER, empty, tools)
    trajectories = tokenise_demonstrations(shown, TOKENIZER, renderer, tools)
    return renderer.num_messages - empty.num_messages, trajectories


def test_new_start_tokenizes_only_what_is_new(model: str, tmp_path: Path) -> None:
    folder = store_of(model, tmp_path / "store", 3)
    num, first = rendered(folder)
    assert num > 3 * 3
    assert rendered(folder) == (0, first)
    store_of(model, folder, 5)
    more, trajectories = rendered(folder)
    assert 0 < more < num
    assert len(trajectories) == 5
    assert rendered(folder) == (0, trajectories)
    tokeniser = TrajectoryTokenizer(RENDERER)
    assert trajectories == [tokeniser.tokenised(each) for each in read(folder)]


def test_other_tokenizer_template_or_tools_are_other_ids(model: str, tmp_path: Path) -> None:
    folder = store_of(model, tmp_path / "store", 1)
    shown = list(read(folder))
    tokens = folder / TOKENIZED
    tokenise_demonstrations([DemonstrationSet(shown, tokens)], TOKENIZER, RENDERER, ())
    assert len(list(tokens.iterdir())) == 1
    other = train_tokenizer(["print(context[:40]) FINAL(0) count rows of 'red'"] * 2, 262)
    tokenise_demonstrations([DemonstrationSet(shown, tokens)], other, renderer_of(other), ())
    assert len(list(tokens.iterdir())) == 2
    for form in (rendering_key(RENDERER, ()), "another template", "other tools"):
        stored = TokenizedCallCache(tokens, TOKENIZER, form)
        assert (stored.turns(shown[0].root) is not None) == (form == rendering_key(RENDERER, ()))


def test_damaged_file_costs_only_time(model: str, tmp_path: Path) -> None:
    folder = store_of(model, tmp_path / "store", 2)
    num, first = rendered(folder)
    (path,) = (folder / TOKENIZED).iterdir()
    assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(path.read_bytes()[:200])
    assert rendered(folder) == (num, first)
    assert rendered(folder) == (0, first)


def test_folder_that_cannot_be_written_costs_only_time(model: str, tmp_path: Path) -> None:
    folder = store_of(model, tmp_path / "store", 2)
    (folder / TOKENIZED).write_text("a file where the folder would be")
    num, first = rendered(folder)
    assert rendered(folder) == (num, first)
    assert num > 0


def test_deleted_run_leaves_no_token_ids(model: str, tmp_path: Path) -> None:
    store = Store(store_of(model, tmp_path / "store", 2))
    rendered(store.root)
    assert list((store.root / TOKENIZED).iterdir())
    store.remove(store.runs()[0].id)
    assert not list((store.root / TOKENIZED).iterdir())


def test_ids_of_a_file_are_kept_in_the_users_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "home"))
    path = tmp_path / "talks.jsonl"
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "1"}]}
    path.write_bytes(msgspec.json.encode(row) + b"\n")
    run = small()
    sft = msgspec.structs.replace(run.sft, demos=str(path))
    run = msgspec.structs.replace(run, sft=sft, rl=None)
    made = demonstrations_of(run, TASK, SCAFFOLD)[0]
    (trajectory,), folder = made.trajectories, made.tokens
    assert folder == tmp_path / "home" / TOKENIZED
    shown = [DemonstrationSet([trajectory], folder)]
    tokenise_demonstrations(shown, TOKENIZER, RENDERER, ())
    renderer = CountingRenderer()
    tokenise_demonstrations(shown, TOKENIZER, renderer, ())
    settings = CountingRenderer()
    tokenise_demonstrations([DemonstrationSet([], folder)], TOKENIZER, settings, ())
    assert renderer.num_messages == settings.num_messages


def demos(task: Any, num: int, seed: int, scaffold: Any, store: str) -> Any:
    return demonstrate(task, "openai:gpt-5-mini", num, scaffold, store=store)


@pytest.mark.parametrize("source", ["trajectories", "demos", "derived shape"])
def test_new_run_finds_the_ids_of_an_earlier_one(
    source: str, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The ids of a store, those of a demonstrator's store, and those that a new model's sizes
    follow from."""
    folder = store_of(model, tmp_path / "store", 4)
    run = small()
    given = (
        {"trajectories": str(folder), "demos": ""}
        if source == "trajectories"
        else {"demos": f"{__name__}:demos", "num": 4, "options": {"store": str(folder)}}
    )
    policy = (
        PolicySpec()
        if source == "derived shape"
        else msgspec.structs.replace(run.policy, vocab_size=261)
    )
    task = TaskSpec(options={"rows": [4, 6]})
    sft = msgspec.structs.replace(run.sft, task=task, **given)
    run = msgspec.structs.replace(run, sft=sft, policy=policy, warmup=None, rl=None)
    caplog.set_level(logging.INFO, "ramify.train")
    rows = []
    for _ in range(2):
        caplog.clear()
        rows.append([row.token_ids.tolist() for row in assemble(run).rows])
        said = {each.getMessage() for each in caplog.records if "stored calls" in each.msg}
    assert rows[0] == rows[1] != []
    assert said == {"4 of 4 stored calls had token ids from before"}
