"""An artifact whose library this machine's loader refuses: compiled here, with one warning, and fetched once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from signed import sign
from test_commands import torchrelay, train
from torchrelay.clients.commands.administration.cache import write_archive
from torchrelay.compiler.artifact import container, symbol_versions
from torchrelay.examples.harness.private_service import PrivateService
from torchrelay.service.signing.key_files import read_private


def elf_hash(name: bytes) -> bytes:
    """The System V hash of a symbol's version, as a library holds it."""
    value = 0
    for byte in name:
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ high >> 24) & ~high
    return value.to_bytes(4, "little")


def needing(library: bytes, old: bytes, new: bytes) -> bytes:
    """The library, with the version `new` in place of `old` among its needs."""
    for before, after in ((old + b"\0", new + b"\0"), (elf_hash(old), elf_hash(new))):
        assert before in library and len(before) == len(after)
        library = library.replace(before, after)
    return library


def republish(service: PrivateService, stored: Path, folder: Path, *, says_so: bool) -> None:
    """Replace an artifact of the service by one, signed as its own, whose library needs a C library of the future."""
    manifest = container.read_manifest(stored.read_bytes())
    (keys,) = service.root.rglob("keys")
    (pem,) = keys.glob("*.pem")
    signer = read_private(pem)
    trust = container.Trust.of([signer.public_key()])
    opened = container.verify(stored.read_bytes(), trust, key=manifest.key)
    version = manifest.needs["GLIBC"]
    members = {
        name: needing(data, b"GLIBC_" + version.encode(), b"GLIBC_2.99") if name.endswith(".so") else data
        for name, data in opened.members.items()
    }
    manifest = msgspec.structs.replace(
        manifest,
        members=[container.member(name, data) for name, data in members.items()],
        needs={**manifest.needs, **({"GLIBC": "2.99"} if says_so else {})},
    )
    said = opened.statement
    data = sign(
        container.pack(manifest, members),
        signer,
        key=manifest.key,
        namespace=said.namespace,
        epoch=said.epoch,
        signed_at=said.signed_at,
    )
    write_archive(folder / "changed.tar", [(manifest.key, data)])
    for arguments in (["rm", manifest.key], ["import", str(folder / "changed.tar")]):
        done = torchrelay(service, "cache", *arguments)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("says_so", "prefetch", "salt"), [(True, "0", 1.8125), (False, "1", 1.9375)])
def test_it_is_refused_once_by_name_and_never_fetched_again(
    service: PrivateService, tmp_path: Path, says_so: bool, prefetch: str, salt: float
) -> None:
    assert train(service, tmp_path / "first", salt)["misses"] == 1
    (stored,) = (path for path in (tmp_path / "first" / "artifacts").rglob("*") if len(path.name) == 64)
    needs = container.read_manifest(stored.read_bytes()).needs
    assert {"GLIBC", "GLIBCXX", "CXXABI", "GCC"} <= needs.keys()
    assert not symbol_versions.lacking(needs, symbol_versions.offered())
    republish(service, stored, tmp_path, says_so=says_so)
    fetches = []
    for _ in range(2):
        before = service.stats()
        found = train(service, tmp_path / "second", salt, TORCHRELAY_PREFETCH=prefetch)
        assert (found["error"], found["fallbacks"]) == ("", {"cannot_load": 1})
        (told,) = found["told"]
        assert "2.99" in told and ("GLIBC " + symbol_versions.offered()["GLIBC"] in told or not says_so)
        after = service.stats()
        fetches.append(sum(after[name] - before[name] for name in ("requests", "fetches")))
    assert fetches == [1, 0]
