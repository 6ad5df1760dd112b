"""Triton source: Python text that is parsed, checked and printed again.

A module holds imports of triton, `@triton.jit` functions and literal constants. What does not stand in the allow-list
is refused with its line. Only the text printed from the checked tree is ever executed or baked.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

IMPORTS = {"triton", "triton.language", "triton.language.extra.libdevice", "triton.language.extra"}
NODES = (
    ast.Module, ast.Import, ast.ImportFrom, ast.alias, ast.FunctionDef, ast.arguments, ast.arg, ast.Assign, ast.AugAssign,
    ast.AnnAssign, ast.Expr, ast.Return, ast.If, ast.For, ast.While, ast.Break, ast.Continue, ast.Pass, ast.BinOp,
    ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.keyword, ast.Attribute, ast.Name, ast.Constant, ast.Tuple, ast.List,
    ast.Subscript, ast.Slice, ast.IfExp, ast.Load, ast.Store, ast.Assert, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
BANNED = {"inline_asm_elementwise", "device_print", "static_print", "device_assert", "jit", "autotune", "heuristics"}
ROOTS = {"tl", "libdevice", "triton"}


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
    for inner in ast.walk(tree):
        problem = _node(inner)
        if problem:
            return Checked("", problem=f"line {getattr(inner, 'lineno', 0)}: {problem}")
    if not names:
        return Checked("", problem="line 1: there is no @triton.jit function")
    return Checked(ast.unparse(tree) + "\n", tuple(names))


def _top(node: ast.stmt, names: list[str]) -> str:
    if isinstance(node, ast.Import):
        bad = [alias.name for alias in node.names if alias.name not in IMPORTS]
        return f"import of {bad[0]} is not allowed" if bad else ""
    if isinstance(node, ast.ImportFrom):
        whole = {f"{node.module}.{alias.name}" for alias in node.names}
        return "" if node.level == 0 and (node.module in IMPORTS or whole <= IMPORTS) else f"import from {node.module} is not allowed"
    if isinstance(node, ast.FunctionDef):
        marks = [ast.unparse(mark) for mark in node.decorator_list]
        if marks != ["triton.jit"]:
            return f"{node.name} must carry @triton.jit and nothing else, not {marks}"
        if node.args.defaults and not all(isinstance(value, ast.Constant) for value in node.args.defaults):
            return f"a default of {node.name} is no literal"
        names.append(node.name)
        return ""
    if isinstance(node, ast.Assign):
        return "" if _literal(node.value) else "a module-level value must be a literal or tl.constexpr of one"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return ""
    return f"{type(node).__name__} is not allowed at module level"


def _literal(value: ast.expr) -> bool:
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.operand, ast.Constant)
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "tl.constexpr":
        return len(value.args) == 1 and not value.keywords and _literal(value.args[0])
    return isinstance(value, ast.Constant)


def _node(node: ast.AST) -> str:
    if not isinstance(node, NODES):
        return f"{type(node).__name__} is not allowed"
    if isinstance(node, ast.Attribute):
        if node.attr.startswith("_") or node.attr in BANNED and ast.unparse(node) != "triton.jit":
            return f"{ast.unparse(node)} is not allowed"
    elif isinstance(node, ast.Name) and node.id.startswith("__"):
        return f"{node.id} is not allowed"
    elif isinstance(node, ast.Call):
        root = node.func
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id in ("exec", "eval", "open", "getattr", "setattr", "compile", "globals"):
            return f"{root.id} is not allowed"
    return ""
