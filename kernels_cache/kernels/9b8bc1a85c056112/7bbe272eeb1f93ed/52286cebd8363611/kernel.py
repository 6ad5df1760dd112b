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
def rows(x0_ptr, t0_ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    m1 = tl.full([ROWS, 1], float("-inf"), tl.float32)
    s4 = tl.zeros([ROWS, 1], tl.float32)
    for k in range(0, tl.cdiv(131072, BLOCK)):
        c = k * BLOCK + tl.arange(0, BLOCK)[None, :]
        v1 = tl.load(x0_ptr + r * 131072 + c).to(tl.float32)
        v2 = v1
        m1_x = v2
        m1_new = kv_max(m1, tl.reduce(m1_x, 1, kv_max, keep_dims=True))
        m1_safe = tl.where(m1_new == float("-inf"), 0.0, m1_new)
        s4 = s4 * tl.exp(m1 - m1_safe) + tl.sum(tl.exp(m1_x - m1_safe), 1, keep_dims=True)
        m1 = m1_new
    v3 = m1
    v4 = tl.where(m1 == float("-inf"), float("nan"), s4)
    v9 = kv_div(1.0, v4)
    for k in range(0, tl.cdiv(131072, BLOCK)):
        c = (tl.cdiv(131072, BLOCK) - 1 - k) * BLOCK + tl.arange(0, BLOCK)[None, :]
        v5 = tl.load(x0_ptr + r * 131072 + c, eviction_policy="evict_first").to(tl.float32)
        v6 = v5
        v7 = v6 - v3
        v8 = tl.exp(v7)
        v10 = v8 * v9
        v11 = v10
        tl.store(t0_ptr + r * 131072 + c, (v11).to(t0_ptr.dtype.element_ty))
