"""What a rank's end is told as: the error that ended it, and not the last line that happened to be written."""

from __future__ import annotations

import pytest
from torchrelay.workers.training.ranks.process import error_line

TRACE = """Traceback (most recent call last):
  File "/home/me/train.py", line 8, in <module>
    inner(s)
  File "/home/me/train.py", line 6, in inner
    raise RuntimeError("bad batch")
"""


GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 3, in <module>
  |     raise ExceptionGroup("many", errors)
  | ExceptionGroup: many (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "train.py", line 1, in <module>
    |     one()
    | ValueError: one
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "train.py", line 2, in <module>
    |     two()
    | TypeError: two
    +------------------------------------
"""


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (TRACE + "RuntimeError: bad batch\n", "RuntimeError: bad batch"),
        (TRACE + "ValueError\n", "ValueError"),
        (
            TRACE + "torch.AcceleratorError: CUDA error: device-side assert triggered\n"
            "CUDA kernel errors might be asynchronously reported at some other API call.\n"
            "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n\n",
            "torch.AcceleratorError: CUDA error: device-side assert triggered",
        ),
        (
            TRACE
            + "KeyError: 1\n\nDuring handling of the above exception, another exception occurred:\n\n"
            + TRACE
            + "OSError: [Errno 28] No space left on device\nwandb: run ended\n",
            "OSError: [Errno 28] No space left on device",
        ),
        (
            '  File "train.py", line 3\n    def f(:\n          ^\nSyntaxError: invalid syntax\n',
            "SyntaxError: invalid syntax",
        ),
        (
            "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --x\n",
            "train.py: error: unrecognized arguments: --x",
        ),
        ("Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File 'a'\n", "  File 'a'"),
        ("", ""),
        (
            "".join(f"[rank1]: {line}\n" for line in [*TRACE.splitlines(), "ValueError: of two", "lines"])
            + "terminate called\n",
            "ValueError: of two",
        ),
        (GROUP, "ExceptionGroup: many (2 sub-exceptions)"),
        (GROUP.partition("-\n")[2], "TypeError: two"),
    ],
)
def test_the_error_is_named(written: str, told: str) -> None:
    assert error_line([line for line in written.splitlines() if line.strip()]) == told
