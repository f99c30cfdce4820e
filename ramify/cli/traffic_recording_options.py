"""Define server options for recording conversations: folder, redaction and retention.

The conversations are those with a local policy. ``ramify/serve/traffic_recorder.py`` records the
conversations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramify.cli.parser import CliOptionSpec, UsageError, parse_duration
from ramify.cli.terminal_text import StderrMessageWriter
from ramify.errors import ConfigError

if TYPE_CHECKING:
    from ramify.clients.base import Client
    from ramify.models.load import Policy
    from ramify.serve.redaction import RedactionRules
    from ramify.serve.traffic_recorder import ServedTrafficRecorder, TrafficRetention

RECORD_OPTIONS = (
    CliOptionSpec(
        "record",
        str,
        "keep the conversations of users with their token ids in the store FOLDER, to train from "
        "(default: no)",
        "FOLDER",
    ),
    CliOptionSpec(
        "redact",
        list,
        "redact text that matches this regular expression from recordings; repeat for more",
        "PATTERN",
    ),
    CliOptionSpec(
        "redact_defaults",
        bool,
        "redact e-mail addresses, phone and card numbers, and keys (default: yes)",
    ),
    CliOptionSpec(
        "record_max_gib",
        float,
        "size at which the oldest recorded conversations are deleted, in GiB (default: 10)",
    ),
    CliOptionSpec(
        "record_keep",
        str,
        "delete recorded conversations that are inactive for this long, such as 30d (default: "
        "when space is needed)",
        "AGE",
    ),
)


def parse_recording_options(
    options: Mapping[str, Any],
) -> tuple[RedactionRules, TrafficRetention] | None:
    """Parse the options for recording conversations.

    They say what is redacted, and how long records are kept. Returns None without ``--record``.
    Raises UsageError or ConfigError for a wrong option.
    """
    if not options["record"]:
        unused = next((each for each in RECORD_OPTIONS if options[each.name] is not None), None)
        if unused is not None:
            raise UsageError(f"{unused.long} needs --record FOLDER: add it")
        return None
    from ramify.serve.redaction import RedactionRules
    from ramify.serve.traffic_recorder import TrafficRetention

    gib = 10.0 if options["record_max_gib"] is None else options["record_max_gib"]
    if not 0.001 <= gib < 1e6:
        raise UsageError(f"--record-max-gib {gib:g}: give a number of GiB from 0.001 up")
    keep = options["record_keep"]
    return (
        RedactionRules(options["redact"] or (), defaults=options["redact_defaults"] is not False),
        TrafficRetention(
            max_bytes=int(gib * (1 << 30)),
            max_age_s=None if keep is None else parse_duration(keep, "--record-keep"),
        ),
    )


def require_single_policy(clients: Sequence[Client]) -> Policy:
    """Return the only local policy that a server serves, so that its conversations can be recorded.

    Raises ConfigError if other models answer as well, or if there are several policies.
    """
    from ramify.inference.local.local_client import LocalClient

    others = [each.name for each in clients if not isinstance(each, LocalClient)]
    if others:
        raise ConfigError(
            f"--record keeps token ids, but {others[0]} returns none: serve a local policy "
            "(--model local:FOLDER), or leave --record out"
        )
    policies = {id(each.policy): each.policy for each in clients if isinstance(each, LocalClient)}
    if len(policies) != 1:
        raise ConfigError(
            f"--record records one policy, but {len(policies)} are served: serve one, or leave "
            "--record out"
        )
    return next(iter(policies.values()))


def open_recorder(
    folder: str,
    recording: tuple[RedactionRules, TrafficRetention],
    policy: Policy,
    notes: StderrMessageWriter,
) -> ServedTrafficRecorder:
    """Open the conversation recorder, and tell the user where records are kept and for how long.

    Raises ConfigError or StoreError if that fails.
    """
    from ramify.serve.traffic_recorder import PolicyFactsForRecorder, ServedTrafficRecorder

    redaction, retention = recording
    recorder = ServedTrafficRecorder(
        Path(folder).expanduser(), PolicyFactsForRecorder.from_policy(policy), redaction, retention
    )
    age = retention.max_age_s
    kept = f"for {age / 86_400:g} days, and " if age is not None else ""
    notes.say(
        f"ramify: conversations are recorded in {recorder.store.root}, redacted by pattern, and "
        f"kept {kept}up to {retention.max_bytes / (1 << 30):g} GiB: tell your users "
        "(docs/traffic.md)"
    )
    return recorder
