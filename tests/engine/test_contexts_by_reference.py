"""Contexts that stay in their files: how a model uses them, and what is stored of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ramify import RLM, Limits, Scaffold, Store, load
from ramify.cli.main import run
from ramify.errors import SourceError
from ramify.types.message import Message
from tests.engine.helpers import SCAFFOLD, client, code, rlm

LINES = "".join(f"line {number} größe\n" for number in range(20_000))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "big.log"
    path.write_text(LINES)
    return path


def ask(store: Store, log: Path, script: list[str], **options: object) -> tuple[RLM, object]:
    asked = rlm(client(script), store=store, **options)
    return asked, asked.completion(load(log, mapped_bytes=1000), "Which line is it?").answer


def test_store_does_not_grow_by_the_size_of_the_log(tmp_path: Path, log: Path) -> None:
    store = Store(tmp_path / "store")
    script = [code("FINAL([context.find('line 19999 '), context.splitlines()[5]])")]
    asked, answer = ask(store, log, script)
    with asked:
        assert answer == [LINES.find("line 19999 "), "line 5 größe"]
        trajectory = store.load("last")
        assert trajectory.context is not None
        assert trajectory.context.kind == "FileBackedText"
        assert [file.path for file in trajectory.context.files] == [str(log)]
        blobs = sum(path.stat().st_size for path in (tmp_path / "store/blobs").rglob("*/*"))
        assert blobs < len(LINES) // 100
        assert asked.replay("last").answer == answer


def test_show_runs_and_exported_page_say_that_it_is_by_reference(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    asked, _ = ask(store, log, [code("FINAL(1)")])
    asked.close()
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "store"))
    told = f"by reference: {log} ({log.stat().st_size:,} bytes)"
    page = tmp_path / "page.html"
    for words in (
        ["show", "last", "--no-pager"],
        ["runs"],
        ["view", "last", "--export", str(page)],
    ):
        assert run(words) == 0
    shown = capsys.readouterr().out
    assert f"context: FileBackedText, {len(LINES):,} characters, {told}" in shown
    assert [line.split("\t")[-1] for line in shown.splitlines() if "\t" in line][-2:] == [
        "by reference",
        "1 file",
    ]
    assert told in page.read_text("utf-8")


@pytest.mark.parametrize("verb", ["resume", "replay"])
def test_run_over_a_file_that_has_changed_is_refused(tmp_path: Path, log: Path, verb: str) -> None:
    store = Store(tmp_path / "store")
    asked, _ = ask(store, log, [code("x = 1"), *["FINAL(x)"] * 2], limits=Limits(max_turns=1))
    with asked:
        log.write_text(LINES.replace("line 7 ", "line 8 "))
        options = {"limits": Limits(max_turns=5)} if verb == "resume" else {}
        with pytest.raises(SourceError, match=r"big\.log has changed since it was read \(it was"):
            getattr(asked, verb)("last", **options)
        log.write_text(LINES)  # the same content again, at another time
        getattr(asked, verb)("last", **options)


def test_log_that_grows_while_it_is_asked_is_read_as_it_was(tmp_path: Path, log: Path) -> None:
    loaded = load(log, mapped_bytes=1000)
    with log.open("a") as file:
        file.write("one more line\n")
    with rlm(client([code("FINAL([len(context), 'more' in context])")])) as asked:
        assert asked.completion(loaded, "?").answer == [len(LINES), False]


def test_file_that_is_truncated_while_it_is_asked_ends_the_run_by_its_name(log: Path) -> None:
    def script(messages: tuple[Message, ...]) -> str:
        if len(messages) == 4:
            log.write_text("")
        return code("context[len(context) // 2]")

    loaded = load(log, mapped_bytes=1000)
    with (
        rlm(client(script), limits={"max_turns": 4}) as asked,
        pytest.raises(
            SourceError, match=r"big\.log has changed since it was read \(it has 0 bytes"
        ),
    ):
        asked.completion(loaded, "?")


def test_child_at_the_depth_limit_is_refused_without_reading_the_file(log: Path) -> None:
    script = [
        code("try:\n    rlm_query('?')\nexcept SubcallError as error:\n    print(error)"),
        code("FINAL(1)"),
    ]
    model = client(script, window=20_000)
    with rlm(model, limits={"max_depth": 0}, scaffold=SCAFFOLD) as asked:
        asked.completion(load(log, mapped_bytes=1000), "?")
    assert f"{len(LINES):,} characters do not fit it" in model.requests[-1].messages[-1].content


def test_text_in_its_file_is_the_context_of_a_child(tmp_path: Path, log: Path) -> None:
    (tmp_path / "other.log").write_text("other\n" * 1000)
    root = [
        code(
            "answers = rlm_query_batched(['a', 'b'], [context['big.log'], [context['other.log']]])"
        ),
        code("FINAL(answers)"),
    ]
    lines = iter(root)

    def script(messages: tuple[Message, ...]) -> str:
        question = messages[1].content
        if "Which" in question:
            return next(lines)
        return code("FINAL(len(context) if type(context) is not list else len(context[0]))")

    store = Store(tmp_path / "store")
    with rlm(client(script), store=store) as asked:
        loaded = load([log, tmp_path / "other.log"], mapped_bytes=1000)
        result = asked.completion(loaded, "Which?")
    assert result.answer == [len(LINES), 6000]
    children = [call.context for call in result.trajectory.calls[1:]]
    assert [[Path(file.path).name for file in each.files] for each in children if each] == [
        ["big.log"],
        ["other.log"],
    ]


def test_session_cannot_name_a_file_that_it_was_not_given(log: Path) -> None:
    script = [
        code(
            "other = object.__new__(type(context)); file = object.__new__(type(context.file))\n"
            "for name in ('data', 'num_bytes', 'encoding', '_chars_at', '_lines_at'):\n"
            "    setattr(file, name, getattr(context.file, name))\n"
            "file.digest = '0' * 64\n"
            "other.file = file\n"
            "try:\n    rlm_query('?', other)\nexcept ValueError as error:\n    print(error)",
        ),
        code("FINAL(1)"),
    ]
    model = client(script)
    with rlm(model) as asked:
        asked.completion(load(log, mapped_bytes=1000), "?")
    assert "a text in a file that is not in `context`" in model.requests[-1].messages[-1].content


def test_citations_of_a_text_in_its_file_are_verified(log: Path) -> None:
    def cited(line: int, quote: str) -> str:
        citation = {"source": "context", "first_line": line, "last_line": line, "quote": quote}
        return code(f"FINAL({{'answer': 'yes', 'citations': [{citation!r}]}})")

    model = client([cited(3, "line 3 größe"), cited(4, "line 3 größe")])
    with rlm(model, scaffold=Scaffold(direct_chars=0)) as asked:
        result = asked.completion(load(log, mapped_bytes=1000), "?", cite=True)
    assert [citation.first_line for citation in result.citations] == [4]
    assert "is not in lines 3-3" in model.requests[-1].messages[-1].content


def test_sandbox_without_files_gets_the_text_and_a_prompt_that_says_so(log: Path) -> None:
    model = client([code("FINAL(context.lower()[:6])")])
    options = {"sandbox": "inprocess", "scaffold": Scaffold(direct_chars=0)}
    with pytest.warns(Warning, match="inprocess"), rlm(model, **options) as asked:
        result = asked.completion(load(log, mapped_bytes=1000), "?")
    assert result.answer == "line 0"
    assert "`context` is a str of" in model.requests[0].messages[-1].content
