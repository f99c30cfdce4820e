"""Map a server's finish reason to our ``Finish``.

Servers pass on the reasons of their backends, such as ``MAX_TOKENS`` or ``SAFETY``.

Not here: how a run handles a truncated or filtered reply (see ``engine/plain.py`` and
``engine/rlm_loop.py``).
"""

from __future__ import annotations

from typing import Any

from ramify.errors import ServerFailed
from ramify.types.message import Finish

_WORDS: dict[Finish, str] = {
    "stop": "stop end_turn stop_sequence",
    "length": "length max_tokens max_output_tokens max_length model_length token_limit"
    " model_context_window_exceeded context_length repetition_truncation",
    "tool_calls": "tool_calls tool_call tool_use function_call",
    "content_filter": "content_filter content_filtered refusal safety recitation blocklist"
    " prohibited_content spii sensitive guardrail_intervened image_safety language error_toxic",
}
_FINISHES: dict[str, Finish] = {
    word: finish for finish, words in _WORDS.items() for word in words.split()
}
_BROKEN = {
    "error",
    "network_error",
    "insufficient_system_resource",
    "abort",
    "aborted",
    "cancelled",
    "canceled",
}


def finish_of(reason: Any, where: str) -> Finish:
    """Return the ``Finish`` for a finish reason. Raises ServerFailed if the server aborted the
    reply; ``where`` names the model in the error."""
    word = str(reason).lower()
    if word in _BROKEN:
        failed = ServerFailed(f"{where} broke the reply off (finish reason {word!r})")
        failed.may_be_paid = True
        raise failed
    return _FINISHES.get(word, "other")
