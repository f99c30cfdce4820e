"""Control sequences are removed from terminal text; numbers, ages and sizes are easy to read."""

from __future__ import annotations

import pytest

from ramify.cli import terminal_text
from ramify.cli.parser import parse_duration, parse_size
from ramify.errors import ConfigError
from ramify.terminal_sanitizer import strip_control_characters


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain [bold]text[/]", "plain [bold]text[/]"),
        ("tab\tand\nline\r\n", "tab\tand\nline\n"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[Hcleared\x1b[?25l", "cleared"),
        ("a\x1b]0;a title\x07b", "ab"),
        ("a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\b", "alinkb"),
        ("a\x1b]52;c;aGk=", "a"),
        ("a\x9b31mb\x9d0;title\x9cc", "abc"),
        ("a\x1bPq#0\x1b\\b\x1b7c\x1b(Bd", "abcd"),
        ("beep\x07 back\x08 over\rwrite\x00", "beep back overwrite"),
        ("left\u202eright\u2066x", "leftrightx"),
        ("half \ud800 smile 😀 é", "half  smile 😀 é"),
    ],
)
def test_clean_removes_terminal_control_sequences(given: str, shown: str) -> None:
    assert strip_control_characters(given) == shown


def test_one_line_collapses_whitespace_and_truncates() -> None:
    assert terminal_text.shorten_to_line("a\n  b\x1b[1m c", 80) == "a b c"
    assert terminal_text.shorten_to_line("x" * 100, 10) == "x" * 9 + "…"


def test_numbers_are_formatted_for_reading() -> None:
    assert [terminal_text.format_count(n) for n in (0, 999, 9_999, 45_210, 1_234_567)] == [
        "0",
        "999",
        "9,999",
        "45.2k",
        "1.23M",
    ]
    assert [terminal_text.format_dollars(d) for d in (None, 0.0, 0.00004, 0.0123, 2.5)] == [
        "cost unknown",
        "$0.00",
        "$0.00004",
        "$0.012",
        "$2.50",
    ]
    assert [terminal_text.format_duration(s) for s in (0, 0.053, 59.7, 125)] == [
        "0 s",
        "53 ms",
        "59.7 s",
        "2 min 5 s",
    ]
    assert [terminal_text.format_growing_duration(s) for s in (0.053, 59.71, 125)] == [
        "0.1 s",
        "59.7 s",
        "2 min 5 s",
    ]
    assert [terminal_text.format_size(b) for b in (5, 12_345, 3_400_000_000)] == [
        "5 B",
        "12.3 kB",
        "3.4 GB",
    ]


def test_ages_and_sizes_are_parsed() -> None:
    assert [parse_duration(given, "--x") for given in ("30d", "12h", "1.5h", "90 m", "0d")] == [
        2_592_000.0,
        43_200.0,
        5_400.0,
        5_400.0,
        0.0,
    ]
    assert [parse_size(given, "--x") for given in ("2GB", "500 mb", "1GiB", "12")] == [
        2 * 10**9,
        5 * 10**8,
        2**30,
        12,
    ]
    with pytest.raises(ConfigError, match="--older-than 'soon' is not understood: write it as 30d"):
        parse_duration("soon", "--older-than")


def test_an_age_and_a_size_to_delete_by_need_a_unit() -> None:
    for given in ("3", "0", " 1.5 "):
        with pytest.raises(ConfigError, match="has no unit: write it as 30d, 12h or 90m"):
            parse_duration(given, "--older-than")
        with pytest.raises(ConfigError, match="has no unit: write it as 2GB or 500MB"):
            parse_size(given, "--max-size", default_unit="")
