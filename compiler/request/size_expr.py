"""Stage 2: size expressions as text, checked and evaluated by an `ast` walker; no eval, no sympy parser.

The grammar is a subset of Python's: integers, finite floats, True and False, declared symbols, + - * / //
% **, comparisons, and/or/not, and calls of the functions in FUNCTIONS. `**` takes a constant exponent, and
the exponents along a path multiply to at most MAX_POWER, so that no short text names a huge number.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import BadExpression

if TYPE_CHECKING:
    import sympy

MAX_LENGTH = 4096
MAX_DEPTH = 64
MAX_POWER = 64
MAX_INTEGER = 1 << 64

_ALPHABET = re.compile(r"[A-Za-z0-9_+\-*/%()<>=!,. ]+")
_HINT = 60


def check(text: str, names: Collection[str]) -> None:
    """Raise BadExpression unless `text` is in the grammar and uses only the symbols in `names`."""
    _validate(_parse(text), text, names, MAX_DEPTH, MAX_POWER)


def evaluate(text: str, env: Mapping[str, Any]) -> Any:
    """The value of `text`. Values in `env` may be int, float, bool, torch.SymInt, SymFloat or SymBool."""
    tree = _parse(text)
    _validate(tree, text, env, MAX_DEPTH, MAX_POWER)
    try:
        return _value(tree, env)
    except (ArithmeticError, ValueError, TypeError) as error:
        # Division by zero, the root of a negative number, a bool where a number should be.
        raise _refuse(text, f"has no value: {error}") from error


def render(expr: sympy.Basic, names: Mapping[sympy.Symbol, str]) -> str:
    """`expr` in the grammar, with symbols renamed. Operands of commutative operators are put in text order,

    so that the text does not depend on the symbols' own names. Raises BadExpression outside the grammar.
    """
    text = _render(expr, names, MAX_DEPTH)
    check(text, set(names.values()))
    return text


# --- text -> tree ----------------------------------------------------------------------------------------


def _parse(text: str) -> ast.expr:
    if len(text) > MAX_LENGTH:
        raise BadExpression(f"expression of {len(text)} characters, {MAX_LENGTH} allowed")
    if not _ALPHABET.fullmatch(text) or text != text.strip():
        raise BadExpression(f"expression {text[:_HINT]!r} has characters outside the grammar")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise BadExpression(f"expression {text[:_HINT]!r} cannot be parsed") from None


def _refuse(text: str, why: str) -> BadExpression:
    return BadExpression(f"expression {text[:_HINT]!r} {why}")


def _validate(node: ast.expr, text: str, names: Collection[str], depth: int, power: int) -> None:
    if depth <= 0:
        raise _refuse(text, f"is nested deeper than {MAX_DEPTH}")
    match node:
        case ast.Constant(value=bool()):
            return
        case ast.Constant(value=int(number)):
            if number > MAX_INTEGER:
                raise _refuse(text, "has an integer past 64 bits")
        case ast.Constant(value=float(number)):
            if not math.isfinite(number):
                raise _refuse(text, "has a float that is not finite")
        case ast.Name(id=name):
            if name not in names:
                raise _refuse(text, f"uses unknown symbol {name[:_HINT]!r}")
        case ast.BinOp(left=base, op=ast.Pow(), right=ast.Constant(value=int(exponent))):
            # bool is an int, and True ** x is harmless, but canonical text never has it.
            if isinstance(exponent, bool) or exponent > power:
                raise _refuse(text, f"raises to a power past {MAX_POWER}")
            _validate(base, text, names, depth - 1, power // max(exponent, 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            _validate(left, text, names, depth - 1, power)
            _validate(right, text, names, depth - 1, power)
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            _validate(operand, text, names, depth - 1, power)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            _validate(left, text, names, depth - 1, power)
            _validate(right, text, names, depth - 1, power)
        case ast.BoolOp(values=values):
            for operand in values:
                _validate(operand, text, names, depth - 1, power)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            if name not in FUNCTIONS:
                raise _refuse(text, f"calls {name[:_HINT]!r}, which is not in the grammar")
            arity, _ = FUNCTIONS[name]
            if len(args) != arity if arity else len(args) < 2:
                raise _refuse(text, f"calls {name} with {len(args)} arguments")
            for arg in args:
                _validate(arg, text, names, depth - 1, power)
        case _:
            raise _refuse(text, f"has {type(node).__name__}, which is not in the grammar")


# --- tree -> value ---------------------------------------------------------------------------------------

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _symbolic(*values: Any) -> bool:
    return not all(isinstance(value, (bool, int, float)) for value in values)


def _torch(function: str, *values: Any) -> Any:
    # Only symbolic values come here, so torch is loaded already; the gateway never gets this far.
    import torch

    return getattr(torch, function)(*values)


def _least(left: Any, right: Any) -> Any:
    return _torch("sym_min", left, right) if _symbolic(left, right) else min(left, right)


def _greatest(left: Any, right: Any) -> Any:
    return _torch("sym_max", left, right) if _symbolic(left, right) else max(left, right)


def _both(left: Any, right: Any) -> Any:
    # A plain bool decides alone; two SymBools join without a guard.
    if isinstance(left, bool):
        return right if left else False
    if isinstance(right, bool):
        return left if right else False
    return left & right


def _either(left: Any, right: Any) -> Any:
    if isinstance(left, bool):
        return True if left else right
    if isinstance(right, bool):
        return True if right else left
    return left | right


def _negation(value: Any) -> Any:
    return _torch("sym_not", value) if _symbolic(value) else not value


def _to_float(value: Any) -> Any:
    return _torch("sym_float", value) if _symbolic(value) else float(value)


def _root(value: Any) -> Any:
    return _torch("sym_sqrt", value) if _symbolic(value) else math.sqrt(value)


FUNCTIONS: Mapping[str, tuple[int, Callable[..., Any]]] = {
    # name -> number of arguments, 0 for two or more; and what is called
    "Min": (0, lambda *values: functools.reduce(_least, values)),
    "Max": (0, lambda *values: functools.reduce(_greatest, values)),
    "And": (0, lambda *values: functools.reduce(_both, values)),
    "Or": (0, lambda *values: functools.reduce(_either, values)),
    "Not": (1, _negation),
    "Eq": (2, operator.eq),
    "Ne": (2, operator.ne),
    "Lt": (2, operator.lt),
    "Le": (2, operator.le),
    "Gt": (2, operator.gt),
    "Ge": (2, operator.ge),
    "Mod": (2, operator.mod),
    "PythonMod": (2, operator.mod),
    "FloorDiv": (2, operator.floordiv),
    "CleanDiv": (2, operator.floordiv),
    "CeilDiv": (2, lambda left, right: -(-left // right)),
    "Abs": (1, abs),
    "IntTrueDiv": (2, operator.truediv),
    "FloatTrueDiv": (2, operator.truediv),
    "ToFloat": (1, _to_float),
    "TruncToInt": (1, math.trunc),
    "FloorToInt": (1, math.floor),
    "CeilToInt": (1, math.ceil),
    "Sqrt": (1, _root),
}


def _value(node: ast.expr, env: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return env[name]
        case ast.BinOp(left=base, op=ast.Pow(), right=ast.Constant(value=exponent)):
            return _value(base, env) ** exponent
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_value(left, env), _value(right, env))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, env)
        case ast.UnaryOp(operand=operand):
            return _negation(_value(operand, env))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _COMPARE[type(op)](_value(left, env), _value(right, env))
        case ast.BoolOp(op=ast.And(), values=values):
            return functools.reduce(_both, (_value(value, env) for value in values))
        case ast.BoolOp(values=values):
            return functools.reduce(_either, (_value(value, env) for value in values))
        case ast.Call(func=ast.Name(id=name), args=args):
            return FUNCTIONS[name][1](*(_value(arg, env) for arg in args))
    raise BadExpression(f"{type(node).__name__} is not in the grammar")


# --- sympy -> text ---------------------------------------------------------------------------------------

_RELATIONS: Mapping[str, str] = {
    "Equality": "Eq",
    "Unequality": "Ne",
    "StrictLessThan": "Lt",
    "LessThan": "Le",
    "StrictGreaterThan": "Gt",
    "GreaterThan": "Ge",
}

_SAME_NAME = frozenset(FUNCTIONS) - {"Eq", "Ne", "Lt", "Le", "Gt", "Ge", "Sqrt"}
_COMMUTATIVE = frozenset({"Min", "Max", "And", "Or", "Eq", "Ne"})


def _render(expr: Any, names: Mapping[sympy.Symbol, str], depth: int) -> str:
    import sympy

    if depth <= 0:
        raise BadExpression(f"a size expression is nested deeper than {MAX_DEPTH}")
    kind = type(expr).__name__

    def below(child: Any) -> str:
        return _render(child, names, depth - 1)

    if isinstance(expr, sympy.Symbol):
        if expr not in names:
            raise BadExpression(f"symbol {expr} is not an input's size")
        return names[expr]
    if isinstance(expr, sympy.Integer):
        return str(int(expr)) if int(expr) >= 0 else f"({int(expr)})"
    if isinstance(expr, sympy.Float):
        return repr(float(expr)) if float(expr) >= 0 else f"({float(expr)!r})"
    if expr is sympy.true or expr is sympy.false:
        return str(expr is sympy.true)
    if isinstance(expr, sympy.core.relational.Relational):
        left, right = _without_fractions(expr.lhs, expr.rhs)
        return _call(_RELATIONS.get(kind, kind), [below(left), below(right)])
    if isinstance(expr, (sympy.Add, sympy.Mul)):
        numerator, denominator = sympy.fraction(sympy.together(expr))
        if denominator != 1:
            return _call("CleanDiv", [below(numerator), below(denominator)])
        # together() may leave another kind of node; only sums and products are joined here.
        if not isinstance(numerator, (sympy.Add, sympy.Mul)):
            return below(numerator)
        sign = " + " if isinstance(numerator, sympy.Add) else " * "
        return "(" + sign.join(sorted(below(arg) for arg in numerator.args)) + ")"
    if isinstance(expr, sympy.Pow) or kind == "PowByNatural":
        base, exponent = expr.args
        if exponent == sympy.Rational(1, 2):
            return _call("Sqrt", [below(base)])
        return f"({below(base)} ** {below(exponent)})"
    if kind == "OpaqueUnaryFn_sqrt":
        return _call("Sqrt", [below(expr.args[0])])
    if kind == "Identity":
        return below(expr.args[0])
    if kind in _SAME_NAME:
        return _call(kind, [below(arg) for arg in expr.args])
    raise BadExpression(f"size expression holds {kind}, which is not in the grammar")


def _call(name: str, args: list[str]) -> str:
    return f"{name}({', '.join(sorted(args) if name in _COMMUTATIVE else args)})"


def _without_fractions(left: Any, right: Any) -> tuple[Any, Any]:
    """Both sides times the (positive, integer) denominators, so that no exact fraction is left."""
    import sympy

    scale = 1
    for side in (left, right):
        denominator = sympy.fraction(sympy.together(side))[1]
        if isinstance(denominator, sympy.Integer) and denominator > 1:
            scale = sympy.lcm(scale, denominator)
    if scale == 1:
        return left, right
    return sympy.expand(left * scale), sympy.expand(right * scale)
