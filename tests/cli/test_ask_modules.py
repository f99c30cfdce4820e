"""A plain question over a long file loads only what it needs: each module costs time and memory."""

import subprocess
import sys

from tests.cli.helpers import SESSION_SCRIPT, Shell

SCRIPT = """
import atexit, sys
atexit.register(lambda: print(*sorted(sys.modules)))
sys.argv = ["ramify", *sys.argv[1:]]
from ramify.__main__ import main
main()
"""
UNNEEDED = {
    "aiohttp",
    "bz2",
    "difflib",
    "importlib.resources",
    "jsonschema",
    "platformdirs",
    "ramify.actors.child_process",
    "ramify.engine.external_conversations",
    "ramify.engine.run_fork",
    "ramify.sources.database_servers",
    "ramify.sources.search_index",
    "ramify.store.prune",
    "ramify.store.recorded_replies",
    "ramify.store.repair",
    "ramify.types.call_tree",
    "rich",
    "shutil",
    "tempfile",
    "zipfile",
}


def test_a_question_over_a_long_file_loads_no_module_in_vain(shell: Shell) -> None:
    shell.write("big.log", "a line of a log\n" * 20_000)
    command = ["ask", "How long is it?", "big.log", "-m", shell.model(SESSION_SCRIPT)]
    done = subprocess.run(
        [sys.executable, shell.write("run.py", SCRIPT), *command],
        cwd=shell.folder,
        env=shell.env,
        capture_output=True,
        text=True,
        check=True,
    )
    answer, modules = done.stdout.splitlines()
    assert answer == "320000"
    assert UNNEEDED & {*modules.split()} == set()
