"""Signing keys in a device, which SoftHSM plays: its keys sign as those of files do, and none of them leaves it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from signed import KEY
from signer_parts import SignerProcess, artifact
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact.signing import key_text
from torchrelay.compiler.errors import SettingsError, Unavailable
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.signing.keyring import Keyring
from torchrelay.service.signing.open import open_folder

pkcs11 = pytest.importorskip("pkcs11", reason="python-pkcs11 is not installed")

FETCHED = f"{sys.prefix}/softhsm/usr"
"""Where `make test-all` puts it."""
MODULES = (
    f"{FETCHED}/lib/softhsm/libsofthsm2.so",
    "/usr/lib/softhsm/libsofthsm2.so",
    "/usr/lib64/pkcs11/libsofthsm2.so",
    "/usr/lib64/libsofthsm2.so",
)
MODULE = next((Path(name) for name in MODULES if Path(name).exists()), None)
TOOL = shutil.which("softhsm2-util", path=f"{FETCHED}/bin:{os.environ['PATH']}")
PIN = "271828"

pytestmark = pytest.mark.skipif(MODULE is None or TOOL is None, reason="SoftHSM (softhsm2) is not installed")


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which SoftHSM keeps its tokens. The module reads its environment once in a process."""
    folder = tmp_path_factory.mktemp("softhsm")
    (folder / "tokens").mkdir()
    (folder / "conf").write_text(f"directories.tokendir = {folder}/tokens\nobjectstore.backend = file\n")
    before = os.environ.get("SOFTHSM2_CONF")
    os.environ["SOFTHSM2_CONF"] = str(folder / "conf")
    yield folder
    if before is None:
        del os.environ["SOFTHSM2_CONF"]
    else:
        os.environ["SOFTHSM2_CONF"] = before


@pytest.fixture
def token(device: Path, request: pytest.FixtureRequest) -> str:
    """The label of a new token."""
    label = request.node.name[:32]
    assert TOOL is not None
    line = [TOOL, "--module", str(MODULE), "--init-token", "--free", "--label", label]
    subprocess.run([*line, "--pin", PIN, "--so-pin", "31415926"], check=True, capture_output=True)
    pkcs11.lib(str(MODULE)).reinitialize()  # it sees the tokens that there were then
    return label


def settings(folder: Path, token: str, **changes: Any) -> ServiceSettings:
    given: dict[str, Any] = {
        "state_dir": folder,
        "pkcs11_module": MODULE,
        "pkcs11_token": token,
        "pkcs11_pin": PIN,
    }
    return ServiceSettings(**{**given, **changes})


def test_keys_of_a_device_sign_rotate_and_are_found_again(token: str, tmp_path: Path) -> None:
    keyring = open_folder(settings(tmp_path, token))
    first = keyring.current
    old = keyring.sign(artifact(), key=KEY, namespace="team")
    keyring.rotate(3600)
    new = keyring.sign(artifact(), key=KEY, namespace="team")
    again = open_folder(settings(tmp_path, token))
    assert again.ring == keyring.ring
    assert [s.key_id for data in (old, new) for s in container.statements(data)] == [first, again.current]
    for data in (old, new, again.sign(artifact(), key=KEY, namespace="team")):
        assert container.verify(data, again.trust("team"), key=KEY)
    assert [path.name for path in again.folder.iterdir() if path.suffix == ".pem"] == []
    with ThreadPoolExecutor(8) as pool:
        signed = pool.map(lambda _: keyring.sign(artifact(), key=KEY, namespace="team"), range(50))
    assert all(container.verify(data, again.trust("team"), key=KEY) for data in signed)


def test_no_key_can_be_read_from_the_device(token: str, tmp_path: Path) -> None:
    open_folder(settings(tmp_path, token))
    with pkcs11.lib(str(MODULE)).get_token(token_label=token).open() as session:
        (private,) = session.get_objects({pkcs11.Attribute.CLASS: pkcs11.ObjectClass.PRIVATE_KEY})
        assert private[pkcs11.Attribute.SENSITIVE] and not private[pkcs11.Attribute.EXTRACTABLE]
        with pytest.raises(pkcs11.exceptions.PKCS11Error):
            private[pkcs11.Attribute.VALUE]


def test_a_folder_with_files_goes_over_to_a_device_by_a_rotation(token: str, tmp_path: Path) -> None:
    files = Keyring(tmp_path / "keys", {})
    old = files.sign(artifact(), key=KEY, namespace="team")
    keyring = open_folder(settings(tmp_path, token))
    assert keyring.current == files.current
    keyring.rotate(3600)
    new = keyring.sign(artifact(), key=KEY, namespace="team")
    for data in (old, new):
        assert container.verify(data, keyring.trust("team"), key=KEY)
    assert len([*(tmp_path / "keys").glob("*.pem")]) == 1
    with pytest.raises(SettingsError, match=r"cannot be read"):
        Keyring(tmp_path / "keys", {})  # without the device


def test_a_session_that_ended_is_opened_again(token: str, tmp_path: Path) -> None:
    keyring = open_folder(settings(tmp_path, token))
    pkcs11.lib(str(MODULE)).reinitialize()  # as after a device was plugged in anew
    signed = keyring.sign(artifact(), key=KEY, namespace="team")
    assert container.verify(signed, keyring.trust("team"), key=KEY)


def test_a_device_that_lost_its_keys_is_told(token: str, device: Path, tmp_path: Path) -> None:
    keyring = open_folder(settings(tmp_path, token))
    name = keyring.current
    with pkcs11.lib(str(MODULE)).get_token(token_label=token).open(rw=True) as session:
        for each in [*session.get_objects({pkcs11.Attribute.LABEL: "torchrelay"})]:
            each.destroy()
    with pytest.raises(Unavailable, match=f"token {token[:20]}.* fails"):
        keyring.sign(artifact(), key=KEY, namespace="team")
    with pytest.raises(SettingsError, match=f"has no key {name}"):
        open_folder(settings(tmp_path, token))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"pkcs11_pin": "000000"}, "refuses the PIN"),
        ({"pkcs11_pin": None}, "PIN"),
        ({"pkcs11_token": "nobody's"}, "there is no token nobody's"),
        ({"pkcs11_module": "/nothing.so"}, "is no PKCS #11 module"),
    ],
    ids=["pin", "no pin", "token", "module"],
)
def test_wrong_settings_are_told(changes: dict[str, str], told: str, token: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=told):
        open_folder(settings(tmp_path, token, **changes))
    assert not (tmp_path / "keys").exists()


def test_a_signer_with_a_device_signs_for_those_who_ask_it(token: str, tmp_path: Path) -> None:
    signer = SignerProcess(tmp_path, pkcs11_module=MODULE, pkcs11_token=token, pkcs11_pin=PIN)
    try:
        signer.start()
        remote = signer.keyring()
        remote.rotate(60)
        assert signer.ended() == 0
        signer.start()
        signed = remote.sign(artifact(), key=KEY, namespace="team")
        assert container.verify(signed, remote.trust("team"), key=KEY)
        assert key_text(remote.public[0]) == remote.ring.keys[-1].public
        remote.close()
        assert [*signer.keys.glob("*.pem")] == []
        assert signer.ended() == 0
        loaded = signer.modules.read_text().split()
        assert "pkcs11" in loaded and not {"ray", "torch", "redis"} & {*loaded}
        assert PIN not in signer.log.read_text()
    finally:
        signer.kill()
