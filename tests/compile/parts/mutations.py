"""Changes of a program and of what is around it: what the key and the generated code make of each.

Run as a script, it prints them all as a table in Markdown.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import programs
import settings as s
import torch
from generated_code import Seen, see
from msgspec import Struct
from programs import PROGRAMS, Inputs, Program, ones
from torch import nn
from torch.nn import attention, functional


class Change(Struct, frozen=True, kw_only=True):
    """One change of the program that `base` names: of what is around it, of its text, its inputs or its compile."""

    base: str = "model"
    around: s.Around = contextlib.nullcontext
    program: Callable[[], Program] | None = None
    inputs: Inputs | None = None
    dynamic: bool | None = None
    mode: str = "default"
    options: Mapping[str, Any] = {}
    generate: bool = True
    """False: Inductor would measure kernels, or needs a GPU."""

    def see(self, *, also_refused: bool = False) -> Seen:
        program, inputs = PROGRAMS[self.base]
        with self.around():
            return see(
                (self.program or program)(),
                (self.inputs or inputs)(),
                dynamic=self.dynamic,
                mode=self.mode,
                options=self.options,
                code=lambda key: self.generate and (also_refused or len(key) == 64),
            )


@functools.cache
def unchanged(base: str) -> Seen:
    return Change(base=base).see()


def around(base: str, context: s.Around) -> Change:
    return Change(base=base, around=context)


def inductor(value: Any, *names: str, base: str = "model") -> dict[str, Change]:
    return {
        f"inductor.{name}": around(base, functools.partial(s.inductor.patch, {name: value})) for name in names
    }


def functorch(value: Any, *names: str, base: str = "model") -> dict[str, Change]:
    return {
        f"functorch.{name}": around(base, functools.partial(s.functorch.patch, {name: value}))
        for name in names
    }


def text(base: str, program: Program) -> Change:
    return Change(base=base, program=lambda: program)


def given(base: str, inputs: Inputs) -> Change:
    return Change(base=base, inputs=inputs)


def marked(mark: Callable[..., object], *args: Any, base: str = "softmax", **kwargs: Any) -> Change:
    def inputs() -> list[torch.Tensor]:
        tensors = PROGRAMS[base][1]()
        mark(tensors[0], *args, **kwargs)
        return tensors

    return given(base, inputs)


def aliased() -> list[torch.Tensor]:
    x = torch.ones(4, 6)
    return [x, x.view(4, 6)]


def annotated(values: dict[str, object]) -> Program:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.fx.traceback.annotate(values):
            return programs.arithmetic(x, y)

    return program


def checkpointed(context: Callable[[], Any] | None = None) -> Program:
    options: dict[str, Any] = {} if context is None else {"context_fn": context}

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(programs.dropped_out, x, use_reentrant=False, **options)

    return program


def save_all() -> Any:
    return torch.utils.checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.sin.default])


backends: Any = torch.backends
cuda: Any = torch.backends.cuda
dynamo: Any = torch._dynamo

FLAGS = {
    "matmul precision, older interface": around(
        "model", lambda: s.precisions(lambda: torch.set_float32_matmul_precision("high"))
    ),
    "fp32_precision": around("model", lambda: s.precisions(s.fp32(backends, "tf32"))),
    "cuda.matmul.fp32_precision": around("model", lambda: s.precisions(s.fp32(cuda.matmul, "tf32"))),
    "cudnn.fp32_precision": around("model", lambda: s.precisions(s.fp32(backends.cudnn, "tf32"))),
    "cudnn.conv.fp32_precision": around("model", lambda: s.precisions(s.fp32(backends.cudnn.conv, "ieee"))),
    "cudnn.rnn.fp32_precision": around("model", lambda: s.precisions(s.fp32(backends.cudnn.rnn, "ieee"))),
    "mkldnn.fp32_precision": around("model", lambda: s.precisions(s.fp32(backends.mkldnn, "bf16"))),
    "mkldnn.matmul.fp32_precision": around(
        "model", lambda: s.precisions(s.fp32(backends.mkldnn.matmul, "bf16"))
    ),
    "mkldnn.conv.fp32_precision": around(
        "convolutions", lambda: s.precisions(s.fp32(backends.mkldnn.conv, "bf16"))
    ),
    "cudnn.allow_tf32": around(
        "model", lambda: s.precisions(lambda: setattr(backends.cudnn, "allow_tf32", False))
    ),
    "cuda.matmul.allow_tf32": around(
        "model", lambda: s.precisions(lambda: setattr(cuda.matmul, "allow_tf32", True))
    ),
    "reduced precision of bf16": around(
        "model", lambda: s.attribute(cuda.matmul, "allow_bf16_reduced_precision_reduction", False)
    ),
    "reduced precision of fp16": around(
        "model", lambda: s.attribute(cuda.matmul, "allow_fp16_reduced_precision_reduction", False)
    ),
    "cudnn.deterministic": around("model", lambda: s.attribute(backends.cudnn, "deterministic", True)),
    "cudnn.enabled": around("model", lambda: s.attribute(backends.cudnn, "enabled", False)),
    "mkldnn.enabled": around("convolutions", lambda: backends.mkldnn.flags(enabled=False)),
    "deterministic": around("scatter", s.deterministic),
    "deterministic, warn only": around("scatter", lambda: s.deterministic(warn_only=True)),
    "fill_uninitialized_memory": around(
        "model", lambda: s.attribute(torch.utils.deterministic, "fill_uninitialized_memory", False)
    ),
    "threads": around("wide", lambda: s.setting(torch.get_num_threads, torch.set_num_threads, 5)),
    "default dtype": around(
        "made inside", lambda: s.setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64)
    ),
    "default device": around("made inside", lambda: torch.device("meta")),
    "opt_einsum.enabled": around("chain of products", lambda: backends.opt_einsum.flags(enabled=False)),
    "opt_einsum.strategy": around("chain of products", lambda: backends.opt_einsum.flags(strategy="optimal")),
    "SDPA by math alone": around("attention", lambda: attention.sdpa_kernel([attention.SDPBackend.MATH])),
    "SDPA without cudnn": around(
        "attention", lambda: s.setting(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, False)
    ),
    "SDPA without flash": around(
        "attention", lambda: s.setting(cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False)
    ),
    "SDPA, priority of kernels": around(
        "attention",
        lambda: s.setting(
            torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order, [2, 1, 0, 3, 4]
        ),
    ),
    "multiprocessors set aside": around(
        "model",
        lambda: s.setting(torch._C._get_sm_carveout_experimental, torch._C._set_sm_carveout_experimental, 8),
    ),
    "SDPA by math alone, reduced precision": around(
        "attention by math",
        lambda: s.setting(
            cuda.fp16_bf16_reduction_math_sdp_allowed, cuda.allow_fp16_bf16_reduction_math_sdp, True
        ),
    ),
}

if backends.cudnn.is_available():
    FLAGS["cudnn.benchmark"] = around("model", lambda: s.attribute(backends.cudnn, "benchmark", True))

CONTEXTS = {
    "inference mode": around("model", torch.inference_mode),
    "no grad": around("model", torch.no_grad),
    "autocast": around("model", lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast to float16": around("model", lambda: torch.autocast("cpu", torch.float16)),
    "autocast without a cache": around(
        "model", lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    ),
    "autocast's default dtype": around("product in autocast", lambda: s.autocast_dtype("cpu", torch.float16)),
    "autocast's default dtype on a GPU": around(
        "product in autocast", lambda: s.autocast_dtype("cuda", torch.bfloat16)
    ),
    "hooks for saved tensors": around("model", s.hooks),
    "InductorChoices of one's own": around("model", s.own_choices),
    "code generator of one's own": around("model", s.own_code_generator),
    "decomposition of one's own": around("model", s.own_decomposition),
    "lowering of one's own": around("model", s.own_lowering),
    "search for a faulty pass": around("model", s.bisecting),
}

CONFIGURATION = {
    **inductor(
        s.a_pass,
        "joint_custom_pre_pass",
        "joint_custom_post_pass",
        "post_grad_custom_pre_pass",
        "post_grad_custom_post_pass",
        "pre_grad_custom_pass",
        "_pre_fusion_custom_pass",
        "custom_partitioner_fn",
    ),
    "optimization off, by the environment": around("model", s.variable("TORCHINDUCTOR_DEBUG_COMPILE", "1")),
    "Triton's interpreter": around("model", s.variable("TRITON_INTERPRET", "1")),
    "Triton's multiplications and additions apart": around(
        "model", s.variable("TRITON_DEFAULT_FP_FUSION", "0")
    ),
    **inductor(True, "cpp_wrapper", "freezing", "emulate_precision_casts", "cpp.dynamic_threads"),
    **inductor(True, "debug_index_asserts", "nan_asserts", "memory_planning"),
    **inductor(True, "cpp.enable_unsafe_math_opt_flag", "cpp.inject_relu_bug_TESTING_ONLY"),
    **inductor(True, "fallback_random", base="dropped out"),
    **inductor(False, "epilogue_fusion", "size_asserts", "implicit_fallbacks", "allow_buffer_reuse"),
    **inductor(False, "split_reductions", "cpp.enable_tiling_heuristics", base="wide"),
    **inductor(False, "pattern_matcher", "cpp.weight_prepack", "cpp.vec_isa_ok"),
    **inductor(1, "cpp.simdlen", "realize_opcount_threshold", "max_fusion_size", base="softmax"),
    **inductor(1, "cpp.min_chunk_size", "cpp.max_horizontal_fusion_size", base="wide"),
    **inductor("fast", "cpp.enable_floating_point_contract_flag"),
    **inductor("joint_graph_passes", "disabled_passes"),
    **functorch(s.a_pass, "joint_custom_pass", "activation_memory_budget_solver"),
    **functorch(True, "enable_activation_offloading", "aggressive_recomputation", "recompute_views"),
    "functorch.functionalize_rng_ops": Change(
        base="dropped out",
        around=lambda: s.functorch.patch(functionalize_rng_ops=True),
        generate=False,  # it asks CUDA for its state
    ),
    **functorch(False, "cse", "donated_buffer", "treat_parameters_as_free_to_save"),
    **functorch(False, "view_replay_for_aliased_outputs", base="views"),
    **functorch("all", "saved_tensors_hooks_filtering_mode"),
    **functorch(0.5, "activation_memory_budget"),
    "backed_size_oblivious": around("model", lambda: s.fx.patch(backed_size_oblivious=True)),
    "mode max-autotune": Change(mode="max-autotune", generate=False),
    "mode reduce-overhead": Change(mode="reduce-overhead"),
    "option max_fusion_size": Change(options={"max_fusion_size": 3}),
}

INPUTS = {
    "an input of float64": given("arithmetic", lambda: [torch.ones(4, 6).double(), torch.ones(4, 6)]),
    "an input of bfloat16": given("arithmetic", lambda: [torch.ones(4, 6).bfloat16(), torch.ones(4, 6)]),
    "an input of int32": given("arithmetic", lambda: [torch.ones(4, 6).int(), torch.ones(4, 6)]),
    "an input of bool": given("arithmetic", lambda: [torch.ones(4, 6).bool(), torch.ones(4, 6)]),
    "a complex input": given("arithmetic", lambda: [torch.ones(4, 6) * 1j, torch.ones(4, 6)]),
    "a lazily conjugated input": given(
        "arithmetic", lambda: [(torch.ones(4, 6) * 1j).conj(), torch.ones(4, 6)]
    ),
    "a transposed input": given("arithmetic", lambda: [torch.ones(6, 4).t(), torch.ones(4, 6)]),
    "an input with gaps": given("arithmetic", lambda: [torch.ones(4, 12)[:, ::2], torch.ones(4, 6)]),
    "an input with an offset": given("arithmetic", lambda: [torch.ones(5, 6)[1:], torch.ones(4, 6)]),
    "an expanded input": given("arithmetic", lambda: [torch.ones(6).expand(4, 6), torch.ones(4, 6)]),
    "an input of one row": given("arithmetic", ones((1, 6), (4, 6))),
    "an input with a gradient": given("arithmetic", ones((4, 6), (4, 6), requires_grad=True)),
    "an input that is computed": given(
        "arithmetic", lambda: [torch.ones(4, 6, requires_grad=True) * 2, torch.ones(4, 6)]
    ),
    "a parameter as input": given("arithmetic", lambda: [nn.Parameter(torch.ones(4, 6)), torch.ones(4, 6)]),
    "inputs that share memory": given("arithmetic", aliased),
    "channels last": given(
        "convolutions", lambda: [torch.ones(2, 3, 8, 8).to(memory_format=torch.channels_last)]
    ),
    "dynamic sizes": Change(base="softmax", dynamic=True),
    "one dynamic size": marked(dynamo.mark_dynamic, 0),
    "a dynamic size with bounds": marked(dynamo.mark_dynamic, 0, min=8, max=4096),
    "a dynamic size with a hint": marked(dynamo.mark_dynamic, 0, hint_override=4096),
    "a dynamic size, special at 64": marked(dynamo.mark_dynamic, 0, specialize_on=[lambda size: size == 64]),
    "an unbacked size": marked(dynamo.decorators.mark_unbacked, 0, base="wide"),
    "a static address": marked(dynamo.mark_static_address),
}

TEXT = {
    "a float for an integer": text("arithmetic", lambda x, y: (x * 2.0 + y).sum(1)),
    "another factor": text("arithmetic", lambda x, y: (x * 3 + y).sum(1)),
    "a bool for an integer": text("arithmetic", lambda x, y: (x * True + y).sum(1)),
    "another dimension": text("arithmetic", lambda x, y: (x * 2 + y).sum(0)),
    "a dimension is kept": text("arithmetic", lambda x, y: (x * 2 + y).sum(1, keepdim=True)),
    "a sum in float64": text("arithmetic", lambda x, y: (x * 2 + y).sum(1, dtype=torch.float64)),
    "another reduction": text("arithmetic", lambda x, y: (x * 2 + y).amax(1)),
    "two outputs": text("arithmetic", lambda x, y: ((x * 2 + y).sum(1), x * 2)),
    "a view is returned": text("arithmetic", lambda x, y: ((x * 2 + y).sum(1), x.t())),
    "an input is changed": text("arithmetic", lambda x, y: (x.mul_(2) + y).sum(1)),
    "a detached operand": text("arithmetic", lambda x, y: (x.detach() * 2 + y).sum(1)),
    "a negative zero": text("arithmetic", lambda x, y: (x * -0.0 + y).sum(1)),
    "a tensor from a list": text("arithmetic", lambda x, y: (x * torch.tensor([2] * 6) + y).sum(1)),
    "annotated to run eagerly": text("arithmetic", annotated({"fallback_to_eager": True})),
    "annotated with a memory budget": text("arithmetic", annotated({"memory_budget": 0.0})),
    "dropout with another rate": text("dropped out", lambda x: (functional.dropout(x, 0.25) * x).sum()),
    "checkpointed": text("dropped out", checkpointed()),
    "checkpointed by rules": text("dropped out", checkpointed(save_all)),
    "causal attention": text(
        "attention", lambda q: functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    ),
    "attention with a scale": text(
        "attention", lambda q: functional.scaled_dot_product_attention(q, q, q, scale=0.5)
    ),
    "softmax in float64": text("softmax", lambda x: torch.softmax(torch.relu(x), 1, dtype=torch.float64)),
}

MATTERS: dict[str, Change] = {**FLAGS, **CONTEXTS, **CONFIGURATION, **INPUTS, **TEXT}
"""What changes the code that PyTorch generates, for this program or for another."""


class Renamed(nn.Module):
    """programs.Model, with other names and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(values))
        return self.down(hidden).sum()


def function_of_model() -> Program:
    model = programs.Model()

    def step(batch: torch.Tensor) -> torch.Tensor:
        return model(batch)

    return step


def with_an_intermediate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    doubled = x * 2
    shifted = doubled + y
    return shifted.sum(1)


def with_gradients() -> nn.Module:
    model = programs.Model()
    model(torch.ones(4, 6)).backward()
    return model


@contextlib.contextmanager
def other_seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        yield


@contextlib.contextmanager
def after_other_compiles() -> Iterator[None]:
    Change(base="wide").see()
    yield


def hooked() -> list[torch.Tensor]:
    x = torch.ones(4, 6, requires_grad=True)
    x.register_hook(lambda gradient: gradient * 2)
    return [x]


def in_inference_mode() -> list[torch.Tensor]:
    with torch.inference_mode():
        return [torch.ones(4, 6), torch.ones(4, 6)]


@contextlib.contextmanager
def in_order(*entries: tuple[str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, value in entries:
            stack.enter_context(s.inductor.patch({name: value}))
        yield


KEEPS: dict[str, Change] = {
    "a variable set to its default": around("model", s.variable("TRITON_DEFAULT_FP_FUSION", "1")),
    "Triton's dumps": around("model", s.variable("MLIR_ENABLE_DUMP", "1")),
    "operands change places": text("arithmetic", lambda x, y: (y * 2 + x).sum(1)),
    "names, and a layer that is not used": Change(program=Renamed),
    "a function that calls the model": Change(program=function_of_model),
    "another object of the class": Change(),
    "evaluation mode, without a layer that knows it": Change(program=lambda: programs.Model().eval()),
    "gradients that are there already": Change(program=with_gradients),
    "values": given("model", lambda: [torch.zeros(4, 6)]),
    "an input with another history": given("model", lambda: [torch.arange(24.0).view(4, 6).clone()]),
    "a hook on an input": given("views", hooked),
    "inputs made in inference mode": given("arithmetic", in_inference_mode),
    "the random seed": around("dropped out", other_seed),
    "graphs compiled before": around("model", after_other_compiles),
    "a local name": text("arithmetic", lambda left, right: (left * 2 + right).sum(1)),
    "an intermediate name": text("arithmetic", with_an_intermediate),
    "matmul precision set to its default": around(
        "model", lambda: s.precisions(lambda: torch.set_float32_matmul_precision("highest"))
    ),
    "fp32_precision set to its default": around("model", lambda: s.precisions(s.fp32(cuda.matmul, "ieee"))),
    "an entry set to its default": around("model", lambda: s.inductor.patch(max_fusion_size=64)),
    "how many compilers run": around(
        "model", lambda: s.inductor.patch(compile_threads=7, worker_start_method="fork")
    ),
    "debugging the partitioner": around("model", lambda: s.functorch.patch(debug_partitioner=True)),
    "anomaly detection": around("model", torch.autograd.detect_anomaly),
    "tracking of original views": around("views", lambda: torch.autograd._force_original_view_tracking(True)),
    "saved tensors moved by hooks at run time": around("model", torch.autograd.graph.save_on_cpu),
    "the autocast cache, without autocast": around(
        "model", lambda: s.setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False)
    ),
    "opt_einsum, for two tensors": around("model", lambda: backends.opt_einsum.flags(enabled=False)),
    "threads of autograd": around("model", lambda: torch.autograd.set_multithreading_enabled(False)),
}
"""What changes neither the code nor the key."""

SAME: list[tuple[str, Change, Change]] = [
    (
        "the order of unrelated settings",
        around("model", lambda: in_order(("max_fusion_size", 2), ("epilogue_fusion", False))),
        around("model", lambda: in_order(("epilogue_fusion", False), ("max_fusion_size", 2))),
    ),
    (
        "the order of options",
        Change(options={"max_fusion_size": 2, "epilogue_fusion": False}),
        Change(options={"epilogue_fusion": False, "max_fusion_size": 2}),
    ),
    (
        "an option, or the same entry of the configuration",
        Change(options={"max_fusion_size": 2}),
        around("model", lambda: s.inductor.patch(max_fusion_size=2)),
    ),
]
"""Two ways to say the same."""


def digest(seen: Seen) -> str:
    return hashlib.sha256("\0".join(seen.code).encode()).hexdigest()[:8] if all(seen.code) else ""


def rows() -> Iterator[tuple[str, str, str]]:
    """(change, what becomes of the key, what becomes of the code)."""
    pairs = [(name, unchanged(change.base), change) for name, change in {**MATTERS, **KEEPS}.items()]
    pairs += [(name, first.see(), second) for name, first, second in SAME]
    for name, before, change in pairs:
        after = change.see(also_refused=True)
        key = "refused" if after.refused else "same" if after.keys == before.keys else "changed"
        code = "not generated" if not digest(after) else "same" if after.code == before.code else "changed"
        yield name, key, code


if __name__ == "__main__":
    print("| change | key | generated code |\n|---|---|---|")
    for row in rows():
        print(f"| {' | '.join(row)} |", flush=True)
