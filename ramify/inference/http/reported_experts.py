"""Decode the mixture-of-experts routing that an engine reports for the tokens of a reply.

The result has the shape [tokens, layers, top-k].

    vLLM        base64 of a .npy file, all tokens but the last, or those from the prompt's last one
    vLLM 0.21   nested lists: those of the prompt, then those of the reply
    SGLang      base64 of int32 numbers without a shape, the same tokens as vLLM

Row i has the experts of the token at position i, which predicts the token at i + 1. An engine
reports all layers of the model, or only those with experts. A table that does not fit the model or
the reply is an error: a row too many or too few would give each token the experts of its neighbour.

How an engine is asked is in ``vllm.py`` and ``sglang.py``, and what the trainer does with the
experts in ``models/moe_routing.py``.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from ramify.errors import MalformedResponse
from ramify.inference.http.inference_spec import EXPERTS_OPTION
from ramify.models.moe_shape import MoeLayout


def decode_reported_experts(
    reported: Any, shape: MoeLayout, num_prompt: int, num_sampled: int
) -> tuple[tuple[int, ...], ...]:
    """Decode the expert ids that an engine reports for each sampled token of a reply.

    For each sampled token, return the ids of the top-k experts in all layers that predicted it.
    They are the experts that processed the token before it.

    ``reported`` may have any of the encodings of vLLM and SGLang. Raises MalformedResponse if it
    does not fit the model or the reply.
    """
    if reported is None:
        raise MalformedResponse(
            f"no routed_experts in the answer: start the engine with {EXPERTS_OPTION}, or leave "
            "rl.rollout.replay_routes out"
        )
    try:
        rows_TLk = _rows(reported, shape)
    except (ValueError, TypeError, EOFError, SyntaxError, MemoryError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise MalformedResponse(f"routed_experts cannot be read: {reason}") from None
    is_integer, found = rows_TLk.dtype.kind in "iu", rows_TLk.shape
    layers = (shape.num_layers, len(shape.layers))
    if not is_integer or len(found) != 3 or found[1] not in layers or found[2] != shape.top_k:
        raise MalformedResponse(
            f"routed_experts has shape {list(found)} of {rows_TLk.dtype}, and this model needs "
            f"integers of [tokens, {' or '.join(map(str, sorted(set(layers))))}, {shape.top_k}]: "
            "the engine serves another model"
        )
    # From the prompt's last token, or all tokens, with or without the last, which predicts none.
    first, num = num_prompt - 1, num_prompt + num_sampled
    starts = {num_sampled: 0, num - 1: first, num: first}
    if len(rows_TLk) not in starts:
        raise MalformedResponse(
            f"routed_experts has {len(rows_TLk)} rows for {num_prompt} tokens of the prompt and "
            f"{num_sampled} of the reply: it needs {num_sampled} or {num - 1}"
        )
    start = starts[len(rows_TLk)]
    chosen_TLk = rows_TLk[start : start + num_sampled].astype(np.int64)
    if found[1] != len(shape.layers):
        chosen_TLk = chosen_TLk[:, list(shape.layers)]
    _check_ids(chosen_TLk, shape)
    return tuple(map(tuple, chosen_TLk.reshape(num_sampled, -1).tolist()))


def encode_experts_npy(rows: Sequence[Sequence[int]], shape: MoeLayout) -> str:
    """Encode reported experts as vLLM does: a .npy file in base64.

    Each row holds one token's experts in all layers with experts.
    """
    buffer = io.BytesIO()
    np.save(buffer, _all_layers(rows, shape))
    return base64.b64encode(buffer.getvalue()).decode()


def encode_experts_int32(rows: Sequence[Sequence[int]], shape: MoeLayout) -> str:
    """Encode reported experts as SGLang does: int32 numbers in base64, without their shape."""
    return base64.b64encode(_all_layers(rows, shape).tobytes()).decode()


def _all_layers(rows: Sequence[Sequence[int]], shape: MoeLayout) -> np.ndarray[Any, Any]:
    """Expand the reported experts to all layers of the model, [tokens, layers, top-k].

    Layers without experts contain zeros.
    """
    table_TLk = np.zeros((len(rows), shape.num_layers, shape.top_k), "<i4")
    table_TLk[:, list(shape.layers)] = np.asarray(rows).reshape(len(rows), -1, shape.top_k)
    return table_TLk


def _rows(reported: Any, shape: MoeLayout) -> np.ndarray[Any, Any]:
    if not isinstance(reported, str):
        return np.asarray(reported)
    data = base64.b64decode(reported, validate=True)
    if data.startswith(b"\x93NUMPY"):
        rows: np.ndarray[Any, Any] = np.load(io.BytesIO(data), allow_pickle=False)
        return rows
    return np.frombuffer(data, "<i4").reshape(-1, shape.num_layers, shape.top_k)


def _check_ids(chosen_TLk: np.ndarray[Any, Any], shape: MoeLayout) -> None:
    """Raise MalformedResponse if the reported expert ids cannot come from the model's routers.

    This includes an expert that is chosen twice for a token, as in rows of zeros that the engine
    never filled.
    """
    sorted_TLk = np.sort(chosen_TLk, -1)
    is_outside = (sorted_TLk < 0) | (sorted_TLk >= shape.num_experts)
    if is_outside.any():
        token, layer, place = (int(each) for each in np.argwhere(is_outside)[0])
        raise MalformedResponse(
            f"routed_experts has expert {sorted_TLk[token, layer, place]} for sampled token {token}"
            f" in layer {layer}, and the model has {shape.num_experts}"
        )
    is_twice = sorted_TLk[..., 1:] == sorted_TLk[..., :-1]
    if is_twice.any():
        token, layer, place = (int(each) for each in np.argwhere(is_twice)[0])
        raise MalformedResponse(
            f"routed_experts has expert {sorted_TLk[token, layer, place]} twice for sampled token "
            f"{token} in layer {layer}: the engine did not record its choice"
        )
