"""The Ray Data source that reads input files in parts of at most 500 rows, and the sink that writes
one file for each answered part.

Importing this module imports Ray.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from ray.data import Datasink
from ray.data.block import BlockAccessor
from ray.data.datasource import FileBasedDatasource

from ramify.maps.part_output import UNFINISHED, PartedOutputFolder
from ramify.maps.ray_row_partition import EncodedRowChunk, RowFiles, read_row_partitions


class RowPartitionDatasource(FileBasedDatasource):
    """A Ray Data source that reads input files in parts.

    Each block holds the name, the format and the rows of one part.
    """

    def __init__(self, files: RowFiles, skipped: frozenset[str]) -> None:
        """Create a Ray Data source that reads the input files of a map.

        It omits the parts named in ``skipped``, which are already answered.
        """
        super().__init__([file.path for file in files.files], filesystem=files.filesystem)
        self._files = {file.path: (number, file) for number, file in enumerate(files.files)}
        self._skipped = skipped

    def _open_input_source(self, filesystem: Any, path: str, **open_args: Any) -> Any:
        # Parquet needs random access, and a compressed file would have another ending.
        return filesystem.open_input_file(path)

    def _read_stream(self, f: Any, path: str) -> Iterator[Any]:
        number, file = self._files[path]
        for part in read_row_partitions(f, file, number):
            if part.name not in self._skipped:
                yield row_partition_block([part])


def row_partition_block(parts: Iterable[EncodedRowChunk]) -> Any:
    import pyarrow

    found = list(parts)
    return pyarrow.table(
        {
            "name": [part.name for part in found],
            "kind": [part.kind for part in found],
            "rows": pyarrow.array([part.rows for part in found], pyarrow.large_binary()),
        }
    )


class PartFileDatasink(Datasink[None]):
    """A Ray Data sink that writes each answered part to one file.

    The file appears atomically under its final name, and replaces any earlier version.
    """

    def __init__(self, output: PartedOutputFolder, budget: Any) -> None:
        """Create a Ray Data sink that writes to the folder ``output``.

        ``budget`` is the Ray actor handle of the ``MapBudgetActor``, which is notified of each
        written file.
        """
        self._output = output
        self._budget = budget

    def write(self, blocks: Iterable[Any], ctx: Any) -> None:
        import pyarrow.fs as arrow_fs
        import ray

        output, files = self._output, self._output.filesystem
        for block in blocks:
            rows: list[dict[str, Any]] = BlockAccessor.for_block(block).to_arrow().to_pylist()
            for row in rows:
                name, is_finished = row["name"], row["is_finished"]
                start, end = f"{output.folder}/{name}", output.ending
                whole, unfinished = f"{start}{end}", f"{start}{UNFINISHED}{end}"
                temporary = f"{output.folder}/_{name}-{uuid.uuid4().hex}{end}"
                with files.open_output_stream(temporary) as file:
                    file.write(row["data"])
                files.move(temporary, whole if is_finished else unfinished)
                other = unfinished if is_finished else whole
                if files.get_file_info(other).type != arrow_fs.FileType.NotFound:
                    files.delete_file(other)
                ray.get(self._budget.mark_written.remote(name))
