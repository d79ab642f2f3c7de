"""The installation's keys, wherever they are: in this process's folder, or at a signer."""

from __future__ import annotations

from ...compiler.errors import SettingsError
from ..settings import ServiceSettings
from .key_files import read_trusted_keys
from .keyring import Keyring
from .remote import RemoteKeyring
from .trusted_keys import TrustedKeys


def open_keyring(settings: ServiceSettings) -> TrustedKeys:
    """Raises SettingsError, OSError; Unavailable if there is a signer to be asked, and it does not answer."""
    if not settings.signer_url:
        return Keyring(settings.keys_location, read_trusted_keys(settings.trusted_public_keys))
    token = settings.signer_admin_token or settings.signer_token
    if token is None:
        raise SettingsError(
            "signer_url needs a token",
            hint="Set TORCHRELAY_SERVICE_SIGNER_TOKEN, as the signer has it; a gateway's: ..._SIGNER_ADMIN_TOKEN",
        )
    for name in ("keys_dir", "trusted_public_keys"):
        if getattr(settings, name):
            raise SettingsError(f"{name} is a setting of the signer", hint="Set it there, and not here")
    return RemoteKeyring(settings.signer_url, token.get_secret_value(), ca_file=settings.signer_ca_file)
