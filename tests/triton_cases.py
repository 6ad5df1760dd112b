"""Cases for the Triton families: functions and inputs, traced to tasks, and a way to run one candidate.

Used by the interpreter tests (as a program of its own, for TRITON_INTERPRET must be set before triton is imported), by
the offline compile tests and by `scripts/gpu-tests`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_kevolve.candidate import Candidate
from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.languages.replay import Replay
from torch_kevolve.lowering.canon import canonical_op
from torch_kevolve.task import DType, KernelTask, Op, Ref, TaskGraph, TensorSpec, canonical

# Eager on a CPU scans in fp64 and multiplies with long fused chains; on a GPU the bound is the judge's own.
LOOSE_ON_CPU = {
    "scan_triton": 12.0,
    "rowwise_triton": 2.0,
    "matmul_triton": 4.0,
    "small_matmul_triton": 4.0,
    "plane_matmul_triton": 4.0,
}
H200 = DeviceFacts("cuda", "cuda:90", 132, 0, 50 << 20, 0, shared_bytes=227 << 10, registers=65536)


@dataclass(frozen=True)
class Case:
    """`make(device)` gives the inputs of `function`."""

    family: str
    name: str
    function: Callable[..., Any]
    make: Callable[[str], tuple[torch.Tensor, ...]]


def trace(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> tuple[KernelTask, tuple[int, ...]]:
    """The task of a function under Inductor's decompositions, and the old place of each of its inputs."""
    import torch._inductor.lowering  # a decomposition of max_pool reads it
    from torch._inductor.decomposition import select_decomp_table

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
        graph = make_fx(torch.func.functionalize(function), decomposition_table=select_decomp_table())(*fakes)
    return task_of(graph)


def task_of(graph: torch.fx.GraphModule) -> tuple[KernelTask, tuple[int, ...]]:
    """The task of a traced graph, and the old place of each of its inputs."""
    count = sum(node.op == "placeholder" for node in graph.graph.nodes)
    ops: list[Op] = []
    values: dict[str, Ref] = {}
    specs: list[TensorSpec] = []

    def arg(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return values[value.name]
        if isinstance(value, list | tuple):
            return tuple(map(arg, value))
        return DType(str(value).removeprefix("torch.")) if isinstance(value, torch.dtype) else value

    def known(ref: Ref) -> TensorSpec:
        return specs[ref.index] if ref.index < count else ops[ref.index - count].outs[ref.item]

    outputs: list[Ref] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node.name] = Ref(len(specs))
            specs.append(spec_of(node.meta["val"]))
        elif node.op == "call_function" and node.target.__name__ == "getitem":
            base = values[node.args[0].name]
            values[node.name] = Ref(base.index, node.args[1])
        elif node.op == "call_function":
            made = node.meta["val"]
            outs = tuple(spec_of(v) for v in (made if isinstance(made, list | tuple) else (made,)))
            skip = ("device", "layout", "pin_memory", "memory_format", "requires_grad")
            kwargs = tuple(sorted((k, arg(v)) for k, v in node.kwargs.items() if k not in skip))
            values[node.name] = Ref(count + len(ops))
            ops.append(Op(str(node.target).replace("_.", "."), tuple(map(arg, node.args)), outs, kwargs))
            ops[-1] = canonical_op(ops[-1], known)
        elif node.op == "output":
            out = node.args[0]
            made = [values[n.name] for n in (out if isinstance(out, list | tuple) else (out,)) if n is not None]
            outputs = [ref for ref in made if ref.index >= count]  # what is saved for a backward may be an input
    made_graph, order, _ = canonical(TaskGraph(tuple(specs), tuple(ops), tuple(outputs)))
    return KernelTask(made_graph), order


def spec_of(t: torch.Tensor) -> TensorSpec:
    return TensorSpec(str(t.dtype).removeprefix("torch."), tuple(map(int, t.shape)), tuple(map(int, t.stride())))


def load(candidate: Candidate) -> Callable[..., None]:
    """A launcher for a Triton candidate: its source as a module."""
    folder = Path(tempfile.gettempdir()) / f"kv-triton-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    path = folder / f"k{hashlib.sha256(candidate.source.encode()).hexdigest()[:24]}.py"
    if not path.exists():
        whole = path.with_suffix(f".{os.getpid()}")
        whole.write_text(candidate.source)
        whole.replace(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def launch(kernel: str, grid: tuple[int, ...], args: Any, meta: Any, options: Any) -> None:
        getattr(module, kernel)[grid](*args, **meta, **options)

    return launch


def family(name: str) -> Any:
    if name == "embedding_triton":
        from torch_kevolve.templates.embedding_triton import EmbeddingTriton as Family
    elif name == "scan_triton":
        from torch_kevolve.templates.scan_triton import ScanTriton as Family
    elif name == "pooling_triton":
        from torch_kevolve.templates.pooling_triton import PoolingTriton as Family
    elif name == "matmul_triton":
        from torch_kevolve.templates.matmul_triton import MatmulTriton as Family
    elif name == "small_matmul_triton":
        from torch_kevolve.templates.small_matmul_triton import SmallMatmulTriton as Family
    elif name == "plane_matmul_triton":
        from torch_kevolve.templates.plane_matmul_triton import PlaneMatmulTriton as Family
    else:
        from torch_kevolve.templates.rowwise_triton import RowwiseTriton as Family
    return Family()


def points(case: Case, task: KernelTask, count: int) -> list[tuple[dict[str, Any], Candidate]]:
    """The starting points and some others, as candidates. Raises AssertionError where the family has no space."""
    space = family(case.family).match(task, H200)
    assert space is not None, f"{case.family} does not claim {case.name}: {task.graph.targets}"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    chosen = list(space.start[: (count + 1) // 2])
    others = [p for p in space.points() if p not in chosen]
    if interpreted:
        # The interpreter is slow: few steps and small tiles, whatever the family calls them.
        def cost(p: Mapping[str, Any]) -> int:
            return math.prod(v for k, v in p.items() if isinstance(v, int) and not k.startswith("num_"))

        others = sorted((p for p in others if p.get("precision") != "bf16x6"), key=cost)[: 8 * count]
        chosen = sorted(space.start, key=cost)[: (count + 1) // 2]
    chosen += random.Random(1).sample(others, min(len(others), count - len(chosen)))
    seen = {p.get("algorithm") for p in chosen}
    for p in others:  # one of each algorithm at least
        if p.get("algorithm") not in seen:
            seen.add(p.get("algorithm"))
            chosen.append(p)
    made = [(dict(p), space.render(p)) for p in chosen]
    # The interpreter has no libdevice: the exponentials of a row in pieces.
    return [each for each in made if not (interpreted and "libdevice.exp" in each[1].source)]


def wide(x: Any) -> Any:
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def flat(out: Any) -> list[torch.Tensor]:
    return list(out) if isinstance(out, list | tuple) else [out]


def error(got: torch.Tensor, want: torch.Tensor, eager: torch.Tensor, loose: float) -> str:
    """Empty where right: same NaN and inf pattern; rms error at most 1.25 of eager's plus `loose` half ulps."""
    if not got.is_floating_point():
        return "" if torch.equal(got, want.to(got.dtype)) else f"{int((got != want).sum())} of {got.numel()} differ"
    bits = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[got.dtype]
    got, eager = got.double(), eager.double()
    if not torch.equal(got.isnan(), want.isnan()) or not torch.equal(got.isinf(), want.isinf()):
        return f"NaN or inf pattern: {int(got.isnan().sum())} for {int(want.isnan().sum())} NaN"
    fine = want.isfinite()
    got, want, eager = got[fine], want[fine], eager[fine]
    eager = torch.where(eager.isfinite(), eager, want)  # where eager left fp32 on the way, it sets no bound
    if not want.numel():
        return ""
    size = want.square().mean().sqrt().item() + 1e-300
    e = (got - want).square().mean().sqrt().item() / size
    e_eager = (eager - want).square().mean().sqrt().item() / size
    return "" if e <= 1.25 * e_eager + loose * 2.0**-bits else f"error {e:.3g}, eager's {e_eager:.3g}"


def check(case: Case, device: str, count: int) -> dict[str, str]:
    """Error text by point, empty where right."""
    torch.manual_seed(0)
    inputs = case.make(device)
    task, order = trace(case.function, inputs)
    eager = flat(case.function(*inputs))
    want = flat(case.function(*map(wide, inputs)))
    out: dict[str, str] = {}
    loose = LOOSE_ON_CPU.get(case.family, 1.0) if device == "cpu" else 1.0
    for point, candidate in points(case, task, count):
        label = f"{case.name} {point}"
        try:
            got = Replay(candidate.plan, task, load(candidate))(*[inputs[i] for i in order])
            problems = [error(g, w, e, loose) for g, w, e in zip(got, want, eager, strict=True)]
            again = Replay(candidate.plan, task, load(candidate))(*[inputs[i] for i in order])
            if not all(torch.equal(torch.nan_to_num(g), torch.nan_to_num(a)) for g, a in zip(got, again, strict=True)):
                problems.append("a second run differs")
            out[label] = "; ".join(p for p in problems if p)
        except Exception:
            out[label] = "raised: " + traceback.format_exc()[-1500:]
    return out


def randn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Callable[[str], torch.Tensor]:
    return lambda device: (torch.randn(shape, device=device) * scale).to(dtype)


def ints(high: int, *shape: int) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.randint(0, high, shape, device=device)


def bags(total: int, count: int) -> Callable[[str], torch.Tensor]:
    def make(device: str) -> torch.Tensor:
        cuts = torch.randint(0, total + 1, (count - 1,)).sort().values
        return torch.cat([torch.zeros(1, dtype=torch.int64), cuts]).to(device)

    return make


def special(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[str], torch.Tensor]:
    """Normal values with a NaN, infinities and -0.0 in places."""

    def make(device: str) -> torch.Tensor:
        x = torch.randn(shape)
        x.flatten()[:: max(7, x.numel() // 5)] = torch.tensor(float("inf"))
        x.flatten()[3 :: max(11, x.numel() // 3)] = torch.tensor(float("nan"))
        x.flatten()[2::13] = -0.0
        return x.to(device, dtype)

    return make


def huge(rows: int, columns: int) -> Callable[[str], torch.Tensor]:
    """Pairs of rows near the top of fp32 that cancel, up to a small part."""

    def make(device: str) -> torch.Tensor:
        top = torch.randn(rows // 2, columns).sign() * 3e38
        return torch.stack([top, -0.9 * top], 1).reshape(rows, columns).to(device)

    return make


def pairs(count: int) -> Callable[[str], torch.Tensor]:
    """Indices of rows of `huge`, so that sums overflow on the way and end within fp32: 0 0 0 1 1 1 ..."""
    return lambda device: (torch.arange(count, device=device) // 3) % 20


def case(family: str, name: str, function: Callable[..., Any], *inputs: Callable[[str], torch.Tensor]) -> Case:
    return Case(family, name, function, lambda device: tuple(make(device) for make in inputs))


bf16, f16, i64 = torch.bfloat16, torch.float16, torch.int64
MM, SMALL, PLANE = "matmul_triton", "small_matmul_triton", "plane_matmul_triton"
EMB, SCAN, POOL, ROW = "embedding_triton", "scan_triton", "pooling_triton", "rowwise_triton"


def saved(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Cross-entropy's forward with what its backward asks for."""
    high = x.amax(1, keepdim=True)
    log = (x - high).exp().sum(1, keepdim=True).log()
    return -(x - high - log).gather(1, y.unsqueeze(1)).squeeze(1), high, log


def head(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w), y)


def label_beside(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """logsumexp of capped logits, less the label's own."""
    z = torch.tanh(x @ w) * 3
    return torch.logsumexp(z, -1) - z.gather(1, y.unsqueeze(1)).squeeze(1)


def _bag(mode: str, last: bool = False) -> Callable[..., Any]:
    return lambda w, i, o: F.embedding_bag(i, w, o, mode=mode, include_last_offset=last)


CASES: list[Case] = [
    case(EMB, "rows", lambda w, i: F.embedding(i, w), randn(37, 19), ints(37, 5, 7)),
    case(EMB, "rows_scaled", lambda w, i, b: F.embedding(i, w) * 2.5 + b,
         randn(37, 64, dtype=bf16), ints(37, 9), randn(64)),
    case(EMB, "bag_sum", _bag("sum"), randn(50, 36), ints(50, 61), bags(61, 9)),
    case(EMB, "bag_overflow", _bag("sum"), huge(20, 36), pairs(60), lambda d: torch.arange(0, 60, 12, device=d)),
    case(EMB, "bag_special", _bag("sum"), special(20, 36), ints(20, 61), bags(61, 9)),
    case(EMB, "bag_mean", _bag("mean"), randn(50, 128), ints(50, 45), bags(45, 7)),
    case(EMB, "bag_weighted", lambda w, i, o, s: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=s),
         randn(50, 33), ints(50, 40), bags(40, 5), randn(40)),
    case(EMB, "bag_relu", lambda w, i, o: torch.relu(_bag("sum")(w, i, o)), randn(20, 16), ints(20, 30), bags(30, 6)),
    case(SCAN, "last", lambda x: x.cumsum(-1), randn(5, 1000)),
    case(SCAN, "last_small", lambda x: x.cumsum(-1), randn(3, 17)),
    case(SCAN, "first", lambda x: x.cumsum(0), randn(301, 37)),
    case(SCAN, "middle_relu", lambda x, b: torch.relu(x.cumsum(1)) + b, randn(3, 67, 18), randn(18)),
    case(SCAN, "bf16", lambda x: x.cumsum(-1), randn(4, 257, dtype=bf16)),
    case(SCAN, "int64", lambda x: x.cumsum(-1), ints(9, 4, 300)),
    case(SCAN, "product", lambda x: x.cumprod(-1), lambda d: 1 + 0.01 * torch.randn(4, 515, device=d)),
    case(SCAN, "special", lambda x: x.cumsum(-1), special(4, 515)),
    case(SCAN, "transposed", lambda x: x.cumsum(-1), lambda d: torch.randn(65, 9, device=d).t()),
    case(POOL, "avg3d", lambda x: F.avg_pool3d(x, 3, 2, 1), randn(1, 2, 7, 5, 9)),
    case(POOL, "avg3d_valid", lambda x: F.avg_pool3d(x, (2, 3, 1), (1, 2, 1), (1, 1, 0), count_include_pad=False),
         randn(1, 2, 5, 7, 6)),
    case(POOL, "avg2d", lambda x: F.avg_pool2d(x, 2), randn(3, 2, 10, 14)),
    case(POOL, "avg2d_half", lambda x: torch.sigmoid(F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)),
         randn(2, 3, 9, 21, dtype=f16)),
    case(POOL, "max2d", lambda x: F.max_pool2d(x, 3, 2, 1), randn(2, 5, 17, 23)),
    case(POOL, "max2d_special", lambda x: F.max_pool2d(x, 3, 2, 1), special(2, 5, 16, 24)),
    case(POOL, "max2d_k4s1", lambda x: F.max_pool2d(x, 4, 1, 1) * 2, randn(2, 2, 12, 18)),
    case(POOL, "max3d", lambda x: F.max_pool3d(x, 2), randn(2, 2, 6, 8, 10)),
    case(ROW, "softmax", lambda x: torch.softmax(x, -1), randn(3, 130, scale=3.0)),
    case(ROW, "softmax_bf16", lambda x: torch.softmax(x, -1), randn(3, 67, dtype=bf16, scale=3.0)),
    case(ROW, "softmax_special", lambda x: torch.softmax(x, -1), special(9, 60)),
    case(ROW, "logsumexp_special", lambda x: torch.logsumexp(x, -1), special(9, 140)),
    case(ROW, "cross_entropy_saved", saved, special(9, 140), ints(140, 9)),
    case(ROW, "softmax_long", lambda x: torch.softmax(x, -1), randn(2, 70001, scale=3.0)),
    case(ROW, "softmax_long_special", lambda x: torch.softmax(x, -1), special(3, 66000, dtype=bf16)),
    case(ROW, "norm_long", lambda x, w: F.layer_norm(x, (66000,), w) * 2, randn(3, 66000), randn(66000)),
    case(ROW, "softmax_first", lambda x: torch.softmax(x, 0), randn(65, 9)),
    case(ROW, "log_softmax", lambda x: torch.log_softmax(x, -1), randn(4, 65)),
    case(ROW, "logsumexp", lambda x: torch.logsumexp(x, -1), randn(3, 130)),
    case(ROW, "layer_norm", lambda x, w, b: F.layer_norm(x, (96,), w, b), randn(10, 96), randn(96), randn(96)),
    case(ROW, "rms_silu", lambda x, w: F.silu(F.rms_norm(x, (100,), w)), randn(10, 100, dtype=f16),
         randn(100, dtype=f16)),
    case(ROW, "group_norm_silu", lambda x, w, b: F.silu(F.group_norm(x, 4, w, b)), randn(3, 8, 5, 7),
         randn(8), randn(8)),
    case(ROW, "group_norm_even", lambda x, w, b: F.group_norm(x, 2, w, b), randn(2, 4, 8, 8), randn(4), randn(4)),
    case(ROW, "cross_entropy", lambda x, y: F.cross_entropy(x, y), randn(5, 130), ints(130, 5)),
    case(ROW, "cross_entropy_rows", lambda x, y: F.cross_entropy(x.float(), y, reduction="none"),
         randn(3, 130, dtype=bf16),
         ints(130, 3)),
    case(ROW, "cross_entropy_grad", lambda x, y: torch.softmax(x, 1) - F.one_hot(y, 70), randn(9, 70), ints(70, 9)),
    case(ROW, "argmax_last", lambda x: torch.argmax(x, -1), randn(2, 37)),
    case(ROW, "argmax_first", lambda x: torch.argmax(x, 0), randn(40, 8)),
    case(ROW, "argmax_special", lambda x: torch.argmax(x, -1), special(2, 37)),
    case(ROW, "amax_special", lambda x: torch.amax(x, -1), special(3, 50)),
    case(ROW, "sum_first", lambda x: x.sum(0), randn(300, 12)),
    case(ROW, "mean_relu", lambda x: torch.relu(x).mean((1, 2)), randn(4, 9, 11)),
    case(ROW, "var", lambda x: x.var(-1), randn(3, 300)),
    case(ROW, "any", lambda x: (x > 2.5).any(-1), randn(5, 90)),
    case(MM, "linear_gelu", lambda x, w, b: F.gelu(F.linear(x, w, b)), randn(35, 48, dtype=f16),
         randn(40, 48, dtype=f16), randn(40, dtype=f16)),
    case(MM, "mm_plain", lambda a, b: a @ b, randn(50, 40, dtype=f16), randn(40, 72, dtype=f16)),
    case(MM, "linear_3d_residual", lambda x, w, r: F.linear(x, w) + r, randn(3, 11, 32, dtype=f16),
         randn(24, 32, dtype=f16), randn(3, 11, 24, dtype=f16)),
    case(MM, "linear_logsumexp", lambda x, w, b: torch.logsumexp(F.linear(x, w, b), -1),
         randn(35, 48, dtype=f16), randn(200, 48, dtype=f16), randn(200, dtype=f16)),
    case(MM, "cross_entropy", head, randn(35, 48, dtype=f16), randn(200, 48, dtype=f16), ints(200, 35)),
    case(MM, "cross_entropy_rows", lambda x, w, b, y: F.cross_entropy(F.linear(x, w, b), y, reduction="none"),
         special(35, 48, dtype=f16), randn(200, 48, dtype=f16), randn(200, dtype=f16), ints(200, 35)),
    case(MM, "label_beside", label_beside, randn(35, 48, dtype=f16), randn(48, 200, dtype=f16), ints(200, 35)),
    case(SMALL, "bmm", torch.bmm, randn(5, 32, 32), randn(5, 32, 32)),
    case(SMALL, "bmm_ragged", lambda a, b: torch.bmm(a, b) * 0.5, randn(5, 19, 21), randn(5, 21, 37)),
    case(SMALL, "baddbmm_relu", lambda c, a, b: torch.relu(torch.baddbmm(c, a, b)), randn(7, 1, 20),
         randn(7, 16, 24), randn(7, 24, 20)),
    case(SMALL, "special", torch.bmm, special(3, 20, 21), randn(3, 21, 37)),
    case(PLANE, "mm", lambda a, b: a @ b, randn(70, 48), randn(48, 72)),
    case(PLANE, "linear_gelu", lambda x, w, b: F.gelu(F.linear(x, w, b)), randn(70, 48), randn(72, 48), randn(72)),
    case(PLANE, "linear_logsumexp", lambda x, w: torch.logsumexp(F.linear(x, w), -1), randn(70, 48), randn(72, 48)),
    case(PLANE, "cross_entropy", head, randn(70, 48), randn(72, 48), ints(72, 70)),
    case(PLANE, "cross_entropy_special", lambda x, w, y: F.cross_entropy(F.linear(x, w), y, reduction="none"),
         special(40, 32), randn(72, 32), ints(72, 40)),
    case(PLANE, "special", lambda a, b: a @ b, special(40, 32), randn(32, 40)),
]  # fmt: skip


LONG = ("softmax_long", "softmax_long_special", "norm_long")
"""Rows of 66000 columns and more, for the algorithm `cooperative`. The interpreter would take minutes for each."""


def main() -> None:
    """`triton_cases.py FAMILY COUNT OUT`: check every case of a family here, write {label: error} as JSON."""
    from torch_kevolve.templates import row_cooperative

    name, count, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    # One program runs after the other here: all but the last of a row wait in vain.
    row_cooperative.PATIENCE = 2
    results: dict[str, dict[str, str]] = {}
    for each in CASES:
        if each.family == name and each.name not in LONG:
            try:
                results[each.name] = check(each, "cpu", count)
            except Exception:
                results[each.name] = {each.name: "raised: " + traceback.format_exc()[-2500:]}
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
