"""Describes the identity of a policy: its name, its architecture and a digest of its vocabulary.

The identity is recorded together with the token ids that the policy sampled.

The same ids mean the same text for two policies only if their vocabularies are equal. A policy of
the same architecture can learn from recorded log-probabilities even if its weights differ.
``weights.fingerprint`` shows whether weights are equal.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from ramify.types.recorded_traffic import TokenizerAndArchitecture

if TYPE_CHECKING:
    from ramify.models.load import Policy


def policy_identity(policy: Policy) -> TokenizerAndArchitecture:
    """Describe a policy by its name, architecture and a digest of its vocabulary.

    With this record, a later process can check whether sampled token ids belong to the policy.
    """
    vocabulary = sorted((id, token) for token, id in policy.tokenizer.get_vocab().items())
    digest = hashlib.blake2b(msgspec.json.encode(vocabulary), digest_size=16).hexdigest()
    return TokenizerAndArchitecture(
        policy.name, digest, f"{policy.config.model_type} of {policy.num_parameters:,} parameters"
    )
