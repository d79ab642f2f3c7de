"""Typed messages out of bytes and plain values, in many threads at once and in forked children; frames in parts."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from torchrelay.compiler import decoding
from torchrelay.compiler.errors import MalformedRequest
from torchrelay.compiler.request import codec

# Thirty structs within one, so that preparing it takes long and runs Python code, between which threads change.
AT_ONCE = """
import os, sys, threading
import msgspec
from torchrelay.compiler import decoding

sys.setswitchinterval(1e-6)
inner = [msgspec.defstruct(f"Inner{i}", [("number", "int")], module=__name__) for i in range(30)]
globals().update({each.__name__: each for each in inner})
Outer = msgspec.defstruct("Outer", [(f"f{i}", f"Inner{i}") for i in range(30)], module=__name__)
plain = {f"f{i}": {"number": i} for i in range(30)}
ways = [
    lambda: decoding.from_json(msgspec.json.encode(plain), type=Outer),
    lambda: decoding.from_msgpack(msgspec.msgpack.encode(plain), type=Outer),
    lambda: decoding.from_msgpack(msgspec.msgpack.encode([plain]), type=list[Outer]),
    lambda: decoding.convert(plain, type=Outer),
]
together = threading.Barrier(len(ways))

def decode(way):
    together.wait()
    for _ in range(5):
        way()
"""
IN_THREADS = """
threads = [threading.Thread(target=decode, args=(way,)) for way in ways]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("done")
"""
IN_FORKS = """
def fork():
    together.wait()
    for _ in range(20):
        child = os.fork()
        if not child:
            for way in ways:
                way()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, "a child was killed"

threads = [threading.Thread(target=decode, args=(way,)) for way in ways[1:]]
for thread in threads:
    thread.start()
fork()
for thread in threads:
    thread.join()
print("done")
"""


@pytest.mark.parametrize("then", [IN_THREADS, IN_FORKS], ids=["threads", "forks"])
def test_a_type_is_decoded_for_the_first_time_by_many_at_once(then: str) -> None:
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", AT_ONCE + then], capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_what_does_not_fit_is_told_as_msgspec_tells_it() -> None:
    with pytest.raises(msgspec.ValidationError, match="Expected `int`"):
        decoding.from_json(b'["1"]', type=list[int])
    assert decoding.from_json(b'["1"]', type=list[int], strict=False) == [1]
    with pytest.raises(msgspec.DecodeError):
        decoding.from_msgpack(b"\xc1")
    with pytest.raises(msgspec.ValidationError):
        decoding.convert({"a": "1"}, type=dict[str, int])
    assert decoding.from_json("[1, null]") == [1, None]


@pytest.mark.parametrize("decode", [decoding.from_json, decoding.from_msgpack])
def test_bytes_that_are_no_text_and_deep_nesting_are_decode_errors(decode) -> None:
    not_text = b'"\xff"' if decode is decoding.from_json else b"\xa1\xff"
    with pytest.raises(msgspec.DecodeError, match="UTF-8"):
        decode(not_text, type=str)
    deep = b"[" * 100_000 if decode is decoding.from_json else b"\x91" * 100_000
    with pytest.raises(decoding.NestedTooDeep):
        decode(deep)


def test_a_frame_may_come_in_any_parts():
    data = bytes(range(256)) * 16384  # whole pieces, so that one can end where a part does
    frame = codec.compress(data)
    for cut in range(1, len(frame)):
        assert b"".join(codec.decompressed([frame[:cut], frame[cut:]], len(data))) == data
    for cut in range(len(frame)):
        with pytest.raises(MalformedRequest, match="ends inside"):
            list(codec.decompressed([frame[:cut]], len(data)))
