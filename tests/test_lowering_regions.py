"""Regions: what is found in the graphs that Inductor hands over."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lowering_kernels import Recorder
from torch import nn

from torch_kevolve.task import KernelTask, TaskGraph


def regions(function, *inputs, wants=lambda task: True, backward=False, **options):
    """The tasks offered and claimed while a function is compiled, by phase, in the order of their weight."""
    torch._dynamo.reset()
    recorder = Recorder(lambda task: None, wants)
    compiled = torch.compile(function, backend=recorder.backend(), **options)
    out = compiled(*inputs)
    if backward:
        out.backward(torch.ones_like(out))
    assert recorder.faults == []
    return recorder


class NormThenSiLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x):
        return F.silu(self.norm(x))


class LinearGelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 64)

    def forward(self, x):
        return F.gelu(self.linear(x))


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8)
CASES = {
    "softmax": (lambda x: torch.softmax(x, -1), (X,), ["aten._softmax.default"]),
    "softmax_bf16": (lambda x: torch.softmax(x, -1), (X.bfloat16(),), ["aten._softmax.default"]),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), (X,), ["aten._log_softmax.default"]),
    "layer_norm": (nn.LayerNorm(64).requires_grad_(False), (X,), ["aten.native_layer_norm.default"]),
    "group_norm_silu": (NormThenSiLU().requires_grad_(False), (torch.randn(2, 16, 8, 8),),
                        ["aten.native_group_norm.default", "aten.silu.default"]),
    "cross_entropy": (F.cross_entropy, (X, LABELS), ["aten._log_softmax.default", "aten.nll_loss_forward.default"]),
    "cumsum": (lambda x: x.cumsum(0), (X,), ["aten.cumsum.default"]),
    "argmax": (lambda x: x.argmax(0), (X,), ["aten.argmax.default"]),
    "linear_gelu": (LinearGelu().requires_grad_(False), (torch.randn(8, 32),),
                    ["aten.permute.default", "aten.addmm.default", "aten.gelu.default"]),
    "max_pool": (lambda x: F.max_pool2d(x, 3, 2, 1), (torch.randn(2, 4, 16, 16),),
                 ["aten.max_pool2d_with_indices.default"]),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 3, 2, 1), (torch.randn(2, 4, 8, 8, 8),), ["aten.avg_pool3d.default"]),
    "embedding": (nn.Embedding(100, 16).requires_grad_(False), (torch.randint(100, (4, 8)),),
                  ["aten.embedding.default"]),
    "embedding_bag": (nn.EmbeddingBag(100, 16, mode="sum").requires_grad_(False),
                      (torch.randint(100, (32,)), torch.arange(0, 32, 4)),
                      ["aten._embedding_bag_forward_only.default"]),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), (X,), ["aten.logsumexp.default"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_region_and_its_proven_twin(name):
    function, inputs, twin = CASES[name]
    recorder = regions(function, *inputs)
    assert len(recorder.seen) == 1
    task = recorder.seen[0].task
    assert list(task.twin.targets) == twin
    assert TaskGraph.from_json(task.graph.to_json()) == task.graph
    assert KernelTask.from_json(task.to_json()).key == task.key


class Head(nn.Module):
    """A linear layer, then what makes one number of each row of it."""

    def __init__(self, then, dtype=torch.float32, bias=True):
        super().__init__()
        self.linear = nn.Linear(32, 500, bias, dtype=dtype).requires_grad_(False)
        self.then = then

    def forward(self, x, *rest):
        return self.then(self.linear(x), *rest)


ROWS = {
    "logsumexp": (lambda z, y: torch.logsumexp(z, -1), ["aten.logsumexp.default"]),
    "logsumexp_then_work": (lambda z, y: torch.exp(torch.logsumexp(z, -1) * 0.1) + y, ["aten.logsumexp.default"]),
    "cross_entropy": (F.cross_entropy, ["aten._log_softmax.default", "aten.nll_loss_forward.default"]),
    "cross_entropy_rows": (lambda z, y: F.cross_entropy(z, y, reduction="none"),
                           ["aten._log_softmax.default", "aten.nll_loss_forward.default"]),
}  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROWS)
def test_a_product_and_the_reductions_of_its_rows_are_one_region(name, dtype, bias):
    from torch_kevolve.templates.matmul_parts import find

    then, twin = ROWS[name]
    x = torch.randn(8, 32, dtype=dtype)
    recorder = regions(Head(then, dtype, bias), x, LABELS, wants=lambda task: find(task) is not None)
    assert len(recorder.seen) == 1
    task = recorder.seen[0].task
    found = find(task)
    assert found.tail is not None and (found.tail.column is None) == name.startswith("logsumexp")
    assert [t for t in task.twin.targets if t in twin] == twin
    # Nothing is left outside, and the product is no output.
    assert [tuple(spec.shape) for spec in task.graph.output_specs] in ([(8,)], [()])
    assert [row.reason for row in recorder.verdicts] == ["no-kernel"]


def test_a_product_that_somebody_else_reads_is_written():
    from torch_kevolve.templates.matmul_parts import find

    def both(z, y):
        return F.cross_entropy(z, y), z

    recorder = regions(Head(both), torch.randn(8, 32), LABELS, wants=lambda task: find(task) is not None)
    assert all(find(each.task).tail is None for each in recorder.seen)


def test_cross_entropy_backward_is_one_region():
    logits = X.clone().requires_grad_()
    recorder = regions(F.cross_entropy, logits, LABELS, backward=True)
    assert [each.phase for each in recorder.seen] == ["forward", "backward"]
    forward, backward = recorder.seen
    assert len(forward.task.graph.outputs) == 4
    assert backward.task.graph.output_specs[0].shape == (8, 64)
    assert "aten._log_softmax_backward_data.default" in backward.task.twin.targets


def test_what_a_layer_norm_saves_is_compared_with_what_eager_saves():
    x = X.clone().requires_grad_()
    (forward, *_) = regions(nn.LayerNorm(64), x, backward=True).seen
    assert len(forward.task.graph.outputs) == 3 and forward.task.twin.targets == ("aten.native_layer_norm.default",)


def test_layer_norm_backward_is_one_region_where_claimed_and_cut_by_axis_where_not():
    x = X.bfloat16().requires_grad_()
    model = nn.LayerNorm(64).bfloat16()
    whole = regions(model, x, backward=True).seen[1].task
    assert whole.twin.targets == ("aten.native_layer_norm_backward.default",)

    def one_axis(task):
        axes = {op.args[1] for op in task.graph.ops if op.target.startswith(("aten.sum", "aten.var_mean"))}
        return len(axes) == 1

    cut = [each.task for each in regions(model, x, backward=True, wants=one_axis).seen if each.phase == "backward"]
    assert len(cut) >= 2
    # Shared normalised rows are computed again, not written for the other region.
    assert all(len(task.graph.output_specs[0].shape) == 1 or len(task.graph.outputs) == 1 for task in cut)


def test_equal_layers_are_one_task():
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(3))).requires_grad_(
        False
    )
    recorder = regions(layers, X, wants=lambda task: "aten.var_mean.correction" in task.graph.targets
                       and "aten.addmm.default" not in task.graph.targets)  # fmt: skip
    assert [each.count for each in recorder.seen] == [3]


def test_index_bounds_come_from_the_table():
    task = regions(nn.Embedding(100, 16).requires_grad_(False), torch.randint(100, (4, 8))).seen[0].task
    index = next(spec for spec in task.graph.inputs if spec.dtype == "int64")
    assert (index.low, index.high) == (0, 99)


def test_symbols_and_this_calls_sizes():
    wanted = regions(lambda x: torch.softmax(x, -1), X, dynamic=True).seen[0]
    assert wanted.binding == {"s0": 8, "s1": 64}
    assert [(s.name, s.lo) for s in wanted.task.symbols] == [("s0", 2), ("s1", 2)]
    assert wanted.task.twin.targets == ("aten._softmax.default",)


def test_random_and_mutating_work_is_left_alone():
    def noisy(x):
        return torch.softmax(torch.dropout(x, 0.5, True), -1)

    for each in regions(noisy, X).seen:
        assert not any("rand" in target or "dropout" in target for target in each.task.graph.targets)


def test_what_is_left_says_why():
    recorder = regions(nn.Conv2d(3, 4, 3).requires_grad_(False), torch.randn(1, 3, 8, 8))
    assert [row.reason for row in recorder.verdicts] == ["convolution"]
    refused = regions(lambda x: torch.softmax(x, -1), X, wants=lambda task: False)
    assert {row.reason for row in refused.verdicts} == {"no-family"}


def test_skip_names_operators():
    torch._dynamo.reset()
    recorder = Recorder(lambda task: None, skip=("cumsum",))
    torch.compile(lambda x: x.cumsum(0), backend=recorder.backend())(X)
    assert [row.reason for row in recorder.verdicts] == ["skipped"]


@pytest.mark.filterwarnings("ignore:Torchinductor does not support")
def test_complex_is_refused():
    recorder = regions(lambda x: torch.view_as_real(torch.fft.fft(x)).abs().sum(-1), X)
    assert all(spec.dtype != "complex64" for each in recorder.seen for spec in each.task.graph.inputs)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch
from test_lowering_regions import CASES, regions
for name in ("cross_entropy", "group_norm_silu", "linear_gelu"):
    function, inputs, _ = CASES[name]
    print(regions(function, *inputs).seen[0].task.key)
"""


def test_the_key_is_the_same_in_another_process():
    here = [regions(*CASES[name][:1], *CASES[name][1]).seen[0].task.key
            for name in ("cross_entropy", "group_norm_silu", "linear_gelu")]  # fmt: skip
    script = SCRIPT.format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == here
