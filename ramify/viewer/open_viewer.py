"""Open the viewer from Python code or a notebook.

It can show the runs of this process. The command ``ramify view`` is in ramify/cli/view_command.py.
It can also start runs from a page.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from ramify.engine import event_loop_thread
from ramify.http_server.access import ListenAddress
from ramify.store.base import RunStore
from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.view_server import ViewServer


def view(*places: str | Path | RunStore, port: int = 0) -> ServedViewerPage:
    """Serve the viewer's page on this machine, in a thread, until it is closed or the process ends.

    ``places`` are stores, or paths as in ``ramify view``. The default is the store of ``ramify
    runs``. Port 0 picks a free port. Raises ConfigError for a path that does not exist.

    >>> store = ramify.MemoryStore()
    >>> rlm = ramify.RLM("openai:gpt-5-mini", store=store)
    >>> page = ramify.view(store)
    >>> page                # open it, ask questions, and watch
    the page http://127.0.0.1:...
    >>> page.close()
    """
    server = ViewServer(RunCatalog(places), address=ListenAddress(port=port))
    event_loop_thread.run(server.__aenter__())
    return ServedViewerPage(server)


class ServedViewerPage:
    """A page of the viewer that is being served.

    Use it as a context manager to stop serving at the end of the ``with`` block.

    >>> with ramify.view(ramify.MemoryStore()) as page:
    ...     address = page.url
    """

    def __init__(self, server: ViewServer) -> None:
        self._server = server
        self._is_closed = False

    @property
    def url(self) -> str:
        """Address of the page, including the access token."""
        return self._server.url

    def close(self) -> None:
        """Stop serving the page.

        Further calls have no effect.
        """
        if not self._is_closed:
            self._is_closed = True
            event_loop_thread.run(self._server.__aexit__())

    def __enter__(self) -> ServedViewerPage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"the page {self.url}"
