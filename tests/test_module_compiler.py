"""A module for sessions is the same, whether it was compiled now or taken from Python's compiled files."""

import marshal
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

from ramify.session_module_compiler import compiled_module, read_module_source


def _filenames(code: CodeType) -> Iterator[str]:
    yield code.co_filename
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _filenames(each)


def test_module_of_a_file_does_not_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "functions.py"
    path.write_text("def outer(x):\n    return lambda: [x for _ in range(3)]\n")
    source = read_module_source(path)
    for _ in ("compiled", "kept"):
        compiled_module.cache_clear()
        code = marshal.loads(compiled_module("functions", source))
        assert code == compile(source, "<functions>", "exec", 0, True)
        assert {*_filenames(code)} == {"<functions>"}


def test_source_with_an_error_is_left_to_the_session(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def f(:\n")
    assert compiled_module("broken", read_module_source(path)) == b""
    assert compiled_module("broken", "x = = 1") == b""
