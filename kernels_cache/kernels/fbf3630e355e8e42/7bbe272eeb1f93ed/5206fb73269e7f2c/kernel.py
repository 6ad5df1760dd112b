import triton
import triton.language as tl


@triton.jit
def plane(base, at, r, c, inside):
    ok = inside & (c * 0 + at >= 0) & (c * 0 + at < 64)
    row = base + at * 16384
    x0 = c * 2 + -1
    x1 = c * 2 + 0
    x2 = c * 2 + 1
    h0 = r * 2 + -1
    ok0 = ok & (h0 >= 0) & (h0 < 128)
    row0 = row + h0 * 128
    v0_0 = tl.load(row0 + x0 * 1, mask=ok0 & (x0 >= 0) & (x0 < 128), other=0.0)
    v0_1 = tl.load(row0 + x1 * 1, mask=ok0 & (x1 >= 0) & (x1 < 128), other=0.0)
    v0_2 = tl.load(row0 + x2 * 1, mask=ok0 & (x2 >= 0) & (x2 < 128), other=0.0)
    h1 = r * 2 + 0
    ok1 = ok & (h1 >= 0) & (h1 < 128)
    row1 = row + h1 * 128
    v1_0 = tl.load(row1 + x0 * 1, mask=ok1 & (x0 >= 0) & (x0 < 128), other=0.0)
    v1_1 = tl.load(row1 + x1 * 1, mask=ok1 & (x1 >= 0) & (x1 < 128), other=0.0)
    v1_2 = tl.load(row1 + x2 * 1, mask=ok1 & (x2 >= 0) & (x2 < 128), other=0.0)
    h2 = r * 2 + 1
    ok2 = ok & (h2 >= 0) & (h2 < 128)
    row2 = row + h2 * 128
    v2_0 = tl.load(row2 + x0 * 1, mask=ok2 & (x0 >= 0) & (x0 < 128), other=0.0)
    v2_1 = tl.load(row2 + x1 * 1, mask=ok2 & (x1 >= 0) & (x1 < 128), other=0.0)
    v2_2 = tl.load(row2 + x2 * 1, mask=ok2 & (x2 >= 0) & (x2 < 128), other=0.0)
    return v0_0 + v0_1 + v0_2 + v1_0 + v1_1 + v1_2 + v2_0 + v2_1 + v2_2


@triton.jit
def pooling(x0_ptr, t0_ptr, WALK: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    c = (tl.program_id(1) % tl.cdiv(64, WIDTH) * WIDTH + tl.arange(0, WIDTH))[None, :]
    walk = tl.program_id(2) * WALK
    i0 = tl.program_id(0)
    r = (tl.program_id(1) // tl.cdiv(64, WIDTH) * HEIGHT + tl.arange(0, HEIGHT))[:, None]
    inside = (r < 64) & (c < 64)
    w0 = plane(x0_ptr + i0 * 1048576, walk * 2 + -1, r, c, inside)
    for j in range(WALK):
        i1 = walk + j
        w1 = plane(x0_ptr + i0 * 1048576, i1 * 2 + 0, r, c, inside)
        w2 = plane(x0_ptr + i0 * 1048576, i1 * 2 + 1, r, c, inside)
        acc = w0 + w1 + w2
        acc = acc * 0.037037037037037035
        tl.store(t0_ptr + i0 * 131072 + i1 * 4096 + r * 64 + c, (acc).to(t0_ptr.dtype.element_ty), mask=inside & (c * 0 + i1 < 32))
        w0 = w2
