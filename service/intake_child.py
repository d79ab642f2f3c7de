"""Stage 4 for large bodies: a ChildInput on standard input, an Ask or error on standard output, then exit.

A few KiB can unpack to 100 MiB of empty lists, which take 4 GiB as objects: hence a limit on this process' memory.
"""

from __future__ import annotations

import resource
import sys

import msgspec

from ..compiler.errors import LimitExceeded, RelayError
from .intake import Ask, ChildInput, encode_result, parse

MEMORY_BYTES = 2 << 30
"""Address space of this process; the largest graph within the limits takes a quarter of it."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ChildInput)
    result: Ask | RelayError
    try:
        result = parse(job.body, job.limits)
    except RelayError as error:
        result = error
    except MemoryError:
        result = LimitExceeded(f"the request takes more than {MEMORY_BYTES >> 20} MiB to check")
    sys.stdout.buffer.write(encode_result(result))


if __name__ == "__main__":
    main()
