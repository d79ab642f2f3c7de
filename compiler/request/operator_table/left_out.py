"""Stage 2, offline: why a name that Dynamo may put into a graph is not in the closed table.

Each rule is a reason and a pattern for whole names. ATEN: base names of dispatcher operators (before the overload);
generate.py drops what it matches. FUNCTIONS: full names of Python functions and bindings. HIGHER_ORDER: names in
torch.ops.higher_order. METHODS: methods of torch.Tensor. The tests compare the table with Dynamo's own lists, and fail
for a name that is neither in the table nor left out here. Users read the reasons (compiler/graph/names.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from . import rules


def _reasons(patterns: Mapping[str, str]) -> Mapping[str, re.Pattern[str]]:
    return {reason: re.compile("".join(pattern.split()), re.ASCII) for reason, pattern in patterns.items()}


_STATE = "it changes state of the process"
_LAYOUTS = "it is for quantized, nested, sparse or named tensors, which a request does not carry"
_DEVICES = "it is for another device, or for a device's runtime"
_MEMORY = "it reads files or memory, or changes a tensor's storage"
_TRACING = "it is part of autograd, of tracing or of the dispatcher"
_PYTHON = "it takes or gives functions, modules or other objects of Python"

ATEN = _reasons(
    {
        _MEMORY: "from_file|set_?|set_data|_set_.*|data|shallow_copy_data_?|_?resize_?|resize_as.*|_resize_.*",
        _STATE: """
            record_stream|_?is_pinned|_?pin_memory|_cudnn_init_dropout_state.*|_cufft_.*|_?print|get_gradients""",
        "it is for PyTorch's own tests": """
            _foobar|_test_.*|_debug_.*|_thnn_fused.*|_thnn_differentiable.*|_linalg_check_errors|_async_error""",
        "it takes packed weights, whose bytes nothing checks": """
            .*fbgemm.*|.*mkldnn.*|.*miopen.*|(.*_)?mps(_.*)?|.*vulkan.*|.*xnnpack.*|.*nnpack.*|_cslt_.*
            |_dyn_quant_.*|.*int[48]pack.*|_mixed_dtypes_linear|_saturate_weight.*|_rowwise_prune|.*xla.*""",
        "it resizes or reads tensors whose sizes nothing checks": """
            _?fused_moving_avg.*|_fake_quantize_per_tensor_affine_cachemask_tensor_qparams""",
        _LAYOUTS: """
            (?!_?fake_quantize_)(.*quantize.*|.*per_(tensor|channel)_affine.*)|q_.*|int_repr|qscheme|.*qparams.*
            |_make_per_.*|.*nested.*|.*jagged.*|.*padded_.*|.*sparse.*|rename_?|refine_names|align_.*|_?coalesced?_?
            |_spdiags|_spsolve|_?indices(_copy)?|_?values(_copy)?|c?(row|col)_indices.*|ccol_indices.*|is_coalesced
            |_nnz|_dim[IV]|dense_dim|hspmm|sspaddmm|smm|_mask_indices.*|_convert_indices_.*""",
        "compiled code trusts its indices": """
            _unsafe_index.*|_unsafe_masked_.*|_index_put_impl.*|_(flash|efficient|cudnn)_attention_.*
            |_segment_reduce.*|_low_memory_max_pool_.*""",
        _TRACING: """
            _backward|retain_grad|retains_grad|requires_grad_|is_leaf|output_nr|_version|_lazy_clone|_use_.*
            |_make_dual.*|_unpack_dual|_fw_primal.*|_add_batch_dim|_remove_batch_dim|_new_zeros_with_same.*
            |_has_.*|_make_dep_token|_copy_from.*|_reshape_from_tensor|_functional_sym_constrain.*
            |sym_constrain_range.*|_sobol_.*|_triton_.*|_cast_.*|_autocast_to_.*|_wrapped_.*|.*_overrideable.*
            |_fill_mem_eff_dropout_mask_|_histogramdd_.*|_make_token|_sink_tokens""",
        "Inductor itself makes it when it lowers a graph": "inductor_.*|prepare_softmax_online",
    }
)

TYPES = re.compile(r"Storage|Stream|__torch__|QScheme|Any\b|PyObject")
"""Types in the schema of a dispatcher operator that no value on the wire can have, or that name storage."""

FUNCTIONS = _reasons(
    {
        _MEMORY: r"""
            torch\.(from_file|from_numpy|frombuffer|_preload_cuda_deps|_load_global_deps)
            |torch\.(_weights_only_unpickler|quantization)\.\w+
            |torch\._numpy\.(from_dlpack|ndarray(\.resize)?)
            |torch\._C\._(from_dlpack|to_dlpack|construct_storage_from_data_pointer|tensor_impl_raw_handle
            |construct_CUDA_Tensor_From_Storage_And_Metadata|free_And_Remove_DeleterFn|storage_\w+|has_storage|wrap_tensor_impl)""",
        "it is part of TorchScript": r"""
            torch\._C\.(_te|_jit_tree_views)\.\w+|torch\.(futures\.\w+|return_types\.pytree_register_structseq)
            |torch\._C\._(jit|create|debug_(get|set)|get_caught_jit|import_ir|backport|load|save
            |get_(mobile|model|module_info|upgrade|operator_version|max_operator|file_format|value_trace|schema
            |operation_overload|graph_executor|version_calculator|custom_class)
            |set_(graph_executor|value_trace|should_use_format)|dump_upgraders|generate_upgraders|calculate_package
            |test_only|tracer_set|tracer_warn|ivalue|propagate|resolve_type|replace_overloaded|last_executed
            |compile_graph|freeze_module|fuse_to|nn_module|llvm|export_op|enable_mobile|run_emit|parse_source
            |quantize_ondevice|check_onnx|hack_do_not|has_tensorexpr|awaitable|collect_all)\w*
            |torch\._C\.(fork|wait|import_ir\w*|parse_\w+|merge_type\w*|unify_type_list)""",
        _DEVICES: r"""
            torch\.(accelerator|cpu|cuda|mps|mtia|xpu)\.(\w+\.)*\w+|torch\._C\._(cpu|cudnn|itt|verbose)\.\w+
            |torch\._C\._((accelerator|cuda|cudnn|mps|nccl|rocm)_\w+|(broadcast|gather|scatter)(_out|_coalesced)?|graph_pool_handle|activate_gpu_trace|(get|set)_(rocm|miopen)_\w+
            |register_py_class_for_device|rename_privateuse1_backend|get_privateuse1_backend_name)
            |torch\._C\._dynamo\.utils\.get_current_stream|torch\.(is_vulkan_available|get_device_module|_register_device_module)""",
        _STATE: r"""
            torch\.(set_\w+|_numpy\.set_default_dtype|use_deterministic_algorithms|compile)|torch\.(__future__|random|backends)\.(\w+\.)*\w+
            |torch\._C\.(_(set|unset|init|push_on|pop|logging)_\w+|set_\w+|init_\w+|_\w+_init|_initExtension
            |_(add|remove)_cached_tensor|_(stash|get)_obj_in_tls|_vmapmode_\w+|clear_autocast_cache
            |autocast_\w+_nesting|_valgrind_\w+|_crash_if_\w+|_remove_worker_pids|_error_if_any_worker_fails
            |_warn\w*|_log_api_usage_\w+|_increment_version)""",
        "Dynamo reads it while it traces": r"""
            torch\.((are|get|is)_\w+|numel|_nnpack_available|compiled_with_cxx11_abi|__getattr__)|torch\._guards\.\w+
            |torch\._C\.(_(get|is|has|can_use|are|current|supported|len_torch)_\w+|(get|is)_\w+|_show_config
            |_parallel_info|_cxx_flags|_will_engine_execute_node|_functionalization_reapply_views_tls|_demangle
            |_meta_in_tls_dispatch_include|_dump_local_tls_set|_check_sparse_tensor_invariants
            |_functorch\.get_\w+|_valgrind_supported_platform|(read_)?vitals(_enabled)?)
            |torch\.nn\.(modules\.activation\._is_make_fx_tracing|parameter\.is_lazy)
            |torch\.autograd\._profiler_enabled
            |torch\._numpy\.(dtype|finfo|iinfo|can_cast|result_type|issubdtype)""",
        _TRACING: r"""
            torch\._(\w*functional\w*|debug_has_internal_overlap|mirror_autograd_meta_to)
            |torch\._C\._(dispatch_\w+|commit_update|replace_|overlaps|non_sym_sizes|new_symbolic_shape_symbol
            |parse_dispatch_key|functionality_to_backend_keys|to_functionality_key|add_docstr
            |disabled_torch_dispatch_impl|select_\w+_backend|conv_determine_backend_memory_format|infer_size
            |should_allow_numbers_as_tensors|debug_only_\w+)
            |torch\._functorch\.eager_transforms\._(maybe_\w+|(un)?wrap_all_tensors\w*)
            |torch\.(fx|_higher_order_ops|_compile)(\.\w+)+""",
        _PYTHON: r"""
            torch\._functorch\.(apis|batch_norm_replacement|deprecated|utils)\.\w+
            |torch\._functorch\.eager_transforms\.(functionalize|assert_flat\w+|_any_differentiable|_is_differentiable)
            |torch\.autograd\.((functional|function|graph)\.\w+|_\w+|variable)|torch\.amp\.\w+\.\w+
            |torch\._check_(with|not_implemented|tensor_all_with)|torch\.(is_storage|is_tensor|nn\.factory_kwargs|nn\.modules\.utils\.\w+)
            |torch\._numpy\.(generic|number|((un)?signed)?integer|inexact|(complex)?floating|\w+Error)
            |torch\._utils\.(_dummy_type|_(un)?flatten_dense_tensors)""",
        _LAYOUTS: r"""
            torch\.(hsmm|saddmm|_pack_padded_sequence)|torch\.(sparse|nested|_C\._nested|_C\._sparse)(\.\w+)+
            |torch\.masked\._ops\._sparse\w+""",
        "its random numbers may come from NumPy's generator": r"torch\._numpy\.random\.\w+",
        "NumPy has no such function": r"""
            torch\._numpy\.((fft|linalg)\.)?(DType|normalizer|upcast|linalg_errors|ArrayLike|Concatenate|KeepDims
            |ParamSpec|TypeVar|_\w+)""",
        "PyTorch has removed it": r"torch\._linalg_utils\.(_?symeig|eig|lstsq|matrix_rank|solve)",
        "it is part of a function that is in the table": r"""
            torch\.(functional|masked\._ops|nn\.functional|nn\.grad|_lowrank)\._\w+
            |torch\.nn\._reduction\.\w+|torch\.masked\._ops\.corresponding_real_dtype
            |torch\._linalg_utils\.(get_floating_dtype|is_sparse)
            |torch\.signal\.windows\.windows\.(_\w+|merge_dicts|parse_kwargs)""",
        "Dynamo computes it of numbers, which it takes for constants": r"""
            math\.(cbrt|comb|dist|exp2|factorial|frexp|fsum|gamma|gcd|isclose|isqrt|lcm|ldexp|lgamma|modf|nextafter
            |perm|prod|sumprod|fma|ulp)|cmath\.\w+|_operator\.length_hint""",
    }
)

HIGHER_ORDER = _reasons(
    {
        "it runs or holds functions of the program": """
            flat_apply|invoke_leaf_function|trace_wrapped|dynamo_bypassing_wrapper|call_torchbind|custom_function_call
            |register_hook|_export_tracepoint|strict_mode""",
        "AOTAutograd or Inductor itself makes it": """
            auto_functionalized(_v2)?|with_effects|(graphsafe_)?run_(and_save|with)_rng_state|run_dtensor_rng_op
            |run_const_graph|control_deps|inductor_compiled_code|triton_kernel_wrapper_functional""",
        "its text is code for a GPU": "inline_asm_elementwise",
        "its callers need a permission of their own": "triton_kernel_wrapper_mutation",
        "it is for another compiler": "(aoti|executorch)_call_delegate",
        "it prints": "print",
        "it came with PyTorch 2.14, and nothing here compiles it yet": "switch|flex_gemm",
        "it spreads tensors over devices": "local_map_hop",
    }
)

METHODS = _reasons(
    {
        "Dynamo answers it itself": r"__\w+__|new|tolist|is_shared",
        _MEMORY: r"(const_)?data_ptr|(_typed_|untyped_)?storage(_type)?|share_memory_|numpy|module_load",
        _TRACING: r"""
            backward|register_hook|register_post_accumulate_grad_hook|reinforce|_is_view|_(rev_)?view_func(_unsafe)?
            |_dtensor__new__|_fix_weakref|_make_(wrapper_)?subclass|_reduce_ex_internal|as_subclass
            |_clear_non_serializable_cached_data""",
        _PYTHON: r"apply_|map2?_",
        _DEVICES: r"ipu|mtia|xpu|hpu",
        _LAYOUTS: r"_update_names|has_names",
        "PyTorch has removed it": r"eig|lstsq|solve|symeig|cholesky|qr",
    }
)


def reason(name: str) -> str | None:
    """Why the table lacks a function (full name) or a method of torch.Tensor (its name alone); None if no rule does."""
    owner, _, base = name.rpartition(".")
    if name.startswith("torch.ops."):
        owner, base = [*name.split("."), ""][2:4]
    if owner == "higher_order":
        tables, name = [HIGHER_ORDER], base
    else:
        tables = [FUNCTIONS if owner else METHODS]
    if owner in ("", "aten", "prims") or owner in rules.BINDING_MODULES:
        tables.append(ATEN)
    for table in tables:
        for found, pattern in table.items():
            if pattern.fullmatch(base if table is ATEN else name):
                return found
    return None
