"""Prints the lines of each package and of the tests, and fails above the limits in pyproject.toml,
[tool.torchrelay.lines], and where a file or a folder of a package is too large to find one's way in.

Every text file in git counts, but for the operator table, which is generated. A folder counts with its subfolders.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("clients", "compiler", "workers", "service")
GENERATED = "compiler/request/operator_table/operators.json"


def files() -> list[Path]:
    known = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in known.stdout.split("\0") if name and (ROOT / name).is_file()]


def lines(path: Path) -> int:
    data = (ROOT / path).read_bytes()
    return 0 if b"\0" in data else data.count(b"\n")


def main() -> int:
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["torchrelay"]["lines"]
    by_top: Counter[str] = Counter()
    by_folder: Counter[str] = Counter()
    entries: dict[str, set[str]] = {}
    problems = []
    for path in files():
        if path.parts[0] not in (*PACKAGES, "tests") or path.as_posix() == GENERATED:
            continue
        count = lines(path)
        by_top[path.parts[0]] += count
        if path.parts[0] in PACKAGES:
            for folder, entry in zip(path.parents, (path, *path.parents), strict=False):
                by_folder[folder.as_posix()] += count
                entries.setdefault(folder.as_posix(), set()).add(entry.name)
            if path.suffix == ".py" and count > limits["file"]:
                problems.append(f"{path} has {count:,} lines, {limits['file']:,} is the limit")
    packages = sum(by_top[name] for name in PACKAGES)
    print(
        "  ".join(f"{name} {by_top[name]:,}" for name in PACKAGES),
        f" together {packages:,}  tests {by_top['tests']:,}",
    )
    if packages > limits["packages"]:
        problems.append(f"the packages have {packages:,} lines, {limits['packages']:,} is the limit")
    if by_top["tests"] > limits["tests"]:
        problems.append(f"the tests have {by_top['tests']:,} lines, {limits['tests']:,} is the limit")
    for folder, count in sorted(by_folder.items()):
        allowed = limits["folders"].get(folder, limits["folder"])
        if folder not in (".", *PACKAGES) and count > allowed:
            problems.append(f"{folder} has {count:,} lines, {allowed:,} is the limit")
        there = len(entries[folder] - {"__init__.py"})
        if folder != "." and there > limits["entries"]:
            problems.append(f"{folder} has {there} entries, {limits['entries']} is the limit")
    for problem in problems:
        print(f"{problem} (pyproject.toml, [tool.torchrelay.lines])", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
