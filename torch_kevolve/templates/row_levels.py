"""Row levels: which reductions wait for which, and which can ride along."""

from __future__ import annotations

from torch_kevolve.task import Ref
from torch_kevolve.templates.rows import VIEWS, Reduce, RowProgram


def level_of(program: RowProgram) -> dict[int, int]:
    """How many reductions along the row lie behind each value."""
    base = len(program.graph.inputs)
    made = {base + r.op for r in program.reduces if not r.final}
    out = dict.fromkeys(range(base), 0)
    for number, op in enumerate(program.graph.ops):
        behind = max((out[ref.index] for ref in op.refs()), default=0)
        out[base + number] = behind + (base + number in made)
    return out


def levels(program: RowProgram) -> int:
    return max((v for v in level_of(program).values()), default=0)


def online_pairs(program: RowProgram, reduces: list[Reduce]) -> dict[int, Reduce]:
    """For each maximum the sum of exponentials that can ride along: sum(exp(x - f(max(x))))."""
    graph = program.graph
    out: dict[int, Reduce] = {}
    for total in reduces:
        power = behind(program, total.source) if total.kind == "sum" else None
        if power is None or graph.ops[power].target != "aten.exp.default":
            continue
        less = behind(program, graph.ops[power].args[0])
        if less is None or graph.ops[less].target != "aten.sub.Tensor" or graph.ops[less].kwargs:
            continue
        x, shift = graph.ops[less].args[:2]
        for top in reduces:
            if top.kind == "max" and _same(program, top.source, x) and shift_form(program, shift, top):
                out[top.op] = total
    return out


def behind(program: RowProgram, ref: object) -> int | None:
    """The operator that makes a value, views left out."""
    while isinstance(ref, Ref) and ref.index >= len(program.graph.inputs):
        op = program.graph.ops[ref.index - len(program.graph.inputs)]
        if op.target not in VIEWS:
            return ref.index - len(program.graph.inputs)
        ref = op.args[0]
    return None


def _same(program: RowProgram, a: object, b: object) -> bool:
    if a == b:
        return True
    one, other = behind(program, a), behind(program, b)
    return one is not None and one == other


def shift_form(program: RowProgram, shift: object, top: Reduce) -> str:
    """`plain`: the maximum itself; `guarded`: 0 where it is infinite, as in logsumexp; empty: something else."""
    place = behind(program, shift)
    if place == top.op:
        return "plain"
    op = program.graph.ops[place] if place is not None else None
    if op is None or op.target != "aten.where.self" or behind(program, op.args[2]) != top.op:
        return ""
    test = behind(program, op.args[0])
    equal = program.graph.ops[test] if test is not None else None
    if equal is None or not equal.target.startswith("aten.eq") or equal.args[1] != float("inf"):
        return ""
    size = behind(program, equal.args[0])
    if size is None or program.graph.ops[size].target != "aten.abs.default":
        return ""
    return "guarded" if behind(program, program.graph.ops[size].args[0]) == top.op else ""


def low_exps(program: RowProgram) -> set[int]:
    """The exponentials of a value less its row's maximum: no argument is above 0, and one of each row is 0."""
    out = set()
    for number, op in enumerate(program.graph.ops):
        less = behind(program, op.args[0]) if op.target == "aten.exp.default" else None
        if less is None or program.graph.ops[less].target != "aten.sub.Tensor" or program.graph.ops[less].kwargs:
            continue
        x, shift = program.graph.ops[less].args[:2]
        tops = [r for r in program.reduces if r.kind == "max" and not r.final]
        if any(_same(program, r.source, x) and shift_form(program, shift, r) == "plain" for r in tops):
            out.add(number)
    return out
