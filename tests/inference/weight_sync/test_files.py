"""Weight files: complete or refused; the pointer comes last; old versions are removed."""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path

import pytest
import torch

from ramify.errors import ConfigError, StoreError
from ramify.inference.weight_sync.base import MEMORY, to_lazy_weight, to_lazy_weights
from ramify.inference.weight_sync.file_sync import FileWeightReceiver, FileWeightSync, read_pointer

WEIGHTS = {"a": torch.arange(600.0), "b": torch.ones(3, 3)}


def written(folder: Path, version: int = 1) -> tuple[FileWeightReceiver, dict[str, object]]:
    weight_sync = FileWeightSync(folder=str(folder), file_bytes=1000)
    info = weight_sync.open(1)[0]
    (chunk,) = weight_sync.chunks(
        to_lazy_weights(WEIGHTS.items(), torch.float32), version, whole=False
    )
    return weight_sync.receiver(info), chunk.info


def test_last_two_versions_are_kept_and_loadable(tmp_path: Path) -> None:
    from ramify.models.weights import read_weights

    weight_sync = FileWeightSync(folder=str(tmp_path), file_bytes=1000)
    weight_sync.open(1)
    (tmp_path / "v000009").mkdir()  # left by an earlier run
    for version in (1, 2, 3):
        list(
            weight_sync.chunks(
                to_lazy_weights(WEIGHTS.items(), torch.float32), version, whole=False
            )
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "current.json",
        "v000002",
        "v000003",
    ]
    folder, pointer = read_pointer(tmp_path)
    assert (folder.name, pointer.version, len(pointer.files)) == ("v000003", 3, 2)
    assert {name: tensor.shape for name, tensor in read_weights(folder).items()} == {
        "a": (600,),
        "b": (3, 3),
    }


@pytest.mark.parametrize(
    ("tear", "says"),
    [
        (
            lambda data: data[:-8],
            r"model-00001.safetensors is torn: it has \d+ bytes instead of \d+",
        ),
        (lambda data: data[:-64] + bytes(64), "is corrupt: its checksum does not match"),
        (lambda data: b"", "it has 0 bytes instead of"),
    ],
)
def test_torn_file_is_refused_and_named(tear: object, says: str, tmp_path: Path) -> None:
    receiver, info = written(tmp_path)
    path = tmp_path / "v000001/model-00001.safetensors"
    path.write_bytes(tear(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(ValueError, match=says):
        list(receiver.unpack_chunk(info))


def test_tensors_of_odd_lengths_round_trip(tmp_path: Path) -> None:
    """The checksum does not depend on the pieces in which tensors arrive or on their alignment to
    64-bit words."""
    from safetensors.torch import load_file

    odd = {
        "true": torch.tensor([True, False, True]),
        "half": torch.arange(5.0).to(torch.bfloat16),
        "none": torch.zeros(0),
        "one": torch.tensor(7.0),
        "long": torch.arange(3, dtype=torch.int64),
        "many": torch.randn(700_001),
        "b": torch.ones(2, 3).T,
    }
    given = [to_lazy_weight(name, tensor, tensor.dtype) for name, tensor in odd.items()]
    weight_sync = FileWeightSync(folder=str(tmp_path))
    info = weight_sync.open(1)[0]
    (chunk,) = weight_sync.chunks(given, 1, whole=False)
    for found in (
        {piece.name: piece.tensor for piece in weight_sync.receiver(info).unpack_chunk(chunk.info)},
        load_file(tmp_path / "v000001/model-00001.safetensors"),
    ):
        assert found.keys() == odd.keys()
        assert all(
            torch.equal(found[name], odd[name]) and found[name].dtype == odd[name].dtype
            for name in odd
        )


@pytest.mark.skipif(not MEMORY.is_dir(), reason="in-memory files need Linux")
def test_version_in_memory_is_overwritten_unless_it_is_open() -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as below:
        folder = Path(below)
        weight_sync = FileWeightSync(folder=below, file_bytes=1000)
        weight_sync.open(1)

        def write(version: int, weights: dict[str, torch.Tensor]) -> Path:
            list(
                weight_sync.chunks(
                    to_lazy_weights(weights.items(), torch.float32), version, whole=False
                )
            )
            read = {
                piece.name: piece.tensor
                for piece in weight_sync.receiver({"folder": below}).unpack_chunk(
                    {"version": version}
                )
            }
            assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())
            return folder / f"v{version:06d}"

        first = (write(1, WEIGHTS) / "model-00001.safetensors").stat().st_ino
        write(2, WEIGHTS)
        third = write(3, {"a": WEIGHTS["a"] + 1})  # shorter, and one file fewer
        assert (third / "model-00001.safetensors").stat().st_ino == first
        assert sorted(path.name for path in third.iterdir()) == [
            "model-00001.safetensors",
            "model.safetensors.index.json",
        ]
        with (third / "model-00001.safetensors").open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        before = bytes(mapped)
        write(4, WEIGHTS)
        assert (write(5, WEIGHTS) / "model-00001.safetensors").stat().st_ino != first
        assert bytes(mapped) == before
        mapped.close()


def test_kill_while_writing_leaves_the_previous_version(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    receiver, info = written(tmp_path)
    weight_sync = FileWeightSync(folder=str(tmp_path))
    weight_sync.open(1)
    each = to_lazy_weights(WEIGHTS.items(), torch.float32)

    def killed() -> torch.Tensor:
        raise Killed

    with pytest.raises(Killed):
        list(weight_sync.chunks([each[0], each[1]._replace(full=killed)], 2, whole=False))
    assert [piece.name for piece in receiver.unpack_chunk(info)] == ["a", "b"]


def test_wrong_pointer_is_refused(tmp_path: Path) -> None:
    receiver, info = written(tmp_path)
    with pytest.raises(ValueError, match="points to version 1, not to the requested 2"):
        list(receiver.unpack_chunk({**info, "version": 2}))
    pointer = tmp_path / "current.json"
    whole = pointer.read_text()
    pointer.write_text(whole.replace("v000001", "../v000001"))
    with pytest.raises(ValueError, match="points outside its folder"):
        list(receiver.unpack_chunk(info))
    pointer.write_text(whole[:20])
    with pytest.raises(ValueError, match="is not a pointer to weights"):
        list(receiver.unpack_chunk(info))
    pointer.unlink()
    with pytest.raises(ValueError, match="the engine needs to see the trainer's folder"):
        list(receiver.unpack_chunk(info))


def test_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="weights cannot be written to"):
        FileWeightSync(folder=str(tmp_path / "file/weights")).open(1)


def test_temporary_folder_is_removed_on_close() -> None:
    weight_sync = FileWeightSync()
    folder = Path(weight_sync.open(1)[0]["folder"])
    list(weight_sync.chunks(to_lazy_weights(WEIGHTS.items(), torch.float32), 1, whole=False))
    weight_sync.close()
    assert not folder.exists()


def test_folders_of_dead_trainers_are_removed_and_of_live_ones_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living = FileWeightSync()
    held = Path(living.open(1)[0]["folder"])
    dead = tmp_path / "ramify-weights-held-dead" / "v000001"
    dead.mkdir(parents=True)
    (dead / "model-00001.safetensors").write_bytes(b"0" * 64)
    (tmp_path / "ramify-weights-held-dead-0").write_bytes(
        b"0" * 64
    )  # a buffer of shared memory, here for lack of /dev/shm
    (tmp_path / "another").mkdir()
    next_one = FileWeightSync()
    fresh = Path(next_one.open(1)[0]["folder"])
    assert {path.name for path in tmp_path.iterdir()} == {held.name, fresh.name, "another"}
    assert held.stat().st_mode & 0o777 == 0o700
    for each in (living, next_one):
        each.close()
    assert [path.name for path in tmp_path.iterdir()] == ["another"]


def test_unrelated_user_folders_are_kept_whatever_their_names(tmp_path: Path) -> None:
    for mine in (
        "venv/kept.py",
        "viewer/kept.js",
        "v2/kept",
        "v000007/kept",
        "v0000001/model-00001.safetensors.bak",
    ):
        (tmp_path / mine).parent.mkdir()
        (tmp_path / mine).write_text("mine")
    (tmp_path / "v000008").symlink_to(tmp_path / "venv")
    (tmp_path / "videos").write_text("mine")
    before = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    for version in (1, 2, 3):
        written(tmp_path, version)
    assert before <= {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}


def test_foreign_version_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "v000001").mkdir()
    (tmp_path / "v000001/kept").write_text("mine")
    with pytest.raises(
        StoreError, match="v000001 holds other files: give the weight sync a separate folder"
    ):
        written(tmp_path)
    assert (tmp_path / "v000001/kept").read_text() == "mine"


def test_foreign_pointer_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "current.json").write_text('{"theme": "dark"}')
    with pytest.raises(
        ConfigError, match=r"current\.json is not a pointer to weights.*give a separate folder"
    ):
        written(tmp_path)
    assert (tmp_path / "current.json").read_text() == '{"theme": "dark"}'
