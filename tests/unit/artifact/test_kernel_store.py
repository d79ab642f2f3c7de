"""Libraries that earlier compiles built: found by name, copied whole, never changed, bounded."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from torchrelay.compiler.kernel_store import libraries
from torchrelay.compiler.kernel_store.libraries import KernelExchange, KernelStore


def name(letter: str) -> str:
    return f"c{letter * 51}.main.so"


@pytest.fixture
def offers(tmp_path: Path) -> Path:
    (folder := tmp_path / "offers").mkdir()
    return folder


def built(tmp_path: Path, letter: str, content: bytes) -> Path:
    path = tmp_path / name(letter)
    path.write_bytes(content)
    return path


def test_what_one_job_offers_another_borrows(tmp_path: Path, offers: Path) -> None:
    store = KernelStore(tmp_path / "store").of("team")
    exchange = KernelExchange(store.folder, offers)
    target = tmp_path / "target.so"
    assert not exchange.copy_to(name("a"), target)
    exchange.offer(built(tmp_path, "a", b"binary"))
    assert store.collect(offers) == 1
    assert exchange.copy_to(name("a"), target)
    assert target.read_bytes() == b"binary"
    assert [path.name for path in offers.iterdir()] == [name("a")]  # marks the use
    assert store.collect(offers) == 0
    assert list(offers.iterdir()) == []


def test_a_borrower_cannot_change_what_others_load(tmp_path: Path, offers: Path) -> None:
    store = KernelStore(tmp_path / "store").of("team")
    exchange = KernelExchange(store.folder, offers)
    exchange.offer(original := built(tmp_path, "a", b"binary"))
    store.collect(offers)
    original.write_bytes(b"changed")
    exchange.copy_to(name("a"), tmp_path / "mine.so")
    (tmp_path / "mine.so").write_bytes(b"changed")
    (offers / name("a")).write_bytes(b"changed")
    store.collect(offers)
    assert (store.folder / name("a")).read_bytes() == b"binary"


@pytest.mark.parametrize("bad", ["x.so", "../" + name("a"), ".hidden", name("a") + "x", name("A")])
def test_other_names_are_not_libraries(tmp_path: Path, offers: Path, bad: str) -> None:
    store = KernelStore(tmp_path / "store").of("team")
    exchange = KernelExchange(store.folder, offers)
    if "/" not in bad:
        (offers / bad).write_bytes(b"binary")
    assert store.collect(offers) == 0
    (tmp_path / name("a")).write_bytes(b"outside the store")
    assert not exchange.copy_to(bad, tmp_path / "target")
    assert list(store.folder.iterdir()) == []


def test_links_empty_and_huge_files_are_not_taken(
    tmp_path: Path, offers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "LIBRARY_LIMIT", 10)
    (offers / name("a")).symlink_to(built(tmp_path, "x", b"secret"))
    (offers / name("b")).write_bytes(b"")
    (offers / name("c")).write_bytes(b"x" * 11)
    store = KernelStore(tmp_path / "store").of("team")
    assert store.collect(offers) == 0
    assert list(store.folder.iterdir()) == []


def test_the_least_recently_used_leave_first(tmp_path: Path, offers: Path) -> None:
    store = KernelStore(tmp_path / "store", limit_bytes=25).of("team")
    for age, letter in enumerate("abc"):
        (offers / name(letter)).write_bytes(b"x" * 10)
        store.collect(offers)
        if letter != "c":
            os.utime(store.folder / name(letter), (age + 1, age + 1))
        if letter == "b":
            (offers / name("a")).touch()  # a job uses the oldest
            store.collect(offers)
    assert sorted(path.name for path in store.folder.iterdir()) == [name("a"), name("c")]


def test_slots_that_share_a_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            (offers := tmp_path / f"offers-{number}").mkdir()
            store = KernelStore(tmp_path / "store", limit_bytes=300).of("team")
            for letter in "abcdefghij" * 5:
                (offers / name(letter)).write_bytes(letter.encode() * 100)
                store.collect(offers)
                target = tmp_path / f"target-{number}"
                if KernelExchange(store.folder, offers).copy_to(name(letter), target):
                    assert target.read_bytes() == letter.encode() * 100
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_namespaces_share_nothing_but_the_limit(tmp_path: Path, offers: Path) -> None:
    stores = KernelStore(tmp_path / "store", limit_bytes=15)
    one, other = stores.of("one"), stores.of("other")
    (offers / name("a")).write_bytes(b"x" * 10)
    one.collect(offers)
    os.utime(one.folder / name("a"), (1, 1))
    assert not KernelExchange(other.folder, offers).copy_to(name("a"), tmp_path / "target")
    (offers / name("b")).write_bytes(b"x" * 10)
    other.collect(offers)
    assert [path.name for path in sorted(stores.folder.glob("*/*"))] == [name("b")]


@pytest.mark.parametrize("bad", ["", "..", "a/b", "-a", "A", "a" * 64, "a\n"])
def test_other_names_are_no_namespaces(tmp_path: Path, bad: str) -> None:
    with pytest.raises(ValueError, match="no namespace"):
        KernelStore(tmp_path / "store").of(bad)
