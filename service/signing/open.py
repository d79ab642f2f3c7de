"""The installation's keys, wherever they are: in this process's folder, or at a signer."""

from __future__ import annotations

from ...compiler import install_hint
from ...compiler.errors import SettingsError
from ..base.settings import ServiceSettings
from .key_files import KeyStore, read_trusted_keys
from .keyring import Keyring
from .remote import RemoteKeyring
from .trusted_keys import TrustedKeys

_KNOWN = "signer_keys.json"
"""The signer's last list of public keys, a file in the state folder."""


def open_folder(settings: ServiceSettings) -> Keyring:
    """The keys that are this process's. Raises SettingsError, OSError, Unavailable."""
    sites = read_trusted_keys(settings.trusted_public_keys)
    return Keyring(settings.keys_location, sites, store=_device(settings))


def open_keyring(settings: ServiceSettings) -> TrustedKeys:
    """Raises SettingsError, OSError; Unavailable if there is a signer to be asked that does not answer, and whose keys
    were never known here."""
    if not settings.signer_url:
        return open_folder(settings)
    token = settings.signer_admin_token or settings.signer_token
    if token is None:
        raise SettingsError(
            "signer_url needs a token",
            hint="Set TORCHRELAY_SERVICE_SIGNER_TOKEN, as the signer has it; a gateway's: ..._SIGNER_ADMIN_TOKEN",
        )
    for name in ("keys_dir", "trusted_public_keys", "pkcs11_module"):
        if getattr(settings, name):
            raise SettingsError(f"{name} is a setting of the signer", hint="Set it there, and not here")
    return RemoteKeyring(
        settings.signer_url,
        token.get_secret_value(),
        ca_file=settings.signer_ca_file,
        known=settings.state_dir / _KNOWN,
    )


def _device(settings: ServiceSettings) -> KeyStore | None:
    """Where private keys are, if not in files. Raises SettingsError, Unavailable."""
    if settings.pkcs11_module is None:
        return None
    if settings.pkcs11_pin is None or not settings.pkcs11_token:
        raise SettingsError(
            "pkcs11_module needs a token's label and its PIN",
            hint="Set TORCHRELAY_SERVICE_PKCS11_TOKEN and TORCHRELAY_SERVICE_PKCS11_PIN",
        )
    try:
        from .pkcs11_keys import Pkcs11Keys  # an extra of its own
    except ModuleNotFoundError as error:
        raise SettingsError(f"pkcs11_module needs {error.name}", hint=install_hint("server,pkcs11")) from None
    return Pkcs11Keys(settings.pkcs11_module, settings.pkcs11_token, settings.pkcs11_pin.get_secret_value())
