"""Find the folders for this user's configuration, data and caches on each platform.

On Linux they follow the XDG base directory specification, which is short enough to be implemented
here. The library ``platformdirs`` handles the other platforms. It is not imported on Linux, because
its import takes as long as a short question needs to read its settings.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

_XDG = {
    "config": ("XDG_CONFIG_HOME", "~/.config"),
    "data": ("XDG_DATA_HOME", "~/.local/share"),
    "cache": ("XDG_CACHE_HOME", "~/.cache"),
}
"""For each kind of folder, the environment variable that names it, and the default folder."""


def user_folder(kind: Literal["config", "data", "cache"]) -> Path:
    """Return the folder for this user's configuration, data or cache files.

    The folder need not exist.
    """
    if sys.platform != "linux":
        import platformdirs

        path: Path = getattr(platformdirs, f"user_{kind}_path")("ramify")
        return path
    variable, default = _XDG[kind]
    given = os.environ.get(variable, "")
    # The specification says that a relative path is to be ignored.
    return Path(given if os.path.isabs(given) else os.path.expanduser(default), "ramify")
