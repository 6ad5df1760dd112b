"""Matmul text: register tiles, packing and row logsumexp in C++."""

TILES = r"""
#include <algorithm>
namespace kv {
// MR rows times NV vectors of columns, K deep: MR * NV accumulators stay in registers.
template <int MR, int NV>
KV void micro(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc,
              bool fresh) {
  fv acc[MR][NV];
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) acc[i][j] = fv{};
  for (int64_t k = 0; k < depth; k++) {
    fv right[NV];
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) right[j] = load(b + k * ldb + j * L).v;
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
      const float left = a[i * lda + k];
#pragma GCC unroll 8
      for (int j = 0; j < NV; j++) acc[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) {
      float* at = c + i * ldc + j * L;
      store(at, fresh ? vf(acc[i][j]) : vf(acc[i][j]) + load(at));
    }
}
template <int MR, int NV> struct Tile {
  static void run(int rows, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, float* c,
                  int64_t ldc, bool fresh) {
    if (rows == MR) micro<MR, NV>(a, lda, b, ldb, depth, c, ldc, fresh);
    else Tile<MR - 1, NV>::run(rows, a, lda, b, ldb, depth, c, ldc, fresh);
  }
};
template <int NV> struct Tile<0, NV> {
  static void run(int, const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t, bool) {}
};
// `cols` columns of B, `depth` rows, as rows of NV vectors; columns that do not exist are 0.
template <int NV, class T> void pack(const T* b, int64_t sk, int64_t sn, int64_t depth, int64_t cols, float* out) {
  for (int j = 0; j < NV; j++) {
    const int64_t left = cols - j * L;
    const int n = left >= L ? L : left > 0 ? (int)left : 0;
    const T* from = b + j * L * sn;
    float* to = out + j * L;
    int64_t k = 0;
    if (sk == 1 && n == L && sn != 1)
      for (; k + L <= depth; k += L) {
        vf x[L];
#pragma GCC unroll 16
        for (int q = 0; q < L; q++) x[q] = load(from + q * sn + k);
        transpose(x);
#pragma GCC unroll 16
        for (int q = 0; q < L; q++) store(to + (k + q) * (NV * L), x[q]);
      }
    for (; k < depth; k++) {
      if (sn == 1 && n == L) store(to + k * (NV * L), load(from + k * sk));
      else store(to + k * (NV * L), load_step(from + k * sk, sn, n));
    }
  }
}
// Rows of A that are not fp32 or not contiguous, as fp32 rows of `wide`.
template <class T>
void pack_rows(const T* a, int64_t sm, int64_t sk, int64_t rows, int64_t depth, float* out, int64_t wide) {
  for (int64_t m = 0; m < rows; m++) {
    int64_t k = 0;
    if (sk == 1) for (; k + L <= depth; k += L) store(out + m * wide + k, load(a + m * sm + k));
    for (; k < depth; k++) out[m * wide + k] = load_one(a + m * sm + k * sk).v[0];
  }
}
KV bool finite(vf x) {
  const fv d = x.v - x.v;
  bool fine = true;
  for (int q = 0; q < L; q++) fine &= d[q] == 0;
  return fine;
}
// L products once more in double, where fp32 left its range: an overflow on the way depends on the order of the sum.
// A row with a NaN is left alone.
template <class A, class B> __attribute__((noinline, cold))
vf again(vf got, const A* a, int64_t step, const B* b, int64_t sk, int64_t sn, int64_t depth, int n) {
  for (int64_t k = 0; k < depth; k++) { const float x = load_one(a + k * step).v[0]; if (x != x) return got; }
  dv sum = {};
  for (int64_t k = 0; k < depth; k++) sum += (double)load_one(a + k * step).v[0] * wide(load_step(b + k * sk, sn, n));
  const fv full = __builtin_convertvector(sum, fv);
  return vf((got.v - got.v) == 0 ? got.v : full);
}
KV double safe(double top) { return __builtin_isinf(top) ? 0.0 : top; }
// Joins (top, sum of exp(x - safe(top))) of two parts of a row. Where the maximum is infinite it is not taken off.
KV void join(double& top, double& sum, double other, double more) {
  const double most = (other > top || other != other) && top == top ? other : top;
  const double off = safe(most);
  sum = (sum == 0 ? 0 : sum * std::exp(safe(top) - off)) + (more == 0 ? 0 : more * std::exp(safe(other) - off));
  top = most;
}
}
"""

SKINNY = r"""
namespace kv {
// out[m][r] = sum over k of a[m][k] b[r][k], for M rows of A and R of B; lanes are flushed to double every 64 vectors.
template <int M, int R, class A, class B>
KV void dots(const A* a, int64_t lda, const B* const* b, int64_t depth, float* out, int64_t ldo) {
  double whole[M][R];
  for (int m = 0; m < M; m++) for (int r = 0; r < R; r++) whole[m][r] = 0;
  for (int64_t k = 0; k < depth;) {
    const int64_t stop = std::min(depth, k + 64 * L);
    fv acc[M][R];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) acc[m][r] = fv{};
    for (; k + L <= stop; k += L) {
      fv left[M];
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) left[m] = load(a + m * lda + k).v;
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const fv right = load(b[r] + k).v;
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) acc[m][r] += left[m] * right;
      }
    }
    if (k < stop) {
      const int n = (int)(stop - k);
      for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++) acc[m][r] += load_n(a + m * lda + k, n).v * load_n(b[r] + k, n).v;
      k = stop;
    }
    for (int m = 0; m < M; m++) for (int r = 0; r < R; r++) whole[m][r] += hsum(wide(vf(acc[m][r])));
  }
  for (int m = 0; m < M; m++) for (int r = 0; r < R; r++) out[m * ldo + r] = (float)whole[m][r];
}
}
"""
