import triton
import triton.language as tl


@triton.jit
def tile_of(t, nm, nn, GROUP: tl.constexpr):
    wide = GROUP * nn
    first = (t // wide) * GROUP
    height = tl.minimum(nm - first, GROUP)
    return first + (t % wide) % height, (t % wide) // height


@triton.jit
def split(x_ptr, high_ptr, middle_ptr, low_ptr, flag_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + o, mask=o < n, other=0)
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    tl.store(high_ptr + o, high, mask=o < n)
    tl.store(middle_ptr + o, middle, mask=o < n)
    tl.store(low_ptr + o, (rest - middle.to(tl.float32)).to(tl.bfloat16), mask=o < n)
    bad = tl.max(((tl.abs(x) < 3.0e38) == 0).to(tl.int32), 0)
    if bad > 0:
        tl.atomic_max(flag_ptr, 1)


@triton.jit
def plane_matmul(t4_ptr, t8_ptr, t1_ptr, t2_ptr, t3_ptr, t5_ptr, t6_ptr, t7_ptr, t0_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    if (tl.load(t4_ptr) + tl.load(t8_ptr)) == 0:
        nm = tl.cdiv(4096, BLOCK_M)
        nn = tl.cdiv(4096, BLOCK_N)
        a0_tiles = tl.make_tensor_descriptor(t1_ptr, [4096, 4096], [4096, 1], [BLOCK_M, BLOCK_K])
        a1_tiles = tl.make_tensor_descriptor(t2_ptr, [4096, 4096], [4096, 1], [BLOCK_M, BLOCK_K])
        a2_tiles = tl.make_tensor_descriptor(t3_ptr, [4096, 4096], [4096, 1], [BLOCK_M, BLOCK_K])
        b0_tiles = tl.make_tensor_descriptor(t5_ptr, [4096, 4096], [4096, 1], [BLOCK_K, BLOCK_N])
        b1_tiles = tl.make_tensor_descriptor(t6_ptr, [4096, 4096], [4096, 1], [BLOCK_K, BLOCK_N])
        b2_tiles = tl.make_tensor_descriptor(t7_ptr, [4096, 4096], [4096, 1], [BLOCK_K, BLOCK_N])
        for t in range(tl.program_id(0), nm * nn, 132):
            pm, pn = tile_of(t, nm, nn, GROUP)
            row0 = pm * BLOCK_M
            column0 = pn * BLOCK_N
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k0 in range(0, 4096, BLOCK_K):
                a0 = a0_tiles.load([row0, k0])
                a1 = a1_tiles.load([row0, k0])
                a2 = a2_tiles.load([row0, k0])
                b0 = b0_tiles.load([k0, column0])
                b1 = b1_tiles.load([k0, column0])
                b2 = b2_tiles.load([k0, column0])
                part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                part = tl.dot(a0, b2, part)
                part = tl.dot(a2, b0, part)
                part = tl.dot(a1, b1, part)
                part = tl.dot(a0, b1, part)
                part = tl.dot(a1, b0, part)
                part = tl.dot(a0, b0, part)
                acc += part
            i0 = (row0 + tl.arange(0, BLOCK_M))[:, None]
            i1 = (column0 + tl.arange(0, BLOCK_N))[None, :]
            tl.store(t0_ptr + i0 * 4096 + i1, (acc).to(t0_ptr.dtype.element_ty))


@triton.jit
def exact_matmul(t4_ptr, t8_ptr, x0_ptr, x1_ptr, t0_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    if (tl.load(t4_ptr) + tl.load(t8_ptr)) > 0:
        nm = tl.cdiv(4096, BLOCK_M)
        nn = tl.cdiv(4096, BLOCK_N)
        for t in range(tl.program_id(0), nm * nn, 132):
            pm, pn = tile_of(t, nm, nn, GROUP)
            row0 = pm * BLOCK_M
            column0 = pn * BLOCK_N
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k0 in range(0, 4096, BLOCK_K):
                rm = (row0 + tl.arange(0, BLOCK_M))
                rn = (column0 + tl.arange(0, BLOCK_N))
                rk = (k0 + tl.arange(0, BLOCK_K))
                a = tl.load(x0_ptr + rm[:, None] * 4096 + rk[None, :], mask=(rm[:, None] < 4096) & (rk[None, :] < 4096), other=0)
                b = tl.load(x1_ptr + rk[:, None] * 4096 + rn[None, :], mask=(rk[:, None] < 4096) & (rn[None, :] < 4096), other=0)
                acc = tl.dot(a, b, acc, input_precision="ieee")
            i0 = (row0 + tl.arange(0, BLOCK_M))[:, None]
            i1 = (column0 + tl.arange(0, BLOCK_N))[None, :]
            tl.store(t0_ptr + i0 * 4096 + i1, (acc).to(t0_ptr.dtype.element_ty))
