"""Switches: torch set as a task says, in the judge and in its worker.

Both are processes of their own, and a user may say `torch.set_float32_matmul_precision("high")` long after they began.
Without this eager's products were made in full fp32 where the user's are in TF32: such kernels were refused for their
error, and others were timed against baselines that the user does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Switches:
    """What a task's flags may name, at torch's own defaults."""

    deterministic: bool = False
    warn_only: bool = False
    precision: str = "highest"
    bf16_reduction: bool = True

    @classmethod
    def of(cls, flags: Mapping[str, str]) -> Switches:
        return cls(
            deterministic="deterministic" in flags,
            # References use operators of fp64 that the user never calls: they may lack a deterministic form.
            warn_only="deterministic" in flags,
            precision=flags.get("precision", "high" if "tf32" in flags else "highest"),
            bf16_reduction="bf16_reduction" not in flags,
        )

    @classmethod
    def now(cls) -> Switches:
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_float32_matmul_precision(),
            bool(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
        )

    def put(self) -> None:
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.set_float32_matmul_precision(self.precision)
        if torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction != self.bf16_reduction:
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = self.bf16_reduction
