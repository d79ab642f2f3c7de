"""Puts a machine with another kind of processor beside the environment that runs this, for tests/e2e/own_service/
test_targets.py: `.venv/targets/aarch64`, 1.7 GB. Installs nothing on this machine; needs apt-get and dpkg.

torch, site: what pip has of PyTorch and of torchrelay's requirements for aarch64, in this environment's versions.
root: Debian's Python for it. tools: Debian's cross compiler and qemu-user. stubs: CUDA's libraries, whose functions all
return an error, because PyPI's PyTorch for aarch64 is linked to them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

HERE = Path(sys.prefix) / "targets" / "aarch64"
TOOLS = (
    *("g++-aarch64-linux-gnu", "gcc-aarch64-linux-gnu", "binutils-aarch64-linux-gnu", "libc6-arm64-cross"),
    *(
        "libc6-dev-arm64-cross",
        "linux-libc-dev-arm64-cross",
        "libgomp1-arm64-cross",
        "libstdc++6-arm64-cross",
    ),
    *("libgcc-s1-arm64-cross", "qemu-user-static"),
)
VERSIONED = ("g++-{0}-aarch64-linux-gnu", "gcc-{0}-aarch64-linux-gnu", "cpp-{0}-aarch64-linux-gnu")
VERSIONED += ("libgcc-{0}-dev-arm64-cross", "libstdc++-{0}-dev-arm64-cross")
ROOT = (
    *(
        "libc6",
        "libstdc++6",
        "libgcc-s1",
        "libgomp1",
        "zlib1g",
        "libexpat1",
        "libbz2-1.0",
        "liblzma5",
        "libffi8",
    ),
    *("libssl3", "libuuid1", "libcrypt1", "libsqlite3-0", "libtinfo6", "libncursesw6", "libreadline8"),
    *("libpython3.11-minimal", "libpython3.11-stdlib", "python3.11-minimal"),
)
WHEELS = ("msgspec", "cryptography", "cffi", "backports.zstd", "MarkupSafe", "numpy")
CPU = {
    "proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd aes pmull crc32 atomics fphp asimdhp asimdrdm asimddp\n"
    "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n\n",
    "sys/devices/system/cpu/cpu0/regs/identification/midr_el1": "0x00000000413fd0c1\n",
    "sys/devices/system/cpu/possible": "0\n",
    "sys/devices/system/cpu/present": "0\n",
    "sys/devices/system/cpu/online": "0\n",
}
"""A Neoverse N1, which qemu plays. PyTorch reads these files, and qemu takes them from its root."""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    environment = os.environ | {"LD_LIBRARY_PATH": str(HERE / "tools/usr/lib/x86_64-linux-gnu")}  # the tools'
    return subprocess.run(
        command, cwd=cwd, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def apt(command: str, *arguments: str, cwd: Path | None = None) -> str:
    """With lists of its own, for both architectures: this machine's stay as they are."""
    state = HERE / "apt"
    if not state.exists():
        for name in ("lists/partial", "cache/archives/partial"):
            (state / name).mkdir(parents=True)
        (state / "status").touch()
        apt("apt-get", "-qq", "update")
    options = [
        "-oAPT::Architectures::=amd64",
        "-oAPT::Architectures::=arm64",
        f"-oDir::State::lists={state}/lists",
    ]
    options += [f"-oDir::Cache={state}/cache", f"-oDir::State::status={state}/status"]
    return run(command, *options, *arguments, cwd=cwd)


def packages(names: Iterable[str], folder: Path) -> None:
    """Debian's packages, unpacked."""
    (debs := folder / "debs").mkdir(parents=True)
    apt("apt-get", "-qq", "download", *names, cwd=debs)
    for deb in sorted(debs.iterdir()):
        run("dpkg", "-x", deb, folder)
        deb.unlink()


def wheels(folder: Path, *names: str) -> None:
    platforms = [f"--platform=manylinux_2_{glibc}_aarch64" for glibc in (28, 27, 26, 17)]
    command = ["-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:", "--target", str(folder)]
    run(sys.executable, *command, *platforms, "--platform=manylinux2014_aarch64", *names)


def tools() -> None:
    folder = HERE / "tools"
    release = re.search(r"g\+\+-(\d+)", apt("apt-cache", "depends", "g++-aarch64-linux-gnu"))
    assert release is not None
    packages([*TOOLS, *(name.format(release[1]) for name in VERSIONED)], folder)
    for script in (folder / "usr/aarch64-linux-gnu/lib").glob("*.so"):
        if not script.is_symlink() and (data := script.read_bytes()).startswith(b"/* GNU ld script"):
            script.write_bytes(data.replace(b"/usr/aarch64", f"{folder}/usr/aarch64".encode()))


def root() -> None:
    packages((f"{name}:arm64" for name in ROOT), HERE / "root")
    for name, text in CPU.items():
        path = HERE / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def stubs() -> None:
    """Each library that torch's need and that is not there, with the symbols and versions that they look for."""
    libraries, folder = HERE / "torch" / "lib", HERE / "stubs"
    folder.mkdir()
    needed: set[str] = set()
    wanted: set[str] = set()
    defined: set[str] = set()
    tool = str(HERE / "tools/usr/bin/aarch64-linux-gnu-")
    for library in libraries.glob("*.so*"):
        needed |= set(re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-dW", library)))
        for *_, kind, name in map(str.split, run("nm", "-D", library).splitlines()):
            (wanted.add(name) if kind == "U" else defined.add(name.partition("@")[0]))
    by_version: dict[str, list[str]] = defaultdict(list)
    for name, _, of in (each.partition("@") for each in sorted(wanted)):
        if name not in defined and re.match("(__)?(cu|nccl|nv|fatbin)", name):
            by_version[of.strip("@")].append(name)
    there = {library.name for library in libraries.iterdir()}
    for library in sorted(name for name in needed - there if re.match("lib(cu|nccl|nv)", name)):
        own = "NVSHMEM" if "nvshmem" in library else library
        names = by_version[own] + (by_version[""] if library.startswith("libcudart") else [])
        source, versions = folder / "stub.s", folder / "stub.map"
        labels = "".join(f".globl {name}\n.type {name},%function\n{name}:\n" for name in names)
        source.write_text(f".text\n{labels} mov x0, #100\n ret\n")  # cudaErrorNoDevice
        versions.write_text(f"{own} {{ global: *; }};\n")
        script = [f"-Wl,--version-script={versions}"] if by_version[own] else []
        flags = ["-shared", "-nostdlib", f"-Wl,-soname,{library}", *script, "-o", str(folder / library)]
        run(f"{tool}g++", *flags, source)


def main() -> int:
    if sys.version_info[:2] != (3, 11) or sysconfig.get_platform() != "linux-x86_64":
        print("Debian 12's Python for aarch64 is 3.11, and this one is another: nothing is fetched")
        return 0
    wheels(HERE, f"torch=={version('torch').partition('+')[0]}")
    wheels(HERE / "site", *(f"{name}=={version(name)}" for name in WHEELS))
    tools()
    root()
    stubs()
    return 0


if __name__ == "__main__":
    sys.exit(main())
