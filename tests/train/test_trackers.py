"""Trackers: data that reaches each service, continuation of a resumed run there, and runs that
survive a failing tracker.

``tensorboardX`` is always installed; the others are heavy, so their tests run only if they are
installed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from ramify.errors import ConfigError
from ramify.train.execute import train
from ramify.train.metrics import Diagnosis, StepMetrics, read_metrics
from ramify.train.trackers.base import FILE, RunTrackers, TrackerRunInfo, flatten_config
from tests.shown import heard
from tests.train.small import small

CONFIG = {
    "name": "mini",
    "rl": {"steps": 3, "optim": {"lr": 1e-3}},
    "rows": [4, 6],
    "nothing": None,
}


class RecordingTracker:
    """A custom tracker that records its calls."""

    modules: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = ""
    tracker_calls: ClassVar[list[Any]] = []

    def __init__(self, about: TrackerRunInfo, label: str = "") -> None:
        self.id = about.id or f"there-{label}"
        self.tracker_calls.append(("opened", about.id, about.step, about.config.get("name")))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.tracker_calls.append((step, dict(values)))

    def close(self, failed: bool) -> None:
        self.tracker_calls.append(("closed", failed))


class NotingTracker(RecordingTracker):
    def note(self, step: int, name: str, text: str) -> None:
        self.tracker_calls.append(("note", step, name, text))


class FailingTracker(RecordingTracker):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise OSError("the line is down")


class TrackerWithoutPackage(RecordingTracker):
    modules: ClassVar[tuple[str, ...]] = ("no_such_package_at_all",)


class UnopenableTracker(RecordingTracker):
    def __init__(self, about: TrackerRunInfo) -> None:
        raise PermissionError("log in first")


RECORDING, FAILING, MISSING, UNOPENABLE = (
    f"tests.train.test_trackers:{name}"
    for name in ("RecordingTracker", "FailingTracker", "TrackerWithoutPackage", "UnopenableTracker")
)


@pytest.fixture(autouse=True)
def tracker_calls() -> list[Any]:
    RecordingTracker.tracker_calls.clear()
    return RecordingTracker.tracker_calls


def log_steps(
    trackers: RunTrackers, folder: Path, steps: range, resumed_at: int | None = None
) -> None:
    """Log ``steps`` with a reward of a hundredth of the step, and slightly more after a resume."""
    more = 0.001 if resumed_at is not None else 0.0
    with trackers.open_all("mini", folder, CONFIG, resumed_at):
        for step in steps:
            trackers(
                StepMetrics(step, "rl", float(step), {"reward": step / 100 + more, "loss": 0.5})
            )


def log_and_resume(
    name: str, folder: Path, options: dict[str, Any] | None = None
) -> dict[str, str]:
    """Log steps 1 to 3, then resume from step 2 and log 3 to 5; return the ids at the service."""
    messages: list[str] = []
    given = {name: options or {}}
    with heard(messages.append):
        log_steps(RunTrackers((name,), given), folder, range(1, 4))
    ids: dict[str, str] = msgspec.json.decode((folder / FILE).read_bytes())
    with heard(messages.append):
        log_steps(RunTrackers((name,), given), folder, range(3, 6), resumed_at=2)
    assert messages == []
    assert msgspec.json.decode((folder / FILE).read_bytes()) == ids
    return ids


# --- all trackers


def test_diagnoses_reach_trackers_in_words(tmp_path: Path, tracker_calls: list[Any]) -> None:
    """A tracker that has no place for text is not asked for one."""
    noting, plain = "tests.train.test_trackers:NotingTracker", RECORDING
    found = Diagnosis(name="too_hard", text="no attempt is right: give easier items")
    trackers = RunTrackers((noting, plain, "tensorboard"), {})
    said: list[str] = []
    with heard(said.append), trackers.open_all("mini", tmp_path, CONFIG):
        trackers(StepMetrics(4, "rl", 1.0, {"reward": 0.0}, [found]))
    assert [each for each in tracker_calls if each[0] == "note"] == [
        ("note", 4, "too_hard", "no attempt is right: give easier items")
    ]
    assert len([each for each in tracker_calls if each[0] == 4]) == 2
    written = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    assert b"no attempt is right: give easier items" in written
    assert said == []


def test_resumed_run_continues_the_same_tracker_run(
    tmp_path: Path, tracker_calls: list[Any]
) -> None:
    run = small(
        sft=None,
        rl=None,
        trackers=(RECORDING,),
        tracker_options={RECORDING: {"label": "x"}},
        policy=policy_of(tmp_path),
    )
    train(run, tmp_path / "out")
    assert tracker_calls[0] == ("opened", "", 0, "small")
    assert tracker_calls[-1] == ("closed", False)
    sent = [each for each in tracker_calls[1:-1] if each[0] != "opened"]
    rows = list(read_metrics(tmp_path / "out"))
    assert sent == [
        (row.step, {f"{row.stage}/{name}": value for name, value in row.values.items()})
        for row in rows
    ]
    tracker_calls.clear()
    train(run, tmp_path / "out", resume=tmp_path / "out")
    assert tracker_calls[0] == ("opened", "there-x", 2, "small")


def policy_of(folder: Path) -> Any:
    """The small policy with a tokenizer, which otherwise would be trained on demonstrations."""
    from tests.packaged import TINY

    return msgspec.structs.replace(small().policy, tokenizer=str(TINY))


def test_failing_tracker_is_reported_once_and_others_continue(
    tmp_path: Path, tracker_calls: list[Any]
) -> None:
    messages: list[str] = []
    with heard(messages.append):
        log_steps(RunTrackers((FAILING, RECORDING), {}), tmp_path, range(1, 4))
    assert messages == [
        f"tracker '{FAILING}' failed and is no longer used; the run continues: OSError: the line is "
        "down",
    ]
    assert [each[0] for each in tracker_calls] == ["opened", "opened", "closed", 1, 2, 3, "closed"]


def test_failed_run_is_closed_as_failed(tmp_path: Path, tracker_calls: list[Any]) -> None:
    trackers = RunTrackers((RECORDING,), {})
    with pytest.raises(KeyboardInterrupt), trackers.open_all("mini", tmp_path, {}):
        raise KeyboardInterrupt
    assert tracker_calls[-1] == ("closed", True)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (("tensorbord",), {}, "unknown tracker 'tensorbord': did you mean 'tensorboard'"),
        (
            (MISSING,),
            {},
            "needs a package that is not installed: pip install no_such_package_at_all",
        ),
        (("math:pi",), {}, "^tracker 'math:pi' is a float, not a class$"),
        ((RECORDING,), {RECORDING: {"lable": 1}}, "has no option 'lable': did you mean 'label'"),
    ],
)
def test_invalid_trackers_are_rejected_before_training(
    names: tuple[str, ...], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(small(trackers=names, tracker_options=options), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tracker_that_cannot_be_opened_closes_the_others(
    tmp_path: Path, tracker_calls: list[Any]
) -> None:
    with (
        pytest.raises(
            ConfigError,
            match="cannot be opened: PermissionError: log in first; remove it from the recipe",
        ),
        RunTrackers((RECORDING, UNOPENABLE), {}).open_all("mini", tmp_path, {}),
    ):
        pass
    assert tracker_calls[-1] == ("closed", True)


def test_secrets_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "tok-0123456789abc")
    config = {
        "a": {"api_key": "xyz", "key": "", "tokenizer": "t", "max_tokens": 5},
        "note": "uses tok-0123456789abc",
        "url": "https://me:pass@host/x",
        "tracker_options": {"wandb": {"key": "zzz"}},
        "list": ["tok-0123456789abc"],
        "empty": {},
    }
    assert flatten_config(config) == {
        "a.api_key": "«redacted»",
        "a.key": "",
        "a.tokenizer": "t",
        "a.max_tokens": 5,
        "note": "uses «redacted MY_TOKEN»",
        "url": "https://«redacted»@host/x",
        "list": '["«redacted MY_TOKEN»"]',
        "empty": "{}",
    }


# --- services


ALLOW_WARNINGS = pytest.mark.filterwarnings("default")
"""Warnings inside these packages should not fail a test."""


def tensorboard_events(folder: Path) -> Iterator[Any]:
    """Yield all events of the files in ``folder``, in order (TensorFlow's record format)."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + size])
            data = data[12 + size + 4 :]


def test_tensorboard_files_contain_both_parts_of_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    ids = log_and_resume("tensorboard", tmp_path)
    assert ids == {"tensorboard": str(tmp_path / "tensorboard")}
    found = list(tensorboard_events(tmp_path / "tensorboard"))
    rewards = [
        (e.step, round(v.simple_value, 3))
        for e in found
        for v in e.summary.value
        if v.tag == "rl/reward"
    ]
    assert sorted(rewards) == [(1, 0.01), (2, 0.02), (3, 0.03), (3, 0.031), (4, 0.041), (5, 0.051)]
    started = [
        event.step
        for event in found
        if event.HasField("session_log") and event.session_log.status == 1
    ]
    # Readers drop earlier events at step 3 and later because of this one.
    assert started == [3]
    (text,) = [
        v.tensor.string_val[0] for e in found for v in e.summary.value if v.tag.startswith("run/")
    ]
    assert b'"rl.optim.lr": 0.001' in text


def test_tensorboard_itself_shows_only_the_resumed_values(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="80 MB: TensorBoard itself, which shows the files",
    )
    log_and_resume("tensorboard", tmp_path)
    read_back = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    read_back.Reload()
    assert [(each.step, round(each.value, 3)) for each in read_back.Scalars("rl/reward")] == [
        (1, 0.01),
        (2, 0.02),
        (3, 0.031),
        (4, 0.041),
        (5, 0.051),
    ]


@ALLOW_WARNINGS
def test_mlflow_gets_params_and_metrics(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="65 MB")
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    ids = log_and_resume("mlflow", tmp_path, {"uri": uri, "experiment": "mine"})
    found = MlflowClient(uri).get_run(ids["mlflow"])
    assert (found.info.status, found.info.run_name) == ("FINISHED", "mini")
    assert found.data.params == {
        "name": "mini",
        "rl.steps": "3",
        "rl.optim.lr": "0.001",
        "rows": "[4,6]",
        "nothing": "null",
    }
    rewards = [
        (each.step, round(each.value, 3))
        for each in MlflowClient(uri).get_metric_history(ids["mlflow"], "rl/reward")
    ]
    assert rewards == [(1, 0.01), (2, 0.02), (3, 0.03), (3, 0.031), (4, 0.041), (5, 0.051)]


@ALLOW_WARNINGS
def test_trackio_gets_metrics_of_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio", reason="35 MB")
    ids = log_and_resume("trackio", tmp_path)
    import sqlite3

    (place,) = Path(trackio.utils.TRACKIO_DIR).glob("*.db")
    rows = (
        sqlite3.connect(place)
        .execute("SELECT run_name, step, metrics FROM metrics ORDER BY rowid")
        .fetchall()
    )
    sent = [
        (name, step, round(msgspec.json.decode(values)["rl/reward"], 3))
        for name, step, values in rows
    ]
    assert sent == [
        (ids["trackio"], step, reward)
        for step, reward in [(1, 0.01), (2, 0.02), (3, 0.03), (3, 0.031), (4, 0.041), (5, 0.051)]
    ]
    assert capfd.readouterr().out == ""


@ALLOW_WARNINGS
def test_wandb_gets_metrics_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb", reason="65 MB")
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = log_and_resume("wandb", tmp_path)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.stem for path in files] == [f"run-{ids['wandb']}"] * 2
    first, second = (path.read_bytes() for path in files)
    assert all(text in first for text in (b"rl/reward", b"rl.optim.lr", b'"mini"', b"0.03"))
    assert b"0.051" in second
    assert capfd.readouterr().out == ""
