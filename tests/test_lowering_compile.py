"""Compile: graphs with kernels in them compute what eager computes."""

import threading

import pytest
import torch
from lowering_kernels import SOFTMAX, Recorder, is_softmax, kernel, softmax
from torch import nn

from torch_kevolve.plan import build
from torch_kevolve.task import TensorSpec


def around(x):
    return torch.softmax(x, -1) + 1


def compiled(recorder, function=around, patches=None, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend=recorder.backend(**(patches or {})), **options)


@pytest.fixture
def x():
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("wrapper", [False, True], ids=["python", "cpp_wrapper"])
def test_a_baked_kernel_runs_in_the_graph(x, dynamic, wrapper):
    recorder = Recorder(lambda task: softmax(task, "2.0"), is_softmax)
    call = compiled(recorder, patches={"cpp_wrapper": wrapper}, dynamic=dynamic)
    # Twice softmax: the factor shows that it was our kernel that ran.
    for rows, columns in ((8, 64), (5, 37)):
        y = torch.randn(rows, columns)
        torch.testing.assert_close(call(y), 2 * torch.softmax(y, -1) + 1)
    assert recorder.faults == [] and recorder.replaced[0].kernel


def test_a_transposed_input_arrives_with_its_captured_strides(x):
    def function(a):
        return around(a.t().contiguous()) + around(a.relu().t())

    recorder = Recorder(lambda task: softmax(task) if task.graph.inputs[0].strides[1] == 1 else None, is_softmax)
    torch.testing.assert_close(compiled(recorder, function)(x), function(x))
    assert recorder.faults == []


def test_training_with_kernels_in_forward_and_backward(x):
    def centre(x):
        return x - x.mean(-1, keepdim=True)

    def launch(p, x):
        part, count, y = p.empty((x.shape[0],), "float64"), p.zeros((1,), "float64"), p.empty_output()
        p.run("rows", args=(x, part, *x.shape))
        p.run("spread", args=(x, part, y, count, *x.shape, 1.0))
        return y

    # Centring is symmetric: its backward is the same work on the gradient, in other operators.
    recorder = Recorder(lambda task: kernel(task, "cpp", TWO, launch), lambda task: len(task.graph.ops) > 1)
    weight = torch.randn(8, 64)
    x = x.requires_grad_()
    (compiled(recorder, centre)(x) * weight).sum().backward()
    got, x.grad = x.grad, None
    (centre(x) * weight).sum().backward()
    torch.testing.assert_close(got, x.grad)
    assert [row.phase for row in recorder.replaced] == ["forward", "backward"] and recorder.faults == []


def test_a_kernel_whose_body_changed_is_never_served_stale(x):
    first, second = (
        Recorder(lambda task, f=f: softmax(task, f), is_softmax, uuid=u) for f, u in (("1.0", "a"), ("3.0", "b"))
    )
    torch.testing.assert_close(compiled(first)(x), torch.softmax(x, -1) + 1)
    torch.testing.assert_close(compiled(second)(x), 3 * torch.softmax(x, -1) + 1)


def test_the_pass_does_not_run_on_a_hit_and_the_kernel_is_still_there(x):
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
    from torch._inductor.codecache import FxGraphCache

    FxGraphCache.clear()
    AOTAutogradCache.clear()
    runs = []
    for _ in range(2):
        recorder = Recorder(lambda task: softmax(task, "5.0"), is_softmax, uuid="hit-test")
        torch.testing.assert_close(compiled(recorder)(x), 5 * torch.softmax(x, -1) + 1)
        runs.append(len(recorder.seen))
    assert runs == [1, 0]


def test_one_uuid_for_forward_and_backward(x):
    from torch._inductor import config

    seen = []
    recorder = Recorder(lambda task: seen.append(config.post_grad_custom_pre_pass.uuid()), uuid="frozen")
    compiled(recorder)(x.requires_grad_()).sum().backward()
    assert len(seen) >= 2 and set(seen) == {"frozen"}


TWO = """
#include <cstdint>
extern "C" void rows(const float* x, double* part, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; r++) {
    double s = 0;
    for (int64_t i = 0; i < n; i++) s += x[r * n + i];
    part[r] = s;
  }
}
extern "C" void spread(const float* x, const double* part, float* y, double* count, int64_t rows, int64_t n,
                       double by) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < n; i++) y[r * n + i] = (float)(x[r * n + i] - part[r] / n) * by;
  count[0] += rows;
}
"""


@pytest.mark.parametrize("dynamic", [False, True])
def test_several_launches_scratch_and_zeros(x, dynamic):
    def launch(p, x):
        rows, n = x.shape
        part = p.empty((rows,), "float64")
        count = p.zeros((1,), "float64")
        y = p.empty_output()
        p.run("rows", args=(x, part, rows, n))
        p.run("spread", args=(x, part, y, count, rows, n, 0.5))
        return y

    def centre(x):
        return (x - x.mean(-1, keepdim=True)) * 0.5

    recorder = Recorder(lambda task: kernel(task, "cpp", TWO, launch))
    torch.testing.assert_close(compiled(recorder, centre, dynamic=dynamic)(x), centre(x))
    assert recorder.faults == [] and recorder.replaced


def test_a_plan_of_library_calls_becomes_library_calls(x):
    def launch(p, x):
        spec = TensorSpec(x.dtype, x.shape, x.strides)
        return p.aten("aten._softmax.default", (x, 1, False), (spec,))[0]

    recorder = Recorder(lambda task: kernel(task, "aten", "", launch), is_softmax)
    for dynamic in (False, True):
        torch.testing.assert_close(compiled(recorder, dynamic=dynamic)(x), around(x))
    assert recorder.faults == [] and len(recorder.replaced) == 2


def test_an_empty_tensor_launches_nothing():
    recorder = Recorder(softmax, is_softmax)
    assert compiled(recorder)(torch.empty(0, 64)).shape == (0, 64)


def test_a_kernel_that_does_not_compile_leaves_the_graph_to_inductor(x):
    broken = Recorder(lambda task: kernel(task, "cpp", SOFTMAX.replace("FACTORf", "oops"),
                                          lambda p, x: _launch(p, x)), is_softmax)  # fmt: skip
    torch.testing.assert_close(compiled(broken)(x), around(x))
    assert [reason for reason, _ in broken.faults] == ["compile"]
    assert [row.reason for row in broken.verdicts] == ["compile"]


def _launch(p, x):
    y = p.empty_output()
    p.run("softmax", args=(x, y, x.shape[0], x.shape[1]))
    return y


def test_a_plan_that_cannot_be_spliced_leaves_its_region(x):
    def absent(p, x):
        y = p.empty_output()
        p.run("nowhere", args=(x, y))
        return y

    recorder = Recorder(lambda task: kernel(task, "cpp", SOFTMAX, absent), is_softmax)
    torch.testing.assert_close(compiled(recorder)(x), around(x))
    assert [row.reason for row in recorder.verdicts] == ["plan"]


def test_a_fault_of_ours_inside_the_pass_leaves_the_graph(x):
    def wants(task):
        raise ZeroDivisionError("ours")

    recorder = Recorder(softmax, wants)
    torch.testing.assert_close(compiled(recorder)(x), around(x))
    assert [reason for reason, _ in recorder.faults] == ["pass"]


def test_the_gate_keeps_the_faster_graph_and_says_so(x):
    slow = SOFTMAX.replace("m = a[i] > m", "for (volatile int k = 0; k < 20000; k++); m = a[i] > m")
    slow = (
        slow.replace("i < n; i++) for", "i < n; i++) { for")
        .replace("? a[i] : m;", "? a[i] : m; }")
        .replace("FACTOR", "1.0")
    )
    recorder = Recorder(lambda task: kernel(task, "cpp", slow, _launch), is_softmax, gate_on=True)
    torch.testing.assert_close(compiled(recorder)(x), around(x))
    ((phase, verdict),) = recorder.gates
    assert phase == "inference" and verdict["kept"] == "plain" and set(verdict["ms"]) == {"plain", "kernels"}
    assert [row.reason for row in recorder.verdicts] == ["graph-not-faster"]
    assert recorder.faults == []


def test_a_known_gate_is_not_raced_again(x):
    recorder = Recorder(softmax, is_softmax, gate_on=True, known_gate={"inference": "plain"})
    torch.testing.assert_close(compiled(recorder)(x), around(x))
    assert recorder.seen == [] and recorder.gates == []


def test_the_gate_leaves_the_users_random_stream_alone(x):
    recorder = Recorder(softmax, is_softmax, gate_on=True)
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    compiled(recorder)(x)
    assert torch.equal(torch.rand(4), want)


def test_branches_of_cond(x):
    def function(x):
        return torch.cond(x.sum() > 0, lambda x: torch.softmax(x, -1), lambda x: torch.softmax(-x, -1), (x,))

    recorder = Recorder(softmax, is_softmax)
    call = compiled(recorder, function)
    for sign in (1, -1):
        torch.testing.assert_close(call(x.abs() * sign), function(x.abs() * sign))
    assert recorder.replaced and recorder.faults == []


def test_mutated_inputs_stay_right(x):
    def function(x, state):
        state.add_(torch.softmax(x, -1))
        return torch.softmax(state, -1)

    recorder = Recorder(softmax, is_softmax)
    ours, theirs = torch.ones(8, 64), torch.ones(8, 64)
    torch.testing.assert_close(compiled(recorder, function)(x, ours), function(x, theirs))
    torch.testing.assert_close(ours, theirs)
    assert len(recorder.replaced) == 2


def test_a_float_argument_restarts_dynamo_through_us(x):
    recorder = Recorder(softmax, is_softmax)
    call = compiled(recorder, lambda x, f: torch.softmax(x, -1) * f, dynamic=True)
    for f in (1.5, 2.5):
        torch.testing.assert_close(call(x, f), torch.softmax(x, -1) * f)


def test_threads_compile_at_once(x):
    recorder = Recorder(softmax, is_softmax)
    torch._dynamo.reset()
    out, errors = {}, []

    def work(number):
        try:
            call = torch.compile(lambda x: torch.softmax(x, -1) + number, backend=recorder.backend())
            out[number] = call(x)
        except Exception as error:  # shown by the assert
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for number, value in out.items():
        torch.testing.assert_close(value, torch.softmax(x, -1) + number)


def test_baked_is_bit_equal_to_the_search_build(x, tmp_path):
    from torch_kevolve.languages import LANGUAGES
    from torch_kevolve.languages.replay import replay

    fast = SOFTMAX.replace('"no-math-errno"', '"no-math-errno","associative-math","no-signed-zeros","no-trapping-math"')
    fast = fast.replace("FACTOR", "1.0")
    recorder = Recorder(lambda task: kernel(task, "cpp", fast, _launch), is_softmax)
    baked = compiled(recorder, lambda x: torch.softmax(x, -1))(x)
    task = recorder.seen[0].task
    candidate = kernel(task, "cpp", fast, _launch).candidate
    assert candidate.plan == build(task, _launch)
    member = LANGUAGES["cpp"]()
    built = member.build(candidate, {}, "cpu:native", tmp_path)
    assert built.ok, built.note
    (searched,) = replay(candidate.plan, task, (x,), member.load(built, candidate))
    assert torch.equal(baked, searched)


def test_a_users_own_pass_runs_first(x):
    from torch._inductor.custom_graph_pass import CustomGraphPass

    seen = []

    class Theirs(CustomGraphPass):
        def __call__(self, graph):
            seen.append(len(list(graph.nodes)))

        def uuid(self):
            return "theirs"

    recorder = Recorder(softmax, is_softmax)
    torch.testing.assert_close(compiled(recorder, patches={"post_grad_custom_pre_pass": Theirs()})(x), around(x))
    assert seen and recorder.replaced


def test_module_weights_and_two_equal_regions():
    model = nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1), nn.Linear(64, 64), nn.Softmax(-1)).requires_grad_(False)
    x = torch.randn(8, 64)
    recorder = Recorder(softmax, is_softmax)
    torch.testing.assert_close(compiled(recorder, model)(x), model(x))
    assert len(recorder.seen) == 1 and recorder.seen[0].count == 2 and len(recorder.replaced) == 2


def test_a_region_that_reads_another_regions_result(x):
    def function(x):
        return torch.softmax(torch.softmax(x, -1).exp(), -1)

    recorder = Recorder(softmax, is_softmax)
    torch.testing.assert_close(compiled(recorder, function)(x), function(x))
    assert len(recorder.replaced) == 2 and recorder.faults == []
