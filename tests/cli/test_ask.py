"""``ramify ask``: its output on stdout and stderr, and its exit code."""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest

from tests.cli.helpers import COMMAND, SESSION_SCRIPT, Done, Shell, code

SESSION = ("--no-direct", "how long?", "log.txt")


def test_stdout_has_only_the_answer(shell: Shell) -> None:
    shell.write("log.txt", "x" * 50_000)
    done = shell.ask(SESSION_SCRIPT, "how long?", "log.txt")
    loaded, summary = done.err.splitlines()
    assert (done.code, done.out, loaded) == (0, "50000\n", "log.txt: text, 50,000 characters")
    assert summary.startswith("final · 2 turns, 2 requests · ")
    assert " · run 2" in summary


def test_weak_sandbox_is_warned_about_unless_accepted(shell: Shell) -> None:
    shell.write("log.txt", "abc")
    weak = (*SESSION, "--sandbox", "process")
    assert shell.ask(SESSION_SCRIPT, *weak, "--quiet") == Done(0, "3\n", "")
    _, warning, _ = shell.ask(SESSION_SCRIPT, *weak).err.splitlines()
    assert warning.startswith("ramify: warning: sandbox 'process': ")
    assert "warning" not in shell.ask(SESSION_SCRIPT, *weak, "--allow-weaker").err


def test_session_gets_requested_packages_and_mounts(shell: Shell) -> None:
    shell.write("log.txt", "abc")
    with_package = shell.ask(
        [code("import pypdf\nFINAL(pypdf.__name__)")], *SESSION, "-q", "--package", "pypdf"
    )
    assert with_package == Done(0, "pypdf\n", "")
    shell.write("data/more.txt", "12345")
    here = str(shell.folder / "data")
    for given, place in (("data", here), ("data:/data", "/data")):
        script = [code(f"FINAL(open({place!r} + '/more.txt').read())")]
        done = shell.ask(
            script, *SESSION, "-q", "--mount", given, "--memory", "300MB", "--tier", "A"
        )
        if "does not reach tier A" in done.err:
            pytest.skip(f"MOUNTS ARE NOT TESTED HERE: {done.err}")
        assert done == Done(0, "12345\n", "")


def test_json_output_is_one_object(shell: Shell) -> None:
    shell.write("log.txt", "abc")
    done = shell.ask(SESSION_SCRIPT, *SESSION, "--json")
    answer = json.loads(done.out)
    seconds, run, usage = answer.pop("seconds"), answer.pop("run"), answer.pop("usage")
    assert answer == {
        "answer": 3,
        "stop": "final",
        "error": None,
        "partial": None,
        "citations": [],
        "mode": None,
        "mode_reason": None,
        "cost": 0.0,
    }
    assert (usage["calls"], usage["unknown_calls"], 0 < seconds < 250, run[:2]) == (
        2,
        0,
        True,
        "20",
    )
    assert set(usage) == {
        "input_tokens",
        "output_tokens",
        "cached_tokens",
        "reasoning_tokens",
        "calls",
        "unknown_calls",
        "cache_write_tokens",
    }


def test_small_context_is_answered_by_one_direct_call(shell: Shell) -> None:
    shell.write("log.txt", "the answer is 7")
    done = shell.ask(["seven"], "what is it?", "log.txt")
    assert (done.code, done.out, "sandbox" in done.err) == (0, "seven\n", False)


@pytest.mark.parametrize("option", [["--no-direct"], ["--mode", "free"]])
def test_a_session_answers_a_question_without_input(shell: Shell, option: list[str]) -> None:
    script = ["31 of them", code("FINAL(30 + 1)")]
    done = shell.ask(script, "how many days has May?", *option)
    assert (done.code, done.out) == (0, "31\n")
    dry = shell.ask(script, "how many days has May?", *option, "--dry-run")
    assert "would be answered by a session" in dry.out


def test_a_session_runs_plans_with_their_scaffold(shell: Shell) -> None:
    shell.write("log.txt", "disk full\nall well\n")
    cell = code("from ramify_plans import classify\nFINAL(classify(context, ['disk', 'other']))")
    script = [cell, '["disk", "other"]']
    done = shell.ask(script, "--scaffold", "plans", "--no-direct", "-q", "which?", "log.txt")
    assert done == Done(0, '["disk","other"]\n', "")
    shown = [line.strip() for line in shell.run("show", "last").out.splitlines()]
    assert '0.0 strategy: classify → ["disk","other"]' in shown
    assert '0.0.0 leaf: label: lines 1-2 → ["disk","other"]' in shown


def test_branches_take_the_majority_answer(shell: Shell) -> None:
    shell.write("log.txt", "abc")
    ways = [code(f"FINAL('{letter}')") for letter in "abb"]
    assert shell.ask(ways, "--branches", "3", "-q", "which?", "log.txt") == Done(0, "b\n", "")
    shown = shell.run("show", "last").out.splitlines()
    assert [line for line in shown if line.startswith("0") and " → " not in line] == [
        "0 scripted:script.json (rlm): which?",
        "0:1 scripted:script.json (rlm, sibling of 0): which?",
        "0:2 scripted:script.json (rlm, sibling of 0): which?",
    ]
    assert sorted(line for line in shown if "answer: " in line) == [
        "  answer: a",
        "  answer: b",
        "  answer: b",
    ]
    assert shown[-1] == "ended: final, after 1 turn"
    assert shown[-2] in (f"the answer of {call} was chosen" for call in ("0", "0:1", "0:2"))
    assert shell.run("replay", "last").out == "same: 3 calls, 3 cells, and the answer\n"
    assert (
        shell.ask(ways, "which?", "log.txt", "--no-direct", "-q", RAMIFY_BRANCHES="3").out == "b\n"
    )
    wrong = shell.ask(ways, "--branches", "0", "which?", "log.txt")
    assert (wrong.code, wrong.out, wrong.err.splitlines()[-1]) == (
        2,
        "",
        "ramify: branches is 0: give 1 for no branching, or more",
    )


@pytest.mark.parametrize("paths", [[], ["-"]])
def test_context_is_read_from_standard_input(shell: Shell, paths: list[str]) -> None:
    done = shell.ask(SESSION_SCRIPT, "--no-direct", "how long?", *paths, stdin="12345")
    assert (done.code, done.out, done.err.splitlines()[0]) == (
        0,
        "5\n",
        "stdin: text, 5 characters",
    )


def test_several_sources_are_a_table_with_what_was_left_out(shell: Shell) -> None:
    shell.write("in/a.csv", "x,y\n1,2\n")
    shell.write("in/notes.txt", "12345")
    shell.write("in/bad.bin", "\0")
    shell.write("in/.env", "KEY=1")
    done = shell.ask(SESSION_SCRIPT, "--no-direct", "how long?", "in")
    assert done.err.splitlines()[:5] == [
        "source     kind  size  contents",
        "a.csv      csv   8 B   CSV: 2 columns x, y; 1 row",
        "notes.txt  text  5 B   5 characters",
        "not loaded (1), is binary: bad.bin",
        "left out (1), hidden: .env",
    ]
    for number in range(20):
        shell.write(f"in/{number}.md", "z" * 100)
    done = shell.ask(SESSION_SCRIPT, "--no-direct", "how long?", "in")
    assert done.err.splitlines()[:5] == [
        "source      kind  size     contents",
        "20 .md      text  2 kB     2,000 characters",
        "a.csv       csv   8 B      CSV: 2 columns x, y; 1 row",
        "notes.txt   text  5 B      5 characters",
        "22 sources        2.01 kB  2,013 characters",
    ]
    refused = shell.ask(SESSION_SCRIPT, "--no-direct", "how long?", "in", "--strict")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.splitlines()[-1] == (
        "ramify: bad.bin is binary; to load the other files, remove --strict"
    )


def test_sources_over_the_limit_name_the_option(shell: Shell) -> None:
    for number in range(2):
        shell.write(f"in/{number}.log", "x" * 2000)
    for paths, says in {
        (
            "in",
        ): "0 bytes; 1.log has 2,000 bytes, over the limit of 1,000 bytes): raise --max-bytes",
        ("in/0.log",): "in/0.log has 2,000 bytes, over the limit of 1,000 bytes: raise --max-bytes",
    }.items():
        done = shell.ask(SESSION_SCRIPT, "how long?", *paths, "--max-bytes", "1000")
        assert (done.code, done.err.count("max-bytes")) == (2, 1)
        assert done.err.endswith(f"{says}\n")
    total = shell.ask(SESSION_SCRIPT, "how long?", "in", "--max-bytes", "3000")
    assert total.err.endswith("over 3,000 bytes: name fewer files, or raise --max-bytes\n")
    shell.write("in/a.txt", "12345")
    done = shell.ask(SESSION_SCRIPT, "--no-direct", "how long?", "in", "--max-bytes", "1000")
    assert "over the limit of 1,000 bytes: raise --max-bytes: 0.log, 1.log" in done.err


def test_question_without_quotes_is_recognised(shell: Shell) -> None:
    shell.write("logs/a.log", "abc")
    model = shell.model(["unused"])
    for command in ("ask", "prompt", "plan"):
        done = shell.run(command, "-m", model, "How", "many", "errors?", "logs")
        assert (done.code, done.out) == (2, "")
        shown = "plan" if command == "plan" else "ask"
        assert done.err.splitlines()[-1].startswith(
            "ramify: many does not exist: if it belongs to the question, put the question in "
            f"quotes: ramify {shown} 'How many errors?' logs ("
        )
    for paths, says in {
        ("Count", "lgos"): "lgos does not exist: did you mean logs?",
        ("Count", "no/file"): "no/file does not exist: nor does the folder no",
        ("How many?", "nothing"): "nothing does not exist: check its name",
    }.items():
        assert says in shell.run("ask", "-m", model, *paths).err


@pytest.mark.parametrize("stdin", [None, ""])
def test_question_without_context_is_answered(shell: Shell, stdin: str | None) -> None:
    done = shell.ask(["31"], "How many days has May?", stdin=stdin)
    assert (done.code, done.out) == (0, "31\n")


def test_options_may_appear_anywhere(shell: Shell) -> None:
    shell.write("a.txt", "aa")
    shell.write("b.txt", "bbb")
    model = shell.model(
        [code("FINAL(sorted((name, len(text)) for name, text in context.items()))")]
    )
    done = shell.run("ask", "which?", "-q", "a.txt", f"--model={model}", "b.txt", "--no-direct")
    assert done == Done(0, '[["a.txt",2],["b.txt",3]]\n', "")
    assert shell.run(
        "ask", "-m", shell.model(["yes"]), "-q", "--", "--is this a question?"
    ) == Done(0, "yes\n", "")


def test_answer_schema_is_read_inline_or_from_file(shell: Shell) -> None:
    schema = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
    shell.write("log.txt", "abc")
    script = [code("FINAL({'n': 'three'})"), code("FINAL({'n': 3})")]
    for given in (schema, shell.write("schema.json", schema)):
        assert shell.ask(script, *SESSION, "-q", "--answer-schema", given) == Done(
            0, '{"n":3}\n', ""
        )


def test_citations_follow_the_answer(shell: Shell) -> None:
    shell.write("log.txt", "one\ntwo\n")
    cited = {
        "answer": "two",
        "citations": [{"source": "context", "first_line": 2, "last_line": 2, "quote": "two"}],
    }
    done = shell.ask([code(f"FINAL({cited!r})")], *SESSION, "-q", "--cite")
    assert done == Done(0, "two\n\n[1] context:2-2 'two'\n", "")
    as_json = shell.ask([code(f"FINAL({cited!r})")], *SESSION, "-q", "--cite", "--json")
    assert json.loads(as_json.out)["citations"] == cited["citations"]


def test_reached_limit_prints_best_answer_and_stop_reason(shell: Shell) -> None:
    shell.write("log.txt", "abc")
    script = [code("x = 1"), code("x = 2"), "FINAL(about three)"]
    done = shell.ask(script, *SESSION, "--max-turns", "2")
    assert (done.code, done.out) == (3, "about three\n")
    assert done.err.splitlines()[-2].startswith("max_turns · ")


def test_missing_answer_exits_with_code_4(shell: Shell) -> None:
    shell.write("log.txt", "abc")
    done = shell.ask([{"match": "", "reply": ""}], *SESSION, "-q")
    assert (done.code, done.out) == (4, "")
    assert done.err.startswith("ramify: no answer")


def test_refused_request_suspends_the_run(shell: Shell) -> None:
    done = shell.ask([{"fail": "refused", "status": 401, "text": "invalid key"}], "hm?", "-q")
    assert (done.code, done.out, done.err.count("\n")) == (5, "", 1)
    assert done.err.startswith("ramify: suspended after ")
    assert "scripted:script.json: 401, invalid key; continue with: ramify ask --" in done.err
    as_json = shell.ask(
        [{"fail": "refused", "status": 401, "text": "invalid key"}], "hm?", "-q", "--json"
    )
    assert (as_json.code, json.loads(as_json.out)["stop"]) == (5, "suspended")


def test_no_store_option_saves_nothing(shell: Shell) -> None:
    done = shell.ask(["yes"], "hm?", "--no-store", "--json")
    assert (json.loads(done.out)["run"], (shell.folder / "store").exists()) == (None, False)


def test_cached_call_is_not_repeated(shell: Shell) -> None:
    shell.ask(["first"], "hm?", "--cache")
    done = shell.ask(["second"], "hm?", "--cache", "--json")
    assert (json.loads(done.out)["answer"], json.loads(done.out)["usage"]["calls"]) == ("first", 0)


def test_verbose_prints_a_line_per_step(shell: Shell) -> None:
    shell.write("log.txt", "abc")
    lines = [
        line.partition(" s  ")[2]
        for line in shell.ask(SESSION_SCRIPT, *SESSION, "-v").err.splitlines()
    ]
    shown = [line for line in lines if line]
    assert shown[0].startswith("call 0 (rlm, scripted:script.json): how long?")
    assert shown[2].startswith("call 0, turn 1: ran ")
    assert shown[-1] == "call 0 ended: final"


def test_sub_model_answers_llm_query(shell: Shell) -> None:
    sub = shell.model(["from below"], "sub.json")
    shell.write("log.txt", "abc")
    done = shell.ask([code("FINAL(llm_query('hm?'))")], *SESSION, "-q", "--sub-model", sub)
    assert done == Done(0, "from below\n", "")


def test_scaffold_is_loaded_from_file(shell: Shell) -> None:
    shell.write(
        "mine.toml",
        'name = "mine"\nsystem = "Say the magic word. {{tools}} {{limits}} FINAL"\ndirect_chars = 0\n',
    )
    shell.write("log.txt", "abc")
    shell.ask(SESSION_SCRIPT, "how long?", "log.txt", "--scaffold", "mine.toml")
    assert "Say the magic word." in shell.run("show", "last", "--call", "0").out


def test_closed_stdout_pipe_exits_silently_with_sigpipe_status(shell: Shell) -> None:
    process = shell.start(
        "ask", "-m", shell.model(["x" * 200_000]), "hm?", "-q", "--max-reply-tokens", "100000"
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process:
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_lone_surrogates_and_ascii_terminals_get_escapes(shell: Shell) -> None:
    shell.write("log.txt", "abc")
    script = [code("FINAL('half \\ud800 é')")]
    assert shell.ask(script, *SESSION, "-q").out == "half \\ud800 é\n"
    assert json.loads(shell.ask(script, *SESSION, "-q", "--json").out)["answer"] == "half \ud800 é"
    assert shell.ask(script, *SESSION, "-q", PYTHONIOENCODING="ascii").out == "half \\ud800 \\xe9\n"


def test_waiting_for_standard_input_is_announced(shell: Shell) -> None:
    process = shell.start("ask", "-m", shell.model(["yes"]), "hm?", stdin=subprocess.PIPE)
    assert process.stderr is not None
    assert process.stderr.readline().startswith(b"reading standard input; ")
    out, _ = process.communicate(timeout=100)
    assert (process.returncode, out) == (0, b"yes\n")


def test_ask_works_with_closed_standard_streams(shell: Shell) -> None:
    ask = f"exec {shlex.join([*COMMAND, 'ask', '--model', shell.model(['31']), 'How many days has May?'])}"
    codes = [
        subprocess.run(
            ["sh", "-c", f"{ask} {closed}"], cwd=shell.folder, env=shell.env, capture_output=True
        ).returncode
        for closed in ("<&-", ">&-", "2>&-")
    ]
    assert codes == [0, 0, 0]
