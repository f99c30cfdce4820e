"""Reads CSV files record by record, detecting delimiters and describing irregular records.

a,b      record 1, the header
1,"x     record 2, of two lines
y"
3        record 3: "record 3 has 1 field, and the header has 2"
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from typing import TextIO

from ramify.format_quantities import pluralize

_DELIMITERS = ",;\t|"


def csv_delimiter(name: str, first_line: str) -> str:
    """Return the delimiter of a CSV file, based on the file's name and first line.

    It is a tab if the name ends with ``.tsv`` or ``.tab``. Otherwise it is the candidate that
    occurs most often in the first line.
    """
    if name.lower().endswith((".tsv", ".tab")):
        return "\t"
    return max(_DELIMITERS, key=first_line.count)


def csv_records(file: TextIO, name: str) -> Iterator[list[str]]:
    """Yield the records of a CSV file, the header first.

    An empty line yields an empty list.
    """
    import csv  # not every load reads tables

    head = file.readline()
    # A cell may be as long as a document.
    csv.field_size_limit(sys.maxsize)
    return csv.reader(chain([head], file), delimiter=csv_delimiter(name, head))


def irregular_record_message(number: int, num_fields: int, num_columns: int) -> str:
    """Return a message about a record whose number of fields differs from the header's.

    Records are counted from 1, which is the header.
    """
    return (
        f"record {number:,} has {pluralize(num_fields, 'field')}, and the header has {num_columns}"
    )
