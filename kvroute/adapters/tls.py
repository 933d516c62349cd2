"""Certificates: what our listener shows, and which authorities we believe when we ask replicas.

One context serves all connections of its kind. Protocols and ciphers are Python's defaults.
"""

from __future__ import annotations

import ssl

from kvroute.errors import ConfigError


def client_tls(verify: bool | str) -> ssl.SSLContext:
    """Return how https:// replicas are believed: by the system's authorities, by those of a file, or in any case.

    Args:
        verify: True: the system's authorities; a path: those of this PEM file alone; False: any certificate will do.

    Raises:
        ConfigError: the file holds no certificates.
    """
    try:
        context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"`proxy.tls_ca`: {verify} cannot be used: {error.strerror or error}; name a PEM file of authorities"
        ) from None
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def session_tls(verify: bool | str) -> ssl.SSLContext | bool:
    """Return the same for an aiohttp session, which has contexts of its own for True and False."""
    return client_tls(verify) if isinstance(verify, str) else verify


def server_tls(certificate: str, key: str | None) -> ssl.SSLContext:
    """Return what the public listener shows to clients.

    Args:
        certificate: PEM file, the server's own certificate first, then those between it and the authority.
        key: PEM file; None: the key is in the certificate's file.

    Raises:
        ConfigError: a file cannot be read, is not PEM, needs a password, or the two do not belong together.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except OSError as error:
        raise ConfigError(
            f"`proxy.tls_certificate`: {certificate} with key {key or certificate} cannot be used: "
            f"{error.strerror or error}; name PEM files of a certificate and its unencrypted key"
        ) from None
    return context


def _no_password() -> str:
    """Answer for a key that is encrypted: without this OpenSSL would ask on the terminal, and wait."""
    return ""
