"""What a client learns about keys, and what nobody can make it forget."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torchrelay.clients.artifacts.verification import FILE, TrustStore
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler.artifact import trust_document
from torchrelay.compiler.artifact.signing import key_id, key_text
from torchrelay.compiler.artifact.trust_document import KnownKeys, ListedKey, SignedDocument, TrustDocument
from torchrelay.compiler.errors import GatewayUnreachable, SignatureError
from waiting import wait_until

FIRST, SECOND, THIRD, STRANGER = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in range(1, 5))
IDS = [key_id(key.public_key()) for key in (FIRST, SECOND, THIRD, STRANGER)]


def listed(signer: Ed25519PrivateKey, until: int | None = None) -> ListedKey:
    public = signer.public_key()
    return ListedKey(id=key_id(public), public=key_text(public), until=until)


def told(
    serial: int,
    keys: list[ListedKey],
    *signers: Ed25519PrivateKey,
    revoked: tuple[str, ...] = (),
    epoch: int = 0,
) -> SignedDocument:
    document = TrustDocument(serial=serial, epoch=epoch, issued=1, keys=keys, revoked=list(revoked))
    return trust_document.sign_document(document, signers)


START = KnownKeys(keys=[listed(FIRST)])
BOTH = [listed(FIRST), listed(SECOND)]


def believed(known: KnownKeys, now: float = 0.0) -> set[str]:
    trust = trust_document.trust(known, namespace="", now=now)
    return set(trust.keys) - trust.revoked


def test_a_known_keys_word_brings_new_keys_and_their_word_brings_more() -> None:
    known = trust_document.learn(START, told(2, BOTH, FIRST, SECOND))
    assert (believed(known), known.serial) == ({IDS[0], IDS[1]}, 2)
    known = trust_document.learn(known, told(3, [listed(THIRD)], SECOND, THIRD))
    assert believed(known) == {IDS[0], IDS[1], IDS[2]}


def test_a_strangers_word_brings_nothing() -> None:
    harmed = told(9, [listed(STRANGER)], STRANGER, revoked=(IDS[0],), epoch=7)
    forged = SignedDocument(harmed.document, {IDS[0]: harmed.signatures[IDS[3]]})
    unsigned = SignedDocument(harmed.document, {})
    without_domain = SignedDocument(harmed.document, {IDS[0]: FIRST.sign(harmed.document)})
    for document in (harmed, forged, unsigned, without_domain):
        with pytest.raises(SignatureError, match="no key that is trusted"):
            trust_document.learn(START, document)


@pytest.mark.parametrize("position", range(0, 200, 7))
def test_no_byte_of_a_document_can_change(position: int) -> None:
    good = told(2, BOTH, FIRST, revoked=(IDS[3],), epoch=1)
    data = bytearray(good.document)
    data[position % len(data)] ^= 1
    with pytest.raises(SignatureError):
        trust_document.learn(START, SignedDocument(bytes(data), good.signatures))


def test_a_key_under_anothers_id_is_refused_though_signed() -> None:
    wrong = msgspec.structs.replace(listed(STRANGER), id=IDS[1])
    for keys in ([wrong], [ListedKey(id=IDS[1], public="AAAA")]):
        with pytest.raises(SignatureError, match="cannot be read"):
            trust_document.learn(START, told(2, keys, FIRST))


def test_an_older_document_takes_nothing_back() -> None:
    """A man in the middle has kept what the gateway said before the revocation."""
    before, after = told(2, BOTH, FIRST, SECOND), told(3, BOTH, FIRST, SECOND, revoked=(IDS[0],), epoch=4)
    known = trust_document.learn(trust_document.learn(START, before), after)
    assert believed(known) == {IDS[1]}
    again = trust_document.learn(known, told(2, BOTH, SECOND))
    assert again == known
    with pytest.raises(SignatureError):
        trust_document.learn(known, told(99, [listed(STRANGER)], FIRST))  # the revoked key's own word


def test_a_newer_document_takes_no_revocation_and_no_epoch_back() -> None:
    known = trust_document.learn(START, told(1, BOTH, FIRST, SECOND))
    known = trust_document.learn(known, told(2, BOTH, FIRST, SECOND, revoked=(IDS[0],), epoch=4))
    known = trust_document.learn(known, told(3, BOTH, SECOND))
    assert (believed(known), known.epoch, known.serial) == ({IDS[1]}, 4, 3)


def test_an_older_documents_revocations_and_epoch_still_close_doors() -> None:
    known = trust_document.learn(START, told(5, BOTH, FIRST, SECOND))
    known = trust_document.learn(known, told(2, BOTH, FIRST, revoked=(IDS[1],), epoch=1))
    assert (believed(known), known.epoch, known.serial) == ({IDS[0]}, 1, 5)


def test_a_key_that_revokes_itself_is_believed_in_that_alone() -> None:
    """Else whoever stole it would name its successor."""
    known = trust_document.learn(START, told(9, [listed(STRANGER)], FIRST, revoked=(IDS[0],)))
    assert (believed(known), known.serial) == (set(), 0)


def test_what_an_ended_overlap_leaves_is_no_trust_but_its_word() -> None:
    known = trust_document.learn(START, told(2, [listed(FIRST, until=100), listed(SECOND)], FIRST, SECOND))
    assert believed(known, now=99) == {IDS[0], IDS[1]}
    assert believed(known, now=100) == {IDS[1]}
    long_away = KnownKeys(keys=[listed(FIRST, until=100)])
    assert IDS[1] in believed(trust_document.learn(long_away, told(7, BOTH, FIRST)), now=200)


# --- the store -------------------------------------------------------------------------------------------


def store(folder: Path, *signers: Ed25519PrivateKey, namespace: str = "") -> TrustStore:
    keys = tuple(key_text(signer.public_key()) for signer in signers or (FIRST,))
    settings = ClientSettings(
        cache_dir=folder, state_dir=folder / "state", public_keys=keys, namespace=namespace
    )
    return TrustStore(settings)


def trusted(found: TrustStore) -> set[str]:
    trust = found.trust()
    return set(trust.keys) - trust.revoked


def test_what_one_process_learned_the_next_one_knows(tmp_path: Path) -> None:
    running, first = store(tmp_path), store(tmp_path, namespace="team")
    first.learn(told(2, BOTH, FIRST, SECOND))
    first.learn(told(3, BOTH, FIRST, SECOND, revoked=(IDS[0],), epoch=3))
    for other in (running, store(tmp_path), store(tmp_path, SECOND)):
        assert (trusted(other), other.trust().epoch) == ({IDS[1]}, 3)
    assert first.trust().namespace == "team"
    assert (tmp_path / "state" / FILE).stat().st_mode & 0o777 == 0o600
    assert trusted(store(tmp_path, STRANGER)) == {IDS[3]}  # another installation


def test_two_installations_do_not_mix(tmp_path: Path) -> None:
    store(tmp_path).learn(told(8, [listed(FIRST)], FIRST, epoch=8))
    store(tmp_path, STRANGER).learn(told(2, [listed(STRANGER), listed(THIRD)], STRANGER))
    assert (trusted(store(tmp_path)), store(tmp_path).trust().epoch) == ({IDS[0]}, 8)
    assert trusted(store(tmp_path, STRANGER)) == {IDS[3], IDS[2]}


def test_news_is_fetched_once_for_each_serial(tmp_path: Path) -> None:
    found, asked = store(tmp_path), []

    def fetch() -> SignedDocument:
        asked.append(1)
        return told(2, BOTH, FIRST, SECOND)

    for serial in (0, 2, 2, 1, 2):
        found.refresh_if_newer(serial, fetch)
    assert (len(asked), trusted(found)) == (1, {IDS[0], IDS[1]})
    store(tmp_path).refresh_if_newer(2, fetch)  # another process: it is in the file
    assert len(asked) == 1


def test_news_that_cannot_be_had_or_believed_changes_nothing(tmp_path: Path) -> None:
    found = store(tmp_path)

    def unreachable() -> SignedDocument:
        raise GatewayUnreachable("gone")

    found.refresh_if_newer(5, unreachable)
    found.refresh_if_newer(6, lambda: told(6, [listed(STRANGER)], STRANGER))
    assert trusted(found) == {IDS[0]}
    assert not (tmp_path / "state" / FILE).exists()


def test_a_process_served_from_its_disk_asks_for_news_once(tmp_path: Path) -> None:
    found, asked = store(tmp_path), threading.Event()

    def fetch() -> SignedDocument:
        assert not asked.is_set()
        asked.set()
        return told(2, BOTH, FIRST, revoked=(IDS[1],))

    found.refresh_if_stale(fetch)
    found.refresh_if_stale(fetch)
    assert asked.wait(60)
    wait_until(lambda: IDS[1] in found.trust().revoked)
    store(tmp_path).refresh_if_stale(fetch)  # a moment ago is news enough


def test_a_check_that_lies_in_the_future_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: 4e9)
        store(tmp_path).learn(told(2, BOTH, FIRST))
    asked = threading.Event()

    def fetch() -> SignedDocument:
        asked.set()
        raise GatewayUnreachable("gone")

    store(tmp_path).refresh_if_stale(fetch)
    assert asked.wait(20)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff"])
def test_a_damaged_file_costs_memory_and_no_run(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / FILE).write_bytes(content)
    found = store(tmp_path)
    assert trusted(found) == {IDS[0]}
    found.learn(told(2, BOTH, FIRST, SECOND))
    assert trusted(store(tmp_path)) == {IDS[0], IDS[1]}


def test_a_folder_that_cannot_be_written_costs_only_memory(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    found = store(tmp_path)
    found.learn(told(2, BOTH, FIRST, SECOND))
    assert trusted(found) == {IDS[0], IDS[1]}


def test_processes_that_learn_at_once_lose_nothing(tmp_path: Path) -> None:
    def learn(number: int) -> None:
        name = f"{number:016x}"
        store(tmp_path).learn(told(2 + number, BOTH, FIRST, SECOND, revoked=(name,)))

    threads = [threading.Thread(target=learn, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store(tmp_path).trust().revoked == {f"{n:016x}" for n in range(12)}
