"""The head's log-probabilities match a plain log-softmax in fp64, whatever the chunk size."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ramify.models.training_forward import LmHeadRequest, compute_logprobs_and_entropies

NUM, WIDTH, VOCAB = 11, 6, 17
RNG = torch.Generator().manual_seed(0)
H = torch.randn(NUM, WIDTH, generator=RNG, dtype=torch.double)
W = torch.randn(VOCAB, WIDTH, generator=RNG, dtype=torch.double)
TARGETS = torch.randint(0, VOCAB, (NUM, 3), generator=RNG)
TEMPERATURE = torch.rand(NUM, generator=RNG, dtype=torch.double) + 0.5
KEPT = [{*TARGETS[e].tolist(), 1, 2} if e % 3 else set() for e in range(NUM)]


def kept() -> tuple[Tensor, Tensor]:
    offsets = np.cumsum([0, *map(len, KEPT)])
    return torch.tensor(offsets), torch.tensor([id for each in KEPT for id in sorted(each)])


def plain(asked: LmHeadRequest) -> tuple[Tensor, Tensor]:
    """Reference computation, one entry at a time."""
    logprobs, entropies = [], []
    for e in range(NUM):
        z = (W @ H[e]) / (1 if asked.temperature is None else asked.temperature[e])
        ids = sorted(KEPT[e]) if asked.kept is not None and KEPT[e] else list(range(VOCAB))
        p = z[ids].softmax(0)
        logprobs.append(torch.stack([p[ids.index(int(id))].log() for id in asked.targets[e]]))
        entropies.append(-(p * p.log()).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def test_chunked_logprobs_entropies_and_gradients_match_plain_computation():
    for temperature in (None, TEMPERATURE):
        for cut in (None, kept()):
            asked = LmHeadRequest(TARGETS, temperature, cut, "gradient")
            wanted = plain(asked)
            grads = []
            for max_elements in (1 << 20, 4 * VOCAB, VOCAB, 1):
                h, w = H.clone().requires_grad_(), W.clone().requires_grad_()
                logprobs, entropy = compute_logprobs_and_entropies(
                    h, lambda x, w=w: x @ w.T, asked, VOCAB, max_elements
                )
                torch.testing.assert_close((logprobs, entropy), wanted, rtol=1e-12, atol=1e-12)
                grads.append(torch.autograd.grad((logprobs.sum(1) * (1 + entropy)).sum(), (h, w)))
            for other in grads[1:]:
                torch.testing.assert_close(other, grads[0], rtol=1e-12, atol=1e-12)


def test_gradients_without_those_of_the_entropy_match_plain_computation():
    for temperature in (None, TEMPERATURE):
        for cut in (None, kept()):
            for entropy in ("no", "value"):
                asked = LmHeadRequest(TARGETS, temperature, cut, entropy)
                h, w = H.clone().requires_grad_(), W.clone().requires_grad_()
                logprobs, entropies = compute_logprobs_and_entropies(
                    h, lambda x, w=w: x @ w.T, asked, VOCAB, 4 * VOCAB
                )
                both = LmHeadRequest(TARGETS, temperature, cut, "gradient")
                wanted, wanted_entropies = compute_logprobs_and_entropies(
                    h, lambda x, w=w: x @ w.T, both, VOCAB, 1 << 20
                )
                torch.testing.assert_close(logprobs, wanted, rtol=1e-12, atol=1e-12)
                if entropy == "value":
                    torch.testing.assert_close(entropies, wanted_entropies, rtol=1e-12, atol=1e-12)
                weights = torch.arange(wanted.numel()).view(wanted.shape) / 7
                found = torch.autograd.grad((logprobs * weights).sum(), (h, w))
                exact = torch.autograd.grad((wanted * weights).sum(), (h, w))
                torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


def test_entropy_as_a_value_carries_no_gradient():
    h = H.clone().requires_grad_()
    logprobs, entropy = compute_logprobs_and_entropies(
        h, lambda x: x @ W.T, LmHeadRequest(TARGETS, entropy="value"), VOCAB, 1 << 20
    )
    assert (logprobs.requires_grad, entropy.requires_grad) == (True, False)
    torch.testing.assert_close(entropy, plain(LmHeadRequest(TARGETS))[1], rtol=1e-12, atol=1e-12)
    _, none = compute_logprobs_and_entropies(
        h, lambda x: x @ W.T, LmHeadRequest(TARGETS), VOCAB, 1 << 20
    )
    assert none.tolist() == [0.0] * NUM


def test_truncated_token_has_no_probability_and_no_gradient():
    w = W.clone().requires_grad_()
    first_two = (torch.tensor([0, 2]), torch.tensor([0, 1]))
    asked = LmHeadRequest(torch.tensor([[0, 1]]), None, first_two, "gradient")
    logprobs, entropy = compute_logprobs_and_entropies(
        H[:1], lambda x: x @ w.T, asked, VOCAB, 1 << 20
    )
    assert logprobs.exp().sum().item() == 1.0
    (slope,) = torch.autograd.grad(logprobs[0, 0] + entropy[0], w)
    assert slope[2:].abs().max() == 0
    assert slope[:2].abs().min() > 0
