import triton
import triton.language as tl


@triton.jit
def small_matmul(x0_ptr, x1_ptr, t0_ptr, MATRICES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    rm = tl.arange(0, BLOCK_M)
    rn = tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    i1 = rm[:, None]
    i2 = rn[None, :]
    mask = (i1 < 32) & (i2 < 32)
    start = tl.program_id(0).to(tl.int64) * MATRICES
    for j in range(0, tl.minimum(MATRICES, 65536 - start)):
        i0 = start + j
        a = tl.load(x0_ptr + i0 * 1024 + rm[:, None] * 32 + rk[None, :])
        b = tl.load(x1_ptr + i0 * 1024 + rk[:, None] * 32 + rn[None, :])
        acc = tl.dot(a, b, input_precision="ieee")
        tl.store(t0_ptr + i0 * 1024 + i1 * 32 + i2, (acc).to(t0_ptr.dtype.element_ty))
