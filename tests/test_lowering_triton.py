"""Triton in the graph: the nodes that stand there, and on a GPU what they compute."""

import pytest
import torch
from lowering_kernels import Recorder, is_softmax, kernel

ROWS = """
import triton
import triton.language as tl


@triton.jit
def rows(x_ptr, y_ptr, n, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + at, mask=at < n, other=float("-inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * n + at, scale * e / tl.sum(e, 0), mask=at < n)
"""


def launch(p, x):
    y = p.empty_output()
    p.run("rows", grid=(x.shape[0],), args=(x, y, x.shape[1], 2.0), BLOCK=64, num_warps=2)
    return y


def make(task):
    return kernel(task, "triton", ROWS, launch)


@pytest.fixture
def after_passes():
    """The operators of every graph after Inductor's post-grad passes."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    seen = []

    class Look(CustomGraphPass):
        def __call__(self, graph):
            seen.append([(str(node.target), dict(node.kwargs)) for node in graph.nodes if node.op == "call_function"])

        def uuid(self):
            return None

    with config.patch(post_grad_custom_post_pass=Look()):
        yield seen


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_launch_is_one_inlined_wrapper(after_passes, dynamic):
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    torch._dynamo.reset()
    recorder = Recorder(make, is_softmax)
    x = torch.randn(8, 50)
    call = torch.compile(lambda x: torch.softmax(x.relu(), -1) + 1, backend=recorder.backend(), dynamic=dynamic)
    if not torch.cuda.is_available():
        # Without a driver Inductor cannot lower the kernel itself: the graph falls back, which is shown here too.
        torch.testing.assert_close(call(x), torch.softmax(x.relu(), -1) + 1)
        assert [row.reason for row in recorder.verdicts] == ["compile"]
    nodes = after_passes[0]
    targets = [target for target, _ in nodes]
    assert "aten.amax.default" not in targets and "aten.exp.default" not in targets
    ((_, wrapper),) = [node for node in nodes if node[0] == "triton_kernel_wrapper_functional"]
    configured = kernel_side_table.get_kernel(wrapper["kernel_idx"])
    assert configured.configs[0].num_warps == 2 and configured.configs[0].kwargs == {"BLOCK": 64}
    assert kernel_side_table.get_constant_args(wrapper["constant_args_idx"])["scale"] == 2.0
    assert ("n" in wrapper["kwargs"]) == dynamic
    assert wrapper["tensors_to_clone"] == ["y_ptr"]
    assert "kevolve_pin" in str(targets)


def test_a_symbolic_constexpr_is_refused():
    def symbolic(p, x):
        y = p.empty_output()
        p.run("rows", grid=(x.shape[0],), args=(x, y, x.shape[1], 1.0), BLOCK=x.shape[1])
        return y

    torch._dynamo.reset()
    recorder = Recorder(lambda task: kernel(task, "triton", ROWS, symbolic), is_softmax)
    x = torch.randn(8, 50)
    torch.testing.assert_close(
        torch.compile(lambda x: torch.softmax(x, -1), backend=recorder.backend(), dynamic=True)(x), torch.softmax(x, -1)
    )
    assert [row.reason for row in recorder.verdicts] == ["plan"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("cudagraphs", [False, True])
def test_on_a_gpu_it_is_right(dynamic, cudagraphs):
    torch._dynamo.reset()
    recorder = Recorder(make, is_softmax)
    patches = {"triton.cudagraphs": True} if cudagraphs else {}
    call = torch.compile(
        lambda x: torch.softmax(x.relu().t(), -1) + 1, backend=recorder.backend(**patches), dynamic=dynamic
    )
    for rows, columns in ((50, 8), (33, 5)):
        x = torch.randn(rows, columns, device="cuda")
        for _ in range(3):
            torch.testing.assert_close(call(x), 2 * torch.softmax(x.relu().t(), -1) + 1)
    assert recorder.faults == [] and recorder.replaced
