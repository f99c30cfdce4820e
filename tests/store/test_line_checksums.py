"""Checksums of journals: every change, gap and reordering is found by every reader, and a repair
keeps what is whole before it."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from ramify import RLM, RamifyError, ScriptedClient, Stop
from ramify.cli.main import run as command
from ramify.errors import RunInUse, StoreError
from ramify.store.folder_store import Store
from ramify.types.event import ScoreAdded
from ramify.types.message import Message
from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.watched_run import WatchedRun
from tests.data.golden import JOURNAL
from tests.engine.helpers import SCAFFOLD, code
from tests.store.helpers import append_all, short_run, write_run

CELLS = ("a = llm_query_batched(['p0', 'p1', 'p2'])", "b = llm_query('p3')", "FINAL([*a, b])")
ANSWER = ["re p0", "re p1", "re p2", "re p3"]


class CountedModel:
    """A scripted model that counts its replies."""

    def __init__(self) -> None:
        self.num_replies = 0

    def reply(self, messages: tuple[Message, ...]) -> str:
        self.num_replies += 1
        if messages[0].role != "system":
            return f"re {messages[-1].content}"
        return code(CELLS[sum(each.role == "assistant" for each in messages)])


def program(store: Store, model: CountedModel, **options: Any) -> RLM:
    return RLM(
        ScriptedClient(model.reply),
        scaffold=SCAFFOLD,
        sandbox="inprocess",
        store=store,
        **options,
    )


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "home"))
    return Store()


@pytest.fixture
def journal(store: Store) -> Path:
    """A whole run with five sub-calls."""
    with program(store, CountedModel()) as rlm:
        assert rlm.completion("text", "?").answer == ANSWER
    return store.path("last")


def damaged_copies(whole: bytes, num: int) -> list[tuple[str, bytes]]:
    """The journal ``whole``, damaged in ``num`` ways: (what was done, content)."""
    draw, copies = random.Random(5), []
    lines = whole.splitlines(keepends=True)
    for _ in range(num):
        kind = draw.choice(["bit", "byte", "line missing", "line twice", "lines swapped", "cut"])
        data, at = bytearray(whole), draw.randrange(len(whole) - 1)
        first, second = sorted(draw.sample(range(len(lines)), 2))
        moved = list(lines)
        match kind:
            case "bit":
                data[at] ^= 1 << draw.randrange(8)
            case "byte":
                data[at] = (data[at] + draw.randrange(1, 256)) % 256
            case "line missing":
                del moved[first]
                data = bytearray(b"".join(moved))
            case "line twice":
                moved.insert(second, moved[first])
                data = bytearray(b"".join(moved))
            case "lines swapped":
                moved[first], moved[second] = moved[second], moved[first]
                data = bytearray(b"".join(moved))
            case "cut":
                end = draw.randrange(at + 1, len(whole))
                del data[at:end]
        copies.append((f"{kind} at byte {at} or lines {first}, {second}", bytes(data)))
    return copies


def test_every_damage_is_found(store: Store, journal: Path) -> None:
    for what, data in damaged_copies(journal.read_bytes(), 400):
        journal.write_bytes(data)
        assert not store.check("last").is_whole, what
        with pytest.raises(StoreError, match=r"line \d+ is damaged: .*`ramify runs (rm|repair) "):
            store.load("last")
        (summary,) = store.runs()
        assert summary.problem or summary.stop is None, what


def test_a_whole_journal_and_its_growing_file_are_not_damaged(store: Store, journal: Path) -> None:
    found = store.check("last")
    assert (found.is_whole, found.stop, found.num_checked) == (True, Stop.FINAL, found.num_lines)
    whole = journal.read_bytes()
    (row,) = RunCatalog([journal]).runs()
    journal.write_bytes(b"")
    run = WatchedRun(RunCatalog([journal]).find(row.key))
    for end in range(0, len(whole) + 1, 97):
        journal.write_bytes(whole[:end])
        run.refresh()
        assert not run.damage
    journal.write_bytes(whole)
    run.refresh()
    assert (run.damage, run.tree.run_data.answer) == ("", ANSWER)


def test_the_page_names_a_changed_line(journal: Path) -> None:
    whole = journal.read_bytes()
    journal.write_bytes(whole.replace(b"re p1", b"re p7", 1))
    library = RunCatalog([journal])
    run = WatchedRun(library.find(library.runs()[0].key))
    run.refresh()
    assert "is damaged and was skipped: its checksum does not match" in run.damage
    assert "more were skipped" not in run.damage


def test_a_changed_reply_is_not_reused(store: Store, journal: Path) -> None:
    journal.write_bytes(journal.read_bytes().replace(b"re p1", b"re p7"))
    model = CountedModel()
    with program(store, model) as rlm:
        assert rlm.completion("text", "?", cache=True).answer == ANSWER
    assert model.num_replies > 0


def test_a_reply_that_changes_after_the_cache_has_read_it_is_not_reused(
    store: Store, journal: Path
) -> None:
    with program(store, CountedModel()) as rlm:
        rlm.completion("another text", "?", cache=True)  # reads all journals
    journal.write_bytes(journal.read_bytes().replace(b"re p1", b"re p7"))
    with program(store, CountedModel()) as rlm:
        assert rlm.completion("text", "?", cache=True).answer == ANSWER


def test_lines_in_another_order_are_named(store: Store, journal: Path) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[4], lines[5] = lines[5], lines[4]
    journal.write_bytes(b"".join(lines))
    reasons = {damage.number: damage.reason for damage in store.check("last").damage}
    assert "it belongs after line 4" not in reasons.get(5, "")
    assert "it belongs after line 5: lines are missing" in reasons[6] or reasons[5]


@pytest.mark.parametrize("at", [2, 5, 9, 14, 20])
def test_a_repaired_run_resumes_without_paying_twice(
    store: Store, journal: Path, at: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[at] = lines[at].replace(b'":', b'" ', 1)
    damaged = b"".join(lines)
    journal.write_bytes(damaged)
    kept, lost = (
        sum(line.startswith(b'{"type":"Replied"') for line in part)
        for part in (lines[:at], lines[at:])
    )
    with program(store, CountedModel()) as rlm, pytest.raises(StoreError, match="is damaged"):
        rlm.resume("last")
    assert command(["runs", "repair", journal.stem]) == 0
    printed = capsys.readouterr().out
    assert f"line {at + 1} is damaged: " in printed
    assert f"kept {at} lines; {lost} later repl{'y' if lost == 1 else 'ies'} will be" in printed
    assert journal.with_suffix(".damaged").read_bytes() == damaged
    assert journal.read_bytes() == b"".join(lines[:at])
    model = CountedModel()
    with program(store, model) as rlm:
        result = rlm.resume("last")
    assert (result.answer, model.num_replies) == (ANSWER, lost)
    assert store.check("last").is_whole
    assert kept + lost == 7


def test_runs_check_names_damaged_runs(
    store: Store, journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(store, "other")
    assert command(["runs", "check", "--all"]) == 0
    assert capsys.readouterr().out == "2 runs checked, 0 damaged\n"
    assert command(["runs", "check", "other"]) == 0
    assert capsys.readouterr().out == "other: 7 lines, whole; final\n"
    (journal.parent / "empty.jsonl").touch()
    assert command(["runs", "check", "empty"]) == 0
    assert capsys.readouterr().out == "empty: nothing is recorded; not ended\n"
    (journal.parent / "empty.jsonl").unlink()
    journal.write_bytes(journal.read_bytes().replace(b"re p1", b"re p7", 1))
    assert command(["runs", "check", "--all"]) == 1
    printed = capsys.readouterr().out
    assert f"{journal.stem}: damaged at 1 line of " in printed
    assert f"ramify runs repair {journal.stem}\n2 runs checked, 1 damaged" in printed
    assert command(["runs", "check"]) == 2
    assert command(["runs", "check", "other", "--all"]) == 2
    capsys.readouterr()
    assert command(["runs", "repair", "other"]) == 0
    assert "is whole: there is nothing to repair" in capsys.readouterr().out


def test_a_killed_run_is_whole_but_not_ended(store: Store, journal: Path) -> None:
    whole = journal.read_bytes()
    journal.write_bytes(whole[: whole[:-1].rindex(b"\n") + 1])
    found = store.check("last")
    assert (found.is_whole, found.stop, found.torn_bytes) == (True, None, 0)
    journal.write_bytes(whole[:-30])
    assert store.check("last").torn_bytes > 0


def test_a_lost_context_is_named(store: Store, journal: Path) -> None:
    (blob,) = (store.root / "blobs").glob("*/*")
    blob.chmod(0o600)
    blob.write_bytes(b"other")
    assert store.check("last").lost_contexts == [f"the context {blob.name[:12]} is damaged"]
    blob.unlink()
    assert store.check("last").lost_contexts == [f"the context {blob.name[:12]} is missing"]
    assert not store.check("last").is_whole


def test_the_first_line_and_a_running_run_cannot_be_repaired(
    store: Store, journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = journal.read_bytes()
    journal.write_bytes(whole.replace(b'"question"', b'"Question"', 1))
    hopeless = r"line 1 is damaged: .*so nothing can be kept: delete it with `ramify runs rm "
    with pytest.raises(StoreError, match=hopeless):
        store.repair("last")
    with pytest.raises(StoreError, match=hopeless):
        store.load("last")
    assert command(["runs", "check", "last"]) == 1
    printed = capsys.readouterr().out
    assert printed.endswith(f"nothing can be kept; delete it: ramify runs rm {journal.stem}\n")
    assert journal.read_bytes() == whole.replace(b'"question"', b'"Question"', 1)
    with store.create("r1"), pytest.raises(RunInUse):
        store.repair("r1")


def test_a_second_repair_keeps_both_files_until_the_run_is_deleted(
    store: Store, journal: Path
) -> None:
    for at in (20, 10):
        lines = journal.read_bytes().splitlines(keepends=True)
        lines[at] = lines[at][:30] + b"x" + lines[at][31:]
        journal.write_bytes(b"".join(lines))
        store.repair("last")
    names = sorted(path.name for path in journal.parent.glob(f"{journal.stem}.*"))
    assert names == [
        journal.with_suffix(".damaged").name,
        f"{journal.stem}.damaged-2",
        journal.name,
    ]
    store.remove(journal.stem)
    assert not list(journal.parent.glob(f"{journal.stem}.*"))


# --- journals of earlier versions


def without_checksums(path: Path) -> list[bytes]:
    """Rewrite a journal as earlier versions did, and return its lines."""
    lines = [line[:-19] + b"}\n" for line in path.read_bytes().splitlines(keepends=True)]
    path.write_bytes(b"".join(lines))
    return lines


def test_a_journal_without_checksums_is_read_resumed_and_then_checked(
    store: Store, journal: Path
) -> None:
    lines = without_checksums(journal)
    assert store.load("last").answer == ANSWER
    assert (store.check("last").is_whole, store.check("last").num_checked) == (True, 0)
    journal.write_bytes(b"".join(lines[:9]))
    model = CountedModel()
    with program(store, model) as rlm:
        assert rlm.resume("last").answer == ANSWER
    assert store.load("last").answer == ANSWER
    mixed = journal.read_bytes()
    journal.write_bytes(mixed.replace(b"text", b"tExt", 1))  # a line of the earlier version
    assert not store.check("last").is_whole


def test_a_missing_line_without_checksums_is_one_sentence(store: Store, journal: Path) -> None:
    lines = without_checksums(journal)
    for at in range(len(lines) - 1):
        journal.write_bytes(b"".join([*lines[:at], *lines[at + 1 :]]))
        with contextlib.suppress(RamifyError):  # another exception fails the test
            store.load("last")
        assert command(["show", "last"]) in (0, 1)
        with contextlib.suppress(RamifyError), program(store, CountedModel()) as rlm:
            rlm.resume("last")
    journal.write_bytes(b"".join([lines[0], *lines[2:]]))  # without its first call
    with pytest.raises(StoreError, match=r"line \d+ is damaged: it does not fit the lines before"):
        store.load("last")


def test_an_earlier_version_s_golden_run_is_read(store: Store) -> None:
    path = store.root / "runs" / "golden.jsonl"
    path.write_bytes(JOURNAL.read_bytes())
    before = list(store.events("golden"))
    store.append("golden", [ScoreAdded(by="judge", values={"x": 1.0})])
    assert list(store.events("golden"))[:-1] == before
    assert store.check("golden").num_checked == 1


def test_an_unchecked_line_after_checked_ones_is_damage(store: Store) -> None:
    write_run(store, "r1", ended=False)
    path = store.path("r1")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:-1], lines[-1][:-19] + b"}\n"]))
    with pytest.raises(StoreError, match="line 3 is damaged: it has no checksum"):
        store.load("r1")
    with pytest.raises(StoreError, match="line 3 is damaged: it has no checksum"):
        store.reopen("r1")
    store.repair("r1")
    with store.reopen("r1") as reopened:
        append_all(reopened, short_run("r1")[2:])
    assert list(store.events("r1")) == short_run("r1")


def test_a_score_can_be_appended_whatever_is_damaged_before_the_last_line(store: Store) -> None:
    write_run(store, "r1")
    path = store.path("r1")
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3][:-19] + b"}\n"
    path.write_bytes(b"".join(lines))
    store.append("r1", [ScoreAdded(by="judge", values={"x": 1.0})])
    found = store.check("r1")
    assert ([damage.number for damage in found.damage], found.num_lines) == ([4, 5], 8)


def test_a_journal_is_continued_after_its_last_checksum(store: Store) -> None:
    write_run(store, "r1", ended=False)
    for event in short_run("r1")[3:]:
        store.append("r1", [event])
    assert list(store.events("r1")) == short_run("r1")
    assert store.check("r1").is_whole
