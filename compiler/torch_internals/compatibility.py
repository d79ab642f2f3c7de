"""Check once that this torch has the private symbols that torch_internals uses, with the parameters that it expects.

PyTorch may move or change a private function in any release. `check(area)` makes of that one typed error with the
symbol's name, before anything is captured, loaded or compiled, in place of an AttributeError in the middle of it.
An area names what a process is about to do; its check imports only modules that this needs anyway.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any, Literal

import torch

from ..errors import Unsupported
from .patching import patched_environment

Area = Literal[
    "load", "capture", "programs", "sizes", "distributed", "compile", "fake_process_group", "training"
]
"""load: a client that runs artifacts. capture: a client that makes requests of Dynamo's graphs. programs: a client that
starts functions without tracing. sizes: one that traces with the symbols that earlier runs had. distributed: DTensors
and the job's store, where torch.distributed is available. compile: a worker, which needs load and capture too.
fake_process_group: simulated ranks. training: a training job or an export."""

TABLE: dict[Area, str] = {
    "load": """
torch._dynamo.aot_compile_types:
torch._functorch._aot_autograd.aot_autograd_result:
    BundledAOTAutogradResult.wrap_post_compile (args, aot_config, fx_config); .compiled_fw; .compiled_bw; .guards_expr;
    .sanitized_aot_config
torch._inductor.async_compile: AsyncCompile.cpp_pybinding = (argtypes, source_code); .use_process_pool = ();
    CompiledTritonKernels.key = (kernel_src)
torch._inductor.codecache: CppPythonBindingsCodeCache._load_library (path, key); .entry_function;
    FxGraphCache.cache_hit_post_compile; get_path = (basename, extension, specified_dir)
torch._inductor.cudagraph_utils: BoxedDeviceIndex (value)
torch._inductor.output_code: CompiledFxGraph.source_code; .device_idxs; .cache_key; ._triton_bundle
torch._inductor.runtime.autotune_cache: AutotuneCache.create; inductor_meta_from_config = ()
torch._inductor.runtime.triton_heuristics: CachingAutotuner.compile_results; .device_props; .triton_meta
torch._inductor.triton_bundler: TritonBundle.static_autotuners; StaticallyLaunchedAutotuner.cache_key; .kernel
torch._inductor.utils: BoxedBool (value); _align (nbytes)
""",
    "capture": """
torch: UntypedStorage._cdata; _TorchCompileInductorWrapper (mode, options, dynamic);
    _TorchCompileInductorWrapper.config
torch._C: _get_math_sdp_allow_fp16_bf16_reduction (); _get_sdp_priority_order ();
    _get_sm_carveout_experimental (); _log_api_usage_once
torch._C._autograd: _top_saved_tensors_default_hooks
torch._C._dynamo.guards: compute_overlapping_tensors
torch._dynamo.exc: ShortenTraceback; TensorifyScalarRestartAnalysis
torch._dynamo.symbolic_convert: TensorifyState.force_specializations; .should_specialize (index);
    .specialize (index)
torch._dynamo.utils: MetricsContext._start_time_ns; .in_progress (); get_metrics_context ()
torch._functorch.config: get_config_copy (); patch
torch._higher_order_ops.triton_kernel_wrap: kernel_side_table.add_constant_args (args); .add_kernel (kernel);
    .get_constant_args (idx); .get_kernel (idx)
torch._inductor: list_mode_options (mode, dynamic)
torch._inductor.codegen.common: DeviceCodegen.scheduling; .wrapper_codegen; device_codegens
torch._inductor.compiler_bisector: CompilerBisector.bisection_enabled
torch._inductor.config: _config; cpp.threads; get_config_copy ()
torch._inductor.virtualized: _choices._key; threadlocal
torch._ops: HigherOrderOperator; OpOverload._schema; .namespace; OpOverloadPacket._qualified_op_name
torch._subclasses.fake_tensor: FakeTensor.item_memo; FakeTensorMode.shape_env
torch.compiler: get_default_backend () since 2.13; set_default_backend (backend) since 2.13
torch.fx.experimental.sym_node: SymNode._expr; .expr; .hint; .shape_env
torch.fx.experimental.symbolic_shapes: ShapeEnv.backed_var_to_val | ShapeEnv.var_to_val;
    .constrain_symbol_range (s, compiler_min, compiler_max); .create_symintnode (sym, *, hint);
    .create_unbacked_symint (); .guards; .ignore_fresh_unbacked_symbols (); .size_like; .unbacked_inputs;
    .unbacked_renamings; .var_to_hint_override; .var_to_range
""",
    "programs": """
torch._C._dynamo.guards: GlobalStateGuard ()
torch._dynamo.backends.distributed: DDPOptimizer.backend_compile_fn; .bucket_bytes_cap; .first_bucket_cap
torch._dynamo.bytecode_transformation: unique_id (name, *, with_uuid)
torch._dynamo.cache_size: exceeds_recompile_limit (cache_size, compile_id)
torch._dynamo.config: enable_compiler_collectives
torch._dynamo.convert_frame: _compile; compile_frame; orig_code_map; output_codes
torch._dynamo.decorators: mark_static_address (t, guard)
torch._dynamo.eval_frame: innermost_fn (fn)
torch._dynamo.exc: ObservedAttributeError; RestartAnalysis
torch._dynamo.guards: CheckFunctionManager (f_code, output_graph, ...); GuardBuilder.get (guard_or_source);
    GuardBuilder._set_guard_export_info (guard, code_list, *, provided_func_name); ShapeCodeParts;
    _get_closure_vars (); install_guard; profile_guard_manager
torch._dynamo.output_graph: OutputGraphGuardsState
torch._dynamo.source: is_from_optimizer_source (source); is_from_skip_guard_source (source)
torch._dynamo.types: GuardedCode (code, guard_manager, compile_id, trace_annotation);
    wrap_guarded_code (guarded_code)
torch._dynamo.utils: CleanupHook.create (scope, name, val); CleanupManager.instance;
    chromium_event_timed (event_name, *, reset_event_log_on_exit); get_metrics_context ()
torch._dynamo.variables: BuiltinVariable.call_function; ConstantVariable.call_method;
    PolyfilledFunctionVariable.call_function; .can_constant_fold_through (); SetVariable.unpack_var_sequence;
    SkipFunctionVariable.call_function; TorchInGraphFunctionVariable.call_function; .can_constant_fold_through ()
torch._dynamo.variables.base: VariableTracker.call_obj_hasattr;
    VariableTracker.tp_getattro_impl | VariableTracker.var_getattr
torch._dynamo.variables.dicts: ConstDictVariable.__contains__; .getitem_const;
    .getitem_const_raise_exception_if_absent; .maybe_getitem_const
torch._dynamo.variables.functions: invoke_and_store_as_constant = (tx, fn, name, args, kwargs)
torch._dynamo.variables.misc: ComptimeVariable.call_function; LoggingLoggerVariable.call_method;
    NumpyVariable.call_function
torch._dynamo.variables.optimizer: OptimizerVariable.move_step_if_cpu ()
torch._dynamo.variables.torch: tracing_state_functions ()
torch._guards: CompileContext (compile_id); DuplicateInputs (input_source_a, input_source_b);
    StorageOverlap (overlapping_sources, non_overlapping_sources); TracingContext.try_get ();
    Guard (originating_source, create_fn); Guard.sort_key (); Source.get_value (globals, locals, cache);
    compile_context (context)
torch.distributed.distributed_c10d: _world.pg_map; .pg_to_tag
torch.nn.parallel: DistributedDataParallel._get_active_ddp_module ()
torch.utils.weak: TensorWeakRef (tensor)
""",
    "sizes": """
torch._dynamo.convert_frame: _compile
torch._dynamo.pgo: auto_dynamic; FrameStateSizeEntry.scalar; .size;
    update_automatic_dynamic (tx, name, entry, *, is_unspecialized_nn_module)
torch._dynamo.source: TensorProperty.SIZE; TensorPropertySource.base; .idx; .prop
torch.fx.experimental.symbolic_shapes: ShapeEnv.replace (expr); .var_to_sources
""",
    "distributed": """
torch._C._distributed_c10d: PrefixStore.underlying_store; TCPStore
torch._library.fake_class_registry: FakeScriptObject.real_obj since 2.12
torch.distributed.distributed_c10d: _get_default_store ()
torch.distributed.tensor: DTensor._local_tensor; ._spec;
    .from_local (local_tensor, device_mesh, placements, *, run_check, shape, stride)
torch.distributed.tensor._utils: compute_global_tensor_info (tensor, mesh, placements)
""",
    "compile": """
torch._C: _ensureCUDADeviceGuardSet; _set_math_sdp_allow_fp16_bf16_reduction; _set_sdp_priority_order
torch._C._autograd: CreationMeta.DEFAULT; _set_creation_meta
torch._dispatch.python: enable_python_dispatcher
torch._dynamo.aot_compile_types: BundledAOTAutogradSerializableCallable (compiled_fn);
    BundledAOTAutogradSerializableCallable.serialize_compile_artifacts (fn)
torch._decomp: core_aten_decompositions (); decomposition_table
torch._dynamo.repro.after_aot: save_graph_repro; torch._dynamo.source: LocalSource (local_name)
torch._dynamo.utils: compilation_time_metrics; counters
torch._functorch._aot_autograd.autograd_cache: AOTAutogradCache.save = (key, entry, remote); autograd_cache_key;
torch._functorch.aot_autograd: AOT_COUNTER
torch._guards: CompileContext (compile_id); CompileContext.current_compile_id ();
    CompileId (*, frame_id, frame_compile_id); TracingContext (fake_mode); compile_context (context); tracing (context)
torch._higher_order_ops.triton_kernel_wrap: kernel_side_table.constant_args; .id_to_kernel
torch._inductor.async_compile: AsyncCompile.process_pool (); .triton (kernel_name, source_code); .wait_pool_ready ();
    .warm_pool (); CompiledTritonKernels.remove_future (kernel_src); shutdown_compile_workers ()
torch._inductor.choices:
    InductorChoices._finalize_template_configs = (template_choices, kernel_inputs, templates, op_name, kwarg_overrides);
    .get_ktc (kernel_inputs, template, op_name, kwarg_overrides)
torch._inductor.codecache: CppPythonBindingsCodeCache._load_library_inner = (path, key);
    .load_pybinding_async (argtypes, main_code);
    PyCodeCache.cache_clear (); .load (source_code); .load_by_key_path (key, path); _HEADER_DIR; _HEADER_LOCK_DIR;
    _precompile_header; _worker_compile_cpp = (lock_path, cpp_builders)
torch._inductor.codegen.common: KernelTemplate._template_from_string = (source); .maybe_append_choice (choices);
    pointwise_overrides_data
torch._inductor.codegen.cpp: stride_at_vec_range = (index, var, vec_length)
torch._inductor.codegen.cpp_template: CppTemplate
torch._inductor.codegen.cpp_template_kernel: parse_expr_with_index_symbols = (expr)
torch._inductor.codegen.triton: TritonScheduling.define_kernel (src_code, ...)
torch._inductor.codegen.wrapper: FreeLine (wrapper, node); PythonWrapperCodegen.codegen_free = (buffer);
    PythonWrapperCodegen.next_kernel_suffix = ()
torch._inductor.compile_fx: _graph_counter;
    _recursive_joint_graph_passes (gm, ...); compile_fx_inner (gm, example_inputs);
    compile_fx (model_, example_inputs_, *, inner_compile, config_patches)
torch._inductor.config: compile_threads; deterministic; patch; worker_start_method
torch._inductor.cpp_builder: _get_optimization_cflags; _get_torch_related_args; get_cpp_compiler = ()
torch._inductor.cpu_vec_isa: VecAVX512; VecISA.check_build = (code); supported_vec_isa_list;
    valid_vec_isa_list = ()
torch._inductor.debug: DebugContext.create_debug_dir (folder_name); DebugFormatter (handler);
    DebugFormatter.fx_graph_transformed = (gm, inputs); .ir_post_fusion = (nodes); .ir_pre_fusion = (nodes);
    .output_code = (filename, extension)
torch._inductor.decomposition: decompositions; select_decomp_table ()
torch._inductor.dtype_propagation: DtypePropagationOpsHandler.__init__ = ()
torch._inductor.exc: CppCompileError.output
torch._inductor.fx_passes.pad_mm: _should_pad = (match, mat1, mat2, op, input);
    get_cached_base_mm_benchmark_time = (key); get_cached_should_pad = (key); get_do_bench = ();
    set_cached_base_mm_benchmark_time = (key, value); set_cached_should_pad = (key, value);
    should_exclude_padding_time = (match, arg_name)
torch._inductor.graph: GraphLowering (gm, *, example_inputs, is_inference, layout_opt);
    GraphLowering.compile_to_module = (); .constants; .graph_outputs;
    SubgraphLowering (parent, ...); _post_grad_graph_counter since 2.13
torch._inductor.ir: Buffer (*, name, layout); IRNode.has_tensor_output (); .maybe_get_name ();
    InvokeSubgraph.create (subgraph, ...); Layout; MultiOutput
torch._inductor.kernel.mm_plus_mm: tuned_mm_plus_mm (mat1, mat2, mat3, mat4)
torch._inductor.lowering: lowerings
torch._inductor.kernel_template_choice: KernelTemplateChoice.choice; .inputs; .layout; .params; .template
torch._inductor.output_code: CompiledFxGraph.__call__ = (inputs)
torch._inductor.runtime.benchmarking: benchmarker.benchmark (fn, fn_args, fn_kwargs); .benchmark_cpu; .benchmark_gpu
torch._inductor.runtime.cache_dir_utils: triton_cache_dir (device)
torch._inductor.runtime.compile_tasks: _reload_python_module (key, path); _set_triton_ptxas_path ()
torch._inductor.runtime.coordinate_descent_tuner: CoordescTuner.autotune (func, baseline_config)
torch._inductor.runtime.runtime_utils: triton_config_to_hashable (cfg); triton_hash_to_path_key (key)
torch._inductor.runtime.triton_compat: triton_key
torch._inductor.runtime.triton_heuristics: CachingAutotuner._coordinate_descent_tuning (launcher);
    ._precompile_config (cfg, ...); .benchmark_all_configs (); .coordesc_tuner; .inductor_meta; .launchers;
    .precompile (*, warm_cache_only, reload_kernel); .restore_after_unpickle (*, old_values);
    .set_compile_info (compile_id, is_backward)
torch._inductor.scheduler: get_scheduler_node_symbol_uses = (node); _post_grad_graph_counter until 2.12
torch._inductor.select_algorithm:
    AlgorithmSelectorCache.__call__ (name, choices, input_nodes, layout, *, input_gen_fns); ._is_extern (choice);
    .get_inputs (choices, input_nodes, layout, input_gen_fns); .key_of (node); .preprocessing_fns;
    AutotuneArgs (*, triton, extern); AutotuneArgs.get_benchmark_tensors (extern); ExternKernelCaller.to_callable ();
    ExternKernelChoice; TritonTemplateCaller.bmreq; extern_kernels
torch._inductor.template_heuristics.registry: get_template_heuristic (template_name, device_type, op_name)
torch._inductor.template_heuristics.triton: BaseConfigHeuristic.mm_configs; .should_scale_configs;
    GemmConfig (block_m, block_n, block_k, num_stages, num_warps, *, group_m)
torch._inductor.triton_bundler: TritonBundle.kernel_artifacts; TritonBundler.put_static_autotuner = (key, kernel)
torch._inductor.utils: get_fused_kernel_name; op_dtype_propagation_rules;
    set_tracing_context_output_strides (example_inputs, compiled_graph)
torch._inductor.virtualized: V.set_choices_handler; .set_fake_mode; .set_graph_handler; torch.cuda: _sleep (cycles)
torch.fx._lazy_graph_module: _LazyGraphModule
torch.fx.experimental.symbolic_shapes: DimDynamic.DYNAMIC; ShapeEnv (*, duck_shape);
    ShapeEnv.create_symbol (val, source, *, dynamic_dim, positive, do_not_specialize_zero_one);
    .create_symfloatnode (sym, *, hint, source); .create_symintnode (sym, *, hint, source);
    .create_unspecified_symbol (val, source, *, dynamic_dim); .constrain_symbol_range (s, compiler_min, compiler_max);
    .size_like; PendingUnbackedSymbolNotFound; SymExprPrinter (); compute_unbacked_bindings (shape_env, example_value);
    free_unbacked_symbols (x)
torch.fx.interpreter: tqdm; torch.fx.passes.fake_tensor_prop: FakeTensorProp (module, mode)
torch.utils._ordered_set: OrderedSet;
torch.utils._python_dispatch: TorchDispatchMode.supports_higher_order_operators; _disable_current_modes ()
torch.utils._sympy.numbers: int_oo; torch.utils._sympy.value_ranges: ValueRanges (lower, upper)
torch.utils._triton: has_triton_package ()
""",
    "fake_process_group": """
torch.distributed.device_mesh: DeviceMesh (device_type, mesh)
torch.distributed.distributed_c10d: _process_group_name (ranks, ...); torch.testing._internal.distributed.fake_pg:
""",
    "training": """
torch._C._autograd: _profiler_enabled; torch._dynamo.backends.registry: list_backends ()
torch._inductor: aoti_compile_and_package (exported_program, *, package_path, inductor_configs);
    aoti_load_package (path)
torch._inductor.config: aot_inductor.metadata; torch.cuda: _device_count_nvml (); _is_in_bad_fork ()
torch.nn.parallel: DistributedDataParallel._register_builtin_comm_hook
""",
}
"""By area, each module (`name:`) and then what is used of it, separated by semicolons.

    name                           is read, or is replaced by a function that takes whatever it is given
    name (a, b, *, c)              is called: a and b by position, c by name; its other parameters have defaults
    name (a, ...)                  the same, where others may follow that its callers pass
    name = (a, b)                  is replaced by a function with these parameters: it has no others
    name since 2.12, until 2.12    in these versions of torch only (inclusive)
    name | other                   one of the two
    .name                          of the class, or object, of the entry before
"""

_ENTRY = re.compile(
    r"(?P<names>[\w.]+(?: \| [\w.]+)*)(?: (?P<exact>= )?\((?P<parameters>[^)]*)\))?"
    r"(?: since (?P<since>[\d.]+))?(?: until (?P<until>[\d.]+))?"
)
_ATTRIBUTE = object()  # stands for what only instances of a class have


def check(*areas: Area) -> None:
    """Raises Unsupported, with the text of `refusal`, if this torch lacks anything of an area."""
    text = refusal(*areas)
    if text:
        raise Unsupported(
            text, hint="Install a torchrelay that knows this torch; until then everything compiles locally"
        )


def refusal(*areas: Area) -> str:
    """Names torch's version and the first symbol of the areas that it lacks; '' if it lacks none."""
    found = [finding for area in areas for finding in missing(area)]
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return f"torch {torch.__version__} is not supported: {found[0]}{more}" if found else ""


@functools.cache
def missing(area: Area) -> tuple[str, ...]:
    """What this torch lacks of an area, or has with other parameters, in words. Imports the area's modules."""
    with patched_environment(TORCH_WARM_POOL="0"):  # no process pool of Inductor's
        return tuple(_findings(TABLE[area]))


def _findings(table: str) -> Iterator[str]:
    home, module = "", None
    for home_of_entry, entry in entries(table):
        if home_of_entry != home:
            home = home_of_entry
            try:
                module = importlib.import_module(home)
            except Exception as error:
                module = None
                yield f"{home} cannot be imported: {type(error).__name__}: {error}"
        if entry and module is not None and (finding := _finding(home, module, entry)) is not None:
            yield finding


def entries(table: str) -> Iterator[tuple[str, str]]:
    """(module, entry) of a table in order, each name in full; the entry is '' where a module begins."""
    home, owner = "", ""
    for written in re.split(r";?\s*\n\s*|; |(?<=:) ", table.strip()):
        entry = owner + written if written.startswith(".") else written
        owner = entry.partition(" ")[0].rpartition(".")[0]
        if entry.endswith(":"):
            home, entry = entry[:-1], ""
        yield home, entry


def _finding(home: str, module: ModuleType, entry: str) -> str | None:
    parsed = _ENTRY.fullmatch(entry)
    assert parsed is not None, entry
    version = _version(torch.__version__)
    if version < _version(parsed["since"] or "0.0") or version > _version(parsed["until"] or "99.0"):
        return None
    names = parsed["names"].split(" | ")
    symbol = f"{home}.{names[0]}"
    found = [value for value in (_resolve(module, name) for name in names) if value is not None]
    if not found:
        return f"{symbol} is missing"
    wanted, exact = parsed["parameters"], parsed["exact"] is not None
    problem = None if wanted is None else _parameter_problem(found[0], wanted, exact=exact)
    return None if problem is None else f"{symbol} {problem}"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _resolve(value: Any, path: str) -> Any:
    """What an attribute path leads to; None where it leads nowhere."""
    for name in path.split("."):
        try:
            found = getattr(value, name)
        except Exception:  # an instance's attribute, or a descriptor that wants an instance
            if not isinstance(value, type) or not _has_instance_attribute(value, name):
                return None
            found = _ATTRIBUTE
        value = _ATTRIBUTE if found is None else found
    return value


def _has_instance_attribute(kind: type, name: str) -> bool:
    """Whether a class has a descriptor or a dataclass field of that name, or a method that names such an attribute."""
    members = [member for base in kind.__mro__ for member in vars(base).values()]
    methods = [member for member in members if isinstance(member, FunctionType)]
    known = {
        *getattr(kind, "__dataclass_fields__", ()),
        *(key for base in kind.__mro__ for key in vars(base)),
    }
    return name in known or any(name in method.__code__.co_names for method in methods)


def _parameter_problem(function: Any, wanted: str, *, exact: bool) -> str | None:
    """What keeps a function from being used with these parameters; None: nothing does, or it is C and does not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    positional, _, by_name = wanted.partition("*, ")
    places = [name for name in positional.split(", ") if name not in ("", "...")]
    names = [name for name in by_name.split(", ") if name]
    kinds = {p.kind for p in parameters}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    plain = [p for p in parameters if p.kind not in variadic and p.name not in ("self", "cls")]
    ordered = [p.name for p in plain if p.kind != p.KEYWORD_ONLY]
    known = [p.name for p in plain]
    has = f"has the parameters ({', '.join(known)})"
    takes_any, takes_any_name = (kind in kinds for kind in variadic)
    if not takes_any and (ordered[: len(places)] != places or (exact and known != places)):
        return f"{has}, not ({wanted})"
    lacking = [name for name in names if name not in known]
    if lacking and not takes_any_name:
        return f"{has}, without {', '.join(lacking)}"
    required = [p.name for p in plain if p.default is p.empty and p.name not in (*places, *names)]
    if required and "..." not in wanted and not takes_any:
        return f"{has}, and requires {', '.join(required)}"
    return None
