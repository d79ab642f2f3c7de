"""Stage 2, offline: make the closed table for the installed torch; PyTorch's own lists in, data/ops-X.Y.json out.

    python -m torchrelay.compiler.generate_table OUT

A name gets in by a rule that says what it is (a binding of a dispatcher operator, a functional that Dynamo puts
in graphs, a member of a short list), never for want of a reason to keep it out. Operators that read files, keep
process-wide state, trust pointers or opaque bytes inside tensors, or only serve tests are dropped from the
rules' results. `python -m ... --excluded` prints what the rules saw and dropped, for review.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from .table import Option, OpTable

# --- what is dropped from the rules' results ---------------------------------------------------------------

# Matched against an ATen operator's base name (before the overload), whole.
DROPPED_OPERATORS = re.compile(
    "|".join(
        (
            "from_file",  # reads any file
            "set_?|set_data|_set_.*|data",  # points a tensor at other storage
            "_?resize_?|resize_as.*|_resize_.*",  # changes an input's storage under its views
            "record_stream|is_pinned|_?pin_memory|_local_scalar_dense_.*",
            "_cudnn_init_dropout_state.*|_cufft_.*",  # process-wide caches
            "_?print|_foobar|_test_.*|_debug_.*",
            ".*fbgemm.*|.*mkldnn.*|.*miopen.*|mps_.*|_mps_.*|.*vulkan.*|.*xnnpack.*|_cslt_.*|_dyn_quant_.*",
            # packed weights hold pointers or unchecked bytes
            ".*quantize.*|q_.*|int_repr|qscheme|dequantize.*|choose_qparams.*|_choose_qparams.*|.*qparams.*",
            ".*affine_quantized.*|.*per_tensor_affine.*|.*per_channel_affine.*|_make_per_.*|_fused_moving_avg.*",
            "fused_moving_avg_obs_fake_quant|empty_quantized|quantized_.*|_quantized_.*",
            ".*nested.*|.*jagged.*|.*padded_.*",  # subclasses of tensors; offsets are trusted
            ".*_unsafe.*sparse.*|_sparse_.*_unsafe.*|_sparse_.*|sparse_.*|.*_sparse.*|_validate_sparse.*|_coalesced_?",
            "_spdiags|_spsolve|_to_sparse.*|to_sparse.*|_indices|_values|crow_.*|ccol_.*|row_indices.*",
            "col_indices.*|indices|values|indices_copy|values_copy|_indices_copy|_values_copy|_coalesce|coalesce",
            "is_coalesced|_nnz|_dimI|_dimV|dense_dim|copy_sparse.*|hspmm|sspaddmm|smm|_mask_indices.*",
            "_make_dual.*|_unpack_dual|_fw_primal.*|_has_same_storage_numel|_new_zeros_with_same_feature_meta",
            "_backward|retain_grad|retains_grad|requires_grad_|is_leaf|output_nr|_version",  # autograd's own state
            "rename_?|refine_names|align_.*",  # named tensors do not compile
            "_thnn_fused.*|_thnn_differentiable.*|_use_.*|_linalg_check_errors|_lazy_clone",
            "_add_batch_dim|_remove_batch_dim",  # come through torch._functorch.predispatch only
            "_unsafe_masked_.*|_functional_sym_constrain.*|_sobol_.*|_triton_.*|_cast_.*|_autocast_to_.*",
            "sym_constrain_range.*|_async_error|_assert_async|_copy_from.*|_fill_mem_eff_dropout_mask_",
            "_flash_attention_forward_no_dropout_inplace|_wrapped_.*|.*_overrideable|_histogramdd_.*",
        )
    )
)

# Dispatcher argument types that no wire value can be, or that name storage.
DROPPED_TYPES = re.compile(r"Storage|Stream|__torch__|QScheme|Any\b|PyObject")

# --- short lists -------------------------------------------------------------------------------------------

OPERATOR_FUNCTIONS = (
    "abs add and_ contains eq floordiv ge getitem gt iadd iand ifloordiv ilshift imatmul imod imul index inv invert "
    "ior ipow irshift is_ is_not isub itruediv ixor le lshift lt matmul mod mul ne neg not_ or_ pos pow rshift "
    "setitem sub truediv truth xor"
).split()

MATH_FUNCTIONS = (
    "acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh degrees erf erfc exp expm1 fabs floor fmod hypot "
    "isfinite isinf isnan log log10 log1p log2 pow radians remainder sin sinh sqrt tan tanh trunc"
).split()

BUILTIN_FUNCTIONS = "abs bool float getattr int max min round".split()

# Functions of torch that bind no dispatcher operator. Those that set state (grad mode, autocast) are what Dynamo
# itself puts in a graph for `with torch.no_grad()` and `with torch.autocast()`; both end with the graph.
OTHER_FUNCTIONS = (
    "torch._C._set_grad_enabled",
    "torch.amp.autocast_mode._enter_autocast",
    "torch.amp.autocast_mode._exit_autocast",
    "torch.autograd.grad_mode._enter_inference_mode",
    "torch.autograd.grad_mode._exit_inference_mode",
    "torch._check",
    "torch._check_is_size",
    "torch._check_index",
    "torch._check_value",
    "torch._check_type",
    "torch._check_tensor_all",
    "torch._assert",
    "torch.as_tensor",
    "torch.asarray",
    "torch.tensor",
    "torch.sym_float",
    "torch.sym_fresh_size",
    "torch.sym_int",
    "torch.sym_ite",
    "torch.sym_max",
    "torch.sym_min",
    "torch.sym_not",
    "torch.sym_sqrt",
    "torch.sym_sum",
    "torch._sym_sqrt",
    "torch.einsum",
    "torch.functional.einsum",
    "torch.broadcast_shapes",
    "torch.cdist",
    "torch.norm",
    "torch.split",
    "torch.meshgrid",
    "torch.unique",
    "torch.unique_consecutive",
    "torch.stft",
    "torch.tensordot",
    "torch.block_diag",
    "torch.cartesian_prod",
    "torch.atleast_1d",
    "torch.atleast_2d",
    "torch.atleast_3d",
    "torch.broadcast_tensors",
    "torch._functorch.predispatch._add_batch_dim",
    "torch._functorch.predispatch._remove_batch_dim",
    "torch._functorch.predispatch._vmap_increment_nesting",
    "torch._functorch.predispatch._vmap_decrement_nesting",
    "torch._functorch.predispatch._make_dual",
    "torch._functorch.predispatch._unpack_dual",
    "torch._functorch.predispatch.lazy_load_decompositions",
    "torch._functorch.predispatch._unwrap_for_grad",
    "torch._C._functorch._grad_increment_nesting",
    "torch._C._functorch._grad_decrement_nesting",
    "torch._C._functorch.set_inplace_requires_grad_allowed",
    "torch._functorch.eager_transforms._set_tensor_requires_grad",
    "torch._functorch.vmap.lazy_load_decompositions",
)

# Modules whose Python functions Dynamo puts in a graph whole, and which do nothing but call operators.
FUNCTIONAL_MODULES = ("torch.nn.functional", "torch.functional", "torch.signal.windows.windows")

# Modules of C bindings: a name is taken if it binds a dispatcher operator (with the module's prefix).
BINDING_MODULES = {
    "torch": "",
    "torch._C._nn": "",
    "torch._C._linalg": "",
    "torch._C._fft": "",
    "torch._C._special": "",
}

HIGHER_ORDER = (
    "associative_scan autograd_function_apply cond flex_attention flex_attention_backward "
    "foreach_map hints_wrapper invoke_subgraph map_impl out_dtype scan tag_activation_checkpoint while_loop "
    "while_loop_stack_output wrap wrap_activation_checkpoint wrap_with_autocast wrap_with_set_grad_enabled"
).split()

# Tensor methods that bind no dispatcher operator. Dunders are arithmetic and indexing alone.
OTHER_METHODS = (
    "__add__ __and__ __eq__ __floordiv__ __ge__ __getitem__ __gt__ __iadd__ __iand__ __ifloordiv__ __ilshift__ "
    "__imod__ __imul__ __invert__ __ior__ __ipow__ __irshift__ __isub__ __itruediv__ __ixor__ __le__ __lshift__ "
    "__lt__ __matmul__ __mod__ __mul__ __ne__ __neg__ __or__ __pos__ __pow__ __radd__ __rand__ __rfloordiv__ "
    "__rlshift__ __rmatmul__ __rmod__ __rmul__ __ror__ __rpow__ __rrshift__ __rshift__ __rsub__ __rtruediv__ "
    "__rxor__ __setitem__ __sub__ __truediv__ __xor__ "
    "bfloat16 bool byte cdouble cfloat char cpu cuda dim dim_order double element_size expand float get_device half "
    "int is_contiguous item long ndimension nelement new_tensor norm numel reshape short size split stride "
    "storage_offset tile to type unflatten unique view requires_grad_"
).split()

# --- options -----------------------------------------------------------------------------------------------

# Inductor options that change the generated code and can do nothing else. A whole value (None) takes the type of
# the option's default; a tuple closes the set of texts.
BACKENDS = ("ATEN", "ATEN,TRITON", "ATEN,TRITON,CPP", "TRITON", "ATEN,CPP", "CPP", "TRITON,ATEN", "CPP,ATEN")
CHOICES: dict[str, tuple[str, ...]] = {
    "combo_kernel_allow_mixed_sizes": (),
    "cpp.enable_floating_point_contract_flag": ("off", "on", "fast"),
    "estimate_op_runtime": ("default", "benchmark"),
    "layout_opt_default": ("0", "1"),
    "max_autotune_conv_backends": BACKENDS,
    "max_autotune_gemm_backends": BACKENDS,
    "max_autotune_flex_search_space": ("DEFAULT", "EXHAUSTIVE"),
    "max_autotune_gemm_search_space": ("DEFAULT", "EXHAUSTIVE"),
    "memory_pool": ("none", "intermediates", "outputs", "combined"),
    "mixed_mm_choice": ("default", "triton", "aten", "heuristic"),
    "pre_grad_pass_timing": ("early", "late", "default"),
    "triton_kernel_default_layout_constraint": ("needs_fixed_stride_order", "flexible_layout"),
}
OPTIONAL: dict[str, str] = {
    "cpp.gemm_cache_blocking": "",
    "cudagraph_policy": "",
    "realize_acc_reads_size_threshold": "int",
    "realize_acc_reads_threshold": "int",
    "realize_opcount_threshold": "int",
    "reorder_prefetch_limit": "int",
    "triton.autotune_at_compile_time": "bool",
    "triton.max_tiles": "int",
    "triton.mix_order_reduction_split_size": "int",
    "combo_kernel_peak_memory_increase_gb": "float",
    "max_fusion_unique_io_buffers": "int",
}

# Options that name programs, files, hosts or callables; dump or profile; drive caches and processes; replace the
# pipeline (another wrapper, freezing); or that the service sets for the client's machine.
DROPPED_OPTIONS = re.compile(
    "|".join(
        (
            r"_.*|.*\._.*|TYPE_CHECKING|.*TESTING_ONLY|test_configs\..*|trace\..*|aot_inductor.*|halide\..*",
            r"cuda\..*|cutlass\..*|rocm\..*|xpu\..*|mtia\..*|tpu_.*|xpu_.*|cuda_backend|cpu_backend|lookup_table\..*",
            r"aten_distributed.*|auto_chunker.*|autoheuristic.*|bucket_.*|collective_.*|distributed_.*|reorder_for_compute.*",
            r"dedup_reduce.*|inter_node_bw|intra_node_bw|estimate_op_runtime|runtime_estimations.*|autotune_multi_device",
            r".*(path|dir|log|cache|remote|debug|dump|profile|profiling|profiler|subproc|worker|timeout|lock|threads).*",
            r".*(custom|hook|callable|regex|metric|upload|progress|warnings|developer|nightly|save_args|verbose).*",
            r".*(freezing|cpp_wrapper|fx_wrapper|external_matmul|bisect|proton|history|objgraph|kernel_name).*",
            r"cpp\.(cxx|march|simdlen|vec_isa_ok|threads|dynamic_threads|enable_kernel_profile)",
            r"autotune_(in_subproc|local_cache|lookup_table|num_choices.*|remote_cache)|search_autotune_cache",
            r".*numeric_check.*|disabled_passes|.*_fusion_options|.*static_launch.*|use_static.*|strict_static.*",
            r"bundle.*|force_disable.*|generate_intermediate.*|quiesce.*|file_.*|compile_.*|global_.*|fx_graph.*",
            r"implicit_fallbacks|fallback_by_default|.*descriptive_names|.*unique_(user_)?kernel_names|comment_origin",
            r"annotate_training|log_.*|.*report_choices.*|unsafe_.*|disable_cpp_codegen|enable_autograd_for_aot",
            r"is_predispatch|inductor_choices_class|use_torch_profiler.*|.*benchmarker|benchmark_harness|cpu_gpu_bw",
            r"use_fast_triton_launcher|use_launch_metadata.*|keep_static_cubin_raw|triton\.store_cubin|triton_disable.*",
            r"wrap_inductor.*|run_jit.*|warn_.*|nvgemm.*|cutedsl.*|precompilation.*|triton\.disallow.*|triton\.inject.*",
            r"pipeline_max_autotune_gemm|incremental_autotune|add_pre_grad_passes|remove_pre_grad_passes|.*asserts_only",
            r"size_asserts|scalar_asserts|assert_indirect_indexing|alignment_asserts|write_are_deterministic.*",
            r"enable_auto_functionalized_v2|triton\.cudagraph_or_error|.*cudagraph_asserts|cudagraph_(policy|unsafe.*)",
        )
    )
)

# torch._functorch.config entries that steer the partitioner and AOTAutograd's wrappers.
AOT_OPTIONS: dict[str, tuple[str, ...]] = {
    "activation_memory_budget": (),
    "activation_memory_budget_runtime_estimator": ("flops", "profile", "testing"),
    "activation_memory_budget_solver": ("dp", "greedy", "ilp", "dp_knapsack_sliding_hirschberg"),
    "aggressive_recomputation": (),
    "backward_pass_autocast": ("same_as_forward", "off"),
    "ban_recompute_long_fusible_chains": (),
    "ban_recompute_materialized_backward": (),
    "ban_recompute_not_in_allowlist": (),
    "ban_recompute_reductions": (),
    "ban_recompute_used_far_apart": (),
    "cse": (),
    "disable_guess_zero_tangent_for_mutated_input_subclass": (),
    "donated_buffer": (),
    "functionalize_rng_ops": (),
    "graphsafe_rng_functionalization": (),
    "guess_tangent_strides_as_outputs": (),
    "max_dist_from_bw": (),
    "recompute_views": (),
    "static_weight_shapes": (),
    "treat_parameters_as_free_to_save": (),
    "view_replay_for_aliased_outputs": (),
}

# --- the rules ---------------------------------------------------------------------------------------------


def dispatcher_operators(namespace: str) -> dict[str, list[str]]:
    """Base name -> overloads of every dispatcher operator of a namespace that the rules keep."""
    kept: dict[str, list[str]] = {}
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, rest = full.partition("::")
        base, _, overload = rest.partition(".")
        if space != namespace or DROPPED_OPERATORS.fullmatch(base):
            continue
        packet = getattr(getattr(torch.ops, namespace), base, None)
        found = getattr(packet, overload or "default", None)
        if found is None or DROPPED_TYPES.search(str(found._schema)):
            continue
        kept.setdefault(base, []).append(overload or "default")
    return kept


def resolve(name: str) -> Any:
    """The object a dotted name stands for, or None."""
    root, *rest = name.split(".")
    value: Any = importlib.import_module(root)
    path = root
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(value, part) and isinstance(value, types.ModuleType):
            try:
                importlib.import_module(path)
            except ImportError:
                return None
        value = getattr(value, part, None)
    return value


def functions(aten: dict[str, list[str]]) -> list[str]:
    from torch._dynamo import trace_rules

    listed = {
        *trace_rules.torch_c_binding_in_graph_functions,
        *trace_rules.torch_non_c_binding_in_graph_functions,
    }
    names: set[str] = {f"_operator.{name}" for name in OPERATOR_FUNCTIONS}
    names |= {f"math.{name}" for name in MATH_FUNCTIONS}
    names |= {f"builtins.{name}" for name in BUILTIN_FUNCTIONS}
    names |= set(OTHER_FUNCTIONS)
    for name in listed:
        owner, _, base = name.rpartition(".")
        if (owner in BINDING_MODULES and base in aten) or (
            owner in FUNCTIONAL_MODULES
            and not base.startswith("_")
            and base not in ("sqrt", "merge_dicts", "parse_kwargs")
        ):
            names.add(name)
    names |= {f"torch.nn.functional.{base}" for base in vars(torch.nn.functional) if base in aten}
    names |= {f"torch.{base}" for base in aten if hasattr(torch, base)}
    found = {name: resolve(name) for name in names}
    return _canonical(
        name for name, value in found.items() if callable(value) and not isinstance(value, type)
    )


def _canonical(names: Iterable[str]) -> list[str]:
    """One name for each function: the one with the fewest dots, then the shortest, then the first."""
    best: dict[Any, str] = {}
    for name in sorted(names, key=lambda text: (text.count("."), len(text), text)):
        best.setdefault(resolve(name), name)
    return list(best.values())


def methods(aten: dict[str, list[str]]) -> list[str]:
    return [
        name
        for name in dir(torch.Tensor)
        if (name in aten or name in OTHER_METHODS) and callable(getattr(torch.Tensor, name))
    ]


def higher_order() -> list[str]:
    import torch._functorch.autograd_function
    import torch._higher_order_ops  # noqa: F401  (registers the operators)

    return [
        f"torch.ops.higher_order.{name}" for name in HIGHER_ORDER if hasattr(torch.ops.higher_order, name)
    ]


def _tag(value: object) -> str:
    return type(value).__name__ if isinstance(value, (bool, int, float, str)) else ""


def inductor_options() -> dict[str, Option]:
    from torch._inductor import config

    table: dict[str, Option] = {}
    for name, default in config.get_config_copy().items():
        tag = _tag(default) or OPTIONAL.get(name, "")
        if DROPPED_OPTIONS.fullmatch(name) or tag not in ("bool", "int", "float", "str"):
            continue
        values = CHOICES.get(name, ())
        if tag == "str" and not values:
            continue
        table[name] = Option(type=tag, optional=name in OPTIONAL, values=values)  # type: ignore[arg-type]
    return table


def aot_options() -> dict[str, Option]:
    from torch._functorch import config

    current = config.get_config_copy()
    return {
        name: Option(type=_tag(current[name]), values=values)  # type: ignore[arg-type]
        for name, values in AOT_OPTIONS.items()
        if _tag(current.get(name))
    }


def generate() -> OpTable:
    """The table for the installed torch."""
    aten, prims = dispatcher_operators("aten"), dispatcher_operators("prims")
    names = functions(aten)
    for space, operators in (("aten", aten), ("prims", prims)):
        for base, overloads in operators.items():
            names += [
                f"torch.ops.{space}.{base}",
                *(f"torch.ops.{space}.{base}.{item}" for item in overloads),
            ]
    version = ".".join(torch.__version__.split(".")[:2])
    return OpTable(
        torch=version,
        functions=frozenset(names),
        hops=frozenset(higher_order()),
        methods=frozenset(methods(aten)),
        options=inductor_options(),
        aot_options=aot_options(),
    )


def encode(table: OpTable) -> str:
    """JSON with one sorted name a line, so that a review sees what changed."""

    def options(entries: Any) -> dict[str, Any]:
        return {
            name: {
                key: value
                for key, value in (
                    ("type", entry.type),
                    ("optional", entry.optional),
                    ("values", entry.values),
                )
                if value
            }
            for name, entry in sorted(entries.items())
        }

    def lines(entries: dict[str, Any]) -> str:
        return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items()) + "\n }"

    parts = [f' "torch": {json.dumps(table.torch)}']
    for field in ("functions", "hops", "methods"):
        parts.append(
            f' "{field}": ' + json.dumps(sorted(getattr(table, field)), indent=2).replace("\n]", "\n ]")
        )
    parts += [f' "{field}": {lines(options(getattr(table, field)))}' for field in ("options", "aot_options")]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(arguments: list[str], write: Callable[[str], object] = sys.stdout.write) -> int:
    if len(arguments) != 1:
        write("usage: python -m torchrelay.compiler.generate_table OUT\n")
        return 2
    Path(arguments[0]).write_text(encode(generate()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
