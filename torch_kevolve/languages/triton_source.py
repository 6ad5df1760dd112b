"""Triton source: Python text that is parsed, checked and printed again.

A module holds imports of triton, `@triton.jit` functions and literal constants. What does not stand in the allow-list
is refused with its line. Only the text printed from the checked tree is ever executed or baked.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

IMPORTS = {"triton", "triton.language", "triton.language.extra.libdevice", "triton.language.extra"}
NODES = (
    ast.Module, ast.Import, ast.ImportFrom, ast.alias, ast.FunctionDef, ast.arguments, ast.arg, ast.Assign,
    ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return, ast.If, ast.For, ast.While, ast.Break, ast.Continue, ast.Pass,
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.keyword, ast.Attribute, ast.Name, ast.Constant,
    ast.Tuple, ast.List, ast.Subscript, ast.Slice, ast.IfExp, ast.Load, ast.Store, ast.Assert, ast.operator,
    ast.unaryop,    ast.boolop, ast.cmpop,
)  # fmt: skip
TOP_ONLY = (ast.Import, ast.ImportFrom, ast.FunctionDef)
BANNED = {"inline_asm_elementwise", "device_print", "static_print", "device_assert", "jit", "autotune", "heuristics"}
ROOTS = {"tl", "libdevice", "triton"}
FROM_TRITON = {"jit", "language", "cdiv", "next_power_of_2"}
INNER_MODULES = {"core", "standard", "semantic", "random", "builtins", "os", "sys", "inspect", "functools", "runtime",
                 "compiler", "backends", "tools", "knobs", "driver", "testing", "warnings", "types", "typing",
                 "importlib", "subprocess"}  # fmt: skip
"""Modules that hang on triton's own: through `tl.core` a text would reach all of Python while it is compiled."""
NAMES = {"exec", "eval", "open", "getattr", "setattr", "delattr", "compile", "globals", "locals", "vars", "input",
         "breakpoint", "memoryview", "object", "type", "super", "help", "dir", "id"}  # fmt: skip


@dataclass(frozen=True)
class Checked:
    """`text`: the printed module, empty when `problem` says what is wrong. `kernels`: names of its functions."""

    text: str
    kernels: tuple[str, ...] = ()
    problem: str = ""


def check(source: str) -> Checked:
    """Parse, check, print. Never executes anything."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        return Checked("", problem=f"line {getattr(error, 'lineno', 0)}: {error}")
    names: list[str] = []
    for node in tree.body:
        problem = _top(node, names)
        if problem:
            return Checked("", problem=f"line {node.lineno}: {problem}")
    whole = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    top = {id(node) for node in tree.body}
    for inner in ast.walk(tree):
        problem = _node(inner, id(inner) in whole, id(inner) in top)
        if problem:
            return Checked("", problem=f"line {getattr(inner, 'lineno', 0)}: {problem}")
    if not names:
        return Checked("", problem="line 1: there is no @triton.jit function")
    return Checked(ast.unparse(tree) + "\n", tuple(names))


def _top(node: ast.stmt, names: list[str]) -> str:
    if isinstance(node, ast.Import):
        bad = [alias.name for alias in node.names if alias.name not in IMPORTS or (alias.asname or "tl") not in ROOTS]
        return f"import of {bad[0]} is not allowed" if bad else ""
    if isinstance(node, ast.ImportFrom):
        whole = {f"{node.module}.{alias.name}" for alias in node.names}
        named = all((alias.asname or alias.name) in (*ROOTS, "language") for alias in node.names)
        return "" if node.level == 0 and whole <= IMPORTS and named else f"import from {node.module} is not allowed"
    if isinstance(node, ast.FunctionDef):
        names.append(node.name)
        return _signature(node)
    if isinstance(node, ast.Assign):
        if not all(isinstance(target, ast.Name) and target.id not in ROOTS for target in node.targets):
            return "only a name of the module's own can be given a value"
        return "" if _literal(node.value) else "a module-level value must be a literal or tl.constexpr of one"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return ""
    return f"{type(node).__name__} is not allowed at module level"


def _signature(node: ast.FunctionDef) -> str:
    """What of a function runs when the module is loaded: decorators, defaults, annotations."""
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    if marks != ["triton.jit"]:
        return f"{node.name} must carry @triton.jit and nothing else, not {marks}"
    if node.name in ROOTS:
        return f"{node.name} is taken"
    defaults = [value for value in (*node.args.defaults, *node.args.kw_defaults) if value is not None]
    if not all(_literal(value) for value in defaults):
        return f"a default of {node.name} is no literal"
    args = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    notes = [arg.annotation for arg in args if arg.annotation is not None]
    notes += [node.returns] if node.returns is not None else []
    if (
        node.args.vararg
        or node.args.kwarg
        or not all(isinstance(n, ast.Name | ast.Attribute | ast.Constant) for n in notes)
    ):
        return f"the arguments of {node.name} must be plain names, annotated by tl.constexpr at most"
    return ""


def _literal(value: ast.expr) -> bool:
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.operand, ast.Constant)
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "tl.constexpr":
        return len(value.args) == 1 and not value.keywords and _literal(value.args[0])
    return isinstance(value, ast.Constant)


def _node(node: ast.AST, is_root: bool, is_top: bool) -> str:
    """`is_root`: an attribute is taken of this node."""
    if not isinstance(node, NODES):
        return f"{type(node).__name__} is not allowed"
    if isinstance(node, TOP_ONLY) and not is_top:
        return f"{type(node).__name__} is not allowed inside a function"
    if isinstance(node, ast.Attribute):
        text = ast.unparse(node)
        inner = node.attr in INNER_MODULES or (node.attr in BANNED and text != "triton.jit")
        outside = isinstance(node.value, ast.Name) and node.value.id == "triton" and node.attr not in FROM_TRITON
        return f"{text} is not allowed" if inner or outside or node.attr.startswith("_") else ""
    if isinstance(node, ast.Name):
        if node.id.startswith("__") or node.id in NAMES:
            return f"{node.id} is not allowed"
        if node.id in ROOTS and not (is_root and isinstance(node.ctx, ast.Load)):
            return f"{node.id} can only be used as {node.id}.NAME"
    return ""
