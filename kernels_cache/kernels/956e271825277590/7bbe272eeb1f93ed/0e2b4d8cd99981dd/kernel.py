import triton
import triton.language as tl


@triton.jit
def scan_resident(x0_ptr, t0_ptr, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr):
    i0 = tl.program_id(0)
    i1 = tl.arange(0, SEGMENTS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    i2 = 0
    mask = i1 < 32768
    x = tl.load(x0_ptr + i0 * 32768 + i1, mask=mask, other=0)
    inside = tl.cumsum(x, 1)
    total = tl.sum(x, 1)
    j = tl.arange(0, SEGMENTS)
    before = tl.where(j[None, :] < j[:, None], total[None, :], 0)
    start = tl.sum(before, 1)
    acc = inside + start[:, None]
    tl.store(t0_ptr + i0 * 32768 + i1, (acc).to(t0_ptr.dtype.element_ty), mask=mask)
