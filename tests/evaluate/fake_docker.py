"""A stand-in for the ``docker`` command: a container is a folder, and its commands run on this
machine. It isolates nothing. ``calls.txt`` in its state folder lists what was asked.

    fake_docker.py STATE ARGUMENTS OF DOCKER …
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

_WITH_VALUE = {"--env", "--user", "--workdir", "--label", "--network", "--publish", "--entrypoint",
               "--name", "--volume", "--cap-drop", "--cap-add", "--security-opt", "--cpus"}  # fmt: skip


def split(arguments: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """(options by name, the rest)"""
    options: dict[str, list[str]] = {}
    while arguments and arguments[0].startswith("-"):
        name, arguments = arguments[0], arguments[1:]
        values = options.setdefault(name, [])
        if name in _WITH_VALUE:
            values.append(arguments[0])
            arguments = arguments[1:]
    return options, arguments


def main(state: Path, command: str, arguments: list[str]) -> int:
    with (state / "calls.txt").open("a") as file:
        file.write(" ".join([command, *arguments[:3]]).replace("\n", " ")[:200] + "\n")
    options, rest = split(arguments)
    if command == "run" and "--detach" in options:
        (state / options["--name"][0]).mkdir()
        print("0123456789abcdef")
    elif command == "run":  # a helper, which sees a folder of the host
        folder = options["--volume"][0].partition(":")[0]
        code = rest[-1].replace("/run/vf", folder)
        return subprocess.run([sys.executable, *rest[1:-1], code], check=False).returncode
    elif command == "inspect":
        print(json.dumps({"Env": ["PATH=/usr/bin:/bin"], "User": "", "Image": "fake"}))
    elif command == "port":
        print("127.0.0.1:9")
    elif command == "rm":
        shutil.rmtree(state / rest[0], ignore_errors=True)
    elif command == "exec" and "vf-workdir" not in rest:
        container, *argv = rest
        given = dict(each.split("=", 1) for each in options.get("--env", ()))
        return subprocess.run(
            argv, cwd=state / container, env={**os.environ, **given}, check=False
        ).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
