"""A published policy: a folder that loads elsewhere, adapters that peft reads, a model card with
the run's facts, a hub, and artefacts of trackers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ramify.cli.main import run as command
from ramify.errors import ConfigError
from ramify.models.load import load_policy
from ramify.testing import FakeHubServer
from ramify.train.config import EvaluateSpec, Schedule
from ramify.train.execute import train
from ramify.train.hub_publication import publish
from tests.train.backends.test_ranks import adapted

ROOT = Path(__file__).parents[2]
TOKEN = "hf_a_token_of_the_hub"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with adapters, as users make it: one process, a local base policy."""
    out = tmp_path_factory.mktemp("runs") / "mine"
    run = adapted(
        evaluate=EvaluateSpec(num=2, final=("test",)), schedule=Schedule(evaluate_every=1)
    )
    assert run.rl is not None
    train(msgspec.structs.replace(run, rl=msgspec.structs.replace(run.rl, steps=1)), out)
    return out


def test_published_folder_loads_with_transformers_and_ramify(trained: Path, tmp_path: Path) -> None:
    published = publish(trained, tmp_path / "new", licence="apache-2.0", base="org/base")
    ids = torch.tensor([[3, 5, 7, 11]])
    theirs = AutoModelForCausalLM.from_pretrained(published.folder)
    assert AutoTokenizer.from_pretrained(published.folder).vocab_size
    ours = load_policy(published.folder)
    with torch.no_grad():
        logits = theirs(ids).logits
    expected = AutoModelForCausalLM.from_pretrained(trained / "policy")
    with torch.no_grad():
        assert torch.equal(expected(ids).logits, logits)
    assert ours.window == 512
    publish(trained, tmp_path / "new")  # publishes again: the folder is a published policy


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, about transformers
def test_adapters_load_with_peft_and_give_the_trained_policy(trained: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs the extra lora")
    folder = publish(trained, tmp_path / "new", base="org/base").folder
    config = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4.0)
    assert config["base_model_name_or_path"] == "org/base"
    base = AutoModelForCausalLM.from_pretrained(ROOT / "ramify/models/tiny", dtype=torch.float32)
    both = peft.PeftModel.from_pretrained(base, folder / "adapter")
    ids = torch.tensor([[3, 5, 7, 11]])
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        trained_logits, logits = merged(ids).logits, both(ids).logits
        with both.disable_adapter():
            before = both(ids).logits
    assert torch.allclose(trained_logits, logits, atol=1e-4)
    assert not torch.allclose(before, logits, atol=1e-4)


def test_card_states_lineage_data_scores_prompt_limits_and_licence(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "MY_API_KEY", "tests.train.small:even"
    )  # the task's name, as if it were a key
    folder = publish(trained, tmp_path / "new", licence="mit", base="org/base").folder
    card = (folder / "README.md").read_text()
    assert re.match(r"---\n(?:.*\n)*?base_model: org/base\n(?:.*\n)*?---\n", card)
    assert "license: mit" in card
    scores = json.loads((trained / "policy.json").read_text())["scores"]
    for split, (reward, low, high) in scores.items():
        assert f"| {split} | {reward:.3f} | {low:.3f} to {high:.3f} |" in card
    for fact in ("Weights from: org/base.", "Stages: rl.", "scaffold `tiny`", "user: 936957?"):
        assert fact in card
    assert "«redacted MY_API_KEY»" in card  # known keys never reach a card
    config = (folder / "ramify.json").read_text()
    assert str(ROOT) not in config + card
    assert json.loads(config)["run"]["policy"]["path"] == "tiny"


@pytest.mark.slow
@pytest.mark.parametrize("token", [TOKEN, "hf_another"])
def test_hub_receives_the_folder_or_its_refusal_is_one_line(
    trained: Path, tmp_path: Path, token: str
) -> None:
    """In another process, since the hub's client reads its settings when it is imported."""
    with FakeHubServer(token=TOKEN) as hub:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": token,
            "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(
            [sys.executable, "-m", "ramify", "publish", trained, "hf://me/mine", "--private"],
            env=environment, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert TOKEN not in done.stdout + done.stderr
        if token != TOKEN:
            assert done.returncode == 2
            assert re.search(
                r"^ramify: the hub refused me/mine \(log in: hf auth login", done.stderr, re.M
            )
            return
        assert done.returncode == 0, done.stderr
        assert f"published {hub.url}/me/mine" in done.stdout
        files = hub.repositories["me/mine"]
        assert hub.private == {"me/mine"}
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            assert files[name] == (trained / "policy" / name).read_bytes() or name == "config.json"
        assert b"## Lineage" in files["README.md"]
        assert "adapter/adapter_model.safetensors" in files
        code = (
            "import transformers, sys\nfrom huggingface_hub import snapshot_download\n"
            "print(transformers.AutoModelForCausalLM.from_pretrained(snapshot_download('me/mine')).num_parameters())"
        )
        back = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert back.stdout.strip() == "508992", back.stderr[-2000:]
    assert not (trained / ".publish").exists()


@pytest.mark.filterwarnings("ignore")  # of MLflow, about SQLAlchemy
def test_mlflow_keeps_the_folder_as_an_artefact(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a store on this machine."""
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    found = publish(trained, tmp_path / "new", trackers=("mlflow",))
    assert found.artefacts == ("mlflow",)
    (run,) = mlflow.search_runs(experiment_names=["ramify"], output_format="list")
    kept = [each.path for each in mlflow.MlflowClient().list_artifacts(run.info.run_id, "policy")]
    assert "policy/README.md" in kept


def test_wandb_keeps_the_folder_as_an_artefact(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    found = publish(trained, tmp_path / "new", trackers=("wandb",))
    assert found.artefacts == ("wandb",)
    staged = {path.read_bytes() for path in tmp_path.rglob("artifacts/staging/*") if path.is_file()}
    assert (found.folder / "model.safetensors").read_bytes() in staged


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "x"], "nowhere is not a folder: give the folder of a run"),
        ([".", "x"], r"\. has no trained policy: give the folder of a run that has ended"),
        (["RUN", "full"], "full is not empty, and not a published policy"),
        (["RUN", "full/file"], "full/file is a file: give a folder, or hf://OWNER/NAME"),
        (["RUN", "hf://mine"], "hf://mine: give hf://OWNER/NAME"),
        (["RUN", "x", "--private"], "--private has no meaning for the folder x"),
        (["RUN", "x", "--track", "tensorboard"], "tracker 'tensorboard' cannot store files"),
        (["RUN", "x", "--track", "wandv"], "did you mean 'wandb'"),
    ],
)
def test_wrong_publications_are_one_line(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    assert command(["publish", *(str(trained) if word == "RUN" else word for word in words)]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said)
    assert said.count("\n") == 1


def test_damaged_policy_is_not_published(trained: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    weights = copy / "policy/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(Exception, match=r"model.safetensors"):
        publish(copy, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match="no trained policy"):
        publish(tmp_path, tmp_path / "new")
