"""The math agent's task: public datasets in their own formats, demonstrations split into turns, the
score, and evaluation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ramify import RLM, Limits, ScriptedClient
from ramify.engine.prompt_scaffold import SCAFFOLDS
from ramify.errors import ConfigError, SourceError
from ramify.evaluate.evaluation_report import report, table
from ramify.evaluate.run_evaluation import EvaluationPlan, evaluate
from ramify.extras.studies.toolmath.retool_sft_conversion import demonstrations, row_to_messages
from ramify.extras.studies.toolmath.task import row_to_item, score_auto, toolmath
from ramify.tasks.base import Item, score_trajectory, task_of
from ramify.tasks.validation import answer_only_trajectory, validate
from ramify.train.data.sft_data import prompt_format, trajectory_of
from ramify.types.boxed_answer import last_boxed
from ramify.types.message import Message
from tests.shown import heard

BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


def dapo(problem: str, gold: str) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"{BEFORE}{problem}{AFTER}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": gold, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    }


STEP_BY_STEP = "Please reason step by step, and put your final answer within \\boxed{}."
AIME = {
    "zhuzilin/aime-2024": {
        "prompt": [{"role": "user", "content": f"Find x. {STEP_BY_STEP}"}],
        "label": "204",
        "metadata": {},
    },
    "BytedTsinghua-SIA/AIME-2024": dapo("Find x.", "204"),
    "Maxwell-Jia/AIME_2024": {
        "ID": "2024-II-4",
        "Problem": "Find x.",
        "Solution": "Let x …",
        "Answer": 204,
    },
    "yentinglin/aime_2025": {
        "id": "60",
        "problem": "Find x.",
        "answer": "204",
        "solution": "Let x …",
        "year": "2025",
    },
    "HuggingFaceH4/aime_2024": {
        "id": 60,
        "problem": "Find x.",
        "solution": "Let x …",
        "answer": "204",
        "year": "2024",
    },
}


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the rows in the format of the file's suffix."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return str(path)


@pytest.mark.parametrize("name", AIME)
def test_public_datasets_are_read_in_their_own_formats(name: str) -> None:
    item = row_to_item(AIME[name])
    assert (item.question, item.gold, item.wrong) == ("Find x.", "204", "205")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x", "target": 1}, "no problem was found among its columns text, target"),
        ({"problem": "x", "gold": 1}, "no answer was found among its columns problem, gold"),
        ({"prompt": [{"role": "system", "content": "x"}], "answer": 1}, "no problem was found"),
        ({"problem": " ", "answer": 1}, "no problem was found"),
        ({"problem": "x", "reward_model": {"style": "rule"}}, "no answer was found"),
    ],
)
def test_unknown_row_format_names_the_columns(row: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        toolmath(test=[row])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_task_from_files_has_disjoint_splits(tmp_path: Path, suffix: str) -> None:
    rows = [dapo(f"What is {n}+1?", str(n + 1)) for n in range(40)]
    train = write(tmp_path / f"train{suffix}", [*rows, *rows[:10]])
    test = write(tmp_path / f"aime{suffix}", [AIME["Maxwell-Jia/AIME_2024"]])
    task = task_of("toolmath", train=train, test=test)
    validate(task)
    questions = {split: [item.question for item in task.splits[split]] for split in task.splits}
    assert len(questions["train"]) + len(questions["validation"]) == 40  # each problem once
    assert not set(questions["train"]) & set(questions["validation"])
    assert questions["validation"]
    assert task.splits["test"][0] == Item("Find x.", gold="204", wrong="205", id="toolmath/test/0")
    assert task.splits["train"][0].kind == "math_dapo"


def test_missing_data_and_unknown_verifiers_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="toolmath needs problems"):
        toolmath()
    with pytest.raises(SourceError, match="does not exist"):
        toolmath(test=str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="unknown score 'exakt': did you mean 'exact'"):
        toolmath(test=[AIME["Maxwell-Jia/AIME_2024"]], verifier="exakt")


@pytest.mark.parametrize(
    ("answer", "gold", "worth"),
    [
        ("34", "34", 1),
        (" 034 ", "34", 1),
        ("$1,024$", "1024", 1),
        ("34.0", "34", 1),
        (34, "34", 1),
        ("35", "34", 0),
        (r"\sqrt{34}", "35", 0),
        ("34 or 35", "34", 0),
        (None, "34", 0),
        ("x+1", "x+1", 1),
        ("", "34", 0),
        ("9" * 5000, "9", 0),
    ],
)
def test_auto_verifier_compares_answers(answer: Any, gold: str, worth: float) -> None:
    assert score_auto(answer, Item("?", gold=gold)) == worth


def test_nested_boxes_are_whole() -> None:
    assert (
        last_boxed(r"\boxed{\frac{a}{b}} and \boxed{\sqrt{\frac{1}{2}}}") == r"\sqrt{\frac{1}{2}}"
    )


# --- demonstrations

ASKED = (
    "Solve the following problem step by step. You now have the ability to selectively write "
    "executable Python code …\n"
    "*user question:*\nWhat is 7!?\n\nRemember to place the final answer in the last part using "
    "the format: \n<answer>\n"
    "\\boxed{'The final answer goes here.'}\n</answer>"
)
SOLVED = (
    "I compute it.\n<code>\n```python\nimport math\nprint(math.factorial(7))\n```\n</code>\n"
    "<interpreter>\n5040\n</interpreter>\n"
    "And check:\n<code>\n```python\nprint(1*2*3*4*5*6*7)\n```\n</code>\n<interpreter>\n5040\n</interpreter>\n"
    "Both agree.\n\n<answer>\n\\boxed{5040}\n</answer>"
)


def row(solution: str, asked: str = ASKED) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": solution}]
    }


def test_demonstration_is_split_into_turns() -> None:
    system, *messages = row_to_messages(row(SOLVED), prompt_format(SCAFFOLDS["retool"]))
    assert system.content == SCAFFOLDS["retool"].system_prompt()
    assert messages == [
        Message("user", "What is 7!?\n\nPut the final answer into \\boxed{}."),
        Message(
            "assistant", "I compute it.\n<code>\nimport math\nprint(math.factorial(7))\n</code>"
        ),
        Message("user", "<interpreter>\n5040\n</interpreter>"),
        Message("assistant", "And check:\n<code>\nprint(1*2*3*4*5*6*7)\n</code>"),
        Message("user", "<interpreter>\n5040\n</interpreter>"),
        Message("assistant", "Both agree.\n\n\\boxed{5040}"),
    ]


def test_demonstration_with_native_tool_calls() -> None:
    messages = row_to_messages(row(SOLVED), prompt_format(SCAFFOLDS["retool_native"]))[2:]
    assert [message.role for message in messages] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    (call,) = messages[0].tool_calls
    assert (messages[0].content, json.loads(call.arguments)) == (
        "I compute it.",
        {"code": "import math\nprint(math.factorial(7))"},
    )
    assert messages[1] == Message(
        "tool", "<interpreter>\n5040\n</interpreter>", tool_call_id=call.id
    )


def test_demonstrations_match_the_engine() -> None:
    """Replies and observations of a demonstration have the form that the engine parses and
    writes."""
    scaffold = SCAFFOLDS["retool"]
    messages = row_to_messages(row(SOLVED), prompt_format(scaffold))
    replies = [message for message in messages if message.role == "assistant"]
    model = ScriptedClient([reply.content for reply in replies], name="scripted:retool")
    with RLM(model, scaffold=scaffold) as rlm:
        result = rlm.completion("What is 7!?")
    assert result.answer == "5040"
    assert tuple(result.trajectory.conversation(result.trajectory.root)) == messages


def test_malformed_demonstrations_are_left_out_with_a_warning(tmp_path: Path) -> None:
    broken = [
        row("no answer"),
        row(SOLVED.replace("</interpreter>", "", 1)),
        row("<code></code><interpreter></interpreter>\\boxed{1}"),
        {"messages": [{"role": "user", "content": "x"}]},
        {"text": "x"},
        row("<answer>\\boxed{1</answer>"),
    ]
    warned: list[str] = []
    source = write(tmp_path / "sft.jsonl", [row(SOLVED), *broken])
    with heard(warned.append):
        found = list(demonstrations(source, prompt_format(SCAFFOLDS["retool"])))
    assert len(found) == 1
    assert warned == [
        "6 of 7 demonstrations are left out because they have another form; the first is row 1: it "
        "ends without a boxed answer"
    ]
    with pytest.raises(ConfigError, match="none of 6 rows is a demonstration"):
        list(demonstrations(broken, prompt_format(SCAFFOLDS["retool"])))
    trajectory = trajectory_of(found[0])
    assert [len(turn.prompt) for turn in trajectory.root.turns] == [2, 1, 1]
    assert trajectory.rewards == {"correct": 1.0}


# --- evaluation


def test_evaluation_reports_accuracy_and_tool_use() -> None:
    """Two problems with four attempts each: one solved in two attempts, the other in none."""
    task = toolmath(test=[{"problem": f"What is {n}*6?", "answer": n * 6} for n in (7, 8)])
    replies = {
        0: ["<code>print(7*6)</code>", r"\boxed{42}"],
        1: [r"\boxed{42}"],
        2: ["<code>1/0</code>", r"\boxed{41}"],
        3: [r"\boxed{41}"],
    }
    order = iter(range(100))
    attempts: dict[str, int] = {}

    def model(messages: tuple[Message, ...]) -> str:
        turn = sum(message.role == "assistant" for message in messages)
        question = messages[1].content
        if turn == 0:
            attempts[question] = next(order) % 4
        return "no box here" if "8*6" in question else replies[attempts[question]][turn]

    async def run() -> Any:
        rlm = RLM(
            ScriptedClient(model, name="scripted:math"),
            scaffold="retool",
            limits=Limits(max_turns=3),
        )
        return await evaluate(
            rlm,
            task,
            EvaluationPlan(model="m", task="toolmath", items=2, attempts=4),
            concurrency=1,
        )

    found = report(asyncio.run(run()), k=2)
    (whole,) = found.rows[:1]
    assert whole.average is not None
    assert whole.passes is not None
    assert whole.majority is not None
    assert (whole.average.value, whole.passes.value) == (0.25, pytest.approx((1 - 1 / 6) / 2))
    assert whole.majority.value == pytest.approx(0.25)  # two blocks of two: 42 42 and 41 41
    assert found.metrics == {
        "tool_calls": 0.25,
        "tool_errors": 0.125,
        "tool_silent": 0.0,
        "used_tool": 0.25,
        "malformed": 1.5,
        "truncated": 0.5,
    }
    assert "tool_errors 0.125" in table(found)


def test_plain_answer_is_scored_without_a_run() -> None:
    task = toolmath(test=[{"problem": "?", "answer": "7"}])
    item = task.splits["test"][0]
    assert score_trajectory(task, item, answer_only_trajectory(item, "7")).rewards == {
        "correct": 1.0
    }
