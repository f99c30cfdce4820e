from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from ramify.models.weights import tensors_fingerprint


def reference_fingerprint(name: str, tensor: Tensor) -> str:
    """Compute the fingerprint word by word with Python integers."""
    given = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
    given += bytes(-len(given) % 8)
    words = [
        int.from_bytes(given[at : at + 8], "little", signed=True) for at in range(0, len(given), 8)
    ]
    total = sum(word * (2 * index + 1) for index, word in enumerate(words)) % (1 << 64)
    digest = hashlib.blake2b(
        f"{name} {tuple(tensor.shape)} {tensor.dtype} {total}\n".encode(), digest_size=8
    )
    return digest.hexdigest()


SHAPES = [(), (0,), (1,), (7,), (3, 5), (2048,), (4097,), (33, 251), (300, 1024)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_fingerprint_matches_the_python_reference(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    draws = torch.Generator().manual_seed(1)
    tensor = (100 * torch.randn(shape, generator=draws)).to(dtype)
    assert tensors_fingerprint([("x", tensor)]) == reference_fingerprint("x", tensor)


def test_views_have_the_fingerprint_of_their_contents() -> None:
    whole = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    for part in (
        whole.T,
        whole[1:, 2:],
        whole.flatten()[3:],
        whole.to(torch.bfloat16).flatten()[1:],
    ):
        assert (
            tensors_fingerprint([("x", part)])
            == tensors_fingerprint([("x", part.clone())])
            == reference_fingerprint("x", part)
        )


def test_fingerprint_depends_on_bits_rows_names_and_shapes_but_not_on_order() -> None:
    tensor = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    bit, rows = tensor.clone(), tensor.clone()
    bit.view(torch.int32)[5, 7] ^= 1
    rows[[3, 4]] = tensor[[4, 3]]
    found = {
        tensors_fingerprint([("x", each)]) for each in (tensor, bit, rows, tensor.view(48, 64))
    }
    assert len({*found, tensors_fingerprint([("y", tensor)])}) == 5
    both = [("x", tensor), ("y", bit)]
    assert tensors_fingerprint(both) == tensors_fingerprint(both[::-1])
