"""The model for offline use: its accuracy, its latency, its names, and the systems that it knows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ramify.clients.base import Price
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.errors import ConfigError
from ramify.testing.offline_model import (
    ModelLatency,
    OfflineModel,
    OfflineModelSuiteStrategy,
    SimulatedAccuracyCurve,
    connect,
    simulated_model,
)
from ramify.testing.scripted_server import ScriptedServer
from ramify.types.message import Message
from tests.clients.helpers import request, run

QUESTION = "What is the access code of Lodavi?"
RLMS = "You are a Recursive Language Model (RLM): a language model with a prompt …"
DROSTE = (
    "You are in a Python REPL. Each turn, produce a single ```python code block```.\n\n"
    "## Authorized compute\ntokens=500000; subcalls=50; depth=1\n"
    "subcall_input_capacity=unknown"
)
EXTRACTION = (
    "An iterative Python-REPL session ended without submitting a confirmed final answer. Use …"
)
DSPY = (
    "Your output fields are:\n[[ ## reasoning ## ]]\n{reasoning}\n\n[[ ## code ## ]]\n{code}\n"
    "- `SUBMIT(answer)` - submit final output when done\nYou have max 50 sub-LLM calls."
)
DSPY_STEP = (
    "[[ ## variables_info ## ]]\n[2] «««\n    Variable: `question` (access it in your code)\n"
    "    Type: str\n    Preview:\n    ```\n    {question}\n    ```\n»»»\n\n"
    "[[ ## repl_history ## ]]\n{history}\n[[ ## iteration ## ]]\n1/20"
)
DSPY_EXTRACTION = "Your fields: [[ ## repl_history ## ]] and [[ ## answer ## ]]"


def text_of(number: int) -> str:
    return f"The access code of Lodavi is {100_000 + number}. That of Mirato is 999999."


def replies(model: OfflineModel, prompts: list[str]) -> list[str]:
    return [model.reply([Message("user", prompt)]) for prompt in prompts]


def conversation(system: str, *texts: str) -> list[Message]:
    roles = ("user", "assistant")
    turns = [Message(roles[at % 2], text) for at, text in enumerate(texts)]
    return [Message("system", system), *turns]


def test_the_curve_is_linear_in_the_logarithm_of_the_tokens() -> None:
    curve = SimulatedAccuracyCurve(((100, 1.0), (10_000, 0.5)))
    assert [curve(tokens) for tokens in (1, 100, 1_000, 10_000, 10**9)] == [
        1.0,
        1.0,
        0.75,
        0.5,
        0.5,
    ]


@pytest.mark.parametrize("points", [(), ((0, 1.0),), ((10, 1.0), (10, 0.5)), ((10, 1.5),)])
def test_a_curve_that_is_none_is_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ConfigError, match=r"^accuracy curve: "):
        SimulatedAccuracyCurve(points)


def test_a_leaf_is_right_as_often_as_the_curve_says_and_its_errors_are_plausible() -> None:
    model = OfflineModel(curve=SimulatedAccuracyCurve(((1, 0.7),)))
    given = replies(model, [f"{text_of(n)}\n\nQuestion: {QUESTION}" for n in range(500)])
    right = [reply == str(100_000 + number) for number, reply in enumerate(given)]
    assert 0.65 < sum(right) / len(right) < 0.75
    assert {reply for reply, is_right in zip(given, right, strict=True) if not is_right} == {
        "999999"
    }


def test_longer_texts_are_read_less_well() -> None:
    model = OfflineModel(curve=SimulatedAccuracyCurve(((50, 1.0), (5_000, 0.0))))
    fillers = ("", " The weaver counts the stone." * 100, " The weaver counts the stone." * 1_000)
    shares = []
    for filler in fillers:
        prompts = [f"{text_of(n)}{filler}\n\nQuestion: {QUESTION}" for n in range(100)]
        given = replies(model, prompts)
        shares.append(sum(reply == str(100_000 + n) for n, reply in enumerate(given)))
    assert shares[0] == 100
    assert 30 < shares[1] < 80
    assert shares[2] == 0


def test_the_same_request_has_the_same_reply_and_another_seed_other_errors() -> None:
    prompts = [f"{text_of(n)}\n\nQuestion: {QUESTION}" for n in range(40)]
    half = SimulatedAccuracyCurve(((1, 0.5),))
    first = replies(OfflineModel(curve=half), prompts)
    assert replies(OfflineModel(curve=half), prompts) == first
    assert replies(OfflineModel(curve=half, seed=1), prompts) != first


def test_the_model_over_http_replies_as_in_this_process() -> None:
    async def main() -> tuple[list[str], list[str]]:
        model = OfflineModel(curve=SimulatedAccuracyCurve(((1, 0.5),)))
        asked = [request(f"{text_of(n)}\n\nQuestion: {QUESTION}") for n in range(10)]
        here = [(await model.client().complete(each)).message.content for each in asked]
        async with ScriptedServer(model.tell) as server:
            pool = RateLimitedClientPool(base_urls={"openai": server.url})
            client = pool.client("openai:test")
            there = [(await client.complete(each)).message.content for each in asked]
            await pool.close()
        return here, there

    here, there = run(main())
    assert here == there
    assert len(set(here)) > 2


def test_a_virtual_latency_is_stated_and_a_real_one_passes() -> None:
    latency = ModelLatency(first_s=0.02, input_s=0.0, output_s=0.0)

    def seconds(model: OfflineModel) -> float:
        return run(
            model.client().complete(request(f"{text_of(1)}\n\nQuestion: {QUESTION}"))
        ).seconds

    stated = ModelLatency(first_s=100.0, input_s=1.0, output_s=10.0)
    virtual = seconds(OfflineModel(latency=stated, sleep="virtual"))
    assert 100.0 < virtual < 101.0
    assert seconds(OfflineModel(latency=latency, sleep="real")) >= 0.02


def test_replies_are_free_unless_a_price_is_simulated(tmp_path: Path) -> None:
    file = tmp_path / "priced.json"
    file.write_text('{"price": {"input": 0.25, "output": 2}}')
    free, other = Price(0.0, 0.0), Price(1.0, 1.0)
    assert connect("offline:default").price == free
    assert connect("offline:0.5", window=9, price=other).price == other
    assert connect(f"offline:{file}", price=free).price == Price(0.25, 2.0)
    assert connect(f"offline:{file}", price=other).price == other
    assert OfflineModel().client().price == free


def test_models_are_named_by_their_accuracy_or_by_a_file(tmp_path: Path) -> None:
    file = tmp_path / "reader.json"
    file.write_text('{"curve": {"points": [[10, 0.25]]}, "seed": 3, "leaf_tokens": 500}')
    assert simulated_model("perfect").curve(10**7) == 1.0
    assert simulated_model("0.9").curve(10**7) == 0.9
    assert simulated_model("default") == OfflineModel()
    assert simulated_model(str(file)).leaf_tokens == 500
    for name, fault in (
        ("best", r"^offline:best: there is no such model; write offline:default, "),
        ("1.5", r"^accuracy curve: the accuracy at 1 tokens is 1.5: give a number from 0 to 1"),
        (str(tmp_path / "absent.json"), "No such file"),
    ):
        with pytest.raises(ConfigError, match=fault):
            simulated_model(name)
    file.write_text('{"curve": {"points": [[10, 2.0]]}}')
    with pytest.raises(ConfigError, match=r"reader.json: .* accuracy at 10 tokens is 2.0"):
        simulated_model(str(file))
    file.write_text('{"curves": []}')
    with pytest.raises(ConfigError, match="unknown field `curves`"):
        simulated_model(str(file))


@pytest.mark.parametrize(
    ("system", "texts", "code", "answer"),
    [
        pytest.param(
            RLMS,
            [f"Answer the following: {QUESTION}\n\nYour context is a str of 9 total characters."],
            "```repl\nprint(type(context)",
            'answer["ready"] = True',
            id="rlms",
        ),
        pytest.param(
            DROSTE,
            [f"Question: {QUESTION}\n\n"],
            "```python\nprint(",
            '"ready"] = True',
            id="droste",
        ),
    ],
)
def test_a_root_looks_runs_its_strategy_and_answers_in_the_form_of_its_system(
    system: str, texts: list[str], code: str, answer: str
) -> None:
    model = OfflineModel()
    for output in ("str 9", "RESULT: 482913"):
        reply = model.reply(conversation(system, *texts))
        texts = [*texts, reply, output]
    assert code in texts[1]
    assert "def solve(" in texts[3]
    assert repr(QUESTION) in texts[3]
    assert answer in model.reply(conversation(system, *texts))


def test_a_root_of_dspy_writes_its_fields() -> None:
    model, history = OfflineModel(), ""
    steps = []
    for number, output in enumerate(("str 9", "RESULT: 482913", ""), 1):
        user = DSPY_STEP.format(question=QUESTION, history=history)
        steps.append(model.reply(conversation(DSPY, user)))
        history += f"=== Step {number} ===\nCode:\n```python\n…\n```\nOutput:\n{output}\n"
    assert all(step.startswith("[[ ## reasoning ## ]]\n") for step in steps)
    assert all(step.endswith("[[ ## completed ## ]]") for step in steps)
    assert "solve(question, context, ask, " in steps[1]
    assert "[[ ## code ## ]]\n```python\nSUBMIT(str(result))" in steps[2]
    user = DSPY_STEP.format(question=QUESTION, history=history)
    last = model.reply(conversation(DSPY_EXTRACTION, user))
    assert last == "[[ ## answer ## ]]\n482913\n\n[[ ## completed ## ]]"


def test_a_root_of_droste_that_ran_out_answers_in_words() -> None:
    summary = f"Question: {QUESTION}\n\n--- Iteration 2 ---\nOutput:\nRESULT: 482913"
    assert OfflineModel().reply(conversation(EXTRACTION, summary)) == "482913"


def test_a_root_makes_its_parts_larger_if_its_prompt_allows_few_calls() -> None:
    texts = [f"Question: {QUESTION}\n\n", "```python\n…\n```", "str 9"]
    few = DROSTE.replace("subcalls=50", "subcalls=8")
    for system, most in ((few, 6), (DROSTE, 37)):
        assert f"len(context) // {most} + 1" in OfflineModel().reply(conversation(system, *texts))


def test_a_question_of_no_suite_has_no_strategy() -> None:
    model, question = OfflineModel(), "How tall is the tower?"
    assert replies(model, [f"{text_of(1)}\n\nQuestion: {question}"]) == ["unknown"]
    root = conversation(RLMS, f"Answer the following: {question}\n\nYour context is a str", "", "x")
    assert "result = 'unknown'" in model.reply(root)


def test_an_unknown_suite_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown offline suite 'niha': did you mean 'niah'"):
        OfflineModel(suites=("niha",)).reply([Message("user", "?")])


def test_a_suite_of_ones_own_is_the_source_of_its_functions() -> None:
    suite = OfflineModelSuiteStrategy(
        "own", "^How many", _solve, lambda question, text: None, _spoil, (_helper,)
    )
    assert suite.code().startswith("def _helper(text: str) -> int:\n")
    assert "def _solve(" in suite.code()


def _helper(text: str) -> int:
    return len(text)


def _solve(question: str, context: str, ask: object, chars: int) -> str:
    return str(_helper(context))


def _spoil(question: str, text: str, right: str, draw: random.Random) -> str:
    return right + "0"
