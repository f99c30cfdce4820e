"""A program that relays a command's input and output through files, for a service without streams.

It runs on the remote machine and needs only the standard library.

    in.0, in.1, …     written by the host, each at once: "LENGTH READING\\n" and LENGTH bytes of
                      input; READING is the number of the output file that the host reads.
                      Deleted after reading.
    out.0, out.1, …   lines of output, appended. The line "-" means that the next file continues,
                      "." that the output has ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import IO

MAX_FILE_BYTES = 4 << 20
_SHORTEST_S, _LONGEST_S = 0.005, 0.1


def feed_command_input(folder: str, sink: IO[bytes]) -> None:
    """Feed numbered input files to the command's standard input, in an endless loop.

    Output files that the host has read are deleted.
    """
    number, oldest, wait_s = 0, 0, _SHORTEST_S
    while True:
        path = os.path.join(folder, f"in.{number}")
        content = _read_complete(path)
        if content is None:
            time.sleep(wait_s)
            wait_s = min(wait_s * 1.5, _LONGEST_S)
            continue
        os.remove(path)
        number, wait_s = number + 1, _SHORTEST_S
        data, reading = content
        while oldest < reading:
            os.remove(os.path.join(folder, f"out.{oldest}"))
            oldest += 1
        sink.write(data)
        sink.flush()


def _read_complete(path: str) -> tuple[bytes, int] | None:
    """Read an input file from the host, which also reports which output file the host is reading.

    Returns the content and that file's number. Returns None while the file is missing or
    incomplete.
    """
    try:
        with open(path, "rb") as file:
            head, newline, data = file.read().partition(b"\n")
    except FileNotFoundError:
        return None
    if not newline:
        return None
    length, reading = map(int, head.split())
    return (data, reading) if len(data) >= length else None


def write_output_files(folder: str, source: IO[bytes]) -> None:
    """Write the command's output to numbered files until it ends."""
    number, size = 0, 0
    file = open(os.path.join(folder, "out.0"), "wb", buffering=0)  # noqa: SIM115  (replaced in the loop)
    for line in source:
        file.write(line)
        size += len(line)
        if size > MAX_FILE_BYTES and line.endswith(b"\n"):
            number, size = number + 1, 0
            following = open(os.path.join(folder, f"out.{number}"), "wb", buffering=0)  # noqa: SIM115
            file.write(b"-\n")
            file.close()
            file = following
    file.write(b"\n.\n")
    file.close()


def main(folder: str, command: list[str]) -> None:
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        threading.Thread(
            target=feed_command_input, args=(folder, process.stdin), daemon=True
        ).start()
        write_output_files(folder, process.stdout)
        os._exit(process.wait() & 0xFF)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
