"""A program that does nothing until the process that started it has ended. It imports nothing of this project."""

import ctypes
import os
import signal
import time

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent = os.getppid()
    if hasattr(libc := ctypes.CDLL(None), "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    while os.getppid() == parent:  # it may have ended before
        time.sleep(1)
