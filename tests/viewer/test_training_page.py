"""The training page in a real browser: alarms on the curves, stages, further runs, and exports."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ramify.train.data.sft_data import append_trajectories
from ramify.train.metrics import Diagnosis, MetricsFile
from ramify.types.trajectory import Call, Stop, Trajectory
from tests.viewer.browser import NARROW, photograph, served, tab
from tests.viewer.conftest import World
from tests.viewer.page_helpers import text

HOSTILE = "=<img src=x onerror='window.hacked=1'>"
WRONG_SIGN = Diagnosis(name="wrong_sign", text="better rollouts get lower advantages: change it")


def trained(
    folder: Path,
    rewards: Sequence[float],
    *,
    seed: int = 0,
    rate: float = 0.001,
    diagnoses: Sequence[Diagnosis] = (),
) -> Path:
    """A folder with two steps of SFT and one of RL for each reward; the last one has
    ``diagnoses``."""
    folder.mkdir(parents=True)
    metrics = MetricsFile(folder)
    for step in (1, 2):
        metrics.write(step, "sft", 10.0 * step, {"loss": 3.0 / step, "row_tokens": 500.0})
    for step, reward in enumerate(rewards, start=3):
        values = {
            "reward": reward,
            "reward_std": 0.2,
            "reward_error": 0.05,
            "num_rollouts": 16.0,
            "length_mean": 100.0 + step,
            "truncated_rollouts": 0.25,
            "advantage_reward_corr": 0.5 - step / 4,
            "sampled_tokens": 1000.0,
            "alarm_wrong_sign": float(bool(diagnoses)),
        }
        is_last = step == len(rewards) + 2
        metrics.write(step, "rl", 10.0 * step, values, diagnoses if is_last else ())
    state = folder / "checkpoints" / "step-000005" / "state.json"
    state.parent.mkdir(parents=True)
    config = {"seed": seed, "rl": {"optim": {"lr": rate}}, "name": HOSTILE}
    state.write_text(json.dumps({"step": 5, "config": config}))
    return folder


def save_rollouts(folder: Path) -> None:
    """Two items with two attempts each at step 4; at step 5 the first item alone."""
    for step, items in ((4, ("t/1", HOSTILE)), (5, ("t/1",))):
        rollouts = [
            Trajectory(
                id=f"step={step}/group={group}/rollout={attempt}",
                task=item,
                question=f"What is {item}?",
                answer=f"answer {attempt}",
                calls=[Call("0", "rlm", "m", 0, item, stop=Stop.FINAL, answer="x")],
                stop=Stop.FINAL,
                rewards={"correct": float(attempt)},
                metadata={"advantages": {"0/0": attempt - 0.5, "0/1": [attempt - 0.5, "odd"]}},
            )
            for group, item in enumerate(items)
            for attempt in (0, 1)
        ]
        (folder / "rollouts").mkdir(exist_ok=True)
        append_trajectories(folder / "rollouts" / f"step-{step:06d}.jsonl", rollouts)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    save_rollouts(trained(folder / "a", (0.2, 0.3, 0.4), seed=1, diagnoses=[WRONG_SIGN]))
    trained(folder / "b", (0.4, 0.5, 0.6), seed=2)
    trained(folder / "c", (0.1, 0.1, 0.1), seed=1, rate=0.1)
    return folder


CHARTS = "() => [...document.querySelectorAll('.pinned .chart')].map((each) => each.dataset.name)"


def legend(page: Any, chart: str) -> str:
    return text(page, f".chart[data-name='{chart}'] h3 span")


def test_alarm_is_in_the_sentence_and_on_the_curves(
    browser: Any, runs: Path, tmp_path: Path
) -> None:
    with served(runs) as server, tab(browser, NARROW) as shown:
        page = shown.open(f"{server.url}#/training")
        page.locator(".chart[data-name='reward'] canvas").wait_for()
        assert page.locator(".verdict .bad").inner_text() == "alarm: wrong sign since step 5"
        assert WRONG_SIGN.text in text(page, ".problem[role='alert']")
        marked = page.locator(".chart[data-alarms='wrong sign']")
        # The chart of the metric that shows it is not folded away.
        assert [chart.get_attribute("data-name") for chart in marked.all()] == [
            "reward",
            "advantage_reward_corr",
        ]
        photograph(page, "training-alarm-390", tmp_path)


def test_choices_are_in_the_address_and_come_back(browser: Any, runs: Path) -> None:
    with served(runs) as server, tab(browser) as shown:
        page = shown.open(f"{server.url}#/training")
        page.locator(".chart[data-name='reward'] canvas").wait_for()
        assert page.locator(".chart[data-name='loss']").count() == 0  # of another stage
        page.get_by_label("horizontal axis").select_option("tokens")
        page.get_by_label("smoothing").fill("0.5")
        page.get_by_label("log scale").check()
        # (.2 * .25 + .3 * .5 + .4 * 1) / 1.75
        assert legend(page, "reward") == "0.3429"
        page.get_by_label("stage").select_option("sft")
        page.locator(".chart[data-name='loss'] canvas").wait_for()
        assert page.locator(".chart[data-name='reward']").count() == 0
        page.reload()
        page.locator(".chart[data-name='loss'] canvas").wait_for()
        assert page.get_by_label("horizontal axis").input_value() == "tokens"
        assert page.get_by_label("smoothing").input_value() == "0.5"
        assert page.get_by_label("log scale").is_checked()
        page.get_by_label("stage").select_option("all")
        page.locator(".chart[data-name='reward'] canvas").wait_for()
        assert page.evaluate(CHARTS) == ["reward", "length and truncation", "advantage_reward_corr"]
        page.get_by_label("filter curves").fill("sort:name")
        page.wait_for_function(f"({CHARTS})()[0] !== 'reward'")
        assert page.evaluate(CHARTS) == ["advantage_reward_corr", "length and truncation", "reward"]
        page.goto("about:blank")
        page.goto(f"{server.url}#/training/view=x:constructor;smooth:9;stage:none")
        page.locator(".chart[data-name='reward'] canvas").wait_for()
        assert page.get_by_label("horizontal axis").input_value() == "step"


def test_runs_are_compared_and_seeds_are_a_band(browser: Any, runs: Path, tmp_path: Path) -> None:
    with served(runs) as server, tab(browser, (1440, 900)) as shown:
        page = shown.open(f"{server.url}#/training")
        page.get_by_role("button", name="all 3").click()
        page.locator(".differences td").first.wait_for()
        assert legend(page, "reward") == "a and 1 other seed 0.5 · c 0.1"
        assert page.locator(".differences tbody tr").all_inner_texts() == [
            "rl.optim.lr\t0.001\t0.001\t0.1",
            "seed\t1\t2\t1",
        ]
        photograph(page, "training-seeds-1440", tmp_path)
        page.get_by_label("merge seeds into a band").uncheck()
        assert legend(page, "reward") == "a 0.4 · b 0.6 · c 0.1"
        page.get_by_label("remove b").click()
        page.locator(".choose button", has_text="b ×").wait_for(state="detached")
        page.locator(".chart[data-name='reward'] canvas").wait_for()
        assert legend(page, "reward") == "a 0.4 · c 0.1"


def test_attempts_at_an_item_are_side_by_side_and_over_steps(
    browser: Any, runs: Path, tmp_path: Path
) -> None:
    with served(runs) as server, tab(browser, NARROW) as shown:
        page = shown.open(f"{server.url}#/training")
        page.get_by_label("item", exact=True).select_option("t/1")
        attempts = page.get_by_label("attempts").locator("tbody tr")
        attempts.first.wait_for()
        assert attempts.all_inner_texts() == [
            "attempt 1\t0\t-0.5\t0\t1\tfinal\tanswer 0",
            "attempt 2\t1\t+0.5\t0\t1\tfinal\tanswer 1",
        ]
        steps = page.get_by_label("steps").locator("tbody tr")
        assert steps.all_inner_texts() == ["4\t0.5\t0 1", "5\t0.5\t0 1"]
        photograph(page, "training-item-390", tmp_path)
        page.get_by_role("button", name="all rollouts").click()
        page.get_by_label("step", exact=True).select_option("4")
        page.locator("select[aria-label='item'] option", has_text=HOSTILE).wait_for(
            state="attached"
        )
        page.get_by_label("item", exact=True).select_option(HOSTILE)
        page.get_by_label("attempts").locator("tbody tr").first.wait_for()
        assert page.evaluate("window.hacked") is None
        page.get_by_role("link", name="compare these attempts").click()
        page.locator("h1", has_text="Compare").wait_for()


def test_advantages_and_gaps_are_painted_on_the_tree_and_the_tokens(
    browser: Any, world: World, tmp_path: Path
) -> None:
    colour_at = """() => {
        const { data } = document.querySelector(".canvas canvas").getContext("2d")
            .getImageData(0, 0, 4000, 60);
        return [...new Set(new Uint32Array(data.buffer))].length;
    }"""
    with served(world.trainings) as server, tab(browser, (1440, 900)) as shown:
        page = shown.open(f"{server.url}#/training")
        page.locator(".rollout").first.click()
        page.locator("canvas[data-drawn='32']").wait_for()
        modes = page.get_by_label("what colours mean")
        assert modes.locator("option:not([hidden])").all_inner_texts() == [
            f"colour: {name}"
            for name in (
                *("outcome", "reward", "advantage", "log-probability gap"),
                *("cost", "time", "tokens"),
            )
        ]
        modes.select_option("gap")
        assert "nats" in text(page, ".legend")
        page.wait_for_function(f"({colour_at})() > 2")
        photograph(page, "run-gap-1440", tmp_path)
        modes.select_option("advantage")
        assert "not trained on" in text(page, ".legend")
        page.get_by_label("filter calls").fill("advantage>0")
        page.locator(".tally", has_text="1 of 32").wait_for()
        page.locator(".turn-head .small:not(.request)").first.click()
        colours = page.get_by_label("token colour")
        colours.select_option("gap")
        assert page.locator(".tok.t-odd").count() > 4
        strong = page.locator(".tok.sampled").first
        assert strong.evaluate("(it) => it.style.getPropertyValue('--strength')") == "1.00"
        strong.hover()
        assert "gap to the trainer 0.6" in text(page, ".about")
        photograph(page, "run-tokens-gap-1440", tmp_path)
        colours.select_option("advantage")
        assert page.locator(".tok.t-good").count() > 4


def test_exports_hold_what_is_shown(browser: Any, runs: Path, tmp_path: Path) -> None:
    with served(runs) as server, tab(browser, (1024, 768)) as shown:
        page = shown.open(f"{server.url}#/training/p0%2Fa/p0%2Fb")
        page.locator(".chart[data-name='reward'] canvas").wait_for()
        files = {}
        for kind in ("CSV", "PNG", "file"):
            page.get_by_role("button", name="share").click()
            with page.expect_download() as saved:
                page.get_by_role("button", name=kind).click()
            files[kind] = tmp_path / saved.value.suggested_filename
            saved.value.save_as(files[kind])
        assert [file.name for file in files.values()] == ["a.csv", "a.png", "a.html"]
        with files["CSV"].open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [(row["run"], row["step"], row["tokens"], row["reward"]) for row in rows] == [
            *(("p0/a", "1", "500", ""), ("p0/a", "2", "1000", "")),
            *(("p0/a", str(step), str(1000 * (step - 1)), f"0.{step - 1}") for step in (3, 4, 5)),
            *(("p0/b", "1", "500", ""), ("p0/b", "2", "1000", "")),
            *(("p0/b", str(step), str(1000 * (step - 1)), f"0.{step + 1}") for step in (3, 4, 5)),
        ]
        assert files["PNG"].read_bytes().startswith(b"\x89PNG")
        page.context.set_offline(True)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        shown.open(files["file"].as_uri())
        assert "alarm: wrong sign since step 5" in text(page, "p")
        assert HOSTILE in text(page, "div:last-of-type table")
        assert page.evaluate("document.images[0].naturalWidth") > 500
        assert page.evaluate("window.hacked") is None
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
        photograph(page, "training-export-1024", tmp_path)
