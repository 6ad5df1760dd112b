import triton
import triton.language as tl


@triton.jit
def embedding_bag(x2_ptr, x0_ptr, x1_ptr, t0_ptr, UNROLL: tl.constexpr, BAGS: tl.constexpr, BLOCK: tl.constexpr):
    i1 = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    for j in range(BAGS):
        bag = tl.program_id(0).to(tl.int64) * BAGS + j
        first = tl.load(x2_ptr + bag * 1, mask=bag < 65536, other=0).to(tl.int64)
        last = tl.load(x2_ptr + (bag + 1) * 1, mask=bag + 1 < 65536, other=2101747).to(tl.int64)
        last = tl.where(bag < 65536, last, first)
        total = tl.zeros([UNROLL, BLOCK], tl.float32)
        for k in range(first, last, UNROLL):
            at = k + tl.arange(0, UNROLL)
            ix = tl.load(x1_ptr + at, mask=at < last, other=0).to(tl.int64)
            live = (at < last)
            row = tl.load(x0_ptr + ix[:, None] * 128 + i1, mask=live[:, None] & (i1 < 128), other=0).to(tl.float32)
            total += row
        acc = tl.sum(total, 0)[None, :]
        i0 = bag
        mask = (i1 < 128) & (i1 * 0 + bag < 65536)
        tl.store(t0_ptr + i0 * 128 + i1, (acc).to(t0_ptr.dtype.element_ty), mask=mask)
