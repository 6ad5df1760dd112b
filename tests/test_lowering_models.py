"""Models: every region of a network replaced by its own operators computes what eager computes.

The kernel of each task is the task itself, operator by operator: a wrong capture, a cycle, a lost view or a wrong
order of inputs shows as a wrong number.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from lowering_kernels import Recorder
from torch import nn

from samples import evidence, fingerprint
from torch_kevolve.candidate import Candidate, Provenance
from torch_kevolve.kernel import Kernel
from torch_kevolve.templates.twin import twin_plan


def itself(task):
    plan = twin_plan(task, task.graph)
    return Kernel(task, fingerprint(), Candidate("aten", "", plan, Provenance("test")), evidence())


class Block(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mask = torch.triu(torch.full((length, length), -1e4), 1)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 8 + mask, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.block, self.head = nn.Embedding(97, 64), Block(), nn.Linear(64, 97)

    def forward(self, tokens):
        logits = self.head(self.block(self.table(tokens)))
        return F.cross_entropy(logits[:, :-1].reshape(-1, 97), tokens[:, 1:].reshape(-1))


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.head = nn.Conv2d(16, 32, 3), nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 3, 2, 1)
        x = F.avg_pool2d(F.silu(self.second(x)), 2)
        return F.log_softmax(self.head(x.mean((2, 3))), -1).sum(0)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.GRUCell(16, 32), nn.LSTMCell(32, 16)

    def forward(self, x):
        hidden, state, out = x.new_zeros(x.shape[0], 32), None, []
        for step in range(2):
            hidden = self.inner(x[:, step], hidden)
            state = self.outer(hidden, state)
            out.append(state[0])
        return torch.stack(out, 1).cumsum(1).square().sum()


class Bounded(nn.Module):
    """Rounded to 8 bits and back; two axes at once; the root of what random numbers make negative."""

    def forward(self, x):
        scale = x.abs().amax(1, keepdim=True) / 127
        rounded = (x / scale).round().clamp(-127, 127).to(torch.int8).float() * scale
        spread = (x.square().mean(1, keepdim=True) - 0.5 * x.mean(1, keepdim=True).square()).sqrt()
        return (torch.softmax(x, 0) * torch.softmax(rounded, 1) * spread + x.amax()).sum()


MODELS = {
    "language": (Language, lambda n: torch.arange(n * 12).reshape(n, 12) % 97),
    "pictures": (Pictures, lambda n: torch.randn(n, 3, 16, 16)),
    "recurrent": (Recurrent, lambda n: torch.randn(n, 3, 16)),
    "bounded": (Bounded, lambda n: torch.randn(n, 33)),
}


@pytest.mark.parametrize(("training", "dynamic"), [(False, False), (True, True)], ids=["inference", "training-dynamic"])
@pytest.mark.parametrize("name", MODELS)
def test_regions_replaced_by_themselves(name, training, dynamic):
    torch.manual_seed(0)
    torch._dynamo.reset()
    make, draw = MODELS[name]
    theirs = make().train(training)
    ours = copy.deepcopy(theirs)
    recorder = Recorder(itself)
    compiled = torch.compile(ours, backend=recorder.backend(), dynamic=dynamic)
    for size in (4, 6) if dynamic else (4,):
        x = draw(size)
        with torch.set_grad_enabled(training):
            want, got = theirs(x), compiled(x)
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
        if training and want.requires_grad:
            want.backward()
            got.backward()
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=2e-5)
    assert recorder.faults == [] and recorder.replaced
