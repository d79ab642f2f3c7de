"""Generate C++ for a given CPU's vector instructions instead of this one's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator
from typing import Any

from ...request import cpu_isa
from ..patching import patched, replace


@contextlib.contextmanager
def cpu_target(cpu: Collection[str]) -> Iterator[None]:
    """Make Inductor generate C++ for a target (Target.cpu) instead of this CPU, without test builds."""
    from torch._inductor import cpp_builder, cpu_vec_isa

    chosen, vector_sets = [], set(cpu_isa.vector_sets(cpu))
    for isa in cpu_vec_isa.supported_vec_isa_list:
        if str(isa).split() and set(str(isa).split()) <= vector_sets:
            if isinstance(isa, cpu_vec_isa.VecAVX512):
                replace(isa, "_is_avx512_bf16_supported", "avx512_bf16" in cpu)
            chosen.append(isa)
    original = cpp_builder._get_optimization_cflags

    @functools.wraps(original)
    def optimization_flags(*args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
        cflags, ldflags = original(*args, **kwargs)
        kept = [flag for flag in cflags if not flag.startswith(("march=", "mcpu="))]
        return kept + cpu_isa.compiler_flags(cpu), ldflags

    with (
        patched(cpu_vec_isa, "valid_vec_isa_list", lambda: chosen),
        patched(cpu_vec_isa.VecISA, "check_build", lambda self, code: True),
        patched(cpp_builder, "_get_optimization_cflags", optimization_flags),
    ):
        yield
