import triton
import triton.language as tl


@triton.jit
def tile_of(t, nm, nn, GROUP: tl.constexpr):
    wide = GROUP * nn
    first = (t // wide) * GROUP
    height = tl.minimum(nm - first, GROUP)
    return first + (t % wide) % height, (t % wide) // height


@triton.jit
def matmul(x1_ptr, x2_ptr, x0_ptr, t1_ptr, t2_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    nm = tl.cdiv(8192, BLOCK_M)
    nn = tl.cdiv(65536, BLOCK_N)
    a_tiles = tl.make_tensor_descriptor(x1_ptr, [8192, 1024], [1024, 1], [BLOCK_M, BLOCK_K])
    b_tiles = tl.make_tensor_descriptor(x2_ptr, [65536, 1024], [1024, 1], [BLOCK_N, BLOCK_K])
    _, next_n = tile_of(tl.minimum(tl.program_id(0), nm * nn - 1), nm, nn, GROUP)
    columns = (next_n * BLOCK_N + tl.arange(0, BLOCK_N))
    next_bias = tl.load(x0_ptr + columns, mask=columns < 65536, other=0)
    for t in tl.range(tl.program_id(0), nm * nn, 264):
        pm, pn = tile_of(t, nm, nn, GROUP)
        row0 = pm * BLOCK_M
        column0 = pn * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc += next_bias.to(tl.float32)[None, :]
        _, next_n = tile_of(tl.minimum(t + 264, nm * nn - 1), nm, nn, GROUP)
        columns = (next_n * BLOCK_N + tl.arange(0, BLOCK_N))
        next_bias = tl.load(x0_ptr + columns, mask=columns < 65536, other=0)
        for k0 in range(0, 1024, BLOCK_K):
            a = a_tiles.load([row0, k0])
            b = b_tiles.load([column0, k0]).T
            acc = tl.dot(a, b, acc)
        i0 = (row0 + tl.arange(0, BLOCK_M))[:, None]
        i1 = (column0 + tl.arange(0, BLOCK_N))[None, :]
        v5 = acc
        z0 = v5
        peak = tl.max(z0, 1) * 1.4426950408889634
        shift = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
        total = tl.sum(tl.exp2(z0 * 1.4426950408889634 - shift[:, None]), 1)
        rows = row0 + tl.arange(0, BLOCK_M)
        place = pn.to(tl.int64) * 8192 + rows
        tl.store(t1_ptr + place, shift, mask=rows < 8192)
        tl.store(t2_ptr + place, total, mask=rows < 8192)


@triton.jit
def combine(t1_ptr, t2_ptr, t0_ptr, ROWS: tl.constexpr, TILES: tl.constexpr, DEPTH: tl.constexpr):
    i0 = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))
    mask = i0 < 8192
    top = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    for t in range(0, 512, TILES):
        at = t + tl.arange(0, TILES)[:, None]
        live = (at < 512) & mask[None, :]
        peaks = tl.load(t1_ptr + at.to(tl.int64) * 8192 + i0[None, :], mask=live, other=0)
        totals = tl.load(t2_ptr + at.to(tl.int64) * 8192 + i0[None, :], mask=live, other=0)
        high = tl.maximum(top, tl.max(tl.where(totals == 0.0, float("-inf"), peaks), 0))
        safe = tl.where(high == float("-inf"), 0.0, high)
        weight = tl.where(totals == 0.0, 0.0, tl.exp2(peaks - safe[None, :]))
        weight = tl.where(totals == float("inf"), 1.0, weight)
        before = tl.where((sums == 0.0) | (sums == float("inf")), 1.0, tl.exp2(top - safe))
        sums = sums * before + tl.sum(totals * weight, 0)
        top = high
    top = tl.where(sums == 0.0, 0.0, top) * 0.6931471805599453
    total = sums
    v6 = tl.log(total)
    v7 = tl.abs(top)
    v8 = v7 == float("inf")
    v9 = tl.where(v8, 0.0, top)
    v11 = v6 + v9
    v12 = v11
    tl.store(t0_ptr + i0, (v12).to(t0_ptr.dtype.element_ty), mask=mask)
