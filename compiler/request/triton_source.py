"""Stage 2, for user-written Triton kernels: functions' texts in, one module's text out; and the check of such a text.

The module is closed: imports of Triton, constants, and functions decorated with `triton.jit`, in this order and each
sorted by name. It has no comments, docstrings, empty lines, file names or line numbers, so that two checkouts of one
kernel give the same bytes.

`check` finds mistakes. It is not what keeps hostile source out: that is the permission to send any
(service/access/tokens.py)
and the isolation of the process in which triton_kernels.build runs (docs/security.md)."""

from __future__ import annotations

import ast
import io
import keyword
import math
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping

from . import allowed_names, schema

BUILTINS = frozenset(
    {"bool", "float", "int", "isinstance", "len", "list", "max", "min", "print", "range", "tuple"}
)
"""The names of Python's own that a kernel may use: what Triton's compiler knows."""


MAX_DEPTH = 200
"""The deepest syntax tree of a source. Python's parser has limits of its own, other ones in each version."""


IMPORTS = ("import triton", "import triton.language as tl")
"""Every module's first lines; Inductor's generated code has them too."""


_MODULE = re.compile(
    r"triton(\.language(\.(core|math|random|standard|extra(\.(cuda\.)?libdevice)?))?)?", re.ASCII
)


_MODULES = frozenset({"core", "cuda", "extra", "language", "libdevice", "math", "random", "standard"})
"""Names below triton and triton.language that are modules."""


_OF_TRITON = frozenset({"cdiv", "jit", "language", "next_power_of_2"})
"""What may be used of the module `triton` itself."""


_INT64 = range(-(1 << 63), 1 << 63)


_BODY: tuple[type[ast.AST], ...] = tuple(
    getattr(ast, name)
    for name in allowed_names.words(
        "Assign AugAssign AnnAssign Expr If For While Return Pass Break Continue Assert Name "
        "Attribute Call keyword Starred Constant BinOp UnaryOp BoolOp Compare IfExp Tuple List "
        "ListComp comprehension Subscript Slice JoinedStr FormattedValue expr_context operator "
        "unaryop boolop cmpop"
    )
)
"""What a kernel is made of."""


class BadKernelSource(Exception):
    """A kernel that has no canonical form, or a text that is not in it; the message says why."""


def function_text(source: str) -> str:
    """A function without decorators, as `def ...`, in canonical form. Raises BadKernelSource."""
    first, *more = _definition(source).body
    if more and _is_text(first):
        lines = source.split("\n")
        begin, end = first.lineno - 1, first.end_lineno or first.lineno
        if not lines[begin][: first.col_offset].strip() and more[0].lineno > end:
            source = "\n".join([*lines[:begin], *lines[end:]])
    return _without_comments(source)


def _definition(source: str) -> ast.FunctionDef:
    tree = _parsed(source)
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        raise BadKernelSource("its source is not one function")
    return tree.body[0]


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _parsed(source: str) -> ast.Module:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise BadKernelSource(f"its source cannot be parsed: {type(error).__name__}") from None
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise BadKernelSource(f"its source is nested deeper than {MAX_DEPTH}")
    return tree


def _without_comments(source: str) -> str:
    """The lines of a source that are not empty, without comments and spaces at their ends; texts stay as they are."""
    lines = source.split("\n")
    within: set[int] = set()
    """Lines that end inside a text."""
    middles: list[int] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            (row, column), (last, _) = token.start, token.end
            kind = tokenize.tok_name[token.type]
            if kind == "COMMENT":
                lines[row - 1] = lines[row - 1][:column]
            elif kind == "FSTRING_START":
                middles.append(row)
            elif kind == "FSTRING_END":
                within.update(range(middles.pop(), last))
            elif kind == "STRING":
                within.update(range(row, last))
    except (tokenize.TokenError, SyntaxError) as error:
        raise BadKernelSource(f"its source cannot be read: {error}") from None
    kept = []
    for number, line in enumerate(lines, 1):
        if number in within:
            kept.append(line)
        elif line.strip() or number - 1 in within:
            kept.append(line.rstrip())
    return "\n".join(kept) + "\n"


def constant_text(name: str, value: object, *, constexpr: bool) -> str:
    """An assignment. `value`: bool, int, float, str, None or wire.TritonDType."""
    if isinstance(value, schema.TritonDType):
        text = f"tl.{value.name}"
    elif isinstance(value, float) and not math.isfinite(value):
        text = f"float({str(value)!r})"
    else:
        text = repr(value)
    return f"{name} = tl.constexpr({text})\n" if constexpr else f"{name} = {text}\n"


def module_text(imports: Iterable[str], constants: Iterable[str], functions: Mapping[str, str]) -> str:
    """The canonical module: `functions` are canonical texts by name."""
    lines = [*IMPORTS, *sorted(set(imports) - set(IMPORTS))]
    defined = [f"@triton.jit\n{functions[name]}" for name in sorted(functions)]
    return "".join([f"{line}\n" for line in lines] + sorted(constants) + defined)


def names_used(function: ast.FunctionDef) -> set[str]:
    """The names that a function takes from its module or from Python."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None]
    body = [node for statement in function.body for node in ast.walk(statement) if isinstance(node, ast.Name)]
    local = {argument.arg for argument in every}
    local |= {node.id for node in body if not isinstance(node.ctx, ast.Load)}
    head = [node for part in _head(function) for node in ast.walk(part) if isinstance(node, ast.Name)]
    return ({node.id for node in body} - local) | {node.id for node in head}


def _head(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """Defaults and annotations: what Python evaluates when it defines the function."""
    arguments = function.args
    yield from arguments.defaults
    yield from (value for value in arguments.kw_defaults if value is not None)
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if argument.annotation is not None:
            yield argument.annotation
    if function.returns is not None:
        yield function.returns


def check(kernel: schema.KernelSource) -> None:
    """Raise BadKernelSource unless the source is a module in canonical form that defines the kernel."""
    _ModuleCheck(kernel.source).check(kernel.name)


class _ModuleCheck:
    """One module's check: `roots` are names that stand for modules of Triton, `known` all that it defines."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._tree = _parsed(source)
        self._roots: set[str] = set()
        self._known: set[str] = set()
        self._functions: dict[str, ast.FunctionDef] = {}

    def check(self, name: str) -> None:
        imports: list[str] = []
        constants: list[str] = []
        for statement in self._tree.body:
            text = ast.get_source_segment(self._source, statement) or ""
            match statement:
                case ast.Import(names=[alias]):
                    self._import(alias.name, alias.asname)
                    imports.append(text)
                case ast.ImportFrom(module=str(module), names=[alias], level=0):
                    self._import_from(module, alias)
                    imports.append(text)
                case ast.Assign(targets=[ast.Name(id=target)], value=value):
                    self._define(target)
                    if not _is_constant(value):
                        raise BadKernelSource(f"line {statement.lineno}: {target} is no constant")
                    constants.append(f"{text}\n")
                case ast.FunctionDef(name=target):
                    self._define(target)
                    self._functions[target] = statement
                case _:
                    raise BadKernelSource(
                        f"line {statement.lineno}: {type(statement).__name__} is neither an import of Triton, "
                        "a constant, nor a function decorated with triton.jit"
                    )
        for function in self._functions.values():
            self._function(function)
        if name not in self._functions:
            raise BadKernelSource("it does not define the kernel")
        texts = {
            found.name: function_text(ast.get_source_segment(self._source, found) or "")
            for found in self._functions.values()
        }
        if module_text(imports, constants, texts) != self._source:
            raise BadKernelSource("it is not in canonical form")

    def _define(self, name: str) -> None:
        if name in self._known:
            raise BadKernelSource(f"the name {name[:60]!r} is defined twice")
        if not allowed_names.IDENTIFIER.fullmatch(name) or keyword.iskeyword(name):
            raise BadKernelSource(
                f"the name {name[:60]!r} is not one of up to 64 ASCII letters, digits and _"
            )
        if name.startswith("__") or name == "triton":
            raise BadKernelSource(f"the name {name[:60]!r} is Python's or Triton's own")
        self._known.add(name)

    def _import(self, module: str, alias: str | None) -> None:
        if not _MODULE.fullmatch(module) or (alias is None) != (module == "triton"):
            raise BadKernelSource(f"it imports {module[:60]!r}")
        if alias is None:
            self._known.add("triton")
            self._roots.add("triton")
        else:
            self._define(alias)
            self._roots.add(alias)

    def _import_from(self, module: str, alias: ast.alias) -> None:
        name = alias.name
        if not _MODULE.fullmatch(module) or name.startswith("_") or name == "*":
            raise BadKernelSource(f"it imports {name[:60]!r} from {module[:60]!r}")
        if module == "triton" and name not in _OF_TRITON:
            raise BadKernelSource(f"it imports {name[:60]!r} from triton")
        known = alias.asname or name
        self._define(known)
        if name in _MODULES:
            self._roots.add(known)

    def _function(self, function: ast.FunctionDef) -> None:
        where = f"function {function.name[:60]!r}"
        if [ast.unparse(decorator) for decorator in function.decorator_list] != ["triton.jit"]:
            raise BadKernelSource(f"{where} is not decorated with triton.jit alone")
        for part in _head(function):
            if not (_is_literal(part) or _is_path(part)):
                raise BadKernelSource(f"{where} has a default or an annotation that is no constant")
        for statement in function.body:
            for node in ast.walk(statement):
                self._node(node, where)
        for written in (*function.body, *_head(function)):
            self._paths(written, where)
        if unknown := sorted(names_used(function) - self._known - BUILTINS):
            raise BadKernelSource(f"{where} uses {unknown[0][:60]!r}, which is not defined")

    def _node(self, node: ast.AST, where: str) -> None:
        if not isinstance(node, _BODY):
            raise BadKernelSource(f"{where} has a {type(node).__name__}")
        if isinstance(node, ast.Name) and node.id.startswith("__"):
            raise BadKernelSource(f"{where} uses {node.id[:60]!r}")
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            raise BadKernelSource(f"{where} uses the attribute {node.attr[:60]!r}")
        if isinstance(node, ast.Constant) and not isinstance(node.value, bool | int | float | str | None):
            raise BadKernelSource(f"{where} has a constant of type {type(node.value).__name__}")

    def _paths(self, part: ast.AST, where: str) -> None:
        """Only an imported module's functions and dtypes are used, and not what these modules have imported."""
        nodes = list(ast.walk(part))
        inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        for node in nodes:
            path = [] if id(node) in inner else _path(node)
            if not path or path[0] not in self._roots:
                continue
            rest = path[1:]
            if path[0] == "triton" and rest and rest[0] not in _OF_TRITON:
                raise BadKernelSource(f"{where} uses {'.'.join(path)[:80]}")
            while rest and rest[0] in _MODULES:
                rest = rest[1:]
            if len(rest) > 1 and rest[0] not in allowed_names.TRITON_DTYPES:
                raise BadKernelSource(f"{where} uses {'.'.join(path)[:80]}")


def _path(node: ast.AST) -> list[str]:
    """['tl', 'math', 'exp'] for tl.math.exp; [] for what is no such path."""
    parts: list[str] = []
    at: ast.AST = node
    while isinstance(at, ast.Attribute):
        parts.append(at.attr)
        at = at.value
    return [at.id, *reversed(parts)] if isinstance(at, ast.Name) else []


def _is_path(node: ast.expr) -> bool:
    return bool(_path(node))


def _is_literal(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=value):
            return isinstance(value, bool | int | float | str | None)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)):
            return isinstance(value, int | float) and not isinstance(value, bool)
    return False


def _is_plain(node: ast.expr) -> bool:
    """A literal, float('inf') and the like, or tl.<dtype>."""
    match node:
        case ast.Call(
            func=ast.Name(id="float"), args=[ast.Constant(value="inf" | "-inf" | "nan")], keywords=[]
        ):
            return True
        case ast.Attribute(value=ast.Name(id="tl"), attr=name):
            return name in allowed_names.TRITON_DTYPES
    return _is_literal(node)


def _is_constant(node: ast.expr) -> bool:
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="tl"), attr="constexpr"), args=[value], keywords=[]
        ):
            return _is_plain(value)
    return _is_plain(node)
