"""Products by oneDNN against PyTorch's, and batches whose rows are rounded for them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ramify.models import onednn_products, training_forward
from ramify.models.onednn_products import linear, rounded_rows
from ramify.models.training_forward import pad_rows_for_onednn
from ramify.types.training_sequences import PackedTokenSegment


@pytest.fixture
def _faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as on a CPU on which oneDNN is faster."""
    if not onednn_products.is_available():
        pytest.skip("this build of PyTorch has no oneDNN")
    for module in (onednn_products, training_forward):
        monkeypatch.setattr(module, "is_faster_on_cpu", lambda: True)


@pytest.mark.usefixtures("_faster")
@pytest.mark.parametrize("num", [256, 1024])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_and_gradients_match_pytorch(num: int, has_bias: bool):
    rng = torch.Generator().manual_seed(0)
    x, weight, bias, dy = (
        torch.randn(shape, generator=rng, dtype=torch.double)
        for shape in ((num, 24), (40, 24), (40,), (num, 40))
    )
    exact = [each.requires_grad_() for each in (x, weight, *([bias] if has_bias else []))]
    ours = [each.detach().float().requires_grad_() for each in exact]
    wanted = F.linear(exact[0], exact[1], bias if has_bias else None)
    found = linear(ours[0], ours[1], ours[2] if has_bias else None)
    assert "_Linear" in type(found.grad_fn).__name__
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(wanted, exact, dy)
    for grad, other in zip(torch.autograd.grad(found, ours, dy.float()), grads, strict=True):
        torch.testing.assert_close(grad.double(), other, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("_faster")
def test_other_tensors_are_left_to_pytorch():
    weight = torch.randn(8, 8, requires_grad=True)
    for x in (
        torch.randn(257, 8),
        torch.randn(15, 8),
        torch.randn(2, 256, 8),
    ):
        assert "_Linear" not in type(linear(x, weight, None).grad_fn).__name__
    half = weight.bfloat16()
    assert linear(torch.randn(256, 8).bfloat16(), half, None).dtype == torch.bfloat16


@pytest.mark.skipif(not onednn_products.is_faster_on_cpu(), reason="not used on this CPU")
@pytest.mark.parametrize("num", [1, 48, 64, 250, 1088])
def test_packed_weights_change_no_bit(num: int):
    torch.manual_seed(num)
    x, weight, bias, more = (torch.randn(shape) for shape in ((num, 24), (24, 40), 40, (num, 40)))
    packed = onednn_products.packed(weight.t())
    for some_bias in (None, bias):
        plain, ours = (onednn_products.product(x, w, some_bias) for w in (weight.t(), packed))
        assert torch.equal(plain, ours)
    plain, ours = (onednn_products.product_and_sum(x, w, bias, more) for w in (weight.t(), packed))
    assert torch.equal(plain, ours)


def test_few_numbers_of_rows_occur():
    assert [rounded_rows(num) for num in (1, 15, 16, 256, 257, 1000, 1024, 1025, 4000)] == [
        1, 15, 64, 256, 320, 1024, 1024, 1152, 4096,
    ]  # fmt: skip


@pytest.mark.usefixtures("_faster")
def test_a_batch_gets_a_segment_of_unused_tokens():
    ids = torch.arange(300)
    found_ids, positions, segments = pad_rows_for_onednn(ids, ids, [PackedTokenSegment(0, 300, -1)])
    assert found_ids.tolist() == [*range(300), *[0] * 20]
    assert positions.tolist() == found_ids.tolist()
    assert segments == [PackedTokenSegment(0, 300, -1), PackedTokenSegment(300, 320, -1)]
    whole = pad_rows_for_onednn(ids[:256], ids[:256], [PackedTokenSegment(0, 256, -1)])
    assert whole[2] == [PackedTokenSegment(0, 256, -1)]
