"""Size expressions: what the grammar takes, what it refuses, and that text means what sympy meant."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
import sympy
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import CeilToInt, CleanDiv, FloorDiv, IntTrueDiv, Max, Min, Mod, PythonMod
from torchrelay.compiler.errors import BadExpression
from torchrelay.compiler.request import size_expr

A, B, C = (sympy.Symbol(name, integer=True, positive=True) for name in "abc")
NAMES = {A: "s0", B: "s1", C: "s2"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("s0", 8),
        ("(1 + s0) * 3 - s1", 24),
        ("s0 // 3 + s0 % 3", 4),
        ("-s0", -8),
        ("s0 ** 2", 64),
        ("s0 / 16", 0.5),
        ("Min(s0, s1, 5)", 3),
        ("Max(s0, s1)", 8),
        ("CeilDiv(s0, 3)", 3),
        ("FloorToInt(IntTrueDiv(s0, 3))", 2),
        ("CeilToInt(s0 / 3)", 3),
        ("Sqrt(s0 * 2)", 4.0),
        ("Eq(Mod(s0, 2), 0)", True),
        ("s0 < s1", False),
        ("And(Lt(s1, s0), Or(Eq(s0, 1), Not(s0 < 2)))", True),
        ("not s0 == 8 or s1 >= 3", True),
        ("True", True),
    ],
)
def test_an_expression_has_its_value(text: str, value: object) -> None:
    env = {"s0": 8, "s1": 3}
    size_expr.check(text, env)
    assert size_expr.evaluate(text, env) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        " s0",
        "s9",
        "s0 + s9",
        "s9 + s0",
        "s0 < s9",
        "s9 < s0",
        "s0.real",
        "s0[0]",
        "__import__('os')",
        "open(s0)",
        "eval(s0)",
        "lambda: 0",
        "(s0 for s0 in s1)",
        "s0 if s0 else s1",
        "s0 < s1 < 3",
        "s0 ** s1",
        "s0 ** -1",
        "s0 ** 65",
        "(s0 ** 9) ** 9",
        "2 ** (2 ** 2)",
        "Min(s0)",
        "Mod(s0)",
        "Max(*s0)",
        "Mod(s0, b=1)",
        "1j",
        "1e999",
        "99999999999999999999999",
        "s0 << 3",
        "s0 & 1",
        "~s0",
        "s0 @ s1",
        "'text'",
        "s0\n+1",
        "s0 is s1",
        "s\u0660",
        "await s0",
        "(" * 300 + "s0" + ")" * 300,
        "-" * 4000 + "s0",
        "not " * 100 + "s0",
        "s0" + " + s0" * 2000,
        "1" * 4000,
    ],
)
def test_what_is_outside_the_grammar_is_refused(text: str) -> None:
    with pytest.raises(BadExpression):
        size_expr.check(text, {"s0", "s1"})
    with pytest.raises(BadExpression):
        size_expr.evaluate(text, {"s0": 8, "s1": 3})


@pytest.mark.parametrize("text", ["s0 // s1", "s0 % s1", "s0 / s1", "Sqrt(s1 - 1)"])
def test_an_expression_without_a_value_is_a_bad_expression(text: str) -> None:
    with pytest.raises(BadExpression):
        size_expr.evaluate(text, {"s0": 8, "s1": 0})


def test_the_longest_expression_is_checked_quickly() -> None:
    text = "(" + "+".join(["s0"] * 30) + ")"
    text = "*".join([text] * 20)
    started = time.process_time()
    for _ in range(10):
        size_expr.check(text, {"s0"})
    assert time.process_time() - started < 1


def _comparable(make: Callable[..., sympy.Expr]) -> Callable[..., sympy.Expr]:
    def made(*args: sympy.Expr) -> sympy.Expr:
        try:
            return make(*args)
        except ValueError:  # sympy: half of 1, inside Max, is not comparable
            reject()

    return made


_sums: st.SearchStrategy[sympy.Expr] = st.recursive(
    st.one_of(st.sampled_from([A, B, C]), st.integers(-4, 9).map(sympy.Integer)),
    lambda inner: st.one_of(
        st.builds(lambda x, y: x + y, inner, inner),
        st.builds(lambda x, y: x * y, inner, inner),
        st.builds(lambda x: x**2, inner),
        st.builds(lambda x: x / 2, inner),
        st.builds(_comparable(Max), inner, inner),
        st.builds(_comparable(Min), inner, inner),
        st.builds(lambda x, n: FloorDiv(x, sympy.Integer(n)), inner, st.integers(1, 5)),
        st.builds(lambda x, n: PythonMod(x, sympy.Integer(n)), inner, st.integers(1, 5)),
    ),
    max_leaves=6,
)


@given(_sums, _sums)
@settings(max_examples=200, deadline=None)
def test_rendered_relations_mean_what_sympy_means(left: sympy.Expr, right: sympy.Expr) -> None:
    relation = sympy.Lt(left, right)
    try:
        text = size_expr.render(relation, NAMES)
    except BadExpression:
        return
    if _has_fractions(relation):
        return  # nor can sympy put numbers into each of these: half of 5, inside Max, is not comparable
    for a, b, c in itertools.product((2, 5), (3, 7), (4,)):
        expected = relation.subs({A: a, B: b, C: c})
        if expected in (sympy.true, sympy.false):
            assert size_expr.evaluate(text, {"s0": a, "s1": b, "s2": c}) == bool(expected), text


def _has_fractions(relation: sympy.Basic) -> bool:
    # Below a FloorDiv or Max, half a size stands for an exact division, which holds for the hints alone.
    return any(
        isinstance(part, sympy.Rational) and not part.is_Integer
        for part in sympy.preorder_traversal(relation)
    )


def test_halves_in_a_relation_become_whole_numbers() -> None:
    assert size_expr.evaluate(size_expr.render(sympy.Lt(A / 2, B), NAMES), {"s0": 5, "s1": 3}) is True
    assert size_expr.evaluate(size_expr.render(sympy.Lt(A / 2, B), NAMES), {"s0": 6, "s1": 3}) is False


def test_text_does_not_depend_on_the_symbols_own_names() -> None:
    texts = set()
    for first, second in (("s77", "s3"), ("s3", "s77"), ("z", "a")):
        x, y = sympy.Symbol(first, integer=True), sympy.Symbol(second, integer=True)
        texts.add(size_expr.render(x * y + 2 * y + Max(x, y, 4) - x, {x: "s0", y: "s1"}))
    assert len(texts) == 1


def test_a_symbol_that_is_no_input_is_refused() -> None:
    with pytest.raises(BadExpression, match="not an input"):
        size_expr.render(A + sympy.Symbol("u0"), NAMES)


@pytest.mark.parametrize(
    "value",
    [
        Mod(A, B),
        CleanDiv(A * B, B),
        IntTrueDiv(A, B),
        CeilToInt(IntTrueDiv(A, B)),
        sympy.Eq(A, B),
        sympy.And(A < B, B < C),
    ],
)
def test_torchs_own_functions_render(value: sympy.Basic) -> None:
    text = size_expr.render(value, NAMES)
    size_expr.evaluate(text, {"s0": 6, "s1": 3, "s2": 9})
