"""Small modules: what people build models of, one or two layers each, with a comparison against fp64.

`CASES[name] = (make, inputs)`: `make()` is the module, `inputs(n)` its arguments with `n` for every size that may vary.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from forced import forced
from torch_kevolve.backend import metrics, reset_metrics


class Do(nn.Module):
    """A function as a module, with layers it may use."""

    def __init__(self, function, *layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, *args):
        return self.function(*self.layers, *args)


def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def tokens(*shape, below=50):
    return torch.randint(below, shape)


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v


def causal(x):
    q, k, v = x.chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def mha():
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    return Do(lambda a, x: a(x, x, x, need_weights=False)[0], layer)


def encoder():
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)


def swiglu(gate, up, down, x):
    return down(F.silu(gate(x)) * up(x))


def gated(proj, x):
    a, b = proj(x).chunk(2, -1)
    return a * F.gelu(b)


def lstm(cell, x, h, c):
    return cell(x, (h, c))


def row(n, width=96, dtype=torch.float32):
    return (rand(n, width, dtype=dtype),)


def image(n, channels=8):
    return (rand(n, channels, 14, 14),)


def linear(*size):
    return nn.Linear(*size)


CASES = {
    "softmax": (lambda: nn.Softmax(-1), row),
    "softmax_bf16": (lambda: nn.Softmax(-1), lambda n: row(n, 96, torch.bfloat16)),
    "softmax_dim0": (lambda: nn.Softmax(0), row),
    "log_softmax": (lambda: nn.LogSoftmax(-1), row),
    "logsumexp": (lambda: Do(lambda x: torch.logsumexp(x, -1)), row),
    "layer_norm": (lambda: nn.LayerNorm(96), row),
    "layer_norm_bf16": (lambda: nn.LayerNorm(96).bfloat16(), lambda n: row(n, 96, torch.bfloat16)),
    "layer_norm_bare": (lambda: nn.LayerNorm(96, elementwise_affine=False), row),
    "add_layer_norm": (lambda: Do(lambda norm, x, y: norm(x + y), nn.LayerNorm(96)), lambda n: row(n) + row(n)),
    "rms_norm": (lambda: nn.RMSNorm(96), row),
    "group_norm": (lambda: nn.GroupNorm(4, 8), image),
    "group_norm_silu": (lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()), image),
    "instance_norm": (lambda: nn.InstanceNorm2d(8, affine=True), image),
    "batch_norm_1d": (lambda: nn.BatchNorm1d(96), row),
    "batch_norm_2d": (lambda: nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()), image),
    "standardise": (lambda: Do(lambda x: (x - x.mean(0)) / (x.std(0) + 1e-3)), row),
    "l2_normalise": (lambda: Do(lambda x: F.normalize(x, dim=-1)), row),
    "linear_relu": (lambda: nn.Sequential(linear(96, 64), nn.ReLU()), row),
    "linear_gelu": (lambda: nn.Sequential(linear(96, 64), nn.GELU()), row),
    "linear_gelu_tanh": (lambda: nn.Sequential(linear(96, 64), nn.GELU("tanh")), row),
    "mlp": (lambda: nn.Sequential(linear(96, 128), nn.SiLU(), linear(128, 32), nn.Softplus()), row),
    "swiglu": (lambda: Do(swiglu, linear(96, 64), linear(96, 64), linear(64, 96)), row),
    "geglu": (lambda: Do(gated, linear(96, 64)), row),
    "glu": (lambda: nn.GLU(), row),
    "prelu": (lambda: nn.Sequential(nn.PReLU(), nn.Hardswish()), row),
    "attention": (lambda: Do(attention), lambda n: tuple(rand(2, n, 16) for _ in range(3))),
    "sdpa_causal": (lambda: Do(causal), lambda n: (rand(2, 2, n, 48),)),
    "multihead": (mha, lambda n: (rand(2, n, 32),)),
    "encoder_layer": (encoder, lambda n: (rand(2, n, 32),)),
    "bmm_softmax": (lambda: Do(lambda x, y: torch.bmm(x, y).softmax(-1)), lambda n: (rand(n, 8, 16), rand(n, 16, 24))),
    "embedding": (lambda: Do(lambda e, i: e(i) * 2, nn.Embedding(50, 32)), lambda n: (tokens(n, 5),)),
    "embedding_bag_sum": (lambda: nn.EmbeddingBag(50, 32, mode="sum"), lambda n: (tokens(n, 5),)),
    "embedding_bag_mean": (lambda: nn.EmbeddingBag(50, 32, mode="mean"), lambda n: (tokens(n, 5),)),
    "cross_entropy": (lambda: nn.CrossEntropyLoss(), lambda n: (rand(n, 50), tokens(n))),
    "cross_entropy_smooth": (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), lambda n: (rand(n, 50), tokens(n))),
    "mse": (lambda: nn.MSELoss(), lambda n: row(n) + row(n)),
    "huber": (lambda: nn.HuberLoss(), lambda n: row(n) + row(n)),
    "bce_logits": (lambda: nn.BCEWithLogitsLoss(), lambda n: (rand(n, 96), torch.rand(n, 96))),
    "kl_div": (
        lambda: Do(lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean")),
        lambda n: row(n) + row(n),
    ),
    "cosine": (lambda: nn.CosineSimilarity(-1), lambda n: row(n) + row(n)),
    "cumsum_last": (lambda: Do(lambda x: x.cumsum(-1)), row),
    "cumsum_dim0": (lambda: Do(lambda x: x.cumsum(0)), row),
    "cumprod": (lambda: Do(lambda x: (1 + x / 100).cumprod(-1)), row),
    "argmax": (lambda: Do(lambda x: (x.argmax(0), x.amax(0))), row),
    "max_min": (lambda: Do(lambda x: x.max(-1).values - x.min(-1).values), row),
    "max_pool": (lambda: nn.MaxPool2d(3, 2, 1), image),
    "avg_pool": (lambda: nn.AvgPool2d(2), image),
    "adaptive_pool": (lambda: Do(lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1)), image),
    "conv_norm_relu": (lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()), image),
    "lstm_cell": (lambda: Do(lstm, nn.LSTMCell(32, 16)), lambda n: (rand(n, 32), rand(n, 16), rand(n, 16))),
    "gru_cell": (lambda: nn.GRUCell(32, 16), lambda n: (rand(n, 32), rand(n, 16))),
}
OPTIONS = {"kevolve.gate": "off", "kevolve.effort": "quick", "kevolve.on_error": "raise"}


def check(name, dynamic):
    """Compile with the first kernel of every family put in; outputs and gradients at two sizes against fp64."""
    make, inputs = CASES[name]
    torch.manual_seed(0)
    module = make()
    sizes = (19, 29) if dynamic else (16,)  # of one bucket, so that the second runs what the first compiled
    for training in (False, True):
        torch._dynamo.reset()
        reset_metrics()
        compiled = torch.compile(
            copy.deepcopy(module).train(training), backend="kevolve", dynamic=dynamic, options=OPTIONS
        )
        for size in sizes:
            torch.manual_seed(size)
            args = inputs(size)
            with forced():
                mine = outcome(compiled, args, training)
            eager = outcome(copy.deepcopy(module).train(training), args, training)
            exact = outcome(copy.deepcopy(module).double().train(training), wide(args), training)
            assert len(mine) == len(eager)
            for place, (y, e, x) in enumerate(zip(mine, eager, exact, strict=True)):
                problem = differs(y, e, x)
                assert not problem, f"{name} training={training} size={size} result {place}: {problem}; {metrics()}"
        counts = metrics()
        assert not set(counts["left"]) & FAULTS, counts
        REPLACED[name, dynamic, training] = counts["replaced"]


FAULTS = {"backend", "session", "pass", "plan", "splice", "compile", "race", "evaluation"}
"""Reasons that are faults of our own; any other is a verdict."""
REPLACED: dict[tuple[str, bool, bool], int] = {}


def replaced(dynamic):
    """The modules, of those checked in this process, in which at least one region was replaced."""
    return {name for (name, mode, _), count in REPLACED.items() if mode == dynamic and count}


def outcome(module, args, training):
    """Outputs; in training also the gradients of parameters and floating inputs."""
    if not training:
        with torch.no_grad():
            return flat(module(*args))
    args = [x.clone().requires_grad_() if x.is_floating_point() else x for x in args]
    outs = flat(module(*args))
    wanted = [p for p in module.parameters()] + [x for x in args if x.requires_grad]
    made = [y for y in outs if y.requires_grad]
    if not made or not wanted:
        return outs
    dice = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=dice).to(y.dtype) for y in made]
    grads = torch.autograd.grad(made, wanted, weights, allow_unused=True)
    return [y.detach() for y in outs] + [torch.zeros(()) if g is None else g for g in grads]


def flat(value):
    return list(torch.utils._pytree.tree_leaves(value))


def wide(args):
    return [x.double() if x.is_floating_point() else x for x in args]


def differs(y, e, x):
    """Why `y` is no answer where eager says `e` and fp64 says `x`; empty if it is one."""
    if y.dtype != e.dtype or y.shape != e.shape:
        return f"{y.dtype}{tuple(y.shape)} against {e.dtype}{tuple(e.shape)}"
    if not e.is_floating_point():
        return "" if torch.equal(y, e) else "unequal integers"
    if not torch.equal(torch.isfinite(y), torch.isfinite(e)):
        return "not finite in other places"
    scale = x.double().square().mean().sqrt().item() or 1.0
    mine, theirs = ((t.double() - x.double()).abs().max().item() / scale for t in (y, e))
    allowed = 4 * theirs + 16 * torch.finfo(e.dtype).eps
    return "" if mine <= allowed else f"off by {mine:.3g} of the rms, eager by {theirs:.3g}"
