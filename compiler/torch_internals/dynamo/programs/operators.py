"""Operators as values that two processes can compare: what a trace takes from one is its schema and its fake."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from ....artifact.programs import digests
from ....artifact.programs.records import NotPortable
from ....request.operator_table import table

_OWN = frozenset({"aten", "higher_order", "prims"})
"""Namespaces of PyTorch's that graphs call: their operators are those of the version."""
_ATEN = "aten/"
"""How the names of kernels of these operators begin; those of other namespaces come when they are first used."""
_UNREAD = frozenset({"functorch_table", "is_view", "non_fallthrough_keys", "py_kernels", "python_key_table"})
"""Attributes of operators that have no underscore."""


def described(op: OpOverload | OpOverloadPacket | HigherOrderOperator) -> Any:
    """Raises NotPortable for an operator of no known library: its fake may call whatever it likes."""
    names = [name for name in vars(op) if not name.startswith("_") and name not in _UNREAD]
    if isinstance(op, HigherOrderOperator):
        return ["operator", str(op), sorted(names)]
    packet = op if isinstance(op, OpOverloadPacket) else op.overloadpacket
    namespace, _, name = packet._qualified_op_name.partition("::")
    added = sorted(set(names) - set(packet.overloads()))
    if namespace in _OWN:
        return ["operator", str(op), added]
    library = table.library_of(f"torch.ops.{namespace}.{name}")
    if library is None:
        raise NotPortable(f"an operator of no known library, {op}")
    return ["operator", str(op), added, _source(table.LIBRARIES[library].module, packet)]


def kernels() -> str:
    """A digest of the names of kernels in Python of PyTorch's operators. PyTorch itself adds some when they are first
    used."""
    return _digest(frozenset(torch.library._impls))


def check_all() -> None:
    """Raises NotPortable for a fake or a kernel in Python of an operator of PyTorch's that is not PyTorch's; takes
    30 ms."""
    _check_fakes()
    _check_kernels()


def check_new(known: str) -> None:
    """The same, but at once if `kernels` were `known`, which have been checked before; else once in this process."""
    digests.once("fakes", _check_fakes, lambda check: check())
    if kernels() != known:
        _check_once(frozenset(torch.library._impls))


@functools.lru_cache(maxsize=1)
def _check_once(registered: frozenset[str]) -> None:
    _check_kernels()


def _check_fakes() -> None:
    for name, functions in _fakes():
        if name.partition("::")[0] in _OWN and not all(map(_is_own, functions)):
            raise NotPortable(f"another fake of an operator of PyTorch's, {name}")


def _check_kernels() -> None:
    own = str(Path(torch.__file__).parent)
    for name in {key.rpartition("/")[0] for key in torch.library._impls if key.startswith(_ATEN)}:
        for line in torch._C._dispatch_dump(name.replace("/", "::", 1)).splitlines():
            file = line.partition("registered at ")[2].partition(":")[0]
            if file.endswith((".py", ">")) and not file.startswith(own):
                raise NotPortable(f"another kernel of an operator of PyTorch's, {name}")


@functools.lru_cache(maxsize=1)
def _digest(registered: frozenset[str]) -> str:
    names = sorted(key for key in registered if key.startswith(_ATEN))
    return hashlib.sha256(repr(names).encode()).hexdigest()


def _source(module: str, packet: OpOverloadPacket) -> str:
    """A digest of the library's file. Raises NotPortable if an operator's functions come from elsewhere."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        raise NotPortable(f"an operator of a library that is not imported, {packet}")
    defined: Any = torch._library.custom_ops.OPDEFS.get(packet._qualified_op_name)
    functions = [
        getattr(defined, name, None)
        for name in ("_abstract_fn", "_backward_fn", "_setup_context_fn", "_init_fn")
    ]
    for name, fakes in _fakes():
        if name.partition(".")[0] == packet._qualified_op_name:
            functions += fakes
    for function in functions:
        if function is not None and not _is_own(function) and function.__code__.co_filename != file:
            raise NotPortable(f"an operator's function that is not the library's, {packet}")
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _fakes() -> Iterator[tuple[str, list[Any]]]:
    for name, entry in list(torch._library.simple_registry.singleton._data.items()):
        kernels = getattr(entry.fake_impl, "kernels", None) or [entry.fake_impl.kernel]
        yield name, [kernel.func for kernel in kernels if kernel is not None]


def _is_own(function: Any) -> bool:
    return str(getattr(function, "__module__", None)).partition(".")[0] in digests.LIBRARIES
