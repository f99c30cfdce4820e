"""Maps on Ray: two nodes on this machine. What is killed, is done again; each row is once in the
output, and no limit is passed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ramify
from ramify import testing
from ramify.actors.ray_cluster import RayClusterConnection
from ramify.engine import event_loop_thread
from ramify.errors import ConfigError, SourceError
from ramify.maps.map_journal import TableMapStore
from ramify.maps.ray_row_partition import PART_ROWS, read_row_partitions, row_files_of_urls
from tests.maps.ray_nodes import ROOT, RayNodes
from tests.maps.s3_server import WritableS3Server

pytest.importorskip("ray.data", reason="needs the extra ray")
pytestmark = pytest.mark.timeout(900)  # Ray starts slowly on a busy machine
KEY = "sk-0123456789"
IN_FLIGHT = 16
LONG = 400_000
"""Characters of a row that needs a session."""
LIMITED_S = 4.0
"""Seconds for which a 429 asks to wait."""


class Model:
    """Answers each prompt with its word, and counts."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.times: list[float] = []
        self.limited_at = 0.0
        self._changed = threading.Condition()

    def reply(self, messages: Any) -> Any:
        text = messages[-1].content
        for mark in ("the word is ", "fails once ", "limited ", "an object: "):
            if mark in text:
                words = text.split(mark)[-1].split("\n")[0]
                return self._answer(mark, words.rstrip("\"'}."))
        if "no object" in text:
            return "There is none."
        return "```repl\nimport os\nFINAL(f'{len(context)} {sorted(os.environ)}')\n```"

    def _answer(self, mark: str, word: str) -> Any:
        with self._changed:
            self.asked[word] += 1
            self.times.append(time.monotonic())
            self._changed.notify_all()
        is_first = self.asked[word] == 1
        if mark == "fails once " and is_first:
            return testing.refused(400, "the word is refused")
        if mark == "limited " and is_first:
            self.limited_at = time.monotonic()
            return testing.rate_limited(LIMITED_S)
        if mark == "an object: ":
            name, _, size = word.partition(", ")
            return json.dumps({"word": name, "size": int(size) if size.isdecimal() else 0})
        return word

    def wait(self, num: int, process: subprocess.Popen[str]) -> None:
        """Wait for ``num`` further requests, which ``process`` causes."""
        until = self.asked.total() + num
        with self._changed:
            while self.asked.total() < until:
                self._changed.wait(0.2)
                assert process.poll() is None, process.communicate()


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = Model()
        self.server = testing.ScriptedServer(self.model.reply, keep=False, latency_s=0.02)
        event_loop_thread.run(self.server.__aenter__())
        self.bucket = WritableS3Server()
        environ = {
            "RAMIFY_HOME": str(folder / "home"),
            "OPENAI_API_KEY": KEY,
            "OPENAI_BASE_URL": self.server.url,
        }
        self.nodes = RayNodes({**environ, **self.bucket.environ})
        self.nodes.add()

    def close(self) -> None:
        self.nodes.close()
        self.bucket.close()
        event_loop_thread.run(self.server.__aexit__())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(tmp_path_factory.mktemp("ray"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def seen(cluster: Cluster) -> dict[str, Any]:
    """What the scenarios saw (see ray_scenarios.py)."""
    rows = "".join(f'{{"text": "the word is s{n}"}}\n' for n in range(3))
    cluster.bucket.files["rows.jsonl"] = rows.encode()
    done = subprocess.run(
        [sys.executable, "-m", "tests.maps.ray_scenarios", str(cluster.folder), str(LONG)],
        capture_output=True,
        text=True,
        timeout=800,
        cwd=ROOT,
        env=cluster.nodes.environ,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --- kills


@pytest.mark.slow
def test_each_row_is_once_in_the_output_whatever_is_killed(cluster: Cluster) -> None:
    """One map: its command is killed, then a worker, until a limit ends it; Ctrl-C; then a node."""
    nodes, model, num = cluster.nodes, cluster.model, 6 * PART_ROWS
    rows, out = cluster.folder / "kills.jsonl", cluster.folder / "kills"
    rows.write_text("".join(f'{{"id": {n}, "text": "the word is k{n}"}}\n' for n in range(num)))

    def start(max_calls: int) -> subprocess.Popen[str]:
        words = ["Which?", str(rows), "--out", str(out), "--column", "text", "--json", "--quiet"]
        words += ["--model", "openai:m", "--workers", "2", "--max-concurrency", str(IN_FLIGHT)]
        return nodes.map(*words, "--max-calls", str(max_calls))

    def asked() -> int:
        return sum(times for word, times in model.asked.items() if word[0] == "k")

    process = start(10_000)
    model.wait(PART_ROWS, process)
    process.kill()
    process.communicate()
    most = asked() + IN_FLIGHT + 400
    process = start(most)
    model.wait(200, process)
    os.kill(nodes.workers()[0], signal.SIGKILL)
    stdout, stderr = process.communicate()
    assert process.returncode == 3, stderr
    limited = json.loads(stdout)  # and nothing else: Ray writes to stdout, too
    assert limited["stop"] == "limit"
    assert asked() <= limited["usage"]["calls"] <= most

    process = start(10_000)
    model.wait(100, process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert (process.returncode, json.loads(stdout)["stop"]) == (3, "stopped"), stderr

    process = start(10_000)
    model.wait(100, process)
    nodes.remove()
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    done = json.loads(stdout)
    assert (done["stop"], done["num_answered"], done["num_missing"]) == ("done", num, 0)
    found = [
        json.loads(line)
        for path in sorted(out.glob("part-*"))
        for line in path.read_text().splitlines()
    ]
    assert [row["id"] for row in found] == list(range(num))
    assert all(row["answer"] == f"k{row['id']}" for row in found)
    assert asked() <= done["usage"]["calls"]
    # Paid again: the parts in progress of two workers, when the command, a worker and a node died.
    assert asked() - num <= (2 + 1 + 1) * (PART_ROWS + IN_FLIGHT)
    nodes.add()


# --- what is asked


@pytest.mark.slow
def test_csv_files_and_urls(seen: dict[str, Any]) -> None:
    part = ["id,text,word,size,error", '1,"an object: {0}, a",{0},0,']
    assert [row["line"] for row in seen["csv"]] == [
        line.format(name) for name in ("one", "two") for line in part
    ]


@pytest.mark.slow
def test_parquet_keeps_types_and_adds_those_of_the_schema(seen: dict[str, Any]) -> None:
    types, row = seen["parquet"]
    assert types == ["timestamp[us]", "list<element: string>", "string", "string", "int64",
                     "string"]  # fmt: skip
    assert row == (
        "{'at': datetime.datetime(2026, 1, 2, 3, 0), 'tags': ['a', 'b'], "
        "'text': 'an object: pear, 4', 'word': 'pear', 'size': 4, 'error': None}"
    )


@pytest.mark.slow
def test_a_folder_of_texts(seen: dict[str, Any]) -> None:
    num_answered, rows = seen["texts"]
    assert [row["file"] for row in rows] == [*(f"{n}.txt" for n in range(4)), "broken.txt"]
    assert [row["answer"] for row in rows] == ["t0", "t1", "t2", "t3", None]
    assert num_answered == 4
    assert rows[-1]["error"] == "broken.txt is not text in UTF-8"


@pytest.mark.slow
def test_rows_and_output_in_a_bucket(seen: dict[str, Any], cluster: Cluster) -> None:
    assert seen["bucket"] == [3, 0, 3]
    files = {name: data for name, data in cluster.bucket.files.items() if "answers/" in name}
    assert sorted(filter(None, (name.partition("/")[2] for name in files))) == [
        "_map.json",
        "part-00000-000000.jsonl",
    ]
    rows = [json.loads(line) for line in files["answers/part-00000-000000.jsonl"].splitlines()]
    assert [row["answer"] for row in rows] == ["s0", "s1", "s2"]


@pytest.mark.slow
def test_a_large_row_has_a_session_in_the_workers_jail(seen: dict[str, Any]) -> None:
    (long, short), num_calls = seen["sessions"]
    assert (short, num_calls) == ("short", 2)
    assert long.split()[0] == str(LONG)
    assert "OPENAI_API_KEY" not in long
    assert "RAY" not in long


@pytest.mark.slow
def test_rows_that_fail(seen: dict[str, Any]) -> None:
    found = seen["failures"]
    assert [row["answer"] for row in found["before"]] == ["a", None, "b", None]
    assert "the word is refused" in found["before"][1]["error"]
    assert found["same"] == 0
    assert found["requests"] == [found["earlier"][1]] * 2
    assert found["earlier"] == [0, *found["earlier"][2:] * 2]
    assert [row["answer"] for row in found["after"]] == ["a", "f1", "b", "f2"]
    assert [row["error"] for row in found["after"]] == [None] * 4
    assert found["counts"] == [4, 0, 2]
    stop, reason, num_missing = found["strict"]
    assert (stop, num_missing) == ("failed", 1)
    assert reason.startswith("row 1 failed:")


@pytest.mark.slow
def test_a_rate_limit_pauses_all_workers(seen: dict[str, Any], cluster: Cluster) -> None:
    assert seen["pauses"] == 800
    began = cluster.model.limited_at
    # What was in flight or granted when it came may still arrive.
    late = [at - began for at in cluster.model.times if LIMITED_S / 2 < at - began < LIMITED_S]
    assert late == []


@pytest.mark.slow
@pytest.mark.parametrize("form", ["pandas", "pyarrow", "numpy"])
def test_an_asker_takes_batches_of_each_format(seen: dict[str, Any], form: str) -> None:
    types, rows = seen["asker"][form]
    assert list(types) == ["id", "text", "word", "size", "error"]
    assert (types["word"], types["size"], types["error"]) == ("string", "int64", "string")
    assert seen["asker"][f"{form} files"] == ["int64"]
    assert [row["word"] for row in rows] == ["w0", "w1", "w2", None, "w4", "w5"]
    assert [row["size"] for row in rows] == [0, 1, 2, None, 4, 5]
    assert [bool(row["error"]) for row in rows] == [n == 3 for n in range(6)]


@pytest.mark.slow
def test_the_limits_of_an_asker_hold_over_its_copies(seen: dict[str, Any]) -> None:
    answers, error = seen["asker"]["limited"]
    assert sum(answer is not None for answer in answers) == 4
    assert error.startswith("not asked: the map's limit of 4 calls is reached")
    assert "give 'provider:model'; keys are read from each worker's" in seen["asker"]["client"]


@pytest.mark.slow
def test_the_map_is_listed_and_keys_are_in_no_file(seen: dict[str, Any], cluster: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ramify", "runs", "--maps", "--json"],
        capture_output=True,
        text=True,
        env=cluster.nodes.environ,
    )
    maps = {row["out"].rpartition("/")[2]: row for row in map(json.loads, done.stdout.splitlines())}
    assert maps["answers"]["rows"] == 3
    assert (maps["failures-out"]["rows"], maps["failures-out"]["failed"]) == (4, 0)
    assert len(seen) == 8
    for path in cluster.folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert KEY.encode() not in data, path
            assert b"test-secret-of-a-bucket" not in data, path


# --- clusters that do not fit


@pytest.mark.slow
def test_a_node_with_another_version_is_named_before_anything_is_asked(
    cluster: Cluster,
) -> None:
    other = cluster.folder / "other"
    shutil.copytree(ROOT / "ramify", other / "ramify", ignore=shutil.ignore_patterns("__pycache__"))
    init = other / "ramify" / "__init__.py"
    init.write_text(init.read_text().replace(f'"{ramify.__version__}"', '"0.0.9"'))
    rows, num = cluster.folder / "versions.jsonl", cluster.model.asked.total()
    rows.write_text('{"text": "the word is v"}\n')
    words = ["Which?", str(rows), "--out", str(cluster.folder / "versions"), "--model", "openai:m"]
    cluster.nodes.add(PYTHONPATH=str(other))
    try:
        process = cluster.nodes.map(*words, "--quiet")
        stdout, stderr = process.communicate()
    finally:
        cluster.nodes.remove()
    assert (process.returncode, stdout, stderr.count("\n")) == (2, "", 1), stderr
    assert "runs ramify 0.0.9, but this run was started with" in stderr
    assert cluster.model.asked.total() == num
    assert list((cluster.folder / "versions").iterdir()) == []
    assert not any(
        header.out.endswith("/versions")
        for _, header in TableMapStore(cluster.folder / "home").headers()
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ray_version", "python_version"])
def test_a_cluster_of_another_ray_or_python_is_one_sentence(cluster: Cluster, name: str) -> None:
    rows = cluster.folder / "versions.jsonl"
    rows.write_text('{"text": "the word is v"}\n')
    before = cluster.nodes.set_version(name, "2.9.3")
    try:
        words = ["Which?", str(rows), "--out", str(cluster.folder / name), "--model", "openai:m"]
        process = cluster.nodes.map(*words, "--quiet")
        stdout, stderr = process.communicate()
    finally:
        cluster.nodes.set_version(name, before)
    assert (process.returncode, stdout, stderr.count("\n")) == (2, "", 1), stderr
    assert "runs other versions than this process" in stderr
    assert "2.9.3" in stderr
    assert "install the same versions of Ray and Python on all nodes" in stderr


def test_an_address_without_a_cluster_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^the Ray cluster at 127.0.0.1:1 cannot be reached"):
        RayClusterConnection("127.0.0.1:1").join_or_start()
    server = testing.ScriptedServer(lambda messages: "yes")
    event_loop_thread.run(server.__aenter__())
    try:
        address = server.url.removeprefix("http://").removesuffix("/v1")
        with pytest.raises(ConfigError, match=f"^the server at {address} is not the head of"):
            RayClusterConnection(address).join_or_start()
    finally:
        event_loop_thread.run(server.__aexit__())


# --- parts


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_a_file_that_is_read_again_has_the_same_parts(tmp_path: Path, name: str) -> None:
    path, num = tmp_path / name, 2 * PART_ROWS + 7
    if name.endswith("csv"):
        path.write_text("id,text\n" + "".join(f'{n},"a, {n}"\n' for n in range(num)))
    else:
        path.write_text("".join(f'{{"id": "{n}", "text": "a, {n}"}}\n' for n in range(num)))
    files = row_files_of_urls([str(path)])
    assert files.columns == ("id", "text")

    def read() -> list[tuple[str, list[dict[str, str]]]]:
        with files.filesystem.open_input_file(files.files[0].path) as file:
            parts = list(read_row_partitions(file, files.files[0], 3))
        return [(part.name, list(part.row_source(files).values())) for part in parts]

    parts = read()
    assert parts == read()
    assert [name for name, _ in parts] == [f"part-00003-{number:06}" for number in range(3)]
    assert [row["id"] for _, rows in parts for row in rows] == [str(n) for n in range(num)]


def test_rows_that_no_worker_can_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.db").touch()
    with pytest.raises(SourceError, match="SQLite cannot be read on a cluster"):
        row_files_of_urls([str(tmp_path / "rows.db")])
    with pytest.raises(SourceError, match="does not exist"):
        row_files_of_urls([str(tmp_path / "none.jsonl")])
    with pytest.raises(SourceError, match="cannot be opened"):
        row_files_of_urls(["nosuch://bucket/rows.jsonl"])
    with pytest.raises(SourceError, match=r"^s3://box/rows.jsonl contains a key") as caught:
        row_files_of_urls(["s3://name:secret@box/rows.jsonl"])
    assert "secret" not in str(caught.value)
