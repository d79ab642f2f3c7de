"""Stage 4 for large bodies: a ChildInput on standard input, an Ask or error on standard output, then exit."""

from __future__ import annotations

import sys

import msgspec

from ..compiler.errors import RelayError
from .intake import Ask, ChildInput, encode_result, parse


def main() -> None:
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ChildInput)
    result: Ask | RelayError
    try:
        result = parse(job.body, job.limits)
    except RelayError as error:
        result = error
    sys.stdout.buffer.write(encode_result(result))


if __name__ == "__main__":
    main()
