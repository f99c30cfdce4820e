"""Call tree of a run for the viewer, with the place of each call's lines in the journal.

``call_detail.py`` reads a call in full from these lines. Not here: the tree itself (see
types/call_tree.py), reading files (see watched_run.py) and the data that a page receives (see
picture.py).
"""

from __future__ import annotations

from array import array

from ramify.types.call_tree import CallNode, CallTree
from ramify.types.trajectory import Trajectory
from ramify.viewer.event_glances import AnyGlance


class RunTree:
    """Call tree of a run so far. It is valid after every event, also for an interrupted run."""

    def __init__(self) -> None:
        self.calls = CallTree()
        self.nodes, self.order = self.calls.nodes, self.calls.order
        self.version = 0
        """Number of journal lines so far; each event has one line."""
        self._starts = array("q")
        """Line of the journal -> its offset."""
        self._before = array("q")
        """Line of the journal -> the previous line about the same call; -1 for none."""

    @property
    def run(self) -> Trajectory:
        """The run as a whole, without its calls."""
        return self.calls.run

    @property
    def at_s(self) -> float:
        """Time of the last event, in seconds since the run began."""
        return self.calls.at_s

    def apply(self, event: AnyGlance, offset: int) -> CallNode | None:
        """Apply ``event``, whose journal line begins at ``offset``, and return its call's node.

        Raises KeyError or IndexError if the event is inconsistent with the earlier ones.
        """
        node = self.calls.apply(event)
        line = self.version
        self.version = line + 1
        self._starts.append(offset)
        if node is None:
            self._before.append(-1)
        else:
            self._before.append(node.last_line)
            node.last_line = line
            node.version = line + 1
        return node

    def skip(self, offset: int) -> None:
        """Count a line that could not be applied."""
        self.version += 1
        self._starts.append(offset)
        self._before.append(-1)

    def lines_of(self, node: CallNode, after: int = -1) -> list[tuple[int, int]]:
        """Return (number from 0, offset) of each journal line about ``node`` after ``after``."""
        lines = []
        line = node.last_line
        while line > after:
            lines.append((line, self._starts[line]))
            line = self._before[line]
        return lines[::-1]

    def take(self, trajectory: Trajectory) -> None:
        """Build the tree from a complete trajectory instead of events."""
        self.calls.take(trajectory)
        self.version += 1
