"""Evidence over several papers: self-validation, child calls that search, and loading of files."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from ramify.engine.limits import Limits
from ramify.engine.prompt_scaffold import TINY
from ramify.engine.rlm import RLM
from ramify.errors import ConfigError, RamifyError
from ramify.evaluate.attempt import attempt
from ramify.extras.studies.paper_evidence_task import evidence
from ramify.sandbox.base import SandboxSpec
from ramify.tasks.base import items_of
from ramify.tasks.validation import answer_only_trajectory, validate
from ramify.testing.scripted_client import ScriptedClient
from ramify.train.recipe import load_recipe
from ramify.train.sft_training_data import demonstrations_of

RECIPES = Path(__file__).resolve().parents[3] / "recipes"

PAPERS = [
    {
        "paper_id": f"p{number}",
        "title": f"Paper {number}",
        "abstract": "We look.",
        "full_text": [
            {"section_name": "Results", "paragraphs": [f"Method {number} won.", "Others lost."]}
        ],
    }
    for number in (1, 2)
]


@pytest.mark.parametrize("options", [{}, {"papers": (2, 3), "facts": (1, 4), "distractors": 8}])
def test_evidence_task_is_valid_and_scores_spans_by_f1(options: dict[str, Any]) -> None:
    task = evidence(**options)
    assert validate(task, ("train", "validation", "test")) == ""
    for item in items_of(task, "train")[:40]:

        def f1(answer: Any) -> float:
            return task.score(item, answer_only_trajectory(item, answer)).rewards["f1"]  # noqa: B023

        gold, context = item.gold, item.context
        assert f1(gold) == f1(json.dumps(gold)) == 1.0
        quotes = [context[id][start:end] for id, start, end in gold]
        if all("".join(context.values()).count(quote) == 1 for quote in quotes):
            assert f1(quotes) == 1.0
        assert f1(item.wrong) < 0.2
        assert f1([[id, 0, len(context[id])] for id in {place[0] for place in gold}]) < 0.3
        assert f1([[id, 0, len(text)] for id, text in context.items()]) < 0.3
        for nothing in (None, "", [], 7, [["P99", 0, 5]], [["P1", 5, 10**9]], [[1, 2]]):
            assert f1(nothing) == 0.0


def test_children_search_their_paper_and_are_scored_separately() -> None:
    task = evidence(papers=(2, 2), facts=(1, 1), distractors=0)
    item = items_of(task, "train")[0]
    ((id, start, end),) = item.gold
    words = item.context[id][start:end]
    root = (
        "```repl\nlisted = papers()\nA = rlm_query_batched(['find', 'find'], list(context.values()))\n"
        f"FINAL([['{id}', *A[list(context).index('{id}')][0]]])\n```"
    )
    child = (
        f"```repl\nfound = [s for s in search({words!r}) if s[2] == {words!r}]\n"
        "a, b, text = extract_section('results')\nassert context[a:b] == text != \"\"\n"
        "FINAL([list(s[:2]) for s in found])\n```"
    )
    client = ScriptedClient(lambda messages: root if "papers()" in str(messages) else child)

    async def run() -> Any:
        spec = SandboxSpec(provider="inprocess", allow_weaker=True)
        async with RLM(client, sandbox=spec, limits=Limits(max_depth=1)) as rlm:
            return await attempt(rlm, task, item)

    trajectory = asyncio.run(run())
    assert trajectory.answer == item.gold
    assert trajectory.rewards == {"f1": 1.0}
    assert trajectory.call_rewards == {"0.0": {"f1": 1.0}, "0.1": {"f1": 1.0}}
    assert trajectory.metrics["papers_found"] == trajectory.metrics["children_f1"] == 1.0


def test_files_with_several_papers_are_loaded(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    pieces = [{"paper_id": "p2", "text": "Method 2 won."}]
    row = {"question": "What won?", "papers": PAPERS, "evidence": pieces}
    path.write_text(json.dumps(row) + "\n")
    task = evidence(test=str(path))
    (item,) = items_of(task, "test")
    ((id, start, end),) = item.gold
    assert (id, item.context[id][start:end], list(item.context)) == (
        "p2",
        "Method 2 won.",
        ["p1", "p2"],
    )
    validate(task, ("test",))
    path.write_text(json.dumps({**row, "evidence": [{"paper_id": "p1", "text": "No."}]}) + "\n")
    with pytest.raises(RamifyError, match=r"'No\.' is not in paper 'p1'"):
        items_of(evidence(test=str(path)), "test")[0]


def test_qasper_items_get_papers_of_other_questions_as_distractors() -> None:
    def row(number: int) -> dict[str, Any]:
        paper = PAPERS[number - 1]
        columns = {"section_name": ["Results"], "paragraphs": [paper["full_text"][0]["paragraphs"]]}  # type: ignore[index]
        answers = {"answer": [{"evidence": []}, {"evidence": [f"Method {number} won."]}]}
        qas = {"question": ["What won?"], "answers": [answers]}
        return {**paper, "id": paper["paper_id"], "full_text": columns, "qas": qas}

    task = evidence(test=[row(1), row(2)])
    items = list(items_of(task, "test"))
    assert [item.gold[0][0] for item in items] == ["p1", "p2"]
    assert [sorted(item.context) for item in items] == [["p1", "p2"]] * 2
    validate(task, ("test",))


def test_judge_adds_a_second_reward() -> None:
    task = evidence(judge=lambda: ScriptedClient([r"\boxed{4, 2}"] * 9), judge_weight=0.25)
    item = items_of(task, "train")[0]
    assert task.score(item, answer_only_trajectory(item, item.gold)).rewards == {
        "f1": 1.0,
        "judged": 0.75,
    }
    assert task.weights == {"f1": 0.75, "judged": 0.25}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"papers": (1, 3)}, r"papers=\(1, 3\); give at least 2"),
        ({"chars": (100, 200)}, "give at least 1500"),
        ({"facts": (1, 9)}, "must be at most two for each of 4 papers"),
        ({"test": [{"id": "1", "qas": []}]}, "no question with evidence"),
    ],
)
def test_invalid_evidence_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evidence(**options)


def test_recipe_demonstrations_contain_right_and_wrong_runs() -> None:
    run = load_recipe(RECIPES / "tiny_evidence.py", ["sft.num=16"])
    (made,) = demonstrations_of(run, evidence(), TINY)
    shown = made.trajectories
    rewards = [each.rewards["f1"] for each in shown]
    children = [each["f1"] for run in shown for each in run.call_rewards.values()]
    assert (len(shown), [each.errors for each in shown]) == (16, [[]] * 16)
    assert min(rewards) < 0.5 < 0.9 < max(rewards)
    assert (min(children) < 0.5, max(children)) == (True, 1.0)
    assert {len(call.turns) for each in shown for call in each.calls if call.depth == 1} == {1}
