"""Variants of a call of an entry of PyTorch's databases: each differs in one thing that a trace may depend on."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from database_cases import Call
from torch import nn
from torch.utils import _pytree

Around = Callable[[], contextlib.AbstractContextManager[Any]]
Variant = tuple[str, Call, Around]

_DTYPES = {
    torch.float32: (torch.float64, torch.bfloat16, torch.int64),
    torch.float64: (torch.float32,),
    torch.int64: (torch.int32, torch.float32),
    torch.bool: (torch.uint8,),
    torch.complex64: (torch.complex128,),
}


_SEQUENCES: tuple[Any, ...] = (list, tuple, torch.Size)


@contextlib.contextmanager
def _setting(read: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    put(value)
    try:
        yield
    finally:
        put(before)


SETTINGS: dict[str, Around] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "default dtype": lambda: _setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic": lambda: _setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "precision": lambda: _setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "default device": lambda: torch.device("meta"),
}


def copied(call: Call) -> Call:
    """On new tensors, with strides, shared memory and the order of its tensors as they are."""
    memo: dict[int, Any] = {}
    made: dict[int, torch.Tensor] = {}

    def new(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if id(tensor) not in made:
            one = copy.deepcopy(tensor.detach(), memo)
            if isinstance(tensor, nn.Parameter):
                one = nn.Parameter(one, tensor.requires_grad)
            made[id(tensor)] = one.requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    function = copy.deepcopy(call.function) if isinstance(call.function, nn.Module) else call.function
    args, kwargs = _pytree.tree_map(new, (call.args, call.kwargs))
    return Call(function, args, kwargs)


def variants(call: Call) -> Iterator[Variant]:
    for name, around in SETTINGS.items():
        yield name, call, around
    for name, other in _of_arguments(call):
        yield name, other, contextlib.nullcontext
    if isinstance(call.function, nn.Module):
        for name, change in _of_modules(call.function):
            other = copied(call)
            with contextlib.suppress(Exception):
                change(other.function)
                yield name, other, contextlib.nullcontext


def _of_arguments(call: Call) -> Iterator[tuple[str, Call]]:
    leaves, spec = _pytree.tree_flatten((call.args, call.kwargs))

    def put(changed: dict[int, Any]) -> Call:
        parts = [changed.get(position, leaf) for position, leaf in enumerate(leaves)]
        args, kwargs = _pytree.tree_unflatten(parts, spec)
        return Call(call.function, args, kwargs)

    tensors = {position: leaf for position, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    for position, leaf in enumerate(leaves):
        change = _of_tensor if isinstance(leaf, torch.Tensor) else _of_constant
        for name, make in change(leaf):
            with contextlib.suppress(Exception):
                yield f"argument {position}: {name}", put({position: make()})
    if len(tensors) > 1:
        for name in dict.fromkeys(name for leaf in tensors.values() for name, _ in _of_tensor(leaf)):
            with contextlib.suppress(Exception):
                every = {position: dict(_of_tensor(leaf)) for position, leaf in tensors.items()}
                yield (
                    f"all: {name}",
                    put({position: each[name]() for position, each in every.items() if name in each}),
                )
    for one in tensors:
        for other in tensors:
            if one < other and tensors[one].shape == tensors[other].shape:
                yield f"argument {other} is {one}", put({other: tensors[one]})
                if tensors[one].layout is torch.strided:
                    yield f"argument {other} is a view of {one}", put({other: tensors[one].detach()[...]})
    for key in call.kwargs:
        yield (
            f"without {key}",
            Call(call.function, call.args, {k: v for k, v in call.kwargs.items() if k != key}),
        )
    if len(call.kwargs) > 1:
        yield "keywords in another order", Call(call.function, call.args, dict(reversed(call.kwargs.items())))
    if len(call.args) > 1:
        yield "without the last argument", Call(call.function, call.args[:-1], call.kwargs)
    for position, given in enumerate(call.args):
        if type(given) in (list, tuple, torch.Size):
            for kind in _SEQUENCES:
                with contextlib.suppress(Exception):
                    parts = [*call.args]
                    parts[position] = kind(given)
                    yield (
                        f"argument {position}: {kind.__name__}",
                        Call(call.function, tuple(parts), call.kwargs),
                    )
            if len(given) > 1:
                parts = [*call.args]
                parts[position] = given[:-1]
                yield f"argument {position}: shorter", Call(call.function, tuple(parts), call.kwargs)


def _of_tensor(x: torch.Tensor) -> list[tuple[str, Callable[[], Any]]]:
    plain = x.detach()
    floats = x.is_floating_point() or x.is_complex()
    found: list[tuple[str, Callable[[], Any]]] = [
        ("other values", lambda: (plain * 0.75 if floats else plain.clone()).requires_grad_(x.requires_grad)),
        ("one more dimension", lambda: plain.clone().unsqueeze(0)),
        ("a parameter", lambda: nn.Parameter(plain.clone(), requires_grad=x.requires_grad)),
        ("of NumPy", lambda: plain.numpy()),
        ("made in inference mode", lambda: _in_inference(plain)),
        ("zeros", lambda: torch._efficientzerotensor(plain.shape, dtype=plain.dtype)),
        *(
            (
                str(dtype),
                lambda dtype=dtype: plain.to(dtype).requires_grad_(
                    x.requires_grad and dtype.is_floating_point
                ),
            )
            for dtype in _DTYPES.get(x.dtype, ())
        ),
    ]
    if floats:
        found += [
            ("requires_grad", lambda: plain.clone().requires_grad_(not x.requires_grad)),
            ("no leaf", lambda: plain.clone().requires_grad_() * 1),
            ("negative", lambda: torch._neg_view(plain.clone())),
        ]
    if x.is_complex():
        found += [("conjugate", lambda: plain.clone().conj())]
    if x.layout is torch.strided and x.dim():
        found += [
            ("smaller", lambda: plain[:-1].clone()),
            ("twice as large", lambda: torch.cat([plain, plain])),
            ("one", lambda: plain[:1].clone()),
            ("nothing", lambda: plain[:0].clone()),
            ("every second", lambda: torch.stack([plain, plain], -1)[..., 0]),
            ("a part", lambda: torch.cat([plain, plain])[plain.shape[0] :]),
            ("one value", lambda: plain[:1].expand(plain.shape)),
        ]
    if x.layout is torch.strided and x.dim() > 1:
        found += [
            ("transposed", lambda: plain.transpose(0, -1).contiguous().transpose(0, -1)),
            ("last smaller", lambda: plain[..., :-1].clone()),
            ("sizes swapped", lambda: plain.transpose(0, -1).contiguous()),
        ]
    if x.dim() == 4:
        found += [("channels last", lambda: plain.clone(memory_format=torch.channels_last))]
    return found


def _in_inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


def _of_constant(value: Any) -> list[tuple[str, Callable[[], Any]]]:
    others: list[Any] = []
    match value:
        case bool():
            others = [not value, int(value), None]
        case int():
            others = [value + 1, value - 1, -value, float(value), numpy.int64(value), torch.tensor(value)]
            others += [bool(value)] if value in (0, 1) else []
        case float():
            others = [value * 1.5, -value, 0.0, -0.0, float("nan"), float("inf"), numpy.float64(value)]
            others += [torch.tensor(value)] + ([int(value)] if value.is_integer() else [])
        case complex():
            others = [value.conjugate(), value.real]
        case None:
            others = [0, 1, True, 0.5]
        case str():
            others = [
                *{"mean", "sum", "none", "reflect", "constant", "floor", "trunc", "tanh", value + "_"}
                - {value}
            ]
        case torch.dtype():
            others = [*{torch.float32, torch.float64, torch.int64, torch.bfloat16, None} - {value}]
        case torch.memory_format():
            others = [*{torch.contiguous_format, torch.preserve_format, torch.channels_last} - {value}]
        case torch.device():
            others = ["meta", None]
    return [(f"{value!r} is {other!r}", lambda other=other: other) for other in sorted(others, key=repr)]


def _of_modules(module: nn.Module) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    yield "the other mode", lambda each: each.train(not each.training)
    yield "float64", lambda each: each.double()
    yield "without gradients", lambda each: each.requires_grad_(False)
    yield "a hook", lambda each: each.register_forward_hook(_doubled)
    yield "a hook before", lambda each: each.register_forward_pre_hook(_doubled_inputs)
    for path, inner in module.named_modules():
        for name, value in vars(inner).items():
            if name == "training" or isinstance(value, bool | int | float | str | None | tuple):
                for label, make in _of_constant(value) or _of_tuple(value):
                    yield f"{path}.{name}: {label}", _attribute(path, name, make())
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                yield f"{path}.{name} frozen", _frozen(path, name)
                yield f"{path}.{name} is None", _attribute(path, name, None)
        for name, _ in inner.named_children():
            yield f"{path}.{name} is Identity", _attribute(path, name, nn.Identity())
        if path:
            yield f"{path} has a hook", _hooked(path)


def _of_tuple(value: Any) -> list[tuple[str, Callable[[], Any]]]:
    if not isinstance(value, tuple) or not all(type(each) is int for each in value):
        return []
    return [
        (f"{value} is {other}", lambda other=other: other)
        for other in ({tuple(each + 1 for each in value), value[::-1]} - {value})
    ]


def _attribute(path: str, name: str, value: Any) -> Callable[[Any], Any]:
    return lambda module: setattr(module.get_submodule(path), name, value)


def _frozen(path: str, name: str) -> Callable[[Any], Any]:
    return lambda module: getattr(module.get_submodule(path), name).requires_grad_(False)


def _hooked(path: str) -> Callable[[Any], Any]:
    return lambda module: module.get_submodule(path).register_forward_hook(_doubled)


def _doubled(module: Any, args: Any, output: Any) -> Any:
    return _pytree.tree_map(lambda each: each * 2, output)


def _doubled_inputs(module: Any, args: Any) -> Any:
    return tuple(each * 2 if isinstance(each, torch.Tensor) else each for each in args)


def program_of(function: Callable[..., Any]) -> Callable[..., Any]:
    def program(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return program
