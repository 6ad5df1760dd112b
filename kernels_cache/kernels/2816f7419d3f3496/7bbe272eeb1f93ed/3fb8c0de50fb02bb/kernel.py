import triton
import triton.language as tl


@triton.jit
def kv_mul(a, b):
    return a * b


@triton.jit
def kv_first_max(a, i, b, j):
    better = (a > b) | ((a != a) & (b == b))
    take = better | (((a == b) | ((a != a) & (b != b))) & (i < j))
    return tl.where(take, a, b), tl.where(take, i, j)


@triton.jit
def kv_first_min(a, i, b, j):
    better = (a < b) | ((a != a) & (b == b))
    take = better | (((a == b) | ((a != a) & (b != b))) & (i < j))
    return tl.where(take, a, b), tl.where(take, i, j)


@triton.jit
def partial(x0_ptr, t1_ptr, t2_ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    a0_0 = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
    a0_1 = tl.full([ROWS, BLOCK], 2147483647, tl.int32)
    piece = tl.cdiv(tl.cdiv(1048576, BLOCK), 128) * BLOCK
    first = tl.program_id(1) * piece
    for at in range(first, tl.minimum(first + piece, 1048576), BLOCK):
        c = at + tl.arange(0, BLOCK)[None, :]
        inside = c < 1048576
        v1 = tl.load(x0_ptr + r + c * 256, mask=inside, other=0)
        a0_0, a0_1 = kv_first_max(a0_0, a0_1, tl.where(inside, v1, float("-inf")), tl.where(inside, tl.broadcast_to(c.to(tl.int32), [ROWS, BLOCK]), 2147483647))
    s0, s0_at = tl.reduce((a0_0, a0_1), 1, kv_first_max, keep_dims=True)
    tl.store(t1_ptr + tl.program_id(1).to(tl.int64) * 256 + r, s0)
    tl.store(t2_ptr + tl.program_id(1).to(tl.int64) * 256 + r, s0_at)


@triton.jit
def joined(t1_ptr, t2_ptr, t0_ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    k = tl.arange(0, 128)[None, :]
    p0_0 = tl.load(t1_ptr + k.to(tl.int64) * 256 + r)
    p0_1 = tl.load(t2_ptr + k.to(tl.int64) * 256 + r)
    s0, s0_at = tl.reduce((p0_0, p0_1), 1, kv_first_max, keep_dims=True)
    v1 = s0_at.to(tl.int64)
    tl.store(t0_ptr + r, (v1).to(t0_ptr.dtype.element_ty))
