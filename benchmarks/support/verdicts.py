"""Bars and what comes of them: in: whether each was met, and a text; out: a line for each, and an exit status.

Without --check a bar that is not met is said and no more: figures of a busy machine are to be looked at.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

Verdict = tuple[bool, str]


def add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is not met")


def conclude(verdicts: Sequence[Verdict], *, check: bool) -> int:
    """Says each bar; the exit status. When nothing that has a bar was measured, a check fails."""
    for met, text in verdicts:
        print(f"{'pass' if met else 'FAIL'}  {text}")
    if check and not verdicts:
        print("FAIL  nothing was measured that has a bar")
    return 1 if check and not (verdicts and all(met for met, _ in verdicts)) else 0
