"""Stage 4: a process that parses one large body. It reads a ParseInput and writes a CompileRequest or an error.

A few KiB can unpack to 100 MiB of empty lists, which take 4 GiB as objects: hence a limit on this process' memory.
"""

from __future__ import annotations

import gc
import resource
import sys

from ...compiler import decoding
from ...compiler.errors import LimitExceeded, RelayError
from ...compiler.request import codec
from .compile_request import CompileRequest, ParseInput, encode_result, parse

_BASE_BYTES = 384 << 20
_TIMES = 3
"""Address space of this process: a base, of which as many values as a request may have take 300 MiB, and so many times
the largest request: as it came, its texts and constants, and its canonical bytes."""


def memory_bytes(limits: codec.Limits) -> int:
    """What one check may take, at most."""
    return _BASE_BYTES + _TIMES * limits.request_bytes


def main() -> None:
    gc.disable()  # a request has no cycles, and the process ends soon: collecting costs most of the time
    job = decoding.from_msgpack(sys.stdin.buffer.read(), type=ParseInput)
    memory = memory_bytes(job.limits)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    result: CompileRequest | RelayError
    try:
        result = parse(job.body, job.limits)
    except RelayError as error:
        result = error
    except MemoryError:
        result = LimitExceeded(f"the request takes more than {memory >> 20} MiB to check")
    sys.stdout.buffer.write(encode_result(result))


if __name__ == "__main__":
    main()
