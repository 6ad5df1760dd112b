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
    m0 = tl.full([ROWS, 1], float("-inf"), tl.float32)
    s3 = tl.zeros([ROWS, 1], tl.float32)
    for k in range(0, tl.cdiv(131072, BLOCK)):
        c = k * BLOCK + tl.arange(0, BLOCK)[None, :]
        v1 = tl.load(x0_ptr + r * 131072 + c)
        m0_x = v1
        m0_new = kv_max(m0, tl.reduce(m0_x, 1, kv_max, keep_dims=True))
        m0_safe = tl.where(m0_new == float("-inf"), 0.0, m0_new)
        s3 = s3 * tl.exp(m0 - m0_safe) + tl.sum(tl.exp(m0_x - m0_safe), 1, keep_dims=True)
        m0 = m0_new
    v2 = m0
    v3 = tl.where(m0 == float("-inf"), float("nan"), s3)
    v7 = kv_div(1.0, v3)
    for k in range(0, tl.cdiv(131072, BLOCK)):
        c = (tl.cdiv(131072, BLOCK) - 1 - k) * BLOCK + tl.arange(0, BLOCK)[None, :]
        v4 = tl.load(x0_ptr + r * 131072 + c, eviction_policy="evict_first")
        v5 = v4 - v2
        v6 = tl.exp(v5)
        v8 = v6 * v7
        tl.store(t0_ptr + r * 131072 + c, (v8).to(t0_ptr.dtype.element_ty))
