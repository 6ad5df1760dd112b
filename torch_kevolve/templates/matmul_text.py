"""Matmul text: register tiles, packing and row logsumexp in C++."""

TILES = r"""
#include <algorithm>
namespace kv {
// Whether a comparison holds in all lanes.
KV bool all(iv m) {
  bool fine = true;
#if defined(__AVX__) && LANES == 8
  fine = __builtin_ia32_movmskps256((fv)m) == 255;
#else
  for (int q = 0; q < L; q++) fine &= m[q] != 0;
#endif
  return fine;
}
KV bool finite(vf x) { return all((x.v - x.v) == 0); }
// MR rows times NV vectors of columns, K deep: MR * NV accumulators stay in registers. LEFT: A is packed as K columns
// of MR, and the next such strip, which follows in memory, is fetched on the way; else it is read in place.
template <int MR, int NV, bool LEFT>
KV void micro(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, fv (&acc)[MR][NV]) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) acc[i][j] = fv{};
  const float* next = a + MR * depth;
#pragma GCC unroll 1
  for (int64_t k = 0; k < depth; k++) {
    if (LEFT) __builtin_prefetch(next + k * MR);
    fv right[NV];
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) right[j] = load(b + j * L).v;
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
      const float left = LEFT ? a[i] : a[i * lda];
#pragma GCC unroll 8
      for (int j = 0; j < NV; j++) acc[i][j] += left * right[j];
    }
    a += LEFT ? MR : 1;
    b += ldb;
  }
}
// out = held + product, as MR rows of NV vectors without gaps; `held` may be null or `out`. False where `last` and a
// sum is not finite.
template <int MR, int NV, bool LEFT, int LDB> __attribute__((noinline))
bool tile(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, const float* held, float* out,
          bool last) {
  fv acc[MR][NV];
  micro<MR, NV, LEFT>(a, lda, b, LDB ? LDB : ldb, depth, acc);
  if (held)
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
      for (int j = 0; j < NV; j++) acc[i][j] += load(held + (i * NV + j) * L).v;
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) store(out + (i * NV + j) * L, vf(acc[i][j]));
  if (!last) return true;
  fv none[4] = {};
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) none[(i * NV + j) % 4] += acc[i][j] - acc[i][j];
  return all((none[0] + none[1]) + (none[2] + none[3]) == 0);
}
// The last rows of A read in place: fewer than MR.
template <int MR, int NV, int LDB> struct Rows {
  static bool run(int rows, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, const float* held,
                  float* out, bool last) {
    if (rows == MR) return tile<MR, NV, false, LDB>(a, lda, b, ldb, depth, held, out, last);
    return Rows<MR - 1, NV, LDB>::run(rows, a, lda, b, ldb, depth, held, out, last);
  }
};
template <int NV, int LDB> struct Rows<0, NV, LDB> {
  static bool run(int, const float*, int64_t, const float*, int64_t, int64_t, const float*, float*, bool) {
    return true;
  }
};
// The lines of a block of B, asked for one after the other while another block is in use.
struct Ahead {
  const char* at;
  int64_t wide, step, left, place = 0;
  template <class T> Ahead(const T* b, int64_t sk, int64_t sn, int64_t depth, int64_t cols)
      : at((const char*)b), wide((int64_t)sizeof(T) * (sk == 1 ? depth : cols)),
        step((int64_t)sizeof(T) * (sk == 1 ? sn : sk)), left(sk == 1 ? cols : sn == 1 ? depth : 0) {}
  int64_t lines() const { return left > 0 ? (wide + 63) / 64 * left : 0; }
  KV void next() {
    if (left <= 0) return;
    __builtin_prefetch(at + place, 0, 2);
    place += 64;
    if (place >= wide) { place = 0; at += step; left--; }
  }
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
// `rows` rows of A, `depth` columns, as columns of MR; rows that do not exist are 0.
template <int MR, class T>
void pack_rows(const T* a, int64_t sm, int64_t sk, int64_t rows, int64_t depth, float* out) {
  int64_t k = 0;
  if (sk == 1)
    for (; k + L <= depth; k += L) {
#pragma GCC unroll 2
      for (int g = 0; g < MR; g += L) {
        constexpr int most = MR < L ? MR : L;
        vf x[L];
#pragma GCC unroll 16
        for (int q = 0; q < most; q++) __builtin_prefetch(a + (g + q) * sm + k + 256 / sizeof(T));
#pragma GCC unroll 16
        for (int q = 0; q < L; q++) x[q] = q < most && g + q < rows ? load(a + (g + q) * sm + k) : vf(0.0f);
        transpose(x);
#pragma GCC unroll 16
        for (int q = 0; q < L; q++) memcpy(out + (k + q) * MR + g, &x[q].v, sizeof(float) * (MR - g < L ? MR - g : L));
      }
    }
  for (; k < depth; k++)
    for (int i = 0; i < MR; i++) out[k * MR + i] = i < rows ? load_one(a + i * sm + k * sk).v[0] : 0.0f;
}
// L products once more in double, where fp32 left its range: an overflow on the way depends on the order of the sum.
// A row with a NaN is left alone.
template <class A, class B> __attribute__((noinline))
vf again(vf got, const A* a, int64_t step, const B* b, int64_t sk, int64_t sn, int64_t depth, int n) {
  for (int64_t k = 0; k < depth; k++) { const float x = load_one(a + k * step).v[0]; if (x != x) return got; }
  dv sum = {};
  int64_t k = 0;
  if (sk == 1 && n == L)
    for (; k + L <= depth; k += L) {
      vf x[L];
      for (int q = 0; q < L; q++) x[q] = load(b + q * sn + k);
      transpose(x);
      for (int q = 0; q < L; q++) sum += (double)load_one(a + (k + q) * step).v[0] * wide(x[q]);
    }
  for (; k < depth; k++) sum += (double)load_one(a + k * step).v[0] * wide(load_step(b + k * sk, sn, n));
  const fv full = __builtin_convertvector(sum, fv);
  return vf((got.v - got.v) == 0 ? got.v : full);
}
// The largest finite absolute value of `rows` vectors of `depth` elements.
template <class T> float largest(const T* from, int64_t rows, int64_t srow, int64_t sdeep, int64_t depth) {
  const int64_t fast = sdeep == 1 ? depth : rows, slow = sdeep == 1 ? rows : depth;
  const int64_t step = sdeep == 1 ? 1 : srow, stride = sdeep == 1 ? srow : sdeep;
  vf top = vf(fv{});
  for (int64_t i = 0; i < slow; i++)
    for (int64_t k = 0; k < fast; k += L) {
      const vf x = abs(load_step(from + i * stride + k * step, step, (int)(fast - k < L ? fast - k : L)));
      top = max(top, vf((x.v - x.v) == 0 ? x.v : fv{}));
    }
  return hmax(top);
}
// The same for what is not finite in a tile of `rows` and `cols`.
template <int NV, class A, class B> __attribute__((noinline))
void again_tile(float* tile, int rows, int64_t cols, const A* a, int64_t sm, int64_t sk, const B* b, int64_t sbk,
                int64_t sbn, int64_t depth) {
  // Finite factors too small to overflow: the infinities and NaNs are the inputs' own, and are right.
  if ((double)largest(a, rows, sm, sk, depth) * largest(b, cols, sbn, sbk, depth) * (double)depth < 1e38) return;
  for (int i = 0; i < rows; i++)
    for (int j = 0; j * L < cols; j++) {
      float* at = tile + (i * NV + j) * L;
      const int n = cols - j * L < L ? (int)(cols - j * L) : L;
      if (!finite(load(at))) store(at, again(load(at), a + i * sm, sk, b + j * L * sbn, sbk, sbn, depth, n));
    }
}
// One element of a product, in double.
template <class A, class B> double dot(const A* a, int64_t sa, const B* b, int64_t sb, int64_t depth) {
  dv sum = {};
  int64_t k = 0;
  if (sa == 1 && sb == 1)
    for (; k + L <= depth; k += L) sum += wide(load(a + k)) * wide(load(b + k));
  for (; k < depth; k += L) {
    const int n = (int)(depth - k < L ? depth - k : L);
    sum += wide(load_step(a + k * sa, sa, n)) * wide(load_step(b + k * sb, sb, n));
  }
  return hsum(sum);
}
KV double safe(double top) { return __builtin_isinf(top) ? 0.0 : top; }
// A row's maximum per lane, and its sum of exp(x - off) for an `off` that no x has passed by more than 4: it is moved
// seldom, and the sum is brought to the maximum at the end.
struct Row {
  typedef float half_fv __attribute__((vector_size(2 * L)));
  half_dv low, high;
  fv top;
  float off, limit;
  KV void clear() { low = high = half_dv{}; top = fv{} - __builtin_inff(); off = 0; limit = -__builtin_inff(); }
  KV double most() const { return hmax(vf(top)); }
  // The sum of exp(x - safe(maximum)).
  double total() const {
    double whole = 0;
    for (int q = 0; q < L / 2; q++) whole += low[q] + high[q];
    return whole == 0 || __builtin_isinf(most()) ? whole : whole * std::exp(off - most());
  }
  // n vectors x, with their maximum and the sum of exp(x - off).
  KV void add(vf big, vf part, const vf* x, int n) {
    if (__builtin_expect(!all(big.v <= limit), 0)) part = move(big, x, n);
    top = max(big, vf(top)).v;
    half_fv first, second;
    memcpy(&first, &part.v, sizeof first);
    memcpy(&second, (const char*)&part.v + sizeof first, sizeof second);
    low += __builtin_convertvector(first, half_dv);
    high += __builtin_convertvector(second, half_dv);
  }
  // Another `off`, which is the largest x, and the sum of exp(x - off); beside an infinity `off` stays.
  __attribute__((noinline, cold)) vf move(vf big, const vf* x, int n) {
    const float largest = hmax(big);
    vf part(0.0f);
    if (__builtin_isinf(largest) || most() == __builtin_inf()) {
      for (int j = 0; j < n; j++) part = part + exp(x[j] - splat(off));
      return part;
    }
    if (limit > -__builtin_inff()) {
      const double less = std::exp((double)off - largest);
      low *= less;
      high *= less;
    }
    off = largest;
    limit = largest + 4;
    for (int j = 0; j < n; j++) part = part + exp_low(x[j] - splat(off));
    return part;
  }
};
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
