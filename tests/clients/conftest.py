"""A certificate for servers on loopback."""

import shutil

import pytest

from tests.clients.helpers import self_signed


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """(certificate, key) of ``localhost``."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    return self_signed(tmp_path_factory.mktemp("tls"))
