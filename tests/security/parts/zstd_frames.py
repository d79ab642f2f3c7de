"""zstd frames that unpack to far more than they are."""

from __future__ import annotations

import struct

_BLOCK = 1 << 17


def frame(total: int, *, declared: int | None) -> bytes:
    """A zstd frame of `total` zeros, 4 bytes for each 128 KiB, that says it holds `declared` bytes or nothing.

    RFC 8878: magic, descriptor, window of 2 MiB, content size; blocks of type RLE, the last one marked.
    """
    head = b"\x28\xb5\x2f\xfd"
    if declared is None:
        head += b"\x00\x58"
    else:
        head += b"\xc0\x58" + struct.pack("<Q", declared)
    count = total // _BLOCK
    block = struct.pack("<I", _BLOCK << 3 | 2)[:3] + b"\0"
    last = struct.pack("<I", _BLOCK << 3 | 3)[:3] + b"\0"
    return head + block * (count - 1) + last
