"""Stage 2, offline: what generate.py lets in and keeps out, as data; read by people before a release.

A name gets in by a rule that says what it is (a binding of a dispatcher operator, a functional that Dynamo
puts in graphs, a member of a short list), never for want of a reason to keep it out. Operators that read
files, keep process-wide state, trust pointers or opaque bytes inside tensors, or only serve tests are
left out (left_out.py says which, and why).
"""

from __future__ import annotations

import re

from ..allowed_names import words

# --- short lists -------------------------------------------------------------------------------------------

OPERATOR_FUNCTIONS = words(
    "abs add and_ contains eq floordiv ge getitem gt iadd iand ifloordiv ilshift imatmul imod imul "
    "index inv invert ior ipow irshift is_ is_not isub itruediv ixor le lshift lt matmul mod mul ne neg "
    "not_ or_ pos pow rshift setitem sub truediv truth xor"
)

MATH_FUNCTIONS = words(
    "acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh degrees erf erfc exp expm1 fabs "
    "floor fmod hypot isfinite isinf isnan log log10 log1p log2 pow radians remainder sin sinh sqrt tan "
    "tanh trunc"
)

BUILTIN_FUNCTIONS = words("abs getattr max min round")

# Functions of torch that bind no dispatcher operator. Those that set state (grad mode, autocast, SDPA
# back ends, functorch levels) are what Dynamo itself puts in a graph for the context managers and
# transforms of those names.
OTHER_FUNCTIONS = tuple(
    f"{module}.{name}"
    for module, names in {
        "torch._C._autograd": "_get_data_attr _saved_tensors_hooks_disable _saved_tensors_hooks_enable",
        "torch._C": "_set_fwd_grad_enabled _set_grad_enabled _enter_dual_level _exit_dual_level",
        "torch.amp.autocast_mode": "_enter_autocast _exit_autocast",
        "torch.autograd.grad_mode": "_enter_inference_mode _exit_inference_mode",
        "torch.nn.attention": "_backend_from_string _sdpa_kernel",
        "torch": """
            _make_dual _unpack_dual _check _check_is_size _check_index _check_value _check_type
            _check_tensor_all _assert Size as_tensor asarray tensor sym_float sym_fresh_size sym_int
            sym_ite sym_max sym_min sym_not sym_sqrt sym_sum _sym_sqrt einsum broadcast_shapes cdist norm
            split meshgrid unique unique_consecutive stft tensordot block_diag cartesian_prod atleast_1d
            atleast_2d atleast_3d broadcast_tensors
        """,
        "torch.functional": "einsum",
        "torch._functorch.predispatch": """
            _add_batch_dim _remove_batch_dim _vmap_increment_nesting _vmap_decrement_nesting
            _enter_dual_level _exit_dual_level _jvp_decrement_nesting _jvp_increment_nesting _make_dual
            _unpack_dual lazy_load_decompositions _unwrap_for_grad
        """,
        "torch._C._functorch": """
            _jvp_decrement_nesting _jvp_increment_nesting _unwrap_for_grad _wrap_for_grad
            _grad_increment_nesting _grad_decrement_nesting set_inplace_requires_grad_allowed
        """,
        "torch.autograd.forward_ad": "_maybe_load_decompositions",
        "torch._functorch.eager_transforms": "_autograd_grad _set_tensor_requires_grad",
        "torch._functorch.vmap": "lazy_load_decompositions",
        "torch._higher_order_ops": "InvokeQuant",
        "torch._dynamo.utils": "numpy_attr_wrapper",
    }.items()
    for name in words(names)
)

# Modules whose Python functions Dynamo puts in a graph whole, and which do nothing but call operators.
FUNCTIONAL_MODULES = words(
    "torch.nn.functional torch.functional torch.signal.windows.windows torch.masked._ops torch.nn.grad torch._lowrank "
    "torch._linalg_utils"
)

REGISTERED_BY: dict[str, str] = {
    "aten": "torch",
    "prims": "torch._inductor.inductor_prims",
    "quantized_decomposed": "torch.ao.quantization.fx._decomposed",
}
"""PyTorch's libraries of operators that a graph may call, and the module that registers all that are in each."""

# Modules of C bindings: a name is taken if it binds a dispatcher operator.
BINDING_MODULES = ("torch", "torch._C._nn", "torch._C._linalg", "torch._C._fft", "torch._C._special")

HIGHER_ORDER = words(
    "associative_scan autograd_function_apply cond flex_attention flex_attention_backward foreach_map "
    "hints_wrapper invoke_quant invoke_quant_packed invoke_subgraph map_impl out_dtype scan "
    "tag_activation_checkpoint while_loop while_loop_stack_output wrap wrap_activation_checkpoint "
    "wrap_with_autocast wrap_with_set_grad_enabled"
)

# PyTorch's form of NumPy, for NumPy code that Dynamo traces: where it lies, the modules that define its functions, some
# of its functions in another module, and methods of its arrays.
NUMPY_MODULES = ("torch._numpy", "torch._numpy.fft", "torch._numpy.linalg")
NUMPY_DEFINED_IN = words(
    "torch._numpy._funcs_impl torch._numpy._reductions_impl torch._numpy._ufuncs torch._numpy.fft torch._numpy.linalg"
)
NUMPY_FUNCTIONS = words("torch._numpy.array torch._numpy.asarray torch._numpy.ascontiguousarray")
NUMPY_METHODS = words(
    "__getitem__ __setitem__ all any argmax argmin argsort astype choose clip conj conjugate copy cumprod cumsum "
    "diagonal dot fill flatten item max mean min nonzero prod ptp put ravel repeat reshape round searchsorted sort "
    "squeeze std sum swapaxes take trace transpose var view"
)

# Tensor methods that bind no dispatcher operator. Dunders are arithmetic and indexing alone.
OTHER_METHODS = words(
    "__abs__ __add__ __and__ __eq__ __floordiv__ __ge__ __getitem__ __gt__ __iadd__ __iand__ "
    "__ifloordiv__ __ilshift__ __imod__ __imul__ __invert__ __ior__ __ipow__ __irshift__ __isub__ "
    "__itruediv__ __ixor__ __le__ __lshift__ __lt__ __matmul__ __mod__ __mul__ __ne__ __neg__ __or__ "
    "__pos__ __pow__ __radd__ __rand__ __rfloordiv__ __rlshift__ __rmatmul__ __rmod__ __rmul__ __ror__ "
    "__rpow__ __rrshift__ __rshift__ __rsub__ __rtruediv__ __rxor__ __setitem__ __sub__ __truediv__ "
    "__xor__ bfloat16 bool byte cdouble cfloat char cpu cuda dim dim_order double element_size expand "
    "float get_device half int is_contiguous item long ndimension nelement new_tensor norm numel "
    "reshape short size split stride storage_offset tile to type unflatten unique view requires_grad_ lu"
)

# --- options -----------------------------------------------------------------------------------------------

# Texts that an option may hold; a text option that is not listed here is dropped.
BACKENDS = ("ATEN", "ATEN,TRITON", "ATEN,TRITON,CPP", "TRITON", "ATEN,CPP", "CPP", "TRITON,ATEN", "CPP,ATEN")
CHOICES: dict[str, tuple[str, ...]] = {
    "cpp.enable_floating_point_contract_flag": ("off", "on", "fast"),
    "layout_opt_default": ("0", "1"),
    "max_autotune_conv_backends": BACKENDS,
    "max_autotune_conv_bwd_input_backends": BACKENDS,
    "max_autotune_conv_bwd_weight_backends": BACKENDS,
    "max_autotune_gemm_backends": BACKENDS,
    "max_autotune_flex_search_space": ("DEFAULT", "EXHAUSTIVE"),
    "max_autotune_gemm_search_space": ("DEFAULT", "EXHAUSTIVE"),
    "memory_pool": ("none", "intermediates", "outputs", "combined"),
    "mixed_mm_choice": ("default", "triton", "aten", "heuristic"),
    "pre_grad_pass_timing": ("early", "late", "default"),
    "triton_kernel_default_layout_constraint": ("needs_fixed_stride_order", "flexible_layout"),
}
# Options whose default is None: the type of their other values.
OPTIONAL: dict[str, str] = {
    **dict.fromkeys(
        words(
            "realize_acc_reads_size_threshold realize_acc_reads_threshold realize_opcount_threshold "
            "reorder_prefetch_limit triton.max_tiles triton.mix_order_reduction_split_size max_fusion_unique_io_buffers"
        ),
        "int",
    ),
    "combo_kernel_peak_memory_increase_gb": "float",
}

# Options that name programs, files, hosts or callables; dump or profile; drive caches and processes;
# replace the pipeline (another wrapper, freezing); drop a bound check; or that the service sets for the
# client's machine.
DROPPED_SECTIONS = frozenset(
    words(
        "aot_inductor aot_inductor_mode aten_distributed_optimizations auto_chunker autoheuristic_collect "
        "autoheuristic_use cuda cutlass halide lookup_table mtia rocm test_configs trace xpu"
    )
)
DROPPED_WORDS = frozenset(
    words(
        "CHECKING TESTING annotate autoheuristic backend benchmarker bucket bundle bundled collective "
        "collectives comm comms custom cutedsl cxx ddp debug developer dir disabled distributed dump file "
        "freezing global history hook hooks host inject launcher lock log logpath march metadata metric "
        "nightly node nvgemm objgraph path profile profiler profiling progress proton regex remote report "
        "save scatters simdlen subproc threads timeout tlparse upload verbose warn warnings worker wrapper"
    )
)
DROPPED_OPTIONS = (
    r"_.*|.*_cache|cache_.*|cpp_cache_.*|compile_.*|fx_graph.*|fx_passes.*|unsafe_.*|use_static.*|strict_static.*|static_launch.*"
    r"|autotune_(in_subproc|multi_device|num_choices_displayed|lookup_table|local_cache|remote_cache)|quiesce_.*"
    r"|cpp\.(vec_isa_ok|dynamic_threads|enable_kernel_profile)|.*descriptive_names|.*unique_(user_)?kernel_names"
    r"|assert_indirect_indexing|benchmark_harness|benchmark_kernel|disable_cpp_codegen|triton_disable_.*|implicit_fallbacks|fallback_by_default|is_predispatch|kernel_name_max_ops"
    r"|comment_origin|inductor_choices_class|enable_autograd_for_aot|runtime_estimations.*|estimate_op_runtime"
    r"|generate_.*|wrap_.*|write_.*|save_args|run_jit.*|use_torch_profiler.*|use_launch_metadata.*|keep_static.*"
    r"|enable_auto_functionalized_v2|cudagraph_unsafe.*|precompilation.*|pipeline_max.*|incremental_autotune"
    r"|add_pre_grad_passes|remove_pre_grad_passes|c?pu_gpu_bw|triton\.(store_cubin|cudagraph_or_error)|.*_fusion_options"
    r"|triton\.(autotune_at_compile_time|autotune_with_sample_inputs|slow_path.*|fast_path.*|disallow.*)|external_matmul"
)


def drops_option(option: str) -> bool:
    section, _, _ = option.rpartition(".")
    words = re.split(r"[._]", option)
    return bool(
        section in DROPPED_SECTIONS
        or not DROPPED_WORDS.isdisjoint(words)
        or re.fullmatch(DROPPED_OPTIONS, option)
    )


# torch._functorch.config entries that steer the partitioner and AOTAutograd's wrappers.
AOT_OPTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        words(
            "activation_memory_budget aggressive_recomputation ban_recompute_long_fusible_chains "
            "ban_recompute_materialized_backward ban_recompute_not_in_allowlist ban_recompute_reductions "
            "ban_recompute_used_far_apart cse disable_guess_zero_tangent_for_mutated_input_subclass "
            "donated_buffer functionalize_rng_ops graphsafe_rng_functionalization "
            "guess_tangent_strides_as_outputs max_dist_from_bw recompute_views static_weight_shapes "
            "treat_parameters_as_free_to_save view_replay_for_aliased_outputs"
        ),
        (),
    ),
    "activation_memory_budget_runtime_estimator": ("flops", "profile"),
    "activation_memory_budget_solver": ("dp", "greedy", "ilp", "dp_knapsack_sliding_hirschberg"),
    "backward_pass_autocast": ("same_as_forward", "off"),
}

# Entries that say where and how to compile, cache, log or profile, that other devices or another pipeline read, or
# that the service sets: a request neither carries nor checks them. All other entries are sent, or must have PyTorch's
# own value.
INDUCTOR = "torch._inductor.config"
FUNCTORCH = "torch._functorch.config"
LOCAL_ENTRIES: dict[str, str] = {
    INDUCTOR: (
        r"TYPE_CHECKING|_cache_config_.*|_save_config_ignore|_profile_var|aot_inductor(_mode)?\..*|is_nightly.*"
        r"|compile_.*|worker_.*|fx_graph_.*|quiesce_.*|bundle_triton.*|bundled_autotune.*|force_disable_caches"
        r"|autotune_(in_subproc|local_cache|remote_cache|num_choices_displayed|multi_device)|unsafe_skip_cache.*"
        r"|cpp_cache.*|global_cache_dir|search_autotune_cache|.*remote_cache.*|remote_gemm_autotune_cache"
        r"|use_static_.*|strict_static_.*|static_launch_user.*|keep_static.*|use_launch_metadata.*"
        r"|trace\..*|debug|debug_fusion|debug_ir_traceback|verbose_progress|disable_progress|developer_warnings"
        r"|warn_mix_layout|log_tlparse|enabled_metric_tables|torchinductor_worker_logpath|.*timeout.*"
        r"|max_autotune_report_choices_stats|autoheuristic_(log_path|collect\..*)|lookup_table\.check_src_hash"
        r"|cpp\.(threads|cxx)|cuda\.(cuda_cxx|version|arch)|.*\.cutlass_dir|comment_origin"
        r"|(xpu|rocm|halide|mtia)\..*|(xpu|tpu)_backend|triton\.proton_.*|sleep_sec_TESTING_ONLY"
    ),
    FUNCTORCH: (
        r"TYPE_CHECKING|_save_config_ignore|_test_.*|.*autograd_cache.*|force_non_lazy_backward_lowering"
        r"|debug_(assert|partitioner)|visualize_.*|.*pareto.*|torch_compile_graph_format|is_non_builtin_to_include"
        r"|(check|error_on)_custom_op_aliasing|fake_tensor_crossref|generate_fake_kernels.*"
    ),
    "torch._inductor.config_comms": r"TYPE_CHECKING|.*debug.*|.*verbose.*|env_str",
    "torch.fx.experimental._config": (
        r"TYPE_CHECKING|translation_validation.*|check_shape_env.*|extended_debug.*|print_specializations"
        r"|validate_shape_env.*|enrich_profiler.*|use_duck_shape|no_data_dependent_graph_break"
        r"|soft_pending_unbacked.*"
    ),
}
"""Module -> pattern of names."""
