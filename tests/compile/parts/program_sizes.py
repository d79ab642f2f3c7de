"""Programs with symbolic sizes, called with sizes that their conditions allow and with others."""

# ruff: noqa: E501 (a row is a program, its change and what the next start does)

from __future__ import annotations

from program_changes import Change, edit

END = ",  # end"
MARKED = "def marked(*sizes):\n    x = torch.linspace(-1, 2, math.prod(sizes)).view(*sizes).clone()\n    torch._dynamo.mark_dynamic(x, 0)\n    return x\n"


def continued(name: str) -> str:
    """The text of a program that is called with the sizes before the change, and then with those after it."""
    ((old, new),) = SIZES[name].edits
    return SIZES[name].before().replace(old, old.removesuffix(END) + ", " + new)


def sizes(body: str, before: str, after: str, how: str = "used", dynamic: str = "None") -> Change:
    """`before` and `after` are argument tuples of calls; t(3, 4) is a tensor of these sizes."""
    text = (
        "import math\n\nfrom torch.nn import functional as F\n\ndynamic = DYNAMIC\n\n\n"
        "def t(*sizes):\n    return torch.linspace(-1, 2, math.prod(sizes)).view(*sizes).clone()\n\n\n"
        f"{MARKED}\n\ndef inputs():\n    return [CALLS\n    ]\n\n\ndef program(x, *more):\n    {body}\n"
    ).replace("DYNAMIC", dynamic)
    return edit(text.replace("CALLS", before + END), (before + END, after + END), how=how)


BRANCH = "return x.sum(0) * x.shape[0] + (1 if x.shape[0] > 8 else 2)"
EVEN = "return x.view(-1, 2).sum(0) if x.shape[0] % 2 == 0 else x * x.shape[0]"
ZERO = "return torch.full_like(x, more[0]).reciprocal() if more[0] == 0.0 else x * 7"
FLOAT = "return F.softshrink(x, more[0])"
SCALED = "return x * more[0] + more[0] / 3"
SIGNED = "return x * math.copysign(2.0, more[0])"

SIZES = {
    "another size": sizes(BRANCH, "(t(3),), (t(5),)", "(t(6),)"),
    "another size, the other branch": sizes(BRANCH, "(t(3),), (t(5),)", "(t(12),)", how="traced"),
    "the branch's bound": sizes(BRANCH, "(t(3),), (t(5),)", "(t(8),)"),
    "past the branch's bound": sizes(BRANCH, "(t(3),), (t(5),)", "(t(9),)", how="traced"),
    "both branches": sizes(BRANCH, "(t(3),), (t(5),), (t(12),)", "(t(20),), (t(7),)"),
    "size of one": sizes(BRANCH, "(t(3),), (t(5),)", "(t(1),)", how="traced"),
    "size of zero": sizes("return x * 2 + x.shape[0]", "(t(3),), (t(5),)", "(torch.ones(0),)", how="traced"),
    "size of two": sizes(BRANCH, "(t(3),), (t(5),)", "(t(2),)"),
    "first size again": sizes(BRANCH, "(t(3),), (t(5),)", "(t(3),), (t(5),), (t(6),)"),
    "other order": sizes(BRANCH, "(t(3),), (t(5),)", "(t(5),), (t(3),)"),
    "dynamic": sizes(BRANCH, "(t(3),)", "(t(5),)", dynamic="True"),
    "dynamic, the other branch": sizes(BRANCH, "(t(3),)", "(t(12),)", how="traced", dynamic="True"),
    "dynamic, size of one": sizes(BRANCH, "(t(3),)", "(t(1),)", how="traced", dynamic="True"),
    "dynamic, a float that is compared": sizes(ZERO, "(t(3), 0.0)", "(t(5), 0.0)", dynamic="True"),
    "dynamic, another float": sizes(ZERO, "(t(3), 0.0)", "(t(3), 0.5)", how="traced", dynamic="True"),
    "dynamic, zero of the other sign": sizes(
        ZERO, "(t(3), 0.0)", "(t(3), -0.0)", how="traced", dynamic="True"
    ),
    "dynamic, a float": sizes(FLOAT, "(t(3), 0.4)", "(t(5), 0.5)", dynamic="True"),
    "dynamic, a float in a fused product": sizes(SCALED, "(t(3), 0.4)", "(t(5), 1e-7)", dynamic="True"),
    "dynamic, a float past its bound": sizes(
        FLOAT, "(t(3), 0.4)", "(t(5), -0.5)", how="traced", dynamic="True"
    ),
    "dynamic, a float that is no number": sizes(
        SCALED, "(t(3), 0.4)", "(t(3), math.nan)", how="traced", dynamic="True"
    ),
    "dynamic, a float that is infinite": sizes(SCALED, "(t(3), 0.4)", "(t(3), math.inf)", dynamic="True"),
    "dynamic, an integer in place of a float": sizes(
        SCALED, "(t(3), 0.4)", "(t(3), 2)", how="traced", dynamic="True"
    ),
    "dynamic, a float and its sign": sizes(
        SIGNED, "(t(3), 0.4)", "(t(3), -0.4)", how="traced", dynamic="True"
    ),
    "static": sizes(BRANCH, "(t(3),), (t(5),)", "(t(6),)", how="traced", dynamic="False"),
    "marked": sizes(BRANCH, "(marked(3),)", "(marked(5),)"),
    "marked, the other branch": sizes(BRANCH, "(marked(3),)", "(marked(12),)", how="traced"),
    "marked, then not": sizes(BRANCH, "(marked(3),)", "(t(5),)", how="traced"),
    "two dimensions": sizes(
        "return x.sum(1) * x.shape[1]", "(t(3, 4),), (t(5, 4),), (t(5, 6),)", "(t(7, 9),)"
    ),
    "second dimension": sizes(
        "return x.sum(1) * x.shape[1]", "(t(3, 4),), (t(5, 4),)", "(t(5, 6),)", how="traced"
    ),
    "equal sizes": sizes("return x.sum(1) * x.shape[1]", "(t(3, 3),), (t(5, 5),)", "(t(6, 6),)"),
    "equal sizes, then different": sizes(
        "return x.sum(1) * x.shape[1]", "(t(3, 3),), (t(5, 5),)", "(t(6, 7),)", how="used"
    ),
    "equal sizes, dynamic": sizes(
        "return x.sum(1) * x.shape[1]", "(t(3, 3),)", "(t(6, 7),)", how="traced", dynamic="True"
    ),
    "different sizes, then equal": sizes(
        "return x.sum(1) * x.shape[1]", "(t(3, 4),)", "(t(5, 5),)", dynamic="True"
    ),
    "sizes of two inputs": sizes("return x.sum() * more[0]", "(t(3), t(4)), (t(5), t(6))", "(t(8), t(9))"),
    "equal sizes of two inputs, then different": sizes(
        "return x.sum() * more[0] + more[0].shape[0]",
        "(t(3), t(3)), (t(5), t(5))",
        "(t(8), t(9))",
        how="used",
    ),
    "broadcast": sizes("return x + more[0]", "(t(3), t(3)), (t(5), t(5))", "(t(5), t(1))", how="traced"),
    "divisible": sizes(EVEN, "(t(4),), (t(6),)", "(t(10),)"),
    "not divisible": sizes(EVEN, "(t(4),), (t(6),)", "(t(7),)", how="traced"),
    "never divisible": sizes(EVEN, "(t(3),), (t(5),)", "(t(7),)"),
    "split in halves": sizes("return x[: x.shape[0] // 2] * 2", "(t(4),), (t(7),)", "(t(9),)"),
    "smaller of two": sizes("return x[: min(x.shape[0], 6)] * 2", "(t(3),), (t(5),)", "(t(12),)", how="used"),
    "product": sizes(
        "return x.view(-1) * (2 if x.shape[0] * x.shape[1] > 20 else 3)",
        "(t(3, 4),)",
        "(t(7, 5),)",
        how="traced",
        dynamic="True",
    ),
    "product, allowed": sizes(
        "return x.view(-1) * (2 if x.shape[0] * x.shape[1] > 20 else 3)",
        "(t(3, 4),)",
        "(t(4, 5),)",
        dynamic="True",
    ),
    "equation": sizes(
        "return x * 2 if x.shape[0] == 2 * x.shape[1] else x * 3",
        "(t(8, 4),)",
        "(t(9, 4),)",
        how="traced",
        dynamic="True",
    ),
    "equation, allowed": sizes(
        "return x * 2 if x.shape[0] == 2 * x.shape[1] else x * 3", "(t(8, 4),)", "(t(10, 5),)", dynamic="True"
    ),
    "inequation": sizes(
        "return x * 2 if x.shape[0] == 2 * x.shape[1] else x * 3",
        "(t(9, 4),)",
        "(t(10, 5),)",
        how="traced",
        dynamic="True",
    ),
    "strides": sizes("return x * 2 + x.stride(0)", "(t(3, 4),), (t(3, 5),)", "(t(6, 3).t(),)", how="traced"),
    "strides of a part": sizes(
        "return x * 2 + x.stride(0)", "(t(3, 4),), (t(3, 5),)", "(t(3, 9)[:, :6],)", how="traced"
    ),
    "int": sizes("return x * more[0]", "(t(3), 2), (t(3), 3)", "(t(3), 7)"),
    "int of one": sizes("return x * more[0]", "(t(3), 2), (t(3), 3)", "(t(3), 1)", how="varies"),
    "int, negative": sizes("return x * more[0]", "(t(3), 2), (t(3), 3)", "(t(3), -3)", how="varies"),
    "int and a branch": sizes(
        "return x * more[0] if more[0] < 5 else x", "(t(3), 2), (t(3), 3)", "(t(3), 7)", how="traced"
    ),
    "int becomes bool": sizes(
        "return x * (5 if more[0] is True else more[0])", "(t(3), 2), (t(3), 3)", "(t(3), True)", how="traced"
    ),
    "int becomes float": sizes("return x * more[0]", "(t(3), 2), (t(3), 3)", "(t(3), 4.0)", how="traced"),
    "float": sizes("return x * more[0]", "(t(3), 2.0), (t(3), 3.0)", "(t(3), 4.0)", how="varies"),
    "int that is a size": sizes(
        "return x.view(more[0], -1) * 2", "(t(12), 2), (t(12), 3)", "(t(12), 4)", how="varies"
    ),
    "list of tensors": sizes(
        "return torch.cat(list(x)) * 2", "([t(3), t(4)],), ([t(5), t(6)],)", "([t(7), t(9)],)"
    ),
    "list of another length": sizes(
        "return torch.cat(list(x)) * 2", "([t(3), t(4)],), ([t(5), t(6)],)", "([t(7)],)", how="traced"
    ),
    "graph break": sizes(
        "y = x * 2\n    torch._dynamo.graph_break()\n    return y * x.shape[0]", "(t(3),), (t(5),)", "(t(6),)"
    ),
    "number read": sizes("return x * x.sum().int().item()", "(t(3),), (t(5),)", "(t(6),)", how="varies"),
    "edit": edit(sizes(BRANCH, "(t(3),), (t(5),)", "(t(6),)").text, ("else 2", "else 3"), how="traced"),
    "dtype": sizes(BRANCH, "(t(3),), (t(5),)", "(t(6).double(),)", how="traced"),
    "requires_grad": sizes(BRANCH, "(t(3),), (t(5),)", "(t(6).requires_grad_(),)", how="traced"),
    "one tensor twice": sizes(
        "x.add_(1)\n    return x * more[0]", "(t(3), t(3)), (t(5), t(5))", "((y := t(6)), y)", how="traced"
    ),
    "tensors that overlap": sizes(
        "x.add_(1)\n    return x * more[0]",
        "(t(3), t(3)), (t(5), t(5))",
        "((y := t(9))[:6], y[3:])",
        how="traced",
    ),
}
