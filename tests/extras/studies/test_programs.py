"""Named-operation programs: the language in two sandboxes, splits, the demonstrator's habits, and
hints."""

from __future__ import annotations

import asyncio
import random
from itertools import islice

import pytest

from ramify import RLM, Limits, SandboxSpec, ScriptedClient
from ramify.engine.prompt_scaffold import SCAFFOLDS
from ramify.errors import ConfigError, SandboxError
from ramify.evaluate.attempt import attempt
from ramify.extras.studies.programs.scripted_demonstrator import (
    ProgramDemonstratorSkill,
    ToyLanguageRule,
    broken_rules,
    demonstrate,
    hint_text,
    rules_from_errors,
)
from ramify.extras.studies.programs.task import programs
from ramify.extras.studies.programs.toy_program_language import (
    IMPORTED,
    NO_PROGRAM,
    NOT_IMPORTED,
    NUM_CHECKED,
    NUM_WORDS,
    PROGRAM_HINT,
    PROGRAM_WORDS,
    ProgramWritingExercise,
    ToyProgram,
    ViolatedProgramRule,
    generate_word_functions,
)
from ramify.models.chat_renderer import renderer_of
from ramify.models.tokenizer_training import UNKNOWN, word_tokenizer
from ramify.sandbox.base import Sandbox, open_sandbox
from ramify.tasks.base import task_of
from ramify.tasks.validation import validate
from ramify.train.data.sft_data import prompt_format
from ramify.types.message import Message

KNOWN = generate_word_functions()
BARE = prompt_format(SCAFFOLDS["bare"])
EVALUATOR = SandboxSpec(provider="ramify.extras.studies.programs.program_interpreter")
RIGHT = dict(enumerate(KNOWN.right))


def some_program(rng: random.Random) -> ToyProgram:
    """Return a program that may be right, silently wrong, rejected, or missing an import."""
    words = rng.sample(range(NUM_WORDS), rng.randint(1, 6))
    functions = {
        word: RIGHT[word] if rng.random() < 0.7 else rng.randrange(NUM_WORDS) for word in words
    }
    problem = ProgramWritingExercise(
        rng.randrange(97), tuple((word, rng.randint(1, 9)) for word in words)
    )
    return problem.program_for_meanings(
        functions, tuple(each for each in IMPORTED if rng.random() < 0.6)
    )


def test_programs_and_problems_are_parsed_and_run() -> None:
    program = ToyProgram.parse("from ops import f10;50@w3@f7@5@w9@f0@2")
    assert program is not None
    assert program.text == "from ops import f10;50@w3@f7@5@w9@f0@2"
    assert ProgramWritingExercise.parse("50@w3@5@w9@2\nhint: use @w3@f9") == ProgramWritingExercise(
        50, ((3, 5), (9, 2))
    )
    word, right = 2, KNOWN.right[2]
    imports = "".join(f"from ops import f{right};" for _ in [0] if right in IMPORTED)
    a, b, c = KNOWN.maps[right]
    found = ToyProgram.parse(f"{imports}50@w{word}@f{right}@5")
    assert found is not None
    assert KNOWN.run(found) == (a * 50 + b * 5 + c) % 97
    other = next(each for each in range(NUM_WORDS) if each != right and each not in IMPORTED)
    wrong = ToyProgram.parse(f"50@w{word}@f{other}@5")
    assert wrong is not None
    broken = KNOWN.run(wrong)
    assert broken == ViolatedProgramRule(word, right)
    assert KNOWN.error_message(wrong, broken) == f"TypeError: not @w2@f{other} but @w2@f{right}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "50",
        "50@w3@f7",
        "50@w3@f7@5@",
        "50@w99@f7@5",
        "50@w3@f7@5\n",
        "import os",
        "from ops import f9;50@w3@f7@5",
        "50@w3@f7@5;50@w3@f7@5",
        "__import__('os')",
        "501@w3@f7@5",
    ],
)
def test_invalid_program_texts_are_rejected(text: str) -> None:
    assert ToyProgram.parse(text) is None


def test_evaluator_gives_the_same_output_as_python() -> None:
    """The same cells run as real Python in the jail and by the evaluator in this process."""
    rng = random.Random(1)
    codes = [some_program(rng).text for _ in range(60)] + ["FINAL(42)"]

    async def shown(sandbox: Sandbox) -> list[tuple[str, object]]:
        session = await sandbox.open()
        try:
            await session.install("prelude", prelude)
            await session.install("ops", KNOWN.python_module_source())
            await session.install("not_imported", NOT_IMPORTED)
            rans = [await session.run(code, answer=nobody) for code in codes]
            return [(BARE.report(ran.cell), ran.note["prelude"].get("final")) for ran in rans]
        finally:
            await sandbox.close()

    async def nobody(name: str, args: object, kwargs: object) -> None:
        raise AssertionError(name)

    from ramify.engine.persistent_session import _prelude

    prelude = _prelude(1000)
    fast, real = (asyncio.run(shown(open_sandbox(spec))) for spec in (EVALUATOR, SandboxSpec()))
    assert fast == real
    kinds = {text.partition(":")[0] for text, _ in fast}
    assert {"TypeError", "ImportError"} <= kinds
    assert any(text.isdigit() for text, _ in fast)
    assert fast[-1] == ("", 42)


def test_evaluator_runs_no_python_and_rejects_other_libraries() -> None:
    async def run() -> None:
        session = await open_sandbox(EVALUATOR).open()
        with pytest.raises(SandboxError, match="its library of programs is not installed"):
            await session.run("50@w3@f7@5", answer=None)  # type: ignore[arg-type]
        with pytest.raises(SandboxError, match="not the source of a library"):
            await session.install("ops", "import os")
        await session.install("ops", KNOWN.python_module_source())
        for code in ("open('/etc/passwd')", "50@w3@f7@5 or 1/0", "FINAL(1/0)"):
            assert (await session.run(code, answer=None)).cell.error == NO_PROGRAM  # type: ignore[arg-type]

    asyncio.run(run())


def test_sandbox_providers_are_loaded_by_module_name() -> None:
    with pytest.raises(
        ConfigError, match=r"sandbox 'no\.such\.module' cannot be loaded: No module"
    ):
        open_sandbox(SandboxSpec(provider="no.such.module"))
    with pytest.raises(ConfigError, match="has no open_provider"):
        open_sandbox(SandboxSpec(provider="ramify.extras.studies.programs.toy_program_language"))
    with pytest.raises(ConfigError, match="unknown sandbox 'jial': did you mean 'jail'"):
        open_sandbox(SandboxSpec(provider="jial"))


def test_splits_share_the_secret_but_no_problem() -> None:
    task = task_of("programs")
    validate(task)
    splits = {
        split: [item.question for item in items[:400]] for split, items in task.splits.items()
    }
    assert len({question for questions in splits.values() for question in questions}) == 1200
    assert all(item.metadata["secret"] == 0 for items in task.splits.values() for item in items[:3])
    assert programs(secret=1).splits["test"][0].gold != KNOWN.correct_answer(
        ProgramWritingExercise.parse(programs(secret=1).splits["test"][0].question)
    )  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="steps=25 must be from 1 to 24"):
        programs(steps=25)


def test_rollout_scores_the_same_in_both_sandboxes() -> None:
    task = task_of("programs")
    item = task.splits["test"][0]
    problem = ProgramWritingExercise.parse(item.question)
    assert problem is not None
    needed = tuple(sorted({RIGHT[word] for word, _ in problem.steps} & set(IMPORTED)))
    right = problem.program_for_meanings(RIGHT, needed).text
    replies = [right + "@", right, f"FINAL({item.gold})"]

    async def run(sandbox: SandboxSpec) -> tuple[object, ...]:
        model = ScriptedClient(
            lambda said: replies[sum(m.role == "assistant" for m in said)], name="scripted:programs"
        )
        async with RLM(model, scaffold="bare", sandbox=sandbox, limits=Limits(max_turns=3)) as rlm:
            found = await attempt(rlm, task, item)
        return (
            found.rewards,
            found.metrics,
            [message.content for message in found.conversation(found.root)][3:],
        )

    for sandbox in (EVALUATOR, SandboxSpec()):
        rewards, metrics, after = asyncio.run(run(sandbox))
        assert rewards == {"correct": 1.0}
        assert metrics == {"malformed": pytest.approx(1 / 3), "code_turns": 1.0, "raised": 0.0}
        assert after == [right, str(item.gold), f"FINAL({item.gold})"]


def test_word_tokenizer_has_one_token_per_word() -> None:
    tokenizer = word_tokenizer(PROGRAM_WORDS)
    renderer = renderer_of(tokenizer)
    text = "from ops import f10;50@w3@f10@5@w13@f0@2" + PROGRAM_HINT + "use @w3@f12"
    ids = renderer.prompt([Message("user", text)])
    assert tokenizer.decode(ids) == f"<|u|>{text}<|a|>"
    assert [tokenizer.decode([id]) for id in ids[1:-1]] == [
        "from ops import f10;",
        "50",
        "@w3",
        "@f10",
        "@5",
        "@w13",
        "@f0",
        "@2",
        PROGRAM_HINT,
        "use ",
        "@w3",
        "@f12",
    ]
    assert UNKNOWN in tokenizer.decode(renderer.prompt([Message("user", "50 apples")]))
    with pytest.raises(ConfigError, match="repeated or reserved"):
        word_tokenizer(["a", "b", "a"])


def test_demonstrator_has_the_expected_accuracy() -> None:
    task = task_of("programs")
    plain = [
        demonstrate(item, ProgramDemonstratorSkill(hinted=0.0), 0, BARE)
        for item in task.splits["train"][:600]
    ]
    assert 0.03 < sum(each.correct for each in plain) / len(plain) < 0.10
    expert = ProgramDemonstratorSkill(knows=1.0, remembers_import=1.0, hinted=0.0)
    assert all(demonstrate(item, expert, 0, BARE).correct for item in task.splits["train"][:50])
    for each in plain:
        assert [message.role for message in each.messages] == ["user", "assistant"] * (
            len(each.messages) // 2
        )
        assert each.messages[-1].content.startswith("FINAL(")
        assert len(each.messages) in (4, 6)


def test_half_of_the_demonstrations_follow_a_hint_and_half_of_those_hints_are_wrong() -> None:
    task = task_of("programs")
    found = [
        demonstrate(item, ProgramDemonstratorSkill(), 0, BARE)
        for item in task.splits["train"][:400]
    ]
    hinted = [each for each in found if PROGRAM_HINT in each.messages[0].content]
    assert 0.42 < len(hinted) / len(found) < 0.58
    wrong = [each for each in hinted if len(each.messages) == 2]
    assert 0.4 < len(wrong) / len(hinted) < 0.6
    for each in hinted:
        hint = each.messages[0].content.partition(PROGRAM_HINT)[2].removeprefix("use ")
        program = ToyProgram.parse(each.messages[1].content)
        assert program is not None
        for rule in hint.partition("from")[0].split("@w")[1:]:
            assert f"@w{rule}@" in program.text  # the program follows the hint


def test_demonstrations_match_the_engine() -> None:
    task = task_of("programs")

    async def again(item: object, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        replies = [message.content for message in messages if message.role == "assistant"]
        async with RLM(
            ScriptedClient(replies, name="s:m"), scaffold="bare", sandbox=EVALUATOR
        ) as rlm:
            found = await attempt(rlm, task, item)  # type: ignore[arg-type]
        return tuple(found.conversation(found.root))

    for item in islice(task.splits["train"], 8):
        messages = demonstrate(item, ProgramDemonstratorSkill(hinted=0.0), 0, BARE).messages
        assert asyncio.run(again(item, messages)) == messages


def test_hints_from_errors_and_from_the_library() -> None:
    seen = [
        "17",
        "TypeError: not @w9@f20 but @w9@f4",
        "ImportError: from ops import f10;",
        "TypeError: not @w9@f20 but @w9@f4",
    ]
    assert rules_from_errors(seen) == [ToyLanguageRule(9, 4), ToyLanguageRule(None, 10)]
    assert hint_text(rules_from_errors(seen)) == "use @w9@f4from ops import f10;"
    assert hint_text([]) == ""
    silent = next(word for word in range(NUM_CHECKED, NUM_WORDS) if RIGHT[word] not in IMPORTED)
    problem = ProgramWritingExercise(5, ((silent, 1),))
    wrong = problem.program_for_meanings({silent: (RIGHT[silent] + 1) % 10})
    assert rules_from_errors([str(KNOWN.run(wrong))]) == []  # no error mentions it
    assert broken_rules(problem, ["no program", wrong.text], KNOWN) == [
        ToyLanguageRule(silent, RIGHT[silent])
    ]
    assert broken_rules(problem, [problem.program_for_meanings(RIGHT).text], KNOWN) == []
