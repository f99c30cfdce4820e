"""Cache the token ids of stored conversations, so that later runs need not tokenize them again.

The cache is kept next to the conversations.

    STORE/tokenized/2f9c….npz       one file per tokenizer, with an entry per call
        name of the file            digest of the tokenizer, its chat template and native tools
        key of an entry             digest of the call's messages

Entries are found by the content of a call. If a store has grown, only its new calls are tokenized,
and a run that was scored again keeps its entry. A file that is damaged or cannot be written only
costs the time to tokenize again. Deleting runs from the store also deletes the cache
(``store/prune.py``).

Calls are tokenized in ``sft_data.py``; the token sequences of a run that is resumed are stored by
``sft_row_cache.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ramify.errors import ConfigError, StoreError
from ramify.logging import ComponentLogger
from ramify.store.durable_files import make_folder
from ramify.types.trajectory import Call, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 1
"""Version of the cache's format. Increase it if a renderer changes how it writes the same
messages."""
_log = ComponentLogger("train")
_OWN = np.array([-1], np.int64)
"""Cache entry that marks a call whose recorded token ids are kept as they are."""
_HEAD = 3
"""Number of integers before the ids of a turn: the counts of reused ids, prompt ids and reply
ids."""


class TokenizedCallCache:
    """A cache of the token ids of stored calls, kept in one file per tokenizer."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast, form: Any) -> None:
        """Open the cache of ``tokenizer`` in ``folder`` and read its entries.

        ``form`` holds everything else that determines the token ids (see
        ``sft_data.rendering_key``).
        """
        backend = tokenizer.backend_tokenizer.to_str().encode()
        key = hashlib.sha256(backend)
        key.update(msgspec.msgpack.encode([FORMAT, str(tokenizer.chat_template), form]))
        self._path = folder / f"{key.hexdigest()}.npz"
        self._entries = _read(self._path)
        self.num_found = 0
        """Number of calls that were found in the cache."""
        self.num_new = 0

    def turns(self, call: Call) -> list[Turn] | None:
        """Return the turns of ``call`` with cached token ids, or None if the call is not cached."""
        entry = self._entries.get(_digest(call))
        if entry is None:
            return None
        self.num_found += 1
        return call.turns if entry[0] == _OWN[0] else list(_with_ids(call, entry))

    def put(self, call: Call, turns: Sequence[Turn]) -> None:
        """Add the token ids of ``turns``, the tokenized turns of ``call``, to the cache.

        Call ``save`` to write them to disk.
        """
        self.num_new += 1
        self._entries[_digest(call)] = _OWN if turns is call.turns else _entry(turns)

    def save(self) -> None:
        """Write the cache to disk if it has new entries.

        If another process wrote the file in the meantime, the entries of that process may be lost.
        They are computed again when needed.
        """
        if not self.num_new:
            return
        arrays: dict[str, Any] = {
            "digests": np.frombuffer(b"".join(self._entries), np.uint8).reshape(-1, 32),
            "lengths": np.array([len(entry) for entry in self._entries.values()], np.int64),
            "numbers": np.concatenate(list(self._entries.values())).astype(np.int32),
        }
        part = ""
        try:
            make_folder(self._path.parent)
            fd, part = tempfile.mkstemp(dir=self._path.parent, suffix=".part")
            with open(fd, "wb") as file:
                np.savez(file, **arrays)
            os.replace(part, self._path)
        except (OSError, ConfigError, StoreError) as error:
            _log.info("tokens_not_kept", f"token ids cannot be kept in {self._path}: {error}")
            with contextlib.suppress(OSError):
                os.unlink(part)


def _digest(call: Call) -> bytes:
    said = [
        (
            turn.reused,
            turn.reused_ids,
            turn.prompt,
            turn.reply.message,
            turn.reply.prompt_ids,
            turn.reply.token_ids,
        )
        for turn in call.turns
    ]
    return hashlib.sha256(msgspec.msgpack.encode(said)).digest()


def _entry(turns: Sequence[Turn]) -> np.ndarray[Any, Any]:
    numbers: list[int] = []
    for turn in turns:
        prompt, reply = turn.reply.prompt_ids or (), turn.reply.token_ids or ()
        numbers += [turn.reused_ids, len(prompt), len(reply), *prompt, *reply]
    return np.array(numbers, np.int64)


def _with_ids(call: Call, entry: np.ndarray[Any, Any]) -> Any:
    numbers, at = entry.tolist(), 0
    for turn in call.turns:
        reused, num_prompt, num_reply = numbers[at : at + _HEAD]
        middle = at + _HEAD + num_prompt
        reply = msgspec.structs.replace(
            turn.reply,
            prompt_ids=tuple(numbers[at + _HEAD : middle]),
            token_ids=tuple(numbers[middle : middle + num_reply]),
            logprobs=None,
        )
        yield msgspec.structs.replace(turn, reply=reply, reused_ids=reused)
        at = middle + num_reply


def _read(path: Path) -> dict[bytes, np.ndarray[Any, Any]]:
    """Return the cached token ids in the file at ``path``, keyed by the digest of a call's
    messages.

    Returns an empty dict if the file is missing or damaged.
    """
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            digests, lengths, numbers = file["digests"], file["lengths"], file["numbers"]
        entries = np.split(numbers, np.cumsum(lengths)[:-1])
        return {digest.tobytes(): entry for digest, entry in zip(digests, entries, strict=True)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        _log.warning(
            "tokens_unreadable", f"{path} cannot be read ({error}): conversations are tokenized"
        )
        return {}
