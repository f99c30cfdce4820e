"""The check of optional numbers in a configuration: None, not 0, means off or automatic.

    check_optional("optim", "never", max_grad_norm=0.0)
    ConfigError: optim.max_grad_norm=0 must be above 0; give null for never

Not here: configurations of earlier versions, in which 0 had that meaning (``override.py``).
"""

from __future__ import annotations

from ramify.errors import ConfigError


def check_optional(owner: str, null: str, **values: float | None) -> None:
    """Raise ConfigError for a value that is neither None nor positive. ``null``: the meaning of
    None."""
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{owner}.{name}={value:g} must be above 0; give null for {null}")
