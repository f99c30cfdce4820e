"""A text that stays in its file does what a str does, and what it does not do, it says."""

import asyncio
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ramify.errors import SandboxError, SourceError
from ramify.sandbox.base import (
    FileBackedText,
    SandboxSpec,
    SharedContextValue,
    map_text_file,
    open_sandbox,
)
from tests.sandbox.jail_helpers import descendants

PARTS = {
    "ascii": ["a", "b", "ab", "\n", "word ", "\r\n"],
    "utf-8": ["a", "b", "ab", "\n", "word ", "\r\n", "é", "⚡", "😀"],
}


def in_file(path: Path, text: str, encoding: str = "utf-8") -> FileBackedText:
    path.write_bytes(text.encode(encoding))
    fd = os.open(path, os.O_RDONLY)
    try:
        return map_text_file(fd, str(path))
    finally:
        os.close(fd)


def drawn(kind: str, number: int) -> str:
    return "".join(random.Random(1).choices(PARTS[kind], k=number))


@pytest.fixture(params=PARTS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, FileBackedText]:
    """A text of some blocks, as a str and in a file."""
    text = drawn(request.param, 120_000)
    return text, in_file(tmp_path / "text", text)


def test_slices_and_searches_give_what_a_str_gives(pair: tuple[str, FileBackedText]) -> None:
    text, mapped = pair
    chosen = random.Random(2)
    assert len(mapped) == len(text)
    for _ in range(60):
        start, end = chosen.randrange(-9, len(text) + 9), chosen.randrange(-9, len(text) + 9)
        assert mapped[start:end] == text[start:end]
        at = chosen.randrange(-len(text), len(text))
        assert mapped[at] == text[at]
        for sub in ("ab", "é\n", "aa", "a", "", "word word", "zzz", "\ud800", "abab"):
            given = (sub, start, end)
            assert mapped.find(*given) == text.find(*given), given
            assert mapped.rfind(*given) == text.rfind(*given), given
            assert mapped.count(*given) == text.count(*given), given
    assert (mapped[5::7], mapped[::-999]) == (text[5::7], text[::-999])
    assert ("word" in mapped, "zzz" in mapped) == (True, False)
    assert mapped.startswith(text[:9])
    assert mapped.endswith((text[-9:], "x"))
    assert mapped.index("word") == text.index("word")
    with pytest.raises(ValueError, match="substring not found"):
        mapped.rindex("zzz")
    with pytest.raises(IndexError, match="out of range"):
        mapped[len(text)]


def test_lines_are_a_list_that_is_read_when_used(pair: tuple[str, FileBackedText]) -> None:
    text, mapped = pair
    whole = re.findall(r"[^\n]*\n|[^\n]+\Z", text)
    for lines, expected in (
        (mapped.splitlines(), [line.removesuffix("\n").removesuffix("\r") for line in whole]),
        (mapped.splitlines(keepends=True), whole),
        (mapped.split("\n"), text.split("\n")),
    ):
        assert list(lines) == expected
        assert len(lines) == len(expected)
        assert (lines[-1], lines[7], lines[-3:]) == (expected[-1], expected[7], expected[-3:])
        for start in range(0, len(expected), 997):
            assert lines[start : start + 20] == expected[start : start + 20]
    assert list(mapped) == list(mapped.splitlines())
    assert list(mapped.split("ab")) == text.split("ab")
    assert list(mapped.split()) == re.findall(r"\S+", text)


@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "\r\n", "é", "\n\na"])
def test_short_texts_have_the_lines_of_a_str(tmp_path: Path, text: str) -> None:
    mapped = in_file(tmp_path / "text", text)
    assert (list(mapped.splitlines()), len(mapped.splitlines())) == (
        text.splitlines(),
        len(text.splitlines()),
    )
    assert list(mapped.split("\n")) == text.split("\n")
    assert (mapped[:], mapped.find("", 1, 2)) == (text, text.find("", 1, 2))


def test_patterns_match_across_the_windows_in_which_they_are_searched(tmp_path: Path) -> None:
    text = drawn("utf-8", 1_400_000)
    mapped = in_file(tmp_path / "text", text)
    for pattern in (r"word( ab)?", r"(?m)^a\S*$", r"(?<=ab)⚡", r"b*(?=é)", r"\Aa?"):
        found = [match.span() for match in re.finditer(pattern, text)]
        assert [match.span() for match in mapped.finditer(pattern)] == found, pattern
    assert mapped.findall("(a)(é)?\n") == re.findall("(a)(é)?\n", text)
    first = mapped.search(r"(?P<x>é+)\n")
    assert first is not None
    assert text[first.start("x") : first.end("x")] == first["x"] == first.group("x")
    long = in_file(tmp_path / "long", "y" * 2_000_000 + "x" * 900_000 + "y" * 3_000_000)
    assert [match.span() for match in long.finditer("x+")] == [(2_000_000, 2_900_000)]


def test_other_encodings_keep_their_characters(tmp_path: Path) -> None:
    western = in_file(tmp_path / "a", "größe € " * 20_000, "cp1252")
    assert (western.file.encoding, len(western), western.find("€")) == ("cp1252", 160_000, 6)
    marked = in_file(tmp_path / "b", "\ufeffgröße " * 1)
    assert (len(marked), marked[:], marked.find("ö")) == (6, "größe ", 2)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda text: text.lower(), r"text of 5 characters, which stays in its file, has no lower"),
        (str, r"str\(\) of a text of 5 characters, which stays in its file: use a slice"),
        (lambda text: f"{text}", "use a slice"),
        (lambda text: 5 in text, "requires string as left operand, not int"),
        (lambda text: text["a"], "indices must be integers or slices, not str"),
        (lambda text: text.nothing, "'FileBackedText' object has no attribute 'nothing'"),
        (lambda text: text.split(",", 1), "has no maxsplit"),
        (lambda text: text.findall(b"a"), r"text\.buffer"),
        (lambda text: text.buffer, "mapped in sessions"),
    ],
)
def test_what_it_lacks_is_an_error_that_says_what_to_do(
    tmp_path: Path, use: Callable[[FileBackedText], Any], message: str
) -> None:
    with pytest.raises((TypeError, AttributeError), match=message):
        use(in_file(tmp_path / "text", "12345"))


@pytest.mark.parametrize("provider", ["jail", "process"])
def test_sessions_map_the_file(tmp_path: Path, provider: str) -> None:
    text = drawn("utf-8", 100_000)
    files = {
        f"{number}": in_file(tmp_path / f"{number}", f"{number}" + text) for number in range(3)
    }
    for number in range(3, 250):  # more than one message can carry
        files[f"{number}"] = in_file(tmp_path / f"{number}", f"{number}")
    context = SharedContextValue({**files, "small": "text"})
    assert context.nbytes < 100_000

    async def life() -> None:
        sandbox = open_sandbox(SandboxSpec(provider=provider, allow_weaker=True))
        try:
            session = await sandbox.open(context=context)
            for code, expected in (
                ("[len(context[name]) for name in '012']", [len(text) + 1] * 3),
                (
                    "context['1'][:9], context['2'].count('word')",
                    ("1" + text[:8], text.count("word")),
                ),
                (
                    "import re\nlen(re.findall('⚡'.encode(), context['0'].buffer))",
                    text.count("⚡"),
                ),
                ("context['small'], context['249'][:]", ("text", "249")),
            ):
                cell = (await session.run(code, answer=nothing)).cell
                assert (cell.value, cell.error) == (repr(expected), None)
            await session.close()
        finally:
            await sandbox.close()

    asyncio.run(life())


@pytest.mark.parametrize("provider", ["inprocess"])
def test_sandbox_that_cannot_map_files_gets_their_text(tmp_path: Path, provider: str) -> None:
    context = SharedContextValue(in_file(tmp_path / "text", "größe"))

    async def life() -> None:
        sandbox = open_sandbox(SandboxSpec(provider=provider, allow_weaker=True))
        try:
            session = await sandbox.open(context=context)
            assert (await session.run("context", answer=nothing)).cell.value == "'größe'"
        finally:
            await sandbox.close()

    asyncio.run(life())


async def nothing(*_: Any) -> None: ...


def test_stored_context_refers_to_the_file_and_refuses_another_one(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    context = SharedContextValue(in_file(path, "one\ntwo\n"))
    data, references = bytes(context.buffer()), [file.reference for file in context.files]
    again = SharedContextValue.from_encoded(data, references)
    assert (again.digest, again.value[:], again.kind) == (
        context.digest,
        "one\ntwo\n",
        "FileBackedText",
    )
    os.utime(path, (1, 1))  # the same content at another time
    assert SharedContextValue.from_encoded(data, references).value[:3] == "one"
    with path.open("a") as file:
        file.write("three\n")  # a log that has grown since
    assert SharedContextValue.from_encoded(data, references).value[:] == "one\ntwo\n"
    path.write_text("one\nTWO\nthree\n")
    with pytest.raises(SourceError, match=r"a\.log has changed since it was read"):
        SharedContextValue.from_encoded(data, references)
    path.write_text("one\n")
    with pytest.raises(SourceError, match=r"a\.log has changed .*\(it has 4 bytes, not 8\)"):
        SharedContextValue.from_encoded(data, references)
    path.unlink()
    with pytest.raises(SourceError, match=r"a\.log cannot be read again: No such file"):
        SharedContextValue.from_encoded(data, references)
    with pytest.raises(SandboxError, match="cannot be read"):
        SharedContextValue.from_encoded(data)


def test_file_that_changes_before_a_session_opens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    context = SharedContextValue(in_file(path, "one\ntwo\n"))
    path.write_text("one\n")

    async def life() -> None:
        sandbox = open_sandbox(SandboxSpec(provider="process", allow_weaker=True))
        try:
            with pytest.raises(SourceError, match=r"a\.log has changed since it was read"):
                await sandbox.open(context=context)
        finally:
            await sandbox.close()

    asyncio.run(life())


def test_process_with_a_file_that_has_changed_ends_with_its_sessions(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    context = SharedContextValue(in_file(path, "one\ntwo\n"))

    async def life() -> None:
        earlier = descendants(os.getpid())
        sandbox = open_sandbox(SandboxSpec(provider="process", allow_weaker=True))
        try:
            session = await sandbox.open(context=context)
            path.write_text("one\n")
            with pytest.raises(SourceError, match=r"a\.log has changed since it was read"):
                await sandbox.open(context=context)
            await session.close()
            server = min(descendants(os.getpid()) - earlier)
            for _ in range(300):
                if not descendants(server):
                    break
                await asyncio.sleep(0.01)
            assert descendants(server) == set()
        finally:
            await sandbox.close()

    asyncio.run(life())
