"""Triton source: Python text that is parsed, checked and printed again.

A module holds imports of triton, `@triton.jit` functions and literal constants. What does not stand in the allow-list
is refused with its line. Only the text printed from the checked tree is ever executed or baked.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TypeGuard

IMPORTS = {"triton", "triton.language", "triton.language.extra.libdevice", "triton.language.extra"}
NODES = (
    ast.Module, ast.Import, ast.ImportFrom, ast.alias, ast.FunctionDef, ast.arguments, ast.arg, ast.Assign,
    ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return, ast.If, ast.For, ast.While, ast.Break, ast.Continue, ast.Pass,
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.keyword, ast.Attribute, ast.Name, ast.Constant,
    ast.Tuple, ast.List, ast.Subscript, ast.Slice, ast.IfExp, ast.Load, ast.Store, ast.Assert, ast.operator,
    ast.unaryop,    ast.boolop, ast.cmpop,
)  # fmt: skip
TOP_ONLY = (ast.Import, ast.ImportFrom, ast.FunctionDef)
_LIBRARY = (
    "abs add arange argmax argmin associative_scan assume atomic_add atomic_and atomic_cas atomic_load atomic_max "
    "atomic_min atomic_or atomic_poll atomic_store atomic_xchg atomic_xor bfloat16 bitonic_merge block_type broadcast "
    "broadcast_to cast cat cdiv ceil clamp condition const constexpr cos cumprod cumsum debug_barrier div_rn dot "
    "dot_scaled dtype erf exp exp2 expand_dims expect_zero extra fdiv flip float16 float32 float64 float8e4b15 "
    "float8e4b8 float8e4nv float8e5 float8e5b16 floor fma full gather histogram int1 int16 int32 int64 int8 interleave "
    "join libdevice load load_tensor_descriptor log log2 make_block_ptr advance make_tensor_descriptor map_elementwise "
    "math max max_constancy max_contiguous maximum min minimum mul multiple_of num_programs permute philox "
    "pointer_type program_id PropagateNan rand rand4x randint randint4x randn randn4x range ravel reduce reduce_or "
    "reshape rsqrt sigmoid sin softmax sort split sqrt sqrt_rn squeeze static_assert static_range store "
    "store_tensor_descriptor sub sum swap swizzle2d tensor tensor_descriptor topk trans tuple uint16 uint32 uint64 "
    "uint8 umulhi unsqueeze view void where xor_sum zeros zeros_like"
)
LIBRARY = set(_LIBRARY.split())
"""What may be taken from `triton.language`, at any depth: no assembler, no printing, no random object of Python's."""
_MEMBERS = (
    "ALL NONE T block_shape element_ty fp_mantissa_width int_bitwidth is_block is_bool is_floating is_int is_ptr item "
    "kind logical_and logical_or numel primitive_bitwidth scalar scatter shape strides to type value with_element_ty "
    "is_bf16 is_fp16 is_fp32 is_fp64 is_fp8 is_int1 is_int8 is_int16 is_int32 is_int64 is_int_signed "
    "is_int_unsigned"
)
MEMBERS = LIBRARY | set(_MEMBERS.split())
"""What may be taken from tensors, their types, and constants."""
BUILTINS = {"len", "list", "tuple", "range", "float", "int", "bool", "isinstance", "min", "max", "abs"}
ROOTS = {"tl", "libdevice", "triton"}
FROM_TRITON = {"jit", "language", "cdiv", "next_power_of_2"}
MODULES = {"core", "standard", "semantic", "random", "builtins", "extern", "os", "sys"}
"""Modules that may hang on libdevice: through `core` a text would reach all of Python while it is compiled."""


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
    given = {
        target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets if _named(target)
    }
    for node in tree.body:
        known = {*names, *given, *_own_names(node)}
        for inner in ast.walk(node):
            problem = _node(inner, id(inner) in whole, id(inner) in top) or _name(inner, known, names)
            if problem:
                return Checked("", problem=f"line {getattr(inner, 'lineno', node.lineno)}: {problem}")
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
        return _attribute(node)
    if isinstance(node, ast.Name) and node.id in ROOTS and not (is_root and isinstance(node.ctx, ast.Load)):
        return f"{node.id} can only be used as {node.id}.NAME"
    return ""


def _attribute(node: ast.Attribute) -> str:
    """Each dot stands in a list, by what it is taken of."""
    base = node.value
    root = base.id if isinstance(base, ast.Name) else ""
    if root == "triton":
        good = node.attr in FROM_TRITON
    elif root == "libdevice":
        good = node.attr not in MODULES and not node.attr.startswith("_")
    elif root == "tl":
        good = node.attr in LIBRARY
    else:
        # A literal's methods are Python's own: through str.format a text would reach any object's attributes.
        good = node.attr in MEMBERS and not isinstance(base, ast.Constant)
        good = good or (ast.unparse(base) == "tl.extra.libdevice" and node.attr not in MODULES)
    good = good and isinstance(node.ctx, ast.Load)
    return "" if good else f"{ast.unparse(node)} is not allowed"


def _name(node: ast.AST, known: set[str], functions: list[str]) -> str:
    """Names that are read are the module's own, the function's own, or in the list of builtins."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in functions:
        return f"{node.value.id}.{node.attr} is not allowed: a function can only be called"
    if not isinstance(node, ast.Name):
        return ""
    if node.id.startswith("__"):
        return f"{node.id} is not allowed"
    if isinstance(node.ctx, ast.Load) and node.id not in known | ROOTS | BUILTINS:
        return f"{node.id} is not allowed: it is no name of this module"
    return ""


def _named(node: ast.expr) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)


def _own_names(node: ast.stmt) -> set[str]:
    """Arguments, and all that a function gives a value to."""
    stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored | {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
