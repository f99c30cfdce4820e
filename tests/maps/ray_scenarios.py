"""Maps and pipelines of one process that has joined a Ray cluster; prints what it saw as JSON.

    python -m tests.maps.ray_scenarios FOLDER LONG        LONG: characters of a large row

Joining takes seconds, so all of them share one process. The assertions are in test_map_on_ray.py.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import ray

import ramify
from ramify.errors import RamifyError

MODEL = "openai:m"
OBJECT = {
    "type": "object",
    "properties": {"word": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["word", "size"],
}
NUM_TEXTS = 4


def read(out: Path) -> list[dict[str, Any]]:
    """Return the rows of all parts, in their order."""
    rows: list[dict[str, Any]] = []
    for path in sorted(out.glob("part-*")):
        match path.suffix:
            case ".parquet":
                rows += parquet.read_table(path).to_pylist()
            case ".csv":
                rows += [{"line": line} for line in path.read_text().splitlines()]
            case _:
                rows += [json.loads(line) for line in path.read_text().splitlines()]
    return rows


class Scenarios:
    def __init__(self, folder: Path, long: int) -> None:
        self.folder = folder
        self.long = long

    def map(self, rows: Any, out: str, question: str = "Which?", **options: Any) -> Any:
        """Map on one worker. Returns (result, rows of the output)."""
        out = out if "://" in out else str(self.folder / out)
        options = {"columns": ["text"], "workers": 1, **options}
        result = ramify.map(question, rows, MODEL, out=out, placement="ray", **options)
        return result, [] if out.startswith("s3:") else read(Path(out.removeprefix("file://")))

    def write(self, name: str, *texts: str) -> Path:
        path = self.folder / name
        lines = (json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts))
        path.write_text("".join(lines))
        return path

    def csv(self) -> Any:
        """Two files of CSV, one by a URL; an answer with properties."""
        for name in ("one", "two"):
            (self.folder / f"{name}.csv").write_text(f'id,text\n1,"an object: {name}, a"\n')
        paths = [(self.folder / f"{name}.csv").as_uri() for name in ("one", "two")]
        _, rows = self.map(paths, f"{self.folder.as_uri()}/csv-out.csv", answer_type=OBJECT)
        return rows

    def parquet(self) -> Any:
        """Types of the columns are kept, and those of the answers follow from the schema."""
        table = pyarrow.table(
            {
                "at": [datetime.datetime(2026, 1, 2, 3)],
                "tags": [["a", "b"]],
                "text": ["an object: pear, 4"],
            }
        )
        parquet.write_table(table, self.folder / "rows.parquet")
        self.map(str(self.folder / "rows.parquet"), "out.parquet", answer_type=OBJECT)
        (part,) = (self.folder / "out.parquet").glob("part-*")
        found = parquet.read_table(part)
        return [str(found.schema.field(name).type) for name in found.column_names], str(
            found.to_pylist()[0]
        )

    def texts(self) -> Any:
        """A folder of texts, one of which is not text."""
        folder = self.folder / "texts"
        folder.mkdir()
        for n in range(NUM_TEXTS):
            (folder / f"{n}.txt").write_text(f"the word is t{n}")
        (folder / "broken.txt").write_bytes(b"\xff\xfe\xfa")
        result, rows = self.map(str(folder), "texts-out", columns=[])
        return result.num_answered, rows

    def bucket(self) -> Any:
        """Rows and output in a bucket; the second time, there is nothing to ask."""
        first, _ = self.map("s3://box/rows.jsonl", "s3://box/answers")
        second, _ = self.map("s3://box/rows.jsonl", "s3://box/answers")
        return first.num_questions, second.num_questions, second.num_rows

    def sessions(self) -> Any:
        """A row that no request holds is read in a session of the worker."""
        path = self.write("long.jsonl", "x" * self.long, "the word is short")
        result, rows = self.map(str(path), "long-out")
        return [row["answer"] for row in rows], result.usage.calls

    def failures(self) -> Any:
        """Rows that fail once: kept, asked again on request, and with ``strict`` the last."""
        texts = ["the word is a", "fails once f1", "the word is b", "fails once f2"]
        path = self.write("failures.jsonl", *texts)
        first, before = self.map(str(path), "failures-out")
        same, _ = self.map(str(path), "failures-out")
        again, after = self.map(str(path), "failures-out", retry_failed=True)
        path = self.write("strict.jsonl", "the word is c", "fails once f3", "the word is d")
        limits = ramify.Limits(max_concurrency=1)
        strict, _ = self.map(str(path), "strict-out", strict=True, limits=limits)
        return {
            "before": before,
            "same": same.num_questions,
            "requests": [each.usage.calls for each in (first, same)],
            "earlier": [each.num_earlier_requests for each in (first, same, again)],
            "after": after,
            "counts": (again.num_answered, again.num_failed, again.num_questions),
            "strict": (strict.stop, strict.reason, strict.num_missing),
        }

    def pauses(self) -> Any:
        """Two workers, of which one gets a 429."""
        texts = [f"the word is p{n}" for n in range(800)]
        texts[20] = "limited p20"
        result, _ = self.map(str(self.write("pauses.jsonl", *texts)), "pauses-out", workers=2)
        return result.num_answered

    def asker(self) -> Any:
        """A stage of someone's own pipeline, in each format of batches."""
        found: dict[str, Any] = {}
        rows = [{"id": n, "text": f"an object: w{n}, {n}"} for n in range(6)]
        rows[3]["text"] = "no object"
        asker = ramify.ray.RayDataAsker("Which?", model=MODEL, columns=["text"], answer_type=OBJECT)
        for form in ("pandas", "pyarrow", "numpy"):
            answered = (
                ray.data.from_items(rows)
                .repartition(2)
                .map_batches(
                    asker,
                    batch_format=form,
                    batch_size=2,
                    compute=ray.data.TaskPoolStrategy(size=2),
                )
                .materialize()
            )
            schema = answered.schema()
            types = dict(zip(schema.names, map(str, schema.types), strict=True))
            found[form] = types, sorted(answered.take_all(), key=lambda row: row["id"])
            folder = self.folder / f"asker-{form}"
            answered.write_parquet(str(folder))
            sizes = {str(parquet.read_schema(path).field("size").type) for path in folder.iterdir()}
            found[f"{form} files"] = sorted(sizes)
        limited = ramify.ray.RayDataAsker("Which?", model=MODEL, columns=["text"], max_calls=4)
        rows = [{"text": f"the word is q{n}"} for n in range(9)]
        answered = ray.data.from_items(rows).map_batches(limited, batch_size=3).take_all()
        found["limited"] = [row["answer"] for row in answered], answered[-1]["error"]
        try:
            ramify.ray.RayDataAsker("Which?", model=ramify.testing.ScriptedClient(["x"]))
        except RamifyError as error:
            found["client"] = str(error)
        return found


def main() -> None:
    from ramify.actors.ray_cluster import RayClusterConnection

    cluster = RayClusterConnection(is_quiet=True)
    cluster.join_or_start()
    scenarios = Scenarios(Path(sys.argv[1]), int(sys.argv[2]))
    found: dict[str, Any] = {}
    names = ("csv", "parquet", "texts", "bucket", "sessions", "failures", "pauses", "asker")
    for name in sys.argv[3:] or names:
        began_s = time.monotonic()
        try:
            found[name] = getattr(scenarios, name)()
        except Exception as error:  # noqa: BLE001 (the tests see it)
            found[name] = f"{type(error).__name__}: {error}"
        print(f"{name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    cluster.leave()
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    main()
