import triton
import triton.language as tl


@triton.jit
def kv_div(a, b):
    return tl.math.div_rn(a, b)


@triton.jit
def kv_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


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
def rows(x1_ptr, t2_ptr, t3_ptr, x0_ptr, t4_ptr, t5_ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    m2 = tl.full([ROWS, 1], float("-inf"), tl.float32)
    s5 = tl.zeros([ROWS, 1], tl.float32)
    for k in range(0, tl.cdiv(128256, BLOCK)):
        c = k * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = c < 128256
        v1 = tl.load(x1_ptr + r * 128256 + c, mask=inside, other=0).to(tl.float32)
        v2 = v1
        m2_x = tl.where(inside, v2, float("-inf"))
        m2_new = kv_max(m2, tl.reduce(m2_x, 1, kv_max, keep_dims=True))
        m2_safe = tl.where(m2_new == float("-inf"), 0.0, m2_new)
        s5 = s5 * tl.exp(m2 - m2_safe) + tl.sum(tl.exp(m2_x - m2_safe), 1, keep_dims=True)
        m2 = m2_new
    v3 = m2
    v4 = tl.where(m2 == float("-inf"), float("nan"), s5)
    tl.store(t2_ptr + r, (v3).to(t2_ptr.dtype.element_ty))
    v5 = tl.log(v4)
    tl.store(t3_ptr + r, (v5).to(t3_ptr.dtype.element_ty))
    v6 = tl.load(x0_ptr + r)
    v7 = v6 != (-100)
    v8 = tl.where(v7, v6, 0)
    v9 = v8.to(tl.int64)
    v11 = tl.load(x1_ptr + r * 128256 + v9).to(tl.float32)
    v12 = v11
    v13 = v12 - v3
    v14 = v13 - v5
    v15 = v14
    v16 = -v15
    v17 = tl.where(v7, v16, 0.0)
    tl.store(t4_ptr + r, (v17).to(t4_ptr.dtype.element_ty))
    tl.store(t5_ptr + r, (v7).to(t5_ptr.dtype.element_ty))


@triton.jit
def over_rows(t4_ptr, t5_ptr, t0_ptr, t1_ptr, BLOCK: tl.constexpr):
    a17 = tl.full([1, BLOCK], 0, tl.float32)
    a18 = tl.full([1, BLOCK], 0, tl.int64)
    for at in range(0, 8192, BLOCK):
        c = at + tl.arange(0, BLOCK)[None, :]
        inside = c < 8192
        a17 += tl.where(inside, tl.load(t4_ptr + c, mask=inside, other=0), 0)
        a18 += tl.where(inside, tl.load(t5_ptr + c, mask=inside, other=0), 0)
    s17 = tl.sum(a17, 1, keep_dims=True)
    s18 = tl.sum(a18, 1, keep_dims=True)
    v1 = s17
    v2 = s18
    v3 = v2.to(tl.float32)
    v4 = kv_div(v1, v3)
    tl.store(t0_ptr + tl.zeros([1, 1], tl.int32), (v4).to(t0_ptr.dtype.element_ty))
    tl.store(t1_ptr + tl.zeros([1, 1], tl.int32), (v3).to(t1_ptr.dtype.element_ty))
