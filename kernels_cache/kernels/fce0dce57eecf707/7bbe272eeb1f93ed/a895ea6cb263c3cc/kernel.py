import triton
import triton.language as tl


@triton.jit
def kv_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def plane(base, at, c, inside):
    ok = inside & (c * 0 + at >= 0) & (c * 0 + at < 224)
    row = base + at * 224
    x0 = c * 2 + -1
    x1 = c * 2 + 0
    x2 = c * 2 + 1
    v0_0 = tl.load(row + x0 * 1, mask=ok & (x0 >= 0) & (x0 < 224), other=float("-inf"))
    v0_1 = tl.load(row + x1 * 1, mask=ok & (x1 >= 0) & (x1 < 224), other=float("-inf"))
    v0_2 = tl.load(row + x2 * 1, mask=ok & (x2 >= 0) & (x2 < 224), other=float("-inf"))
    return kv_max(kv_max(v0_0, v0_1), v0_2)


@triton.jit
def pooling(x0_ptr, t0_ptr, WALK: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    c = (tl.program_id(1) % tl.cdiv(112, WIDTH) * WIDTH + tl.arange(0, WIDTH))[None, :]
    walk = tl.program_id(0) * WALK
    i0 = (tl.program_id(1) // tl.cdiv(112, WIDTH) * HEIGHT + tl.arange(0, HEIGHT))[:, None]
    inside = (i0 < 4096) & (c < 112)
    w0 = plane(x0_ptr + i0 * 50176, walk * 2 + -1, c, inside)
    for j in range(WALK):
        i1 = walk + j
        w1 = plane(x0_ptr + i0 * 50176, i1 * 2 + 0, c, inside)
        w2 = plane(x0_ptr + i0 * 50176, i1 * 2 + 1, c, inside)
        acc = kv_max(kv_max(w0, w1), w2)
        tl.store(t0_ptr + i0 * 12544 + i1 * 112 + c, (acc).to(t0_ptr.dtype.element_ty), mask=inside & (c * 0 + i1 < 112))
        w0 = w2
