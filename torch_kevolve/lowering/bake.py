"""Bake: C++ kernels written into Inductor's output.

An `ir.ExternKernel` that emits the source and calls it like a kernel of Inductor's own, from the Python wrapper and
from the C++ wrapper. No operator is registered: on a hit of Inductor's caches, and in a package, the code is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.virtualized import V

from torch_kevolve.lowering.bake_text import Entry


@dataclass(frozen=True)
class Layout:
    """One tensor at the call: sizes and strides as ints or expressions of the shape environment."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]

    @classmethod
    def of(cls, value: torch.Tensor) -> Layout:
        def plain(size: Any) -> Any:
            return size.node.expr if isinstance(size, torch.SymInt) else size

        return cls(value.dtype, value.device, tuple(map(plain, value.shape)), tuple(map(plain, value.stride())))


class BakedKernel(ir.ExternKernel):
    """Reads its first inputs and writes the others, which are fresh buffers of its own."""

    def __init__(self, entry: Entry, reads: list[Any], writes: list[Any], symbols: Sequence[sympy.Expr]) -> None:
        device = writes[0].get_device()
        inputs = [
            *(self.unwrap_storage_for_input(x) for x in reads),
            *(self.unwrap_storage_for_input(y) for y in writes),
        ]
        super().__init__(None, ir.NoneLayout(device=device), inputs)
        self.entry, self.symbols, self.device = entry, tuple(sympy.sympify(s, strict=True) for s in symbols), device
        self.mutation_outputs = [ir.MutationOutput(ir.NoneLayout(device=device), y, self) for y in writes]
        V.graph.register_operation(self)

    def get_outputs(self) -> list[Any]:
        return list(self.mutation_outputs)

    def get_device(self) -> torch.device:
        return self.device  # type: ignore[no-any-return]

    def should_allocate(self) -> bool:
        return False

    def get_unbacked_symbol_defs(self) -> Any:
        from torch.utils._ordered_set import OrderedSet

        return OrderedSet()

    def get_free_symbol_uses(self, unbacked_only: bool = False) -> Any:
        found = super().get_free_symbol_uses(unbacked_only)
        if not unbacked_only:
            for expr in self.symbols:
                found |= expr.free_symbols
        return found

    def codegen(self, wrapper: Any) -> None:
        self.codegen_comment(wrapper)
        name = self._define(wrapper)
        args = [x.codegen_reference() for x in self.inputs]  # type: ignore[union-attr]
        args += [
            wrapper.codegen_sizevar(expr) if hasattr(wrapper, "codegen_sizevar") else str(expr) for expr in self.symbols
        ]
        wrapper.generate_kernel_call(name, args, device=self.device, triton=False, arg_types=self.entry.arg_types)

    def _define(self, wrapper: Any) -> str:
        """The kernel's name in the generated code; its text is put there once."""
        shared = bool(V.graph.cpp_wrapper)
        name = self.entry.name
        text = self.entry.text(name if shared else "kernel", shared)
        if text in wrapper.src_to_kernel:
            return wrapper.src_to_kernel[text]  # type: ignore[no-any-return]
        wrapper.src_to_kernel[text] = name
        body = text if shared else f"async_compile.cpp_pybinding({self.entry.arg_types!r}, {_quoted(text)})"
        declaration = self.entry.declaration(name) + ";\n"
        wrapper.define_kernel(name, body, gpu=False, cpp_definition=declaration)
        return name


def _quoted(text: str) -> str:
    return "r'''" + text + "'''" if "'''" not in text and not text.endswith("'") else repr(text)


def lowering(
    entry: Entry, reads: Sequence[Layout], values: Sequence[torch.Tensor], symbols: Sequence[sympy.Expr]
) -> Callable[..., Any]:
    """The function that Inductor calls while it lowers: tensors in, fresh tensors (like the fake `values`) out.

    Inputs arrive with the strides that the kernel was verified for, whatever layout Inductor would have chosen. Called
    with fake tensors, as the branches of a `cond` are, it returns fake ones.
    """
    writes = [Layout.of(value) for value in values]

    def lower(*inputs: Any) -> Any:
        from torch._inductor.lowering import lowerings

        if isinstance(inputs[0], torch.Tensor):
            return tuple(values)
        pinned = [_pinned(x, layout) for x, layout in zip(inputs, reads, strict=True)]
        fresh = [
            lowerings[torch.ops.aten.empty_strided.default](
                list(w.shape), list(w.strides), dtype=w.dtype, device=w.device
            )
            for w in writes
        ]
        for each in fresh:
            each.realize()
        BakedKernel(entry, pinned, fresh, symbols)
        return tuple(fresh)

    lower.__name__ = lower.__qualname__ = entry.name
    lower._inductor_lowering_function = True  # type: ignore[attr-defined]
    return lower


def pin(layout: Layout) -> Callable[..., Any]:
    """The function that hands a tensor on with exactly these strides."""

    def kevolve_pin(x: Any) -> Any:
        # A bare StorageBox is not broadcast and has no views: lowerings of what reads it next expect a TensorBox.
        return x if isinstance(x, torch.Tensor) else _boxed(_pinned(x, layout))

    kevolve_pin.__qualname__ = "kevolve_pin"
    kevolve_pin._inductor_lowering_function = True  # type: ignore[attr-defined]
    return kevolve_pin


def library_call(target: Any) -> Callable[..., Any]:
    """The function that calls ATen's own operator, also where Inductor would decompose it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor.lowering import fallback_handler

        if any(isinstance(x, torch.Tensor) for x in (*args, *kwargs.values())):
            return target(*args, **kwargs)
        return fallback_handler(target, add_to_fallback_set=False)(*args, **kwargs)

    call.__name__ = call.__qualname__ = "kevolve_" + target.name().split("::")[1].replace(".", "_")
    call._inductor_lowering_function = True  # type: ignore[attr-defined]
    return call


def _pinned(x: Any, layout: Layout) -> Any:
    x = ir.ExternKernel.realize_input(x)
    return ir.ExternKernel.require_exact_strides(x, list(layout.strides)) if layout.strides else x


def _boxed(x: Any) -> Any:
    return x if isinstance(x, ir.TensorBox) else ir.TensorBox(x)
