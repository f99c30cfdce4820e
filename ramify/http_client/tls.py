"""TLS settings for connections to model servers: which certificate authorities are trusted, and
what a failed handshake means.

By default the system's certificate authorities are trusted. ``SSL_CERT_FILE`` and ``SSL_CERT_DIR``
replace them; ``REQUESTS_CA_BUNDLE``, ``CURL_CA_BUNDLE`` and ``NODE_EXTRA_CA_CERTS`` add to them.
Every server must prove its host name. Reading the certificates takes some hundredths of a second,
so it happens once per process, and not in the event loop. Connections are opened by
``http_transport.py``.
"""

from __future__ import annotations

import os
import ssl
import threading

from ramify.errors import ConfigError

_REPLACING = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_ADDING = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
_NOT_TLS = (
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "RECORD_LAYER_FAILURE",
    "PACKET_LENGTH_TOO_LONG",
)
"""OpenSSL's error codes for an answer that is not TLS."""
_contexts: dict[tuple[str | None, ...], ssl.SSLContext] = {}
"""Values of the environment variables -> the TLS context for them."""
_lock = threading.Lock()


def tls_context() -> ssl.SSLContext:
    """Return the TLS settings (``SSLContext``) for the current environment variables.

    The first call blocks while certificates are read. Raises ConfigError if a variable names an
    unusable file or folder.
    """
    values = tuple(os.environ.get(name) for name in (*_REPLACING, *_ADDING))
    with _lock:
        if values not in _contexts:
            _contexts[values] = _new_context()
        return _contexts[values]


def tls_failure(error: Exception) -> tuple[str, str]:
    """Return OpenSSL's message for a failed TLS handshake, and advice on how to fix it."""
    reason = " ".join(str(getattr(error, "verify_message", "") or error).split())[:200]
    if isinstance(error, ssl.SSLCertVerificationError):
        return reason, "name your certificate authority in SSL_CERT_FILE"
    if any(sign in reason for sign in _NOT_TLS):
        return reason, "the server does not speak TLS at this port: write http://"
    return reason, "check the address, and the version of TLS that the server requires"


def _new_context() -> ssl.SSLContext:
    _check_replacing()
    context = ssl.create_default_context()  # OpenSSL itself reads SSL_CERT_FILE and SSL_CERT_DIR
    context.set_alpn_protocols(["http/1.1"])
    replaced = {os.environ.get(name) for name in _REPLACING}
    for name in _ADDING:
        bundle = os.environ.get(name)
        if not bundle or bundle in replaced:
            continue
        try:
            context.load_verify_locations(
                **{"capath" if os.path.isdir(bundle) else "cafile": bundle}
            )
        except (OSError, ssl.SSLError) as error:
            why = error.strerror or str(error)
            raise ConfigError(f"{name} names {bundle}: {why}; fix or unset it") from None
    return context


def _check_replacing() -> None:
    """Raise ConfigError if ``SSL_CERT_FILE`` or ``SSL_CERT_DIR`` leads to no usable certificates.

    OpenSSL would silently ignore the variable, and every connection would fail.
    """
    file, folders = (os.environ.get(name) for name in _REPLACING)
    if file:
        try:
            with open(file, "rb") as pem:
                is_pem = b"-----BEGIN" in pem.read()
        except OSError as error:
            raise ConfigError(
                f"SSL_CERT_FILE names {file}: {error.strerror}; fix or unset it"
            ) from None
        if not is_pem:
            raise ConfigError(
                f"SSL_CERT_FILE names {file}, which holds no certificate in PEM format; fix or "
                "unset it"
            )
    if folders and not any(os.path.isdir(folder) for folder in folders.split(os.pathsep)):
        raise ConfigError(f"SSL_CERT_DIR names {folders}, which is not a folder; fix or unset it")
