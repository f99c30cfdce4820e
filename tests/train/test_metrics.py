"""The file of metrics: read back whole, torn by a kill, cut on resume."""

from __future__ import annotations

from pathlib import Path

from ramify.train.metrics import FILE, Measured, Metrics, cut, read


def test_written_and_read_back(tmp_path: Path) -> None:
    heard: list[Measured] = []
    metrics = Metrics(tmp_path, heard.append)
    metrics.write(1, "sft", 0.51239, {"loss": 1 / 3})
    metrics.write(2, "rl", 2, {"reward": 1, "loss": float("nan")})
    metrics.close()
    first, second = read(tmp_path)
    assert first == Measured(1, "sft", 0.512, {"loss": 0.3333333}) == heard[0]
    assert (second.step, second.stage, second.values) == (2, "rl", {"reward": 1})


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    Metrics(tmp_path).write(1, "rl", 1, {"a": 1})
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"step": 2, "sta')
    Metrics(tmp_path).write(3, "rl", 3, {"a": 3})
    assert [each.step for each in read(tmp_path)] == [1, 3]


def test_resume_drops_what_will_be_measured_again(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    for step in (1, 2, 3, 4):
        metrics.write(step, "rl", step, {})
    metrics.close()
    cut(tmp_path, 2)
    assert [each.step for each in read(tmp_path)] == [1, 2]
    assert list(read(tmp_path / "nowhere")) == []
