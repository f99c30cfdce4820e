"""Maps on Ray: two nodes on this machine, one of them killed in the middle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ramify.actors.ray_cluster import RayCluster
from ramify.errors import ConfigError, SourceError
from ramify.maps.ray_rows import PART_ROWS, open_row_files, parts_of

pytest.importorskip("ray.data", reason="needs the extra ray")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_row_is_once_in_the_output_if_a_node_is_killed() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/map_ray.py", "--only", "lost", "--json"],
        capture_output=True,
        text=True,
        timeout=800,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert [figure["name"] for figure in figures if not figure["holds"]] == [], done.stderr


def test_a_cluster_that_cannot_be_reached_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^the Ray cluster at 127.0.0.1:1 cannot be reached"):
        RayCluster("127.0.0.1:1").join()


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_a_file_that_is_read_again_has_the_same_parts(tmp_path: Path, name: str) -> None:
    path, num = tmp_path / name, 2 * PART_ROWS + 7
    if name.endswith("csv"):
        path.write_text("id,text\n" + "".join(f'{n},"a, {n}"\n' for n in range(num)))
    else:
        path.write_text("".join(f'{{"id": "{n}", "text": "a, {n}"}}\n' for n in range(num)))
    files = open_row_files([str(path)])
    assert files.columns == ("id", "text")

    def read() -> list[tuple[str, list[dict[str, str]]]]:
        with files.filesystem.open_input_file(files.files[0].path) as file:
            parts = list(parts_of(file, files.files[0], 3))
        return [(part.name, list(part.table(files).values())) for part in parts]

    parts = read()
    assert parts == read()
    assert [name for name, _ in parts] == [f"part-00003-{number:06}" for number in range(3)]
    assert [row["id"] for _, rows in parts for row in rows] == [str(n) for n in range(num)]


def test_rows_that_no_worker_can_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.db").touch()
    with pytest.raises(SourceError, match="SQLite is read on one machine"):
        open_row_files([str(tmp_path / "rows.db")])
    with pytest.raises(SourceError, match="does not exist"):
        open_row_files([str(tmp_path / "none.jsonl")])
    with pytest.raises(SourceError, match="cannot be opened"):
        open_row_files(["nosuch://bucket/rows.jsonl"])
