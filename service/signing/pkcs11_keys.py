"""Ed25519 keys that stay in a device: an HSM, or what else has a PKCS #11 module (version 3.0, for EdDSA)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pkcs11
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pkcs11 import Attribute, KeyType, Mechanism, ObjectClass
from pkcs11.exceptions import NoSuchToken, PinIncorrect, PinLocked, PKCS11Error, UserAlreadyLoggedIn
from pkcs11.util.ec import encode_named_curve_parameters

from ...compiler.artifact.signing import key_id
from ...compiler.errors import SettingsError, Unavailable

_LABEL = "torchrelay"
"""The label of our keys, among others that may be in the device."""
_ED25519 = encode_named_curve_parameters("1.3.101.112")
_RAW_BYTES = 32

T = TypeVar("T")


class Pkcs11Key:
    """A key in the device, by the id that the device knows it by."""

    def __init__(self, keys: Pkcs11Keys, name: bytes, public: Ed25519PublicKey) -> None:
        self._keys = keys
        self._name = name
        self._public = public

    def public_key(self) -> Ed25519PublicKey:
        return self._public

    def sign(self, data: bytes) -> bytes:
        """Raises Unavailable. The device gets all of `data`: EdDSA hashes it twice."""
        return self._keys.sign(self._name, data)


class Pkcs11Keys:
    """The keys of one token. Safe for threads: they take turns in one session, which is opened again after an error."""

    def __init__(self, module: Path, token: str, pin: str) -> None:
        """`token`: its label. Raises SettingsError, Unavailable."""
        self._token = token
        self._pin = pin
        self._lock = threading.Lock()
        self._session: pkcs11.Session | None = None
        self._private: dict[bytes, Any] = {}
        """By their ids in the device. python-pkcs11 makes its objects' classes by what the device says."""
        try:
            self._library = pkcs11.lib(os.fspath(module))
        except (PKCS11Error, RuntimeError) as error:
            raise SettingsError(f"{module} is no PKCS #11 module: {_told(error)}") from None
        self._in_session(lambda session: None)

    def make(self) -> Pkcs11Key:
        def generate(session: pkcs11.Session) -> Pkcs11Key:
            curve = session.create_domain_parameters(
                KeyType.EC_EDWARDS, {Attribute.EC_PARAMS: _ED25519}, local=True
            )
            public, _ = curve.generate_keypair(
                mechanism=Mechanism.EC_EDWARDS_KEY_PAIR_GEN,
                id=os.urandom(8),
                label=_LABEL,
                store=True,
                private_template={
                    Attribute.SENSITIVE: True,
                    Attribute.EXTRACTABLE: False,
                    Attribute.SIGN: True,
                },
            )
            return self._key(public)

        return self._in_session(generate)

    def load(self, name: str) -> Pkcs11Key:
        def find(session: pkcs11.Session) -> Pkcs11Key | None:
            ours = {
                Attribute.CLASS: ObjectClass.PUBLIC_KEY,
                Attribute.KEY_TYPE: KeyType.EC_EDWARDS,
                Attribute.LABEL: _LABEL,
            }
            found = [self._key(public) for public in session.get_objects(ours)]
            return next((key for key in found if key_id(key.public_key()) == name), None)

        key = self._in_session(find)
        if key is None:
            raise SettingsError(
                f"token {self._token} has no key {name}, which the folder of keys names",
                hint="Restore the token from its backup, or the folder that belongs to it",
            )
        return key

    def sign(self, name: bytes, data: bytes) -> bytes:
        def sign_once(session: pkcs11.Session) -> bytes:
            if name not in self._private:
                self._private[name] = session.get_key(
                    object_class=ObjectClass.PRIVATE_KEY, key_type=KeyType.EC_EDWARDS, id=name
                )
            return bytes(self._private[name].sign(data, mechanism=Mechanism.EDDSA))

        return self._in_session(sign_once)

    def _key(self, public: Any) -> Pkcs11Key:
        # a DER octet string, as the standard has it, or the bare point, as some devices have it
        raw = bytes(public[Attribute.EC_POINT])[-_RAW_BYTES:]
        return Pkcs11Key(self, bytes(public[Attribute.ID]), Ed25519PublicKey.from_public_bytes(raw))

    def _in_session(self, work: Callable[[pkcs11.Session], T]) -> T:
        """Raises SettingsError for a token or PIN that is wrong, Unavailable if the device fails twice."""
        with self._lock:
            try:
                # a session may end at any time: the device was reset, or plugged in anew
                with suppress(PKCS11Error):
                    return work(self._opened())
                self._close()
                return work(self._opened())
            except PKCS11Error as error:
                self._close()
                raise Unavailable(
                    f"token {self._token} with the signing keys fails: {_told(error)}",
                    hint="See to the device and its PKCS #11 module, then try again",
                ) from None

    def _opened(self) -> pkcs11.Session:
        if self._session is None:
            try:
                token = self._library.get_token(token_label=self._token)
                try:
                    self._session = token.open(rw=True, user_pin=self._pin)
                except UserAlreadyLoggedIn:  # by another session: that is the whole process's
                    self._session = token.open(rw=True)
            except NoSuchToken:
                raise SettingsError(f"there is no token {self._token}") from None
            except (PinIncorrect, PinLocked) as error:  # not tried again: a few wrong ones lock a token
                raise SettingsError(f"token {self._token} refuses the PIN: {_told(error)}") from None
        return self._session

    def _close(self) -> None:
        session, self._session = self._session, None
        self._private.clear()
        if session is not None:
            with suppress(PKCS11Error):
                session.close()


def _told(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()
