"""Lasting keys: the graph keys and task keys of a dozen small modules, printed as JSON.

    scripts/keys [--compare | --write]

`tests/data/keys.json` holds what they are; a stored kernel is found by them in every process and on every torch that
we support. `--compare` says what differs from the file and exits with 1 if anything does, but for the modules that the
file lists under `other_decomposition`, by version of torch: there torch itself makes other operators of them. `--write`
brings the file up to date, where regions grow otherwise on purpose: kernels stored for the old ones are then not found.
"""

import argparse
import json
import logging
import sys
from pathlib import Path

import torch
from lowering_kernels import Recorder
from small_modules import CASES

from torch_kevolve.lowering.graph_key import graph_key
from torch_kevolve.lowering.hooks import Hooks
from torch_kevolve.lowering.inductor import compile

FILE = Path(__file__).parent / "data" / "keys.json"
NAMES = (
    "softmax", "log_softmax", "logsumexp", "layer_norm", "rms_norm", "group_norm_silu", "linear_gelu", "swiglu",
    "embedding", "cross_entropy", "cumsum_last", "argmax", "max_pool", "bmm_softmax",
)  # fmt: skip
TRAINED = ("layer_norm", "cross_entropy")


class Seen(Exception):
    """The keys are known: the rest of the compilation would be time for nothing."""


def keys_of(name, dynamic=False, training=False):
    """`{"graph": key, "tasks": [keys of all regions, sorted]}` where everything that may be claimed is claimed."""
    make, inputs = CASES[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, args = make().train(training), inputs(16)
    if training:
        args = [x.requires_grad_() if x.is_floating_point() else x for x in args]
    recorder, found = Recorder(lambda task: None), {}

    def stop(reason, error):
        raise error

    def choose(wanted):
        chosen = Recorder.choose(recorder, wanted)
        if not training:
            raise Seen
        return chosen

    hooks = Hooks(claims=lambda task, binding: True, choose=choose, fault=stop, gate_on=False, min_share=0.0)

    def backend(gm, given, **_):
        found["graph"] = graph_key(gm, {"made by": "lasting_keys"})
        return compile(gm, given, hooks, {})

    compiled = torch.compile(module, backend=backend, dynamic=dynamic)
    try:
        with torch.set_grad_enabled(training):
            made = compiled(*args)
        if training:
            sum(y.sum() for y in torch.utils._pytree.tree_leaves(made)).backward()
    except Exception as error:
        # Dynamo wraps whatever its backend raises.
        if "Seen" not in f"{type(error).__name__} {error}":
            raise
    return {**found, "tasks": sorted({each.task.key for each in recorder.seen})}


def keys():
    """Name of the module and of how it was compiled -> its keys."""
    torch.set_num_threads(2)
    made = {name: keys_of(name) for name in NAMES}
    made.update({f"{name} dynamic": keys_of(name, dynamic=True) for name in NAMES})
    made.update({f"{name} training": keys_of(name, training=True) for name in TRAINED})
    return made


def differing(made, expected):
    """`{name: what of "graph" and "tasks" differs}`."""
    out = {}
    for name in sorted({*made, *expected}):
        mine, theirs = made.get(name, {}), expected.get(name, {})
        parts = [part for part in ("graph", "tasks") if mine.get(part) != theirs.get(part)]
        if parts:
            out[name] = parts
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    logging.getLogger("torch_kevolve").setLevel(logging.ERROR)
    made = keys()
    if given.write:
        old = json.loads(FILE.read_text())
        FILE.write_text(json.dumps({**old, "keys": made}, indent=1, sort_keys=True) + "\n")
    if not given.compare:
        print(json.dumps(made, indent=1, sort_keys=True))
        return 0
    data = json.loads(FILE.read_text())
    version = ".".join(torch.__version__.split(".")[:2])
    known = set(data["other_decomposition"].get(version, ()))
    different = {name: parts for name, parts in differing(made, data["keys"]).items() if name not in known}
    print(json.dumps({"torch": torch.__version__, "different": different}, indent=1))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
