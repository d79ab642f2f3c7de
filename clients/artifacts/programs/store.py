"""Keeps programs on this machine, each under its frame's key, and reads none that this user has not written.

Layout: FOLDER/programs/KEY/NAME, a file for each variant of a frame, whose modification time is its last use, and a
file of digests of stale ones. A program holds bytecode. So each file ends with an HMAC by a key of this user's
(STATE/programs.key, mode 0600), and is decoded only if that holds. A failure of the disk costs a program, never the
run.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ....compiler import decoding
from ....compiler.artifact.programs.records import LIMIT_BYTES, FrameProgram
from ....compiler.process.own_files import own_folder, read_own
from ....compiler.request import codec
from ...atomic_file import locked, write_atomically
from ...reports.run_report import process_report

_VARIANTS = 32
"""The most that are kept of one frame; those whose last use is longest ago go."""
_STALE = 256
"""Digests of one frame's stale records; the oldest go."""
_STALE_FILE = "stale"
_CONSTANT, _SYMBOLIC = "constant-", "symbolic-"
"""Beginnings of a variant's name, by its sizes: which is read first is known before any is."""
_MAC_BYTES = 32
_KEY_BYTES = 32
_KEY_FILE = "programs.key"
_SOME = "a function"
"""A file's name is a digest: which function it is of is not known here."""


def digest(program: FrameProgram) -> str:
    """What names a record that is not to be used again."""
    return hashlib.sha256(msgspec.msgpack.encode(program)).hexdigest()


class ProgramStore:
    """Programs in a folder. Safe for threads and processes: a file appears whole, and each variant has its own."""

    def __init__(self, folder: Path, state: Path) -> None:
        self._folder = folder / "programs"
        self._key_path = state / _KEY_FILE
        self._key: bytes | None = None

    def variants(self, key: str) -> Iterator[FrameProgram]:
        """What is kept under `key` and can be used, the likeliest first (records.in_order), each read when it is asked
        for."""
        names = self._names(key)
        for name in sorted(names, key=lambda name: (name.startswith(_SYMBOLIC), -names[name])):
            program = self._read(key, name, FrameProgram)
            if program is not None:
                yield program

    def stale(self, key: str) -> list[str]:
        """Digests of records that are not used, because a new trace of the same call differed; the latest last."""
        return self._read(key, _STALE_FILE, list[str]) or []

    def add(self, key: str, program: FrameProgram) -> None:
        """Keep one more variant."""
        self._write(key, _name(program), program)
        names = self._names(key)
        for name in sorted(names, key=names.__getitem__)[:-_VARIANTS]:
            self._remove(key, name)

    def used(self, key: str, program: FrameProgram) -> None:
        """A variant is used now, if it is kept here."""
        with contextlib.suppress(OSError):  # a team's, or a disk that is read-only
            _use_now(self._folder / key / _name(program))

    def remove(self, key: str, program: FrameProgram) -> None:
        self._remove(key, _name(program))

    def drop(self, key: str, program: FrameProgram) -> None:
        """Remove a variant that is stale, and do not use it again, whoever brings it."""
        self.remove(key, program)
        self._write(key, _STALE_FILE, [*self.stale(key), digest(program)][-_STALE:])

    def _names(self, key: str) -> dict[str, int]:
        """Files of variants, with the time of their last use in nanoseconds."""
        found = {}
        try:
            with os.scandir(self._folder / key) as entries:
                for each in entries:
                    if each.name.startswith((_CONSTANT, _SYMBOLIC)):
                        with contextlib.suppress(FileNotFoundError):  # another process has removed it
                            found[each.name] = each.stat().st_mtime_ns
        except FileNotFoundError:
            pass
        except OSError as error:
            process_report().traced(_SOME, f"its records cannot be read: {error}")
        return found

    def _read(self, key: str, name: str, kind: Any) -> Any:
        """What the file holds; None if there is none that can be used."""
        try:
            data = (self._folder / key / name).read_bytes()
            body, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
            if not hmac.compare_digest(mac, self._mac(key, name, body)):
                raise ValueError("the file was not written with this user's key")
            return decoding.from_msgpack(codec.decompress(body, LIMIT_BYTES), type=kind)
        except FileNotFoundError:
            return None
        except Exception as error:
            process_report().traced(_SOME, f"its records cannot be read: {error}")
            return None

    def _write(self, key: str, name: str, value: Any) -> None:
        try:
            body = codec.compress(msgspec.msgpack.encode(value))
            data = body + self._mac(key, name, body)
            with own_folder(self._folder) as folder:
                (folder / key).mkdir(mode=0o700, exist_ok=True)
                write_atomically(folder / key / name, data)
                _use_now(folder / key / name)
        except Exception as error:
            process_report().traced(_SOME, f"its record cannot be kept: {error}")

    def _remove(self, key: str, name: str) -> None:
        try:
            with own_folder(self._folder) as folder:
                (folder / key / name).unlink(missing_ok=True)
        except OSError as error:
            process_report().traced(_SOME, f"its record cannot be removed: {error}")

    def _mac(self, key: str, name: str, body: bytes) -> bytes:
        return hmac.new(self._secret(), f"{key}/{name}".encode() + b"\0" + body, hashlib.sha256).digest()

    def _secret(self) -> bytes:
        if self._key is None:
            with locked(self._key_path.with_suffix(".lock")):  # ranks start at one time
                if not self._key_path.exists():
                    write_atomically(self._key_path, secrets.token_bytes(_KEY_BYTES))
            found = read_own(self._key_path)
            if len(found) != _KEY_BYTES:
                raise ValueError(f"{self._key_path} does not hold {_KEY_BYTES} bytes")
            self._key = found
        return self._key


def _use_now(path: Path) -> None:
    """Raises OSError. The clock of files themselves is coarse."""
    os.utime(path, ns=(time.time_ns(), time.time_ns()))


def _name(program: FrameProgram) -> str:
    return (_SYMBOLIC if program.shapes else _CONSTANT) + digest(program)
