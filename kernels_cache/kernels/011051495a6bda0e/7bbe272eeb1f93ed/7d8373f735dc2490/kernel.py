import triton
import triton.language as tl


@triton.jit
def kv_div(a, b):
    return tl.math.div_rn(a, b)


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
def rows(x1_ptr, x0_ptr, t1_ptr, t2_ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    m2 = tl.full([ROWS, 1], float("-inf"), tl.float32)
    s5 = tl.zeros([ROWS, 1], tl.float32)
    for k in range(0, tl.cdiv(128256, BLOCK)):
        c = k * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = c < 128256
        v1 = tl.load(x1_ptr + r * 128256 + c, mask=inside, other=0).to(tl.float32)
        v2 = v1
        m2_x = tl.where(inside, v2, float("-inf"))
        m2_new = tl.maximum(m2, tl.max(m2_x, 1, keep_dims=True))
        m2_safe = tl.where(m2_new == float("-inf"), 0.0, m2_new)
        s5 = s5 * tl.exp(m2 - m2_safe) + tl.sum(tl.exp(m2_x - m2_safe), 1, keep_dims=True)
        m2 = m2_new
    v3 = tl.where((s5 != s5) & (m2 != float("inf")), s5, m2)
    v4 = tl.where(m2 == float("-inf"), float("nan"), s5)
    v5 = tl.load(x0_ptr + r)
    v6 = v5 != (-100)
    v7 = tl.where(v6, v5, 0)
    v8 = v7.to(tl.int64)
    v10 = tl.load(x1_ptr + r * 128256 + v8).to(tl.float32)
    v11 = v10
    v12 = v11 - v3
    v13 = tl.log(v4)
    v14 = v12 - v13
    v15 = v14
    v16 = -v15
    v17 = tl.where(v6, v16, 0.0)
    tl.store(t1_ptr + r, (v17).to(t1_ptr.dtype.element_ty))
    tl.store(t2_ptr + r, (v6).to(t2_ptr.dtype.element_ty))


@triton.jit
def over_rows(t1_ptr, t2_ptr, t0_ptr, BLOCK: tl.constexpr):
    a17 = tl.full([1, BLOCK], 0, tl.float32)
    a18 = tl.full([1, BLOCK], 0, tl.int64)
    for at in range(0, 8192, BLOCK):
        c = at + tl.arange(0, BLOCK)[None, :]
        inside = c < 8192
        a17 += tl.where(inside, tl.load(t1_ptr + c, mask=inside, other=0), 0)
        a18 += tl.where(inside, tl.load(t2_ptr + c, mask=inside, other=0), 0)
    s17 = tl.sum(a17, 1, keep_dims=True)
    s18 = tl.sum(a18, 1, keep_dims=True)
    v1 = s17
    v2 = s18
    v3 = v2.to(tl.float32)
    v4 = kv_div(v1, v3)
    tl.store(t0_ptr + tl.zeros([1, 1], tl.int32), (v4).to(t0_ptr.dtype.element_ty))
