import triton
import triton.language as tl
from triton.language.extra import libdevice


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
def kv_add(total, rest, x):
    t = total + x
    lost = tl.where(tl.abs(total) >= tl.abs(x), (total - t) + x, (x - t) + total)
    return t, rest + lost


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
def rows(t1_ptr, x0_ptr, t2_ptr, t3_ptr, t0_ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    ticket = tl.atomic_add(t1_ptr + 4096, 1).to(tl.int64)
    piece = ticket % 8
    r = (ticket // 8 + tl.arange(0, ROWS))[:, None]
    c = piece * BLOCK + tl.arange(0, BLOCK)[None, :]
    v1 = tl.load(x0_ptr + r * 131072 + c, eviction_policy="evict_first")
    y0_x = v1
    y0_0 = tl.reduce(y0_x, 1, kv_max, keep_dims=True)
    y0_safe = tl.where(y0_0 == float("-inf"), 0.0, y0_0)
    y0_1 = tl.sum(tl.exp(y0_x - y0_safe), 1, keep_dims=True)
    tl.store(t2_ptr + r * 8 + piece, y0_0)
    tl.store(t3_ptr + r * 8 + piece, y0_1)
    tl.debug_barrier()
    seen = tl.atomic_add(t1_ptr + ticket // 8, 1, sem="acq_rel") + 1
    looks = 0
    while (seen < 8) & (looks < 16384):
        seen = tl.atomic_add(t1_ptr + ticket // 8, 0, sem="acquire")
        looks += 1
    tl.debug_barrier()
    if seen >= 8:
        g = tl.arange(0, 8)[None, :]
        p0_0 = tl.load(t2_ptr + r * 8 + g, cache_modifier=".cg")
        p0_1 = tl.load(t3_ptr + r * 8 + g, cache_modifier=".cg")
        m0 = tl.reduce(p0_0, 1, kv_max, keep_dims=True)
        m0_safe = tl.where(m0 == float("-inf"), 0.0, m0)
        s3 = tl.sum(p0_1 * libdevice.exp(p0_0 - m0_safe), 1, keep_dims=True)
    else:
        m0 = tl.full([ROWS, 1], float("-inf"), tl.float32)
        s3 = tl.zeros([ROWS, 1], tl.float32)
        s3_rest = tl.zeros([ROWS, 1], tl.float32)
        for k in range(0, tl.cdiv(131072, 1024)):
            c_all = k * 1024 + tl.arange(0, 1024)[None, :]
            v2 = tl.load(x0_ptr + r * 131072 + c_all)
            m0_x = v2
            m0_new = kv_max(m0, tl.reduce(m0_x, 1, kv_max, keep_dims=True))
            m0_safe = tl.where(m0_new == float("-inf"), 0.0, m0_new)
            s3_down = tl.exp(m0 - m0_safe)
            s3_more = tl.sum(tl.exp(m0_x - m0_safe), 1, keep_dims=True)
            s3, s3_rest = kv_add(s3 * s3_down, s3_rest * s3_down, s3_more)
            m0 = m0_new
        s3 += s3_rest
    v3 = m0
    v4 = tl.where(m0 == float("-inf"), float("nan"), s3)
    v5 = v1 - v3
    v6 = tl.exp(v5)
    v7 = kv_div(1.0, v4)
    v8 = v6 * v7
    tl.store(t0_ptr + r * 131072 + c, (v8).to(t0_ptr.dtype.element_ty), cache_modifier=".cs")
