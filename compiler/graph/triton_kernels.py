"""Builds user-written Triton kernels from checked sources, and converts their constants to the wire and back.

`build` RUNS the source: only a compile child calls it."""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Callable
from typing import Any

import msgspec

from .. import decoding
from ..errors import MalformedRequest, RelayError
from ..request import allowed_names, schema
from ..request.triton_source import _INT64, BadKernelSource, check


def build(kernel: schema.KernelSource) -> Any:
    """The Triton kernel of a checked source: a JITFunction, or an Autotuner of one. RUNS the source.

    Calls with equal kernels return the same object. Raises MalformedRequest.
    """
    return _built(msgspec.msgpack.encode(kernel))


@functools.lru_cache(maxsize=256)
def _built(encoded: bytes) -> Any:
    kernel = decoding.from_msgpack(encoded, type=schema.KernelSource)
    try:
        check(kernel)
    except BadKernelSource as error:
        raise MalformedRequest(f"the source of kernel {kernel.name!r} is refused: {error}") from None
    import triton

    module = f"torchrelay_kernel_{hashlib.sha256(kernel.source.encode()).hexdigest()[:16]}"
    file = f"<{module}>"
    # Triton and Inductor read a function's source by its file's name. linecache keeps an entry that has no mtime.
    lines = kernel.source.splitlines(keepends=True)
    linecache.cache[file] = (len(kernel.source), None, lines, file)
    namespace: dict[str, Any] = {"__name__": module}
    try:
        exec(compile(kernel.source, file, "exec", dont_inherit=True), namespace)
        made = namespace[kernel.name]
        if kernel.configs:
            made = triton.autotune(
                configs=[_config(config) for config in kernel.configs],
                key=[],
                do_bench=_FirstThatRuns(len(kernel.configs)),
            )(made)
    except RelayError:
        raise
    except Exception as error:
        raise MalformedRequest(
            f"kernel {kernel.name!r} cannot be defined: {type(error).__name__}: {str(error)[:300]}"
        ) from error
    return made


class _FirstThatRuns:
    """Takes the place of triton.autotune's benchmark where the kernel is only a reference for verification.

    The first configuration that the GPU has room for is good enough: it gets time 0, those after it get time 1 and do
    not run. Autotune calls it for each of `configs` in turn.
    """

    def __init__(self, configs: int) -> None:
        self._configs = configs
        self._asked = 0
        self._found = False

    def __call__(self, run: Callable[[], object], quantiles: object) -> tuple[float, float, float]:
        if self._asked % self._configs == 0:
            self._found = False
        self._asked += 1
        if self._found:
            return 1.0, 1.0, 1.0
        run()  # raises what triton.autotune catches if the configuration does not fit
        self._found = True
        return 0.0, 0.0, 0.0


def _config(config: schema.KernelConfig) -> Any:
    import triton

    return triton.Config(
        {name: value_of(value) for name, value in config.kwargs},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        num_ctas=config.num_ctas,
        maxnreg=config.maxnreg,
    )


def constant_of(name: str, value: Any) -> schema.KernelConstant:
    """The wire format of a parameter's constant. Raises BadKernelSource."""
    if not allowed_names.IDENTIFIER.fullmatch(name):
        raise BadKernelSource(f"the name {name[:80]!r} is too long")
    if isinstance(value, str) and not allowed_names.OPTION_TEXT.fullmatch(value):
        raise BadKernelSource(f"the text of {name} is too long, or has characters that could end a literal")
    return plain_of(name, value)


def plain_of(name: str, value: Any) -> schema.KernelConstant:
    """The wire format of a module's constant, which may be any text. Raises BadKernelSource."""
    dtype = dtype_of(value)
    if dtype is not None:
        return dtype
    if value is None or type(value) in (bool, float, str) or (type(value) is int and value in _INT64):
        plain: schema.KernelConstant = value
        return plain
    raise BadKernelSource(f"{name} is a {type(value).__name__}, which cannot be sent")


def value_of(value: Any) -> Any:
    """The value that Triton takes for a constant on the wire."""
    if not isinstance(value, schema.TritonDType):
        return value
    import triton.language

    if value.name not in allowed_names.TRITON_DTYPES or not hasattr(triton.language, value.name):
        raise MalformedRequest(f"Triton has no dtype {value.name[:40]!r}")
    return getattr(triton.language, value.name)


def dtype_of(value: object) -> schema.TritonDType | None:
    """The wire format of a triton.language dtype; None for any other value."""
    if type(value).__module__ != "triton.language.core" or type(value).__name__ != "dtype":
        return None
    import triton.language

    found = (
        name for name in sorted(allowed_names.TRITON_DTYPES) if getattr(triton.language, name, None) == value
    )
    name = next(found, None)
    return None if name is None else schema.TritonDType(name)
