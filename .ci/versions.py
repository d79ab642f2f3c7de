"""Runs the short tests with other versions of PyTorch and Python, each in an environment of its own; prints one table.

    make test-versions VERSIONS="2.15 2.11@python3.12"

Without versions: each PyTorch that has an operator table, with this Python. With two environments or more, a service of
the first one then serves clients of the second one too (tests/e2e/own_service/test_toolchains.py), and a service with a
Ray cluster of each serves both (tests/e2e/apart/test_two_clusters.py). --unit: only tests/unit, and starts of programs
that were changed (RECORDS); they start no service, and only torch is installed; the rest comes from the environment
that runs this file. The exit status is 0 if everything was installed and passed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import xml.etree.ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "compiler" / "request" / "operator_table" / "operators.json"
TWO_TOOLCHAINS = (
    "tests/e2e/own_service/test_toolchains.py",
    "tests/e2e/apart/test_two_clusters.py::test_each_of_two_clusters_compiles_for_its_own_toolchain_alone",
)
RECORDS = [f"tests/compile/programs/test_program_{name}.py" for name in ("mutations", "checks", "processes")]
PYTHON_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"
VERSIONS_OF = "import platform, torch; print(torch.__version__, platform.python_version())"


class Row(NamedTuple):
    """A line of the table; the counts are texts, '' where nothing ran."""

    torch: str
    python: str
    passed: str
    failed: str
    skipped: str


def supported() -> list[str]:
    """The PyTorch versions that have an operator table, newest first."""
    versions = {version for section in json.loads(TABLE.read_text()) for version in section.split()}
    return sorted(versions, key=lambda version: [int(part) for part in version.split(".")], reverse=True)


def environment(torch: str, python: str) -> Path:
    """The Python of an environment with this torch and all that the tests need, made if it is not there."""
    asked = subprocess.run([python, "-c", PYTHON_VERSION], capture_output=True, text=True, check=True)
    folder = f".venv-torch-{torch}-python-{asked.stdout.strip()}"
    command = ["make", f"{folder}/.ready", f"VENV={folder}", f"PYTHON={python}", f"TORCH=torch=={torch}.*"]
    subprocess.run(command, cwd=ROOT, check=True)
    return ROOT / folder / "bin" / "python"


def environment_for_unit_tests(torch: str) -> Path:
    """The same with this Python; all but torch and what torch requires is that of the environment we run in."""
    folder = ROOT / f".venv-torch-{torch}-unit"
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    # The environment's own setuptools would come before that of the rest, and be too old to build the package.
    subprocess.run([python, "-m", "pip", "install", "-q", f"torch=={torch}.*", "setuptools>=77"], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    rest = sysconfig.get_path("purelib")
    (packages / "rest.pth").write_text(f"import site; site.addsitedir({rest!r})\n")
    return python


def tested(python: Path, *arguments: str, **environment: str) -> Row:
    """What pytest says in the environment of this Python."""
    said = subprocess.run([python, "-c", VERSIONS_OF], capture_output=True, text=True, check=True)
    torch, version = said.stdout.split()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [str(python), "-m", "pytest", "--ignore=tests/gpu", f"--junitxml={report}", *arguments]
        status = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}).returncode
        if not report.exists():
            return Row(torch, version, "", f"pytest ended with status {status}", "")
        (suite,) = xml.etree.ElementTree.parse(report).getroot().iter("testsuite")
    tests, failures, errors, skipped = (
        int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    if status and not failed:
        return Row(torch, version, "", f"pytest ended with status {status}", "")
    return Row(torch, version, str(tests - failed - skipped), str(failed), str(skipped))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--unit", action="store_true")
    parser.add_argument("versions", nargs="*", metavar="TORCH[@PYTHON]")
    arguments = parser.parse_args()
    short = ["tests/unit" if arguments.unit else "tests", "-q", "-n", "3", "-m", "quick and not slow"]
    rows: list[Row] = []
    ran: list[tuple[Path, Row]] = []
    for entry in arguments.versions or supported():
        torch, _, named = entry.partition("@")
        python = named or sys.executable
        try:
            made = environment_for_unit_tests(torch) if arguments.unit else environment(torch, python)
            rows.append(tested(made, *short))
            ran.append((made, rows[-1]))
            if arguments.unit:
                rows.append(tested(made, *RECORDS, "-q", "-n", "3", "-m", "not slow"))
        except (OSError, subprocess.CalledProcessError) as error:  # one that does not import torch, too
            print(error, file=sys.stderr)
            rows.append(Row(torch, named, "", "not installed", ""))
    if len(ran) > 1 and not arguments.unit:
        (first, one), (second, other) = ran[:2]
        marked = ("-q", "-m", "slow or not slow")
        row = tested(first, *TWO_TOOLCHAINS, *marked, TORCHRELAY_TEST_TOOLCHAIN=str(second))
        both = row._replace(torch=f"{one.torch} and {other.torch}", python=f"{one.python} and {other.python}")
        rows.append(both)
    print("\n| torch | Python | passed | failed | skipped |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return 0 if all(row.failed == "0" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
