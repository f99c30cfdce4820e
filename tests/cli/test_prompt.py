"""``ramify prompt``, ``ask --dry-run``, and instructions on the command line."""

from __future__ import annotations

import json

from ramify.models.tokenizer_training import train_tokenizer
from tests.cli.helpers import Shell, code
from tests.models.templates import CHATML

MODEL = ("--model", "openai:gpt-5-mini")


def test_prompt_is_printed_without_a_key(shell: Shell) -> None:
    shell.write("log.txt", "one line\n" * 9000)
    done = shell.run("prompt", "how many?", "log.txt", *MODEL)
    assert done.code == 0
    assert done.out.startswith("[system]\nYou answer a question about data")
    assert "[user]\nQuestion: how many?\n\n`context` is a str of 81,000 characters" in done.out
    assert done.out.splitlines()[-1].startswith("openai:gpt-5-mini: ")
    child = shell.run("prompt", "how many?", "log.txt", *MODEL, "--depth", "1", "--json")
    data = json.loads(child.out)
    assert "one part of a larger question" in data["messages"][0]["content"]
    assert data["tokens_are_estimated"] is True


def test_prompt_is_printed_as_tokens_of_a_tokenizer(shell: Shell) -> None:
    shell.write("log.txt", "one line\n" * 9000)
    tokenizer = train_tokenizer(["some text of a log"], vocab_size=262)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(shell.folder / "model")
    asked = ("prompt", "how many?", "log.txt", *MODEL, "--tokenizer", "model")
    assert shell.run(*asked).out.startswith("<|im_start|>system\nYou answer")
    *ids, _, size = shell.run(*asked, "--tokens").out.splitlines()
    assert f" {len(ids[0].split()):,} tokens of 272,000" in size
    done = shell.run("prompt", "how many?", "log.txt", *MODEL, "--tokens")
    assert (done.code, done.out) == (2, "")
    assert "--tokens needs a tokenizer" in done.err


def test_dry_run_says_what_would_be_loaded_and_paid(shell: Shell) -> None:
    shell.write("log.txt", "one line\n" * 9000)
    done = shell.run("ask", "how many?", "log.txt", *MODEL, "--dry-run", "--max-cost", "2")
    assert done.code == 0
    shown = done.out.splitlines()[-4:]
    assert shown[0] == "would load: log.txt: text, 81,000 characters"
    assert shown[1] == "would be answered by a session; nothing was sent"
    assert shown[2].startswith("first turn: $0.00")
    assert shown[3].endswith(" to $2.00, which is its --max-cost")
    assert not (shell.folder / "store").exists()


def test_instructions_and_examples_come_from_files_or_text(shell: Shell) -> None:
    shell.write("log.txt", "one line\n" * 9000)
    shell.write("rules.md", "Count only errors.\n")
    shell.write("pairs.jsonl", '{"question": "how many warnings?", "answer": 3}\n')
    shell.write("empty.jsonl", "\n")
    shell.write("notes/a.txt", "Count.\n")
    given = ("--instructions", "rules.md", "--examples", "pairs.jsonl")
    done = shell.ask([code("FINAL(history[0]['content'])")], "how many?", "log.txt", *given)
    assert "Instructions of the user:\nCount only errors.\n" in done.out
    assert done.out.endswith("Question: how many warnings?\nAnswer: 3\n")
    for wrong, problem in (
        (("--instructions", "rulez.md"), "rulez.md cannot be read: there is no such file"),
        (("--instructions", "notes"), "notes are a folder: give a file or a text"),
        (("--examples", "empty.jsonl"), "the examples empty.jsonl are empty"),
        (("--examples", "rules.md"), "rules.md does not parse"),
        (("--examples", "none.jsonl"), "the examples none.jsonl cannot be read"),
    ):
        done = shell.ask([], "how many?", "log.txt", *wrong)
        assert (done.code, done.out) == (2, "")
        assert problem in done.err
