"""Stages 1 and 7: PyTorch's configuration as it is now becomes a request's options; these, Inductor's configuration.

Every entry of the configuration modules is sent, or local to a machine (rules.py lists both), or must have PyTorch's
own value, which the operator table holds. So neither code nor an environment variable changes what is compiled without
changing the key.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal, cast, get_args

import torch

from ..errors import BadOption
from ..request import schema
from ..request.operator_table import rules, table
from ..torch_internals.inductor import config

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Options = list[tuple[str, schema.OptionValue]]
DYNAMO_OPTIONS = ("guard_filter_fn", "use_aoti")
"""Options that torch.compile takes out for itself: no back end sees them."""
BACKGROUND = "torchrelay.background"
"""The one option that is ours: whether a graph that is still to be compiled runs eagerly meanwhile."""


def split_options(options: Mapping[str, Any] | None) -> tuple[bool | None, dict[str, Any]]:
    """BACKGROUND's value (None: not given), and Inductor's options. Raises RuntimeError for a value that is no bool, as
    Inductor does for its own."""
    theirs = dict(options or {})
    background = theirs.pop(BACKGROUND, None)
    if background is not None and not isinstance(background, bool):
        raise RuntimeError(
            f"Unexpected type of attr {BACKGROUND}, got {type(background).__name__} should be bool"
        )
    return background, theirs


def portable_mode(mode: str, options: Mapping[str, Any]) -> tuple[Mode, Mapping[str, Any]]:
    """The mode and options of a request. A mode that a request has no name for is sent as the options for which it
    stands."""
    if mode in get_args(Mode):
        return cast(Mode, mode), options
    return "default", {**config.mode_options(mode), **options}


def read_configuration(mode: Mode, options: Mapping[str, Any]) -> tuple[Options, Options, bool]:
    """Inductor's options and AOTAutograd's, where they differ from their defaults; whether CUDA graphs are on.

    `options`: of the call to torch.compile; they come before the process' own. Raises BadOption with the name of an
    entry that a request cannot carry.
    """
    known = table.load(torch.__version__)
    inductor = config.config_entries(rules.INDUCTOR)
    functorch = config.config_entries(rules.FUNCTORCH)
    _refuse_changes(rules.INDUCTOR, inductor, known, known.options)
    _refuse_changes(rules.FUNCTORCH, functorch, known, known.aot_options)
    for module in rules.LOCAL_ENTRIES:
        if module not in (rules.INDUCTOR, rules.FUNCTORCH):
            _refuse_changes(module, config.config_entries(module), known, ())
    for variable in config.variables_that_change_code():
        raise BadOption(f"{variable} cannot be sent", hint="Unset the variable, or compile locally")
    for extension in config.user_extensions():
        raise BadOption(
            f"{extension} cannot be sent", hint="The service compiles with PyTorch as it is; compile locally"
        )
    chosen = _changed(inductor, known.options)
    for name, value in options.items():
        name = name.replace("-", "_")
        if name not in known.options or name not in inductor or not known.options[name].accepts(value):
            raise BadOption(f"option {name} = {value!r} cannot be sent")
        chosen[name] = value
    aot = _changed(functorch, known.aot_options)
    for name, value in chosen.items():
        if not known.options[name].accepts(value):
            raise BadOption(f"{rules.INDUCTOR}.{name} = {value!r} cannot be sent")
    for name, value in aot.items():
        if not known.aot_options[name].accepts(value):
            raise BadOption(f"{rules.FUNCTORCH}.{name} = {value!r} cannot be sent")
    merged = {**inductor, **config.mode_options(mode), **options}
    return sorted(chosen.items()), sorted(aot.items()), bool(merged["triton.cudagraphs"])


def _changed(entries: Mapping[str, Any], sent: Mapping[str, table.ConfigOption]) -> dict[str, Any]:
    """Entries that are sent and differ from their defaults. A torch newer than the table may lack some."""
    return {
        name: entries[name]
        for name, entry in sent.items()
        if name in entries and entries[name] != entry.default
    }


def _refuse_changes(
    module: str, entries: Mapping[str, Any], known: table.OperatorTable, sent: Collection[str]
) -> None:
    """Raises BadOption for an entry that may reach code, is not sent, and has another value than PyTorch's own."""
    fixed = known.fixed.get(module, {})
    for name, value in entries.items():
        if name in sent:
            continue
        own = fixed[name] if name in fixed else table.portable(config.own_default(module, name))
        if table.portable(value) != own and not re.fullmatch(rules.LOCAL_ENTRIES[module], name):
            raise BadOption(
                f"{module}.{name} = {value!r} cannot be sent",
                hint=f"Leave it at PyTorch's own value ({own!r}), in code and in the environment, or compile locally",
            )


# --- on the worker -----------------------------------------------------------------------------------------


def options_of(request: schema.GraphRequest, threads: int) -> dict[str, Any]:
    """Inductor's configuration for a request. threads: parallel g++ and Triton compilers."""
    options = {**config.mode_options(request.mode), **dict(request.options)}
    return _options(request.toolchain.torch, options, request.ambient.threads, threads)


def search_options(torch_version: str, kernel_threads: int, threads: int) -> dict[str, Any]:
    """Inductor's configuration for a search. kernel_threads: of a CPU's kernels. threads: as for `options_of`."""
    options = config.mode_options("max-autotune-no-cudagraphs")
    return _options(torch_version, options, kernel_threads, threads)


def _options(
    torch_version: str, options: Mapping[str, Any], kernel_threads: int, threads: int
) -> dict[str, Any]:
    present = config.settable_entries(rules.INDUCTOR)  # a torch newer than the table may lack some
    return {
        **{
            name: entry.default
            for name, entry in table.load(torch_version).options.items()
            if name in present
        },
        **options,
        "cpp.threads": kernel_threads,
        "compile_threads": threads,
        "fx_graph_cache": True,
        "fx_graph_remote_cache": False,
        "autotune_local_cache": True,
        "autotune_remote_cache": False,
        "bundle_triton_into_fx_graph_cache": True,
        "use_static_triton_launcher": True,
        **config.STATIC_USER_KERNELS,
        "force_disable_caches": False,
    }
