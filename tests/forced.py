"""Forced: kernels without a measurement, so that a test of what they compute takes seconds.

The families write real candidates and Inductor bakes them; only the judge is a double, which finds every first
candidate with a kernel of its own right and fast, and library calls no faster than Inductor.
"""

import contextlib
from unittest import mock

import samples
from torch_kevolve import hunt
from torch_kevolve.devices import current


class Yes:
    """Says yes to everything that holds a kernel, without running it."""

    def __init__(self):
        self.opened, self.baselines, self.notes = [], {}, {}

    def open(self, job, settings):
        self.opened.append(job.task)
        return self

    def evaluate(self, candidates):
        for candidate in candidates:
            yield candidate, self.confirm(candidate)

    def confirm(self, candidate):
        ratio = 0.5 if candidate.language == "aten" else 2.0
        device = {"hard": {}, "soft": current("cpu").soft()}
        return samples.evidence(ratio, device=device, roofline=0.99 if ratio > 1 else None)

    def close(self):
        pass


@contextlib.contextmanager
def forced():
    """While it lasts, whoever searches gets the first kernel that a family writes. Yields the judge."""
    judge = Yes()
    with mock.patch.object(hunt, "shared_evaluator", lambda name: judge):
        yield judge
