"""Generate C++ for a given CPU's vector instructions instead of this one's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ..patching import patched, replace


@contextlib.contextmanager
def cpu_target(vector_sets: Collection[str], flags: Sequence[str], avx512_bf16: bool) -> Iterator[None]:
    """Make Inductor generate C++ for a given CPU instead of this one.

    Replaces torch._inductor.cpu_vec_isa.valid_vec_isa_list, the test builds by which Inductor finds out what this
    CPU can do (VecISA.check_build: three runs of g++, 2.5 s, in every job), and the -march part of
    torch._inductor.cpp_builder._get_optimization_cflags.
    """
    from torch._inductor import cpp_builder, cpu_vec_isa

    chosen = []
    for isa in cpu_vec_isa.supported_vec_isa_list:
        if str(isa).split() and set(str(isa).split()) <= set(vector_sets):
            if isinstance(isa, cpu_vec_isa.VecAVX512):
                replace(isa, "_is_avx512_bf16_supported", avx512_bf16)
            chosen.append(isa)
    original = cpp_builder._get_optimization_cflags

    @functools.wraps(original)
    def optimization_flags(*args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
        cflags, ldflags = original(*args, **kwargs)
        kept = [flag for flag in cflags if not flag.startswith(("march=", "mcpu="))]
        return kept + list(flags), ldflags

    with (
        patched(cpu_vec_isa, "valid_vec_isa_list", lambda: chosen),
        patched(cpu_vec_isa.VecISA, "check_build", lambda self, code: True),
        patched(cpp_builder, "_get_optimization_cflags", optimization_flags),
    ):
        yield
