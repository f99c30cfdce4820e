"""Every weight sync delivers what was sent: one suite for all that run on this machine, with sender
and receivers in one process, in threads if they must connect."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from ramify.errors import ConfigError
from ramify.inference.weight_sync import WEIGHT_SYNCS
from ramify.inference.weight_sync.base import (
    LoraAdaptedMatrix,
    MissingDeltaBaseError,
    WeightReceiver,
    WeightSync,
    reserve_file_space,
    to_checkpoint_names,
    to_lazy_weight,
    to_lazy_weights,
)
from ramify.models.weights import read_weights

LOCAL_SYNCS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("shared", "file", "gloo", "delta")},
    "shared in place": {"in_place": True},
    "delta by gloo": {"by": "gloo"},
}
Weights = dict[str, Tensor]


def weights(seed: int = 0) -> Weights:
    """Return awkward tensors: odd lengths, a scalar, two precisions, one longer than a chunk."""
    make = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 5), "b": (), "c.weight": (7,), "long": (50, 41), "d": (1, 1)}
    found = {name: torch.randn(shape, generator=make) for name, shape in shapes.items()}
    return {**found, "half": torch.randn(9, generator=make).to(torch.bfloat16)}


@contextmanager
def opened_sync(
    name: str, num_engines: int = 1, **options: Any
) -> Iterator[tuple[WeightSync, list[WeightReceiver]]]:
    weight_sync: WeightSync = WEIGHT_SYNCS.resolve(name.split()[0])(
        **{**({"chunk_bytes": 600} if name != "file" else {}), **options}
    )
    receivers: list[WeightReceiver | None] = [None] * num_engines
    try:
        infos = [
            msgspec.json.decode(msgspec.json.encode(info)) for info in weight_sync.open(num_engines)
        ]

        def make(index: int) -> None:
            receivers[index] = WEIGHT_SYNCS.resolve(infos[index]["weight_sync"]).receiver(
                infos[index]
            )

        threads = [threading.Thread(target=make, args=(index,)) for index in range(num_engines)]
        for thread in threads:
            thread.start()
        weight_sync.join()
        for thread in threads:
            thread.join()
        yield weight_sync, receivers  # type: ignore[misc]
    finally:
        for receiver in receivers:
            if receiver is not None:
                receiver.close()
        weight_sync.close()


def sync(
    weight_sync: WeightSync,
    receivers: list[WeightReceiver],
    trained: Weights,
    have: list[Weights],
    version: int,
    whole: bool = False,
) -> int:
    """Copy ``trained`` into each of ``have`` and return the number of chunks. A chunk is read while
    the next is written, as in the client."""
    ahead = None
    num = 0

    def take(receiver: WeightReceiver, into: Weights, info: Any) -> None:
        for piece in receiver.unpack_chunk(info):
            if piece.places is None:
                into[piece.name] = piece.tensor.clone()
            else:
                into[piece.name].view(-1)[piece.places] = piece.tensor

    chunks = weight_sync.chunks(
        to_lazy_weights(trained.items(), torch.float32), version, whole=whole
    )
    ahead = next(chunks, None)
    while ahead is not None:
        info = msgspec.json.decode(msgspec.json.encode(ahead.info))
        threads = [
            threading.Thread(target=take, args=(*each, info))
            for each in zip(receivers, have, strict=True)
        ]
        if ahead.send is None:
            following = next(chunks, None)
        for thread in threads:
            thread.start()
        if ahead.send is not None:
            ahead.send()
            following = next(chunks, None)
        for thread in threads:
            thread.join()
        ahead, num = following, num + 1
    for receiver in receivers:
        receiver.finished(str(version))
    return num


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name].float(), other[name].float()) for name in one
    )


@pytest.mark.parametrize("name", LOCAL_SYNCS)
def test_every_engine_receives_the_weights_that_were_sent(name: str) -> None:
    with opened_sync(name, 2, **LOCAL_SYNCS[name]) as (weight_sync, receivers):
        have: list[Weights] = [{}, {}]
        trained = weights()
        for version in (1, 2, 3):
            num = sync(weight_sync, receivers, trained, have, version)
            assert num == 1 if name in ("file", "shared in place") else num >= 1
            assert all(same(trained, each) for each in have)
            for tensor in trained.values():
                tensor += 0.25


def test_weights_are_sent_in_the_engines_precision() -> None:
    with opened_sync("shared") as (weight_sync, receivers):
        have: Weights = {}
        for chunk in weight_sync.chunks(
            to_lazy_weights(weights().items(), torch.bfloat16), 1, whole=False
        ):
            have |= {
                piece.name: piece.tensor.clone() for piece in receivers[0].unpack_chunk(chunk.info)
            }
        assert {tensor.dtype for tensor in have.values()} == {torch.bfloat16}
        assert torch.equal(have["long"], weights()["long"].to(torch.bfloat16))


def test_delta_sends_only_changes() -> None:
    with opened_sync("delta") as (weight_sync, receivers):
        trained, have = weights(), [{}]
        sync(weight_sync, receivers, trained, have, 1)
        assert weight_sync.num_bytes == sum(4 * tensor.numel() for tensor in trained.values())
        sync(weight_sync, receivers, trained, have, 2)
        assert weight_sync.num_bytes == 0
        trained["a"] += 1  # all of it: sent whole
        trained["long"][3, 4] += 1  # a place (4 bytes) and a value (4 bytes)
        trained["d"].copy_(trained["d"].clone())  # rewritten with the same values
        sync(weight_sync, receivers, trained, have, 3)
        assert weight_sync.num_bytes == 15 * 4 + 8
        assert same(trained, have[0])


def test_small_tensors_of_a_delta_are_bundled() -> None:
    """Frozen tensors are not compared, and may be trained again later."""
    shapes: dict[str, tuple[int, ...]] = {
        "a": (4,),
        "b": (2, 3),
        "none": (0,),
        "c": (),
        "d": (512,),
        "large": (513,),
    }
    trained = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    with opened_sync("delta", chunk_bytes=1 << 20) as (weight_sync, receivers), torch.no_grad():
        have: list[Weights] = [{}]
        sync(weight_sync, receivers, trained, have, 1)
        for changes, still, expected in (
            ({"a", "d"}, set(), 4 + 512),
            ({"b"}, {"a", "c"}, 6),
            (set(), {"a", "c"}, 0),
            ({"a"}, {"b"}, 4 + 1),
        ):
            for name, tensor in trained.items():
                tensor.requires_grad_(name not in still)
                if name in changes:
                    tensor += 1
            sync(weight_sync, receivers, trained, have, 2)
            assert same(trained, have[0])
            assert (
                weight_sync.num_bytes == 4 * expected
            )  # 'c' is no longer frozen: it is sent in any case
        trained["a"] += 1
        chunk = next(
            weight_sync.chunks(to_lazy_weights(trained.items(), torch.float32), 3, whole=False)
        )
        assert chunk.info["names"] == ["::together-0"]
        assert chunk.info["together"] == {"::together-0": {"names": ["a"], "shapes": [(4,)]}}
        for wrong in (
            {},
            {"names": ["a"], "shapes": [[5]]},
            {"names": ["a", "b"], "shapes": [[4]]},
            {"names": 1, "shapes": 2},
        ):
            with pytest.raises(
                ValueError, match="the table of a tensor bundle does not match its contents"
            ):
                list(receivers[0].unpack_chunk({**chunk.info, "together": {"::together-0": wrong}}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by", ["shared", "gloo"])
def test_only_the_adapter_of_an_adapted_matrix_is_sent(by: str, dtype: torch.dtype) -> None:
    """The result equals the trainer's merged matrix bit for bit. The whole matrix is sent again
    once the adapter is gone, or if adapters are not to be sent."""
    make = torch.Generator().manual_seed(1)
    base = torch.randn(60, 50, generator=make).to(torch.bfloat16).float()  # of a checkpoint in bf16
    pair = [torch.randn(4, 50, generator=make), torch.randn(60, 4, generator=make)]
    held = torch.nn.Parameter(torch.randn(30, generator=make), requires_grad=False)
    adapted = LoraAdaptedMatrix(lambda: base, lambda: (pair[0], pair[1]), 0.5, base.dtype)

    def carried(
        weight_sync: WeightSync,
        receiver: WeightReceiver,
        given: Callable[[], Tensor] | None,
        version: int,
    ) -> Weights:
        found: Weights = {}
        both = [to_lazy_weight("held", held, dtype), to_lazy_weight("w", base, dtype, given)]

        def take(info: dict[str, Any]) -> None:
            found.update(
                {piece.name: piece.tensor.clone() for piece in receiver.unpack_chunk(info)}
            )

        for chunk in weight_sync.chunks(both, version, whole=False):
            taking = threading.Thread(
                target=take, args=(msgspec.json.decode(msgspec.json.encode(chunk.info)),)
            )
            taking.start()
            if chunk.send is not None:
                chunk.send()
            taking.join()
        receiver.finished(str(version))
        return found

    first, size = (3000 + 30) * dtype.itemsize, (4 * 50 + 60 * 4) * 4
    with opened_sync("delta", by=by) as (weight_sync, receivers):
        found = carried(weight_sync, receivers[0], adapted, 1)
        assert weight_sync.num_bytes == first + size
        assert same(found, {"held": held.to(dtype), "w": adapted().to(dtype)})
        pair[1] = pair[1] + 0.25
        found = carried(weight_sync, receivers[0], adapted, 2)
        assert weight_sync.num_bytes == size
        assert same(found, {"w": adapted().to(dtype)})
        assert found["w"].dtype == dtype
        assert torch.equal(found["w"].float(), (base + 0.5 * pair[1] @ pair[0]).to(dtype).float())
        assert same(carried(weight_sync, receivers[0], lambda: base, 3), {"w": base.to(dtype)})
        assert same(carried(weight_sync, receivers[0], adapted, 4), {"w": adapted().to(dtype)})
        assert weight_sync.num_bytes == size
        assert same(carried(weight_sync, receivers[0], lambda: base, 5), {"w": base.to(dtype)})
    with opened_sync("delta", by=by, adapters=False) as (weight_sync, receivers):
        carried(weight_sync, receivers[0], adapted, 1)
        pair[1] = pair[1] + 0.25
        assert same(carried(weight_sync, receivers[0], adapted, 2), {"w": adapted().to(dtype)})
        assert weight_sync.num_bytes == 3000 * dtype.itemsize


def test_whole_layer_is_sent_to_engines_that_fuse_weights() -> None:
    with opened_sync("delta", layers=True, places=False) as (weight_sync, receivers):
        make = torch.Generator().manual_seed(0)
        shapes = {
            "embed.weight": (40, 20), "layers.0.attn.q.weight": (30, 20), "layers.0.attn.k.weight": (10, 20),
            "layers.0.attn.k.bias": (10,), "layers.0.mlp.up.weight": (30, 20), "layers.1.attn.q.weight": (30, 20),
            "norm": (20,),
        }  # fmt: skip
        trained, have = (
            {name: torch.randn(shape, generator=make) for name, shape in shapes.items()},
            [{}],
        )
        sync(weight_sync, receivers, trained, have, 1)
        assert same(trained, have[0])
        trained["layers.0.attn.k.bias"][3] += 1
        trained["norm"] += 1
        have[0].clear()
        sync(weight_sync, receivers, trained, have, 2)
        assert same(
            have[0],
            {name: each for name, each in trained.items() if "0.attn" in name or name == "norm"},
        )
        have[0].clear()
        sync(weight_sync, receivers, trained, have, 3)
        assert not have[0]


def test_nan_and_the_sign_of_zero_count_as_changes() -> None:
    with opened_sync("delta") as (weight_sync, receivers):
        trained, have = {"x": torch.zeros(1000)}, [{}]
        sync(weight_sync, receivers, trained, have, 1)
        trained["x"][7], trained["x"][8] = float("nan"), -0.0
        sync(weight_sync, receivers, trained, have, 2)
        assert weight_sync.num_bytes == 2 * 8
        assert torch.equal(trained["x"].view(torch.int32), have[0]["x"].view(torch.int32))
        sync(weight_sync, receivers, trained, have, 3)
        assert weight_sync.num_bytes == 0


def test_engine_with_another_base_gets_all_weights() -> None:
    with opened_sync("delta") as (weight_sync, receivers):
        trained, have = weights(), [{}]
        sync(weight_sync, receivers, trained, have, 1)
        fresh = WEIGHT_SYNCS.resolve("delta").receiver(weight_sync.open(1)[0])
        trained["a"] += 1
        chunk = next(
            weight_sync.chunks(to_lazy_weights(trained.items(), torch.float32), 2, whole=False)
        )
        with pytest.raises(
            MissingDeltaBaseError,
            match=r"builds on the weights '\w+', but this engine has 'none of them'",
        ):
            list(fresh.unpack_chunk(chunk.info))
        received: list[Weights] = [{}]
        sync(weight_sync, [fresh], trained, received, 2, whole=True)
        assert same(trained, received[0])


def test_aborted_sync_is_not_used_as_base() -> None:
    with opened_sync("delta") as (weight_sync, receivers):
        trained, have = weights(), [{}]
        sync(weight_sync, receivers, trained, have, 1)
        for tensor in trained.values():
            tensor += 1
        broken = weight_sync.chunks(to_lazy_weights(trained.items(), torch.float32), 2, whole=False)
        list(receivers[0].unpack_chunk(next(broken).info))
        del broken
        sync(weight_sync, receivers, trained, have, 3)
        assert same(trained, have[0])
        assert weight_sync.num_bytes == sum(4 * tensor.numel() for tensor in trained.values())


def test_chunks_are_produced_on_demand() -> None:
    """Resharding streams: no more tensors are made than two chunks hold."""
    made: list[str] = []

    def tracked(name: str, tensor: Tensor) -> Any:
        def full() -> Tensor:
            made.append(name)
            return tensor

        return full

    each = to_lazy_weights(((f"p{index}", torch.ones(100)) for index in range(6)), torch.float32)
    tracking = [source._replace(full=tracked(source.name, source.full())) for source in each]
    with opened_sync("shared") as (weight_sync, _):
        chunks = weight_sync.chunks(tracking, 1, whole=False)
        next(chunks)
        assert made == ["p0"]
        next(chunks)
        assert made == ["p0", "p1"]


def test_receiver_reports_unreachable_or_inconsistent_chunks() -> None:
    with opened_sync("shared") as (weight_sync, receivers):
        chunk = next(
            weight_sync.chunks(to_lazy_weights(weights().items(), torch.float32), 1, whole=False)
        )
        with pytest.raises(
            ValueError, match="shared memory is for engines on the trainer's machine"
        ):
            list(
                WEIGHT_SYNCS.resolve("shared")
                .receiver({"folder": "/nowhere", "name": "ramify-weights-x"})
                .unpack_chunk(chunk.info)
            )
        with pytest.raises(ValueError, match=r"bytes, but \d+ arrived"):
            list(
                receivers[0].unpack_chunk(
                    {**chunk.info, "shapes": [[1 << 20] for _ in chunk.info["shapes"]]}
                )
            )
        with pytest.raises(ValueError, match="do not describe tensors"):
            list(
                receivers[0].unpack_chunk(
                    {**chunk.info, "dtype_names": ["int99" for _ in chunk.info["shapes"]]}
                )
            )
    with pytest.raises(ValueError, match="is not the name of a weights buffer"):
        WEIGHT_SYNCS.resolve("shared").receiver({"folder": "/etc", "name": "../passwd"})


def test_joining_an_incomplete_group_times_out() -> None:
    weight_sync = WEIGHT_SYNCS.resolve("gloo")(timeout_s=0.3)
    info = weight_sync.open(1)[0]
    with pytest.raises(RuntimeError):
        weight_sync.join()
    weight_sync.close()
    with pytest.raises(ValueError, match=r"the trainer's group at \S+ could not be joined"):
        WEIGHT_SYNCS.resolve("gloo").receiver(info)


def test_weight_syncs_are_found_by_name() -> None:
    assert all(WEIGHT_SYNCS.resolve(name).__doc__ for name in WEIGHT_SYNCS)
    assert WEIGHT_SYNCS.resolve(
        "ramify.inference.weight_sync.shared_memory:SharedMemoryWeightSync"
    ) is WEIGHT_SYNCS.resolve("shared")
    with pytest.raises(ConfigError, match=r"unknown weight sync 'shred': did you mean 'shared'\?"):
        WEIGHT_SYNCS.resolve("shred")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        WEIGHT_SYNCS.resolve("nowhere:Carrier")
    with pytest.raises(ConfigError, match="cannot send by 'file'"):
        WEIGHT_SYNCS.resolve("delta")(by="file")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", ["nccl", "cuda_ipc"])
def test_gpu_weight_sync_names_its_requirement(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the weight sync '{name}' needs a"):
        WEIGHT_SYNCS.resolve(name)().open(1)


@pytest.mark.parametrize("options", [{}, {"allocate": None}])
def test_file_space_is_reserved_with_and_without_the_system_call(
    options: dict[str, None], tmp_path: Path
) -> None:
    with (tmp_path / "buffer").open("w+b") as file:
        for length, expected in ((100, 100), (40, 100), (5000, 5000)):
            reserve_file_space(file.fileno(), length, **options)
            assert os.fstat(file.fileno()).st_size == expected
        with pytest.raises(OSError, match=r"File too large|No space left"):
            reserve_file_space(file.fileno(), 1 << 60, **options)


def test_checkpoint_format_has_one_tensor_per_expert(tmp_path: Path) -> None:
    """Names, shapes and bits are those on disk; each stacked tensor is read once."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=31,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        moe_intermediate_size=4,
        num_experts=3,
        num_experts_per_tok=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    read: list[str] = []

    def counted(name: str, tensor: Tensor) -> Tensor:
        read.append(name)
        return tensor.detach()

    given = [
        to_lazy_weight(name, tensor, torch.float32, partial(counted, name, tensor))
        for name, tensor in model.named_parameters()
    ]
    found = list(to_checkpoint_names(model, given))
    weights = read_weights(tmp_path)
    assert {each.name for each in found} == weights.keys()
    assert "model.layers.1.mlp.experts.2.gate_proj.weight" in weights
    for each in found:
        tensor = each.full()
        assert tensor.shape == each.shape
        assert torch.equal(tensor, weights[each.name])
    assert sorted(read) == sorted(each.name for each in given)
