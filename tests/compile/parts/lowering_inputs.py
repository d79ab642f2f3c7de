"""All that PyTorch's lowering reads beside a graph's nodes, as its sources say, and what a request does with each.

Run as a script with the folder of another PyTorch (`.../site-packages/torch`), it prints what is not classified here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("_inductor", "_functorch")
CLASSES = ("FxGraphHashDetails", "AOTAutogradCacheDetails", "_CompileFxKwargs", "CacheableAOTConfig")
"""What PyTorch's own keys are made of."""
BYPASS = re.compile(r"(.*\.)?(bypass|BypassFxGraphCache|BypassAOTAutogradCache)")
"""How PyTorch's own caches refuse a graph."""
STATE = re.compile(r"torch\.(backends(\.[a-z_0-9]+)+|(_C\.)?_?(are|is|get)_\w+)")
"""A setting of the process."""

CONFIGURATION = ("config.py", "config_comms.py")
"""Modules whose entries are a kind of their own: test_every_entry_of_the_configuration."""

KEY, NO_CODE, REFUSED, MADE = "in the key", "reaches no code", "refused", "made while lowering"
"""MADE: the lowering writes it. In a graph of Dynamo's it is refused, as any annotation that is not known."""

KEY_FIELDS = {
    "gm": (KEY, "graph, constants, kernels"),
    "example_inputs": (KEY, "inputs, symbols, relations"),
    "fx_kwargs": (KEY, "see the fields of _CompileFxKwargs"),
    "cache_key_tag": (NO_CODE, "names a cache"),
    "user_defined_triton_source": (KEY, "kernels"),
    "triton_kernel_source_codes": (REFUSED, "operators of the user's own are in no operator table"),
    "default_cuda_device_index": (NO_CODE, "an artifact is loaded for the client's device"),
    "deterministic_algorithms_settings": (KEY, "ambient"),
    "deterministic_algorithms": (KEY, "ambient"),
    "cpp_runtime_thread_count": (KEY, "ambient.threads"),
    "provenance_tracking_level": (NO_CODE, "comments"),
    "provenance_tracking_to_timeline": (NO_CODE, "comments"),
    "default_dtype": (KEY, "ambient"),
    "cuda_matmul_settings": (KEY, "ambient.flags"),
    "cudagraph_override": (REFUSED, "an annotation of the graph"),
    "cudagraph_annotation": (REFUSED, "an annotation of the graph"),
    "torch_version": (KEY, "toolchain"),
    "system_info": (KEY, "toolchain, target"),
    "inductor_config": (KEY, "options, or refused: see test_every_entry_of_the_configuration"),
    "inductor_config_comms": (REFUSED, "unless it has PyTorch's own values"),
    "nested_inductor_config_patches": (REFUSED, "an annotation of nodes"),
    "pre_grad_custom_pass": (REFUSED, "configuration"),
    "post_grad_custom_pre_pass": (REFUSED, "configuration"),
    "post_grad_custom_post_pass": (REFUSED, "configuration"),
    "joint_custom_pre_pass": (REFUSED, "configuration"),
    "joint_custom_post_pass": (REFUSED, "configuration"),
    "_pre_fusion_custom_pass": (REFUSED, "configuration"),
    "_post_fusion_custom_pass": (REFUSED, "configuration"),
    "_fuse_ddp_communication_passes": (REFUSED, "configuration, unless PyTorch's own"),
    "_custom_partitioner_fn": (REFUSED, "configuration"),
    "precompile_enabled": (NO_CODE, "the worker sets it"),
    "custom_backend_passes": (REFUSED, "user_extensions"),
    "custom_backend_codegen_configs": (REFUSED, "user_extensions"),
    "var_to_hint_override": (KEY, "symbols: the hint is the overriding one"),
    "custom_backend_codegen_implications": (REFUSED, "user_extensions"),  # since 2.15
    "compile_on_one_rank": (REFUSED, "user_extensions"),
    "aot_config": (KEY, "see the fields of CacheableAOTConfig"),
    "grad_enabled": (KEY, "ambient"),
    "autocast_state": (KEY, "ambient.autocast; the dtypes of those that are off: ambient.flags"),
    "disable_amp": (KEY, "ambient.autocast"),  # until 2.12
    "autograd_config": (KEY, "aot_options, or refused"),
    "saved_tensors_hooks_fx_wrap_cache_hashes": (REFUSED, "graphs with hooks for saved tensors"),
    "sac_context_fn_hashes": (REFUSED, "an annotation of nodes"),
    "region_activation_memory_budget": (REFUSED, "an annotation of nodes"),
    "region_activation_memory_budget_annotations": (REFUSED, "an annotation of nodes"),  # since 2.15
    "custom_estimator_solver_uuids": (REFUSED, "configuration: a function is no option's value"),
    "act_input_paths": (REFUSED, "inputs of a tensor subclass"),
    # _CompileFxKwargs: compile_fx makes them of the configuration and of the graph
    "cudagraphs": (KEY, "mode, options"),
    "static_input_idxs": (KEY, "inputs: static_address"),
    "inputs_to_check": (KEY, "inputs: follows from them"),  # until 2.12
    "is_backward": (NO_CODE, "a request is for both"),
    "is_inference": (KEY, "ambient.grad, inputs: requires_grad"),
    "graph_id": (NO_CODE, "a number"),
    "cpp_wrapper": (REFUSED, "configuration"),
    "fx_wrapper": (REFUSED, "configuration"),
    "aot_mode": (NO_CODE, "always off in a back end"),
    "layout_opt": (KEY, "options"),
    "extern_node_serializer": (NO_CODE, "AOTInductor's"),
    "boxed_forward_device_index": (NO_CODE, "a device's number"),
    "get_decomp_fn": (REFUSED, "user_extensions: PyTorch's table has been changed"),
    # CacheableAOTConfig
    "num_params_buffers": (NO_CODE, "parameters are inputs"),
    "aot_id": (NO_CODE, "a number"),
    "keep_inference_input_mutations": (NO_CODE, "always on in compile_fx"),
    "is_export": (NO_CODE, "always off in a back end"),
    "no_tangents": (NO_CODE, "always off in a back end"),
    "dynamic_shapes": (KEY, "symbols"),
    "aot_autograd_arg_pos_to_source": (NO_CODE, "names of inputs; those that are one tensor are one input"),
    "static_input_indices": (KEY, "inputs: static_address"),
    "enable_log": (NO_CODE, "logs"),
    "pre_dispatch": (NO_CODE, "always off in a back end"),
    "precompile_backend_id": (NO_CODE, "a name"),
}

BYPASS_REASONS = {
    "Cannot produce stable cache key for unpicklable type {}": (
        REFUSED,
        "an argument without a form on the wire",
    ),
    "Failed to pickle cache key": (REFUSED, "an argument without a form on the wire"),
    "Unsupported pre grad custom pass": (REFUSED, "configuration"),
    "Unsupported post grad custom pass": (REFUSED, "configuration"),
    "Unsupported joint custom pass": (REFUSED, "configuration"),
    "Unsupported _pre_fusion_custom_pass": (REFUSED, "configuration"),
    "Unsupported _post_fusion_custom_pass": (REFUSED, "configuration"),
    "Unsupported _fuse_ddp_communication_pass": (REFUSED, "configuration"),
    "Skipping graph with frozen constants": (REFUSED, "configuration: freezing"),
    "Cannot cache a graph with freezing enabled": (REFUSED, "configuration: freezing"),
    "Runtime constant folding can introduce constants that aren't static across runs": (
        NO_CODE,
        "AOTInductor's",
    ),
    "compiler bisector enabled": (REFUSED, "user_extensions"),
    "No shape env": (NO_CODE, "the worker makes one"),
    "Can't cache HigherOrderOperator: {}": (REFUSED, "unless the operator table has it"),
    "Can't cache torchbind objects": (REFUSED, "an attribute that is no tensor"),
    "mkldnn tensors unpickleable": (REFUSED, "an input or constant that is not strided"),
    "Reduce unsupported": (REFUSED, "an input that is no tensor or number"),
    "Unsupported call_function target {}. \n Function module: {}, \nFunction name: {}": (
        REFUSED,
        "unless the operator table has it",
    ),
    "Unsupported call_method target {}. \nMethod module: {}, \nMethod name: {}": (
        REFUSED,
        "unless the operator table has it",
    ),
    "Unsupported call_method method {}: {}": (REFUSED, "unless the operator table has it"),
    "Unsupported call_method method {}": (REFUSED, "unless the operator table has it"),
    "Unsupported call_method {} on receiver {}, which has no example_value and so is not known to be a Tensor": (
        REFUSED,
        "unless the operator table has it",
    ),
    "Unsupported node op {}": (REFUSED, "encode.py knows five"),
    "FX graph cache is not enabled": (NO_CODE, "caches"),
    "Won't cache a graph with fakify_first_call enabled": (
        NO_CODE,
        "DDPOptimizer's; its graphs come one by one",
    ),
    "SAC context_fn does not have a cache_hash attribute. To enable caching with selective activation "
    "checkpointing, add a 'cache_hash' attribute to your context_fn. This can be a string or any hashable value "
    "that uniquely identifies the checkpointing behavior (e.g., based on source code hash and closed-over globals). "
    "For functools.partial objects, set cache_hash on the partial itself.": (
        REFUSED,
        "an annotation of nodes",
    ),
    "CustomRuntimeEstimator.uuid() returned None, bypassing cache": (REFUSED, "configuration"),
    "activation_memory_budget_runtime_estimator is a raw callable without uuid() method, bypassing cache. Use "
    "CustomRuntimeEstimator for cache support.": (REFUSED, "configuration"),
    "CustomKnapsackSolver.uuid() returned None, bypassing cache": (REFUSED, "configuration"),
    "activation_memory_budget_solver is a raw callable without uuid() method, bypassing cache. Use "
    "CustomKnapsackSolver for cache support.": (REFUSED, "configuration"),
    "AOTAutogradCache requires triton 3.2.0": (KEY, "toolchain"),
    "Uncacheable nested region config '{}': callable value": (REFUSED, "an annotation of nodes"),
    "Uncacheable nested region config '{}': custom pass": (REFUSED, "an annotation of nodes"),
}

ANNOTATIONS = {
    # inert: compiler/graph/encode.py
    **dict.fromkeys(
        (
            "creation_timestamp",
            "desc",
            "from_node",
            "fwd_nn_module_stack",
            "fwd_source_fn_stack",
            "nn_module_stack",
        ),
        (NO_CODE, "where a node came from: names and comments"),
    ),
    **dict.fromkeys(
        ("original_aten", "seq_nr", "source_fn_stack", "stack_trace"),
        (NO_CODE, "where a node came from: names and comments"),
    ),
    **dict.fromkeys(("example_value", "tensor_meta", "val"), (KEY, "follows from inputs and graph")),
    "tensor_dict": (KEY, "inputs: static_address"),
    "unbacked_bindings": (KEY, "follows from the graph; what is known of the sizes: unbacked"),
    "dynamo_compile_id": (NO_CODE, "a number"),
    "dynamo_flat_name_to_original_fqn": (NO_CODE, "names"),
    "custom": (REFUSED, "unless it is encode.EAGER, which is in the key"),
    **dict.fromkeys(
        ("_checkpoint_context_fn", "recompute", "ac_graph_id", "has_backward_hook", "is_gradient_acc"),
        (REFUSED, "checkpointing: in Dynamo's graphs it is an argument of tag_activation_checkpoint"),
    ),
    **dict.fromkeys(
        ("cudagraph_annotation", "memory_budget", "nested_region_config", "fallback_to_eager", "is_wrapped"),
        (REFUSED, "annotations of the user's"),
    ),
    **dict.fromkeys(
        ("user_cache_hash", "quant_options", "dequant_type"), (REFUSED, "annotations of the user's")
    ),
    **dict.fromkeys(
        (
            "aot_runtime_epilogue_input_mutation",
            "autograd_backward",
            "chunking",
            "concrete_value",
            "cpu_offload_reload_node",
            "dislike_padding",
            "eager_input_vals",
            "extern_semantic_key",
            "inductor_realize_to_strides",
            "is_static_input",
            "low_precision_pointwise_barrier",
            "manual_bucket_node_type",
            "mutated_named_buffers",
            "mutation_region_id",
            "only_clone_these_tensors",
            "original_device",
            "original_output_strides",
            "original_size",
            "original_stride",
            "output_stack_traces",
            "partitioner_tag",
            "produced_by_chunker",
            "saved_for_offloading",
            "saved_for_quantization",
            "saved_tensor_with_no_vc_check",
            "should_fallback",
            "should_offload",
            "user_visible_output_idxs",
            "value",
            "_allow_mixed_dtype_folding",
        ),
        (MADE, "by AOTAutograd, the partitioner or a pass"),
    ),
    **dict.fromkeys(
        (
            "ACC_TYPE",
            "HOST_SIDE_TMA",
            "buf_meta",
            "extra_options",
            "fusion_meta",
            "kpack",
            "matrix_instr_nonkdim",
            "waves_per_eu",
        ),
        (MADE, "no node's: of a template or a debug file"),
    ),
}

PROCESS_STATE = {
    "torch._C._are_functorch_transforms_active": (
        NO_CODE,
        "Dynamo traces transforms; none is around a back end",
    ),
    "torch._C._get_fp32_precision_getter": (KEY, "ambient.flags"),
    "torch._C._get_privateuse1_backend_name": (REFUSED, "devices other than cpu and cuda"),
    "torch._C._get_sm_carveout_experimental": (REFUSED, "ambient"),
    "torch._C._is_any_autocast_enabled": (KEY, "ambient.autocast"),
    "torch._C._is_fwd_grad_enabled": (NO_CODE, "transforms of torch.func are in the graph"),
    "torch._C._is_view_replay_enabled": (NO_CODE, "read and put back when compiled code runs"),
    "torch._is_functional_tensor": (NO_CODE, "asks a tensor"),
    "torch.is_tensor": (NO_CODE, "asks a tensor"),
    "torch.are_deterministic_algorithms_enabled": (KEY, "ambient"),
    "torch.is_deterministic_algorithms_warn_only_enabled": (KEY, "ambient"),
    "torch.get_autocast_dtype": (KEY, "ambient.autocast, ambient.flags"),
    "torch.is_autocast_enabled": (KEY, "ambient.autocast"),
    "torch.is_autocast_cache_enabled": (KEY, "ambient.autocast; AOTAutograd traces without the cache"),
    "torch.get_default_device": (KEY, "Dynamo writes the device into the graph"),
    "torch.get_default_dtype": (KEY, "ambient"),
    "torch.get_float32_matmul_precision": (KEY, "ambient"),
    "torch.get_num_threads": (KEY, "ambient.threads"),
    "torch.get_rng_state": (NO_CODE, "saved and put back around tracing"),
    "torch.is_grad_enabled": (KEY, "ambient"),
    "torch.is_inference_mode_enabled": (KEY, "ambient"),
    "torch._C._get_obj_in_tls": (NO_CODE, "CUDA graphs, at run time"),
    "torch._C._is_key_in_tls": (NO_CODE, "CUDA graphs, at run time"),
    "torch.backends.cpu.get_cpu_capability": (KEY, "target"),
    "torch.backends.cuda.is_built": (KEY, "toolchain"),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (KEY, "ambient.flags"),
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (KEY, "ambient.flags"),
    "torch.backends.cuda.matmul.allow_tf32": (KEY, "ambient.flags"),
    "torch.backends.cuda.matmul.fp32_precision": (KEY, "ambient.flags"),
    "torch.backends.cudnn.allow_tf32": (KEY, "ambient.flags"),
    "torch.backends.cudnn.fp32_precision": (KEY, "ambient.flags"),
    "torch.backends.mkl.is_available": (KEY, "toolchain"),
    "torch.backends.mkldnn.allow_tf32": (KEY, "ambient.flags: fp32_precision"),
    "torch.backends.mkldnn.enabled": (KEY, "ambient.flags"),
    "torch.backends.mkldnn.fp32_precision": (KEY, "ambient.flags"),
    "torch.backends.mkldnn.is_available": (KEY, "toolchain"),
    "torch.backends.mkldnn.matmul.fp32_precision": (KEY, "ambient.flags"),
    "torch.backends.kleidiai.is_available": (NO_CODE, "ARM processors, for which nothing is compiled"),
}

VARIABLES = {
    "ATEN_CPU_CAPABILITY": (KEY, "target"),
    **dict.fromkeys(
        (
            "TORCHINDUCTOR_DEBUG_COMPILE",
            "TORCHINDUCTOR_DEBUG_SYMBOL",
            "TRITON_INTERPRET",
            "TRITON_USE_META_WS",
        ),
        (REFUSED, "environment"),
    ),
    **dict.fromkeys(
        (
            "CONDA_EXE",
            "CONDA_PREFIX",
            "CUDACXX",
            "CUDA_HOME",
            "CUDA_PATH",
            "CXX",
            "OMP_PREFIX",
            "TORCH_INDUCTOR_INSTALL_GXX",
            "TRITON_LIBDEVICE_PATH",
            "TRITON_PTXAS_PATH",
        ),
        (NO_CODE, "where compilers are: a worker has its own"),
    ),
    **dict.fromkeys(
        (
            "KMP_DUPLICATE_LIB_OK",
            "LD_LIBRARY_PATH",
            "TORCH_CUSTOM_PYTHONPATH",
            "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
        ),
        (NO_CODE, "written or read for a process that is started"),
    ),
    **dict.fromkeys(
        (
            "TORCHINDUCTOR_CACHE_DIR",
            "TORCHINDUCTOR_DISABLE_MULTI_KERNEL_CACHE",
            "TORCHINDUCTOR_REDIS_HOST",
            "TORCHINDUCTOR_REDIS_PORT",
            "TORCHINDUCTOR_REDIS_URL",
            "TRITON_CACHE_DIR",
        ),
        (NO_CODE, "caches"),
    ),
    **dict.fromkeys(
        (
            "TORCHINDUCTOR_AUTOTUNE_POOL_INACTIVITY_TIMEOUT",
            "TORCHINDUCTOR_COMPILE_THREADS",
            "TORCHINDUCTOR_FX_COMPILE_MODE",
            "TORCH_TNT_IN_USE",
            "TORCH_WARM_POOL",
        ),
        (NO_CODE, "in which processes a graph is compiled"),
    ),
    **dict.fromkeys(
        (
            "HALIDE_REPRO",
            "INDUCTOR_WRITE_SCHEDULER_GRAPH",
            "PYTORCH_GEN_PATTERNS",
            "TORCHINDUCTOR_CONV_LOGGING_FILE",
            "TORCHINDUCTOR_DUMP_LAUNCH_PARAMS",
            "TORCHINDUCTOR_DUMP_LAUNCH_TENSORS",
            "TORCHINDUCTOR_FLEX_ATTENTION_LOGGING_FILE",
            "TORCHINDUCTOR_KERNELS_TO_DUMP",
            "TORCHINDUCTOR_MM_LOGGING_FILE",
            "TORCHINDUCTOR_PATTERN_MATCH_BACKEND",
            "TORCHINDUCTOR_PATTERN_MATCH_DEBUG",
            "TORCHINDUCTOR_WRITE_MISSING_OPS",
            "TORCH_COMPILE_DEBUG",
            "XLA_HLO_DEBUG",
        ),
        (NO_CODE, "logs, files and names of counters"),
    ),
    **dict.fromkeys(
        (
            "INDUCTOR_TEST_DISABLE_FRESH_CACHE",
            "TORCHINDUCTOR_FX_GRAPH_CACHE",
            "TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT",
        ),
        (NO_CODE, "PyTorch's own tests"),
    ),
    "TORCH_CUDA_ARCH_LIST": (NO_CODE, "AOTInductor's, for further architectures"),  # since 2.14
    "TORCHINDUCTOR_NVGEMM_PREFETCH": (REFUSED, "environment"),  # 2.14
    "CI": (NO_CODE, "checks, and fewer candidates for one template, all of them right"),
    "CUBLAS_WORKSPACE_CONFIG": (NO_CODE, "cuBLAS reads it when it runs"),
    "CUDA_VISIBLE_DEVICES": (NO_CODE, "which device it runs on"),
    "PYTORCH_JIT": (NO_CODE, "TorchScript"),
    **dict.fromkeys(
        (
            "CPLUS_INCLUDE_PATH",
            "FLYDSL_GPU_ARCH",  # since 2.15
            "FLYDSL_RUNTIME_CACHE_DIR",
            "HALIDE_INCLUDE",
            "HALIDE_LIB",
            "HSA_OVERRIDE_GFX_VERSION",
            "LEVEL_ZERO_V1_SDK_PATH",
            "ONEAPI_ROOT",
            "PYTORCH_ROCM_ARCH",
            "ProgramFiles",
            "ProgramFiles(x86)",
            "TORCHINDUCTOR_XPU_KERNEL_FORMAT",
            "WINDOWS_CUDA_HOME",
        ),
        (NO_CODE, "devices, compilers and systems for which nothing is compiled"),
    ),
}

TRITON_LOGS = frozenset(
    {
        "LLVM_ENABLE_TIMING",
        "LLVM_EXTRACT_DI_LOCAL_VARIABLES",
        "LLVM_IR_ENABLE_DUMP",
        "MLIR_DISABLE_MULTITHREADING",
        "MLIR_DUMP_PATH",
        "MLIR_ENABLE_DIAGNOSTICS",
        "MLIR_ENABLE_DUMP",
        "MLIR_ENABLE_TIMING",
        "NVPTX_ENABLE_DUMP",
        "TRITON_DISABLE_LINE_INFO",
        "TRITON_DUMP_MIR",
        "TRITON_ENABLE_LLVM_DEBUG",
        "TRITON_LLVM_DEBUG_ONLY",
        "TRITON_PARTITION_SCHEDULING_DUMP_DATA_ONLY",
        "TRITON_PARTITION_SCHEDULING_DUMP_LOOP_ONLY",
        "TRITON_PARTITION_SCHEDULING_ENABLE_DUMP_DOT",
        "TRITON_PLUGIN_VERSION_CHECK",
        "USE_IR_LOC",
    }
)
"""Variables of Triton's own kernel keys that are for output and debug information."""
TRITON_FOR_AMD = ("AMDGCN_", "TRITON_HIP_")
"""How those begin that are for devices for which nothing is compiled."""

CLASSIFIED = {
    "field of PyTorch's own keys": KEY_FIELDS,
    "reason why PyTorch's own caches refuse a graph": BYPASS_REASONS,
    "annotation of a node or graph": ANNOTATIONS,
    "setting of the process": PROCESS_STATE,
    "environment variable": VARIABLES,
}
"""Kind -> what there is of it -> what a request does with it, and where or why."""


def read_sources(torch: Path) -> dict[str, dict[str, str]]:
    """Kind -> what the lowering's sources in torch's folder have of it -> one place."""
    found: dict[str, dict[str, str]] = {kind: {} for kind in CLASSIFIED}
    fields, reasons, annotations, states, variables = found.values()
    for folder in FOLDERS:
        for path in sorted((torch / folder).rglob("*.py")):
            place = path.relative_to(torch).as_posix()
            for node in ast.walk(ast.parse(path.read_text())):
                at = f"{place}:{getattr(node, 'lineno', 0)}"
                if isinstance(node, ast.ClassDef) and node.name in CLASSES:
                    fields |= dict.fromkeys(_fields(node), f"{place}, {node.name}")
                if isinstance(node, ast.Call) and node.args and BYPASS.fullmatch(_dotted(node.func)):
                    reasons |= dict.fromkeys(_text(node.args[0]), at)
                if (name := _annotation(node)) is not None:
                    annotations[name] = at
                if isinstance(node, ast.Attribute) and STATE.fullmatch(name := _dotted(node)):
                    states[name] = at
                if path.name not in CONFIGURATION and (name := _variable(node)) is not None:
                    variables[name] = at
    # `torch.backends.cuda` is not a setting where `torch.backends.cuda.matmul` is one
    inner = {name.rpartition(".")[0] for name in states} | {"torch.backends.cuda", "torch.backends.mkl"}
    found["setting of the process"] = {name: at for name, at in states.items() if name not in inner}
    return found


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for inner in ast.walk(node):
        targets = inner.targets if isinstance(inner, ast.Assign) else ()
        targets = [inner.target] if isinstance(inner, ast.AnnAssign) else targets
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                yield target.attr
            elif isinstance(target, ast.Name) and isinstance(inner, ast.AnnAssign) and inner in node.body:
                yield target.id


def _dotted(node: ast.expr) -> str:
    """`a.b.c` as a text; '' of any other expression."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def _text(node: ast.expr) -> list[str]:
    """A text, with `{}` for what is put into it; [] of what is no text."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            return ["".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in values)]
    return []


def _annotation(node: ast.AST) -> str | None:
    """The key, where `something.meta` is asked for one by name."""
    owner: ast.expr | None = None
    match node:
        case ast.Subscript(value=owner, slice=key):
            pass
        case ast.Call(func=ast.Attribute(value=owner, attr="get" | "pop" | "setdefault"), args=[key, *_]):
            pass
        case ast.Compare(left=key, comparators=[owner]):
            pass
    if isinstance(owner, ast.Attribute) and owner.attr == "meta" and isinstance(key, ast.Constant):
        return str(key.value)
    return None


def _variable(node: ast.AST) -> str | None:
    """The name, where the environment is asked for one."""
    match node:
        case ast.Call(func=function, args=[key, *_]) if _dotted(function) in ("os.getenv", "os.environ.get"):
            pass
        case ast.Subscript(value=owner, slice=key) if _dotted(owner) == "os.environ":
            pass
        case ast.Compare(left=key, comparators=[owner]) if _dotted(owner) == "os.environ":
            pass
        case _:
            return None
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


def unclassified(torch: Path) -> Iterator[str]:
    """What the sources have and CLASSIFIED lacks, in words."""
    for kind, found in read_sources(torch).items():
        for name, place in found.items():
            if name not in CLASSIFIED[kind]:
                yield f"{kind}: {name!r} ({place})"


if __name__ == "__main__":
    print("\n".join(unclassified(Path(sys.argv[1]))))
