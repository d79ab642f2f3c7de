"""Keeps programs on this machine, each under its frame's key, and reads none that this user has not written.

A program holds bytecode. So each file ends with an HMAC by a key of this user's (STATE/programs.key, mode 0600), and a
file is decoded only if it holds. A failure of the disk costs a program, never the run.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

import msgspec

from ....compiler import decoding
from ....compiler.artifact.programs.records import LIMIT_BYTES, REVISION, FrameProgram, ProgramFile
from ....compiler.process.own_files import own_folder, read_own
from ....compiler.request import codec
from ...atomic_file import locked, write_atomically
from ...reports.run_report import process_report

_VARIANTS = 16
"""The most that are kept of one frame; the oldest go."""
_STALE = 256
"""Digests of one frame's stale records; the oldest go."""
_MAC_BYTES = 32
_KEY_BYTES = 32
_KEY_FILE = "programs.key"
_SOME = "a function"
"""A file's name is a digest: which function it is of is not known here."""


def digest(program: FrameProgram) -> str:
    """What names a record that is not to be used again."""
    return hashlib.sha256(msgspec.msgpack.encode(program)).hexdigest()


class ProgramStore:
    """Programs in a folder. Safe for threads and processes: a file appears whole, and the last writer wins."""

    def __init__(self, folder: Path, state: Path) -> None:
        self._folder = folder / "programs"
        self._key_path = state / _KEY_FILE
        self._key: bytes | None = None

    def file(self, key: str) -> ProgramFile:
        """What is kept under `key`, the latest variant last; nothing if there is no file that can be used."""
        none = ProgramFile(revision=REVISION, variants=[])
        try:
            data = (self._folder / key).read_bytes()
            body, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
            if not hmac.compare_digest(mac, self._mac(key, body)):
                raise ValueError("the file was not written with this user's key")
            plain = codec.decompress(body, LIMIT_BYTES)
            found = decoding.from_msgpack(plain, type=ProgramFile)
        except FileNotFoundError:
            return none
        except Exception as error:
            process_report().traced(_SOME, f"its records cannot be read: {error}")
            return none
        return found if found.revision == REVISION else none

    def add(self, key: str, program: FrameProgram) -> None:
        """Keep one more variant."""
        file = self.file(key)
        variants = [each for each in file.variants if each != program][1 - _VARIANTS :]
        self._write(key, [*variants, program], file.stale)

    def drop(self, key: str, program: FrameProgram) -> None:
        """Remove a variant that is stale, and do not use it again, whoever brings it."""
        file, stale = self.file(key), digest(program)
        variants = [each for each in file.variants if digest(each) != stale]
        self._write(key, variants, [*file.stale, stale][-_STALE:])

    def _write(self, key: str, variants: list[FrameProgram], stale: list[str]) -> None:
        try:
            file = ProgramFile(revision=REVISION, variants=variants, stale=stale)
            body = codec.compress(msgspec.msgpack.encode(file))
            with own_folder(self._folder) as folder:
                write_atomically(folder / key, body + self._mac(key, body))
        except Exception as error:
            process_report().traced(_SOME, f"its record cannot be kept: {error}")

    def _mac(self, key: str, body: bytes) -> bytes:
        return hmac.new(self._secret(), key.encode() + b"\0" + body, hashlib.sha256).digest()

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
