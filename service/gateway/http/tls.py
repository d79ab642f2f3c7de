"""The gateway's own TLS: checks the certificate's files and makes uvicorn's options."""

from __future__ import annotations

import ssl
from typing import Any

from ....compiler.errors import SettingsError
from ...base.settings import ServiceSettings


def check(settings: ServiceSettings) -> None:
    """Raises SettingsError now, rather than after everything else has started."""
    certificate, key = settings.tls_cert_file, settings.tls_key_file
    if (certificate is None) != (key is None):
        raise SettingsError(
            "TLS needs a certificate and its key", hint="Give --tls-cert and --tls-key, or neither"
        )
    if certificate is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    password = settings.tls_key_password
    try:
        # without a password, OpenSSL would ask on the terminal for one
        context.load_cert_chain(
            certificate, key, lambda: password.get_secret_value() if password is not None else ""
        )
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{certificate} with key {key} cannot be used: {error}",
            hint="Both are PEM files, and fit together",
        ) from None


def options(settings: ServiceSettings) -> dict[str, Any]:
    """For uvicorn.Config; TLS 1.2 or later is the least that Python's servers speak."""
    if settings.tls_cert_file is None:
        return {}
    password = settings.tls_key_password
    return {
        "ssl_certfile": str(settings.tls_cert_file),
        "ssl_keyfile": str(settings.tls_key_file),
        "ssl_keyfile_password": password.get_secret_value() if password is not None else None,
    }
