"""What this process' own Inductor generates for a program, beside the keys of the program's graphs."""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct
from torchrelay.compiler.errors import RelayError
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.request import key
from torchrelay.compiler.torch_internals import patching
from torchrelay.compiler.torch_internals.inductor import config
from torchrelay.compiler.torch_internals.inductor.compile_fx import (
    DryRunFinished,
    copy_graph,
    stop_after_lowering,
)


class Seen(Struct, frozen=True):
    """A program as the service and as Inductor see it, one item for each graph that Dynamo makes of it.

    keys: 64 hex digits, or the code and message of a refusal. code: what Inductor generates, forward and backward; ''
    where it was not asked.
    """

    keys: tuple[str, ...]
    code: tuple[str, ...]

    @property
    def refused(self) -> bool:
        return any(len(item) != 64 for item in self.keys)


def see(
    program: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    dynamic: bool | None = None,
    mode: str = "default",
    options: Mapping[str, Any] | None = None,
    code: Callable[[str], bool] = lambda key: True,
) -> Seen:
    """Trace a program with Dynamo, and run its graphs without Inductor. code: whether to generate a graph's code, by
    its key or refusal."""
    keys: list[str] = []
    generated: list[str] = []
    chosen = dict(options or {})

    def backend(gm: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        try:
            request = capture(gm, example, mode=mode, options=chosen).request  # type: ignore[arg-type]
            keys.append(key.key_of(request))
        except RelayError as error:
            keys.append(f"{error.code}: {error}")
        eager = copy_graph(gm)
        patches = {**config.mode_options(mode), **chosen}
        source = ""
        if code(keys[-1]):
            # What cannot be sent need not compile either.
            with contextlib.nullcontext() if len(keys[-1]) == 64 else contextlib.suppress(Exception):
                source = without_comments(generated_source(gm, example, patches))
        generated.append(source)
        return eager.forward

    torch.compiler.reset()
    torch.compile(program, backend=backend, dynamic=dynamic)(*inputs)
    return Seen(tuple(keys), tuple(generated))


def generated_source(gm: torch.fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any]) -> str:
    """The Python and C++ that Inductor generates for a graph, forward and backward, after the C++ compiler's command.
    `gm` may be changed. Neither Inductor's caches nor a C++ compiler are used."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.graph import GraphLowering

    sources: list[str] = []
    always: Any = types.SimpleNamespace(in_dry_run=True, report_problems=lambda: None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.inductor_config({"force_disable_caches": True, "compile_threads": 1}))
        lazily = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
        stack.enter_context(config.aot_config(lazily))
        lower = stack.enter_context(stop_after_lowering(compile_fx_inner, always))
        stop = GraphLowering.compile_to_module

        def compile_to_module(self: Any) -> Any:
            code, _ = self.codegen_with_cpp_wrapper() if self.cpp_wrapper else self.codegen()
            sources.append(code.value)
            return stop(self)

        def generate(*args: Any, **kwargs: Any) -> Any:
            if not sources:
                sources.append(_compiler_command())
            return lower(*args, **kwargs)

        stack.enter_context(patching.patched(GraphLowering, "compile_to_module", compile_to_module))
        stack.enter_context(contextlib.suppress(DryRunFinished))
        compile_fx(gm, list(inputs), inner_compile=generate, config_patches=dict(patches))
    return "\n".join(sources)


def _compiler_command() -> str:
    """How this configuration compiles C++ kernels."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    options = CppTorchDeviceOptions(vec_isa=pick_vec_isa(), device_type="cpu")
    return str(CppBuilder(name="kernel", sources="source", BuildOption=options).get_command_line())


def without_comments(source: str) -> str:
    """Generated code without its comments, which name nodes, files and the numbers of graphs."""
    return "\n".join(line for line in source.splitlines() if not re.match(r"\s*(# |//)", line))
