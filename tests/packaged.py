"""The policy that ships with the package, for tests that need real weights or a real tokenizer."""

from __future__ import annotations

from ramify.trained_policy_settings import packaged_policy_folder

_FOLDER = packaged_policy_folder("tiny")
assert _FOLDER is not None
TINY = _FOLDER
"""Its folder."""
