"""Vector text: C++ that several families put behind the prelude."""

TRANSPOSE = r"""
#include <algorithm>
namespace kv {
#if LANES == 8
#define KV_LOW (iv){0, 8, 1, 9, 2, 10, 3, 11}
#define KV_HIGH (iv){4, 12, 5, 13, 6, 14, 7, 15}
#else
#define KV_LOW (iv){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}
#define KV_HIGH (iv){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31}
#endif
#if defined(__AVX__) && LANES == 8
// Pairs, fours, then halves: 24 shuffles of one instruction each.
KV void transpose(vf* r) {
  fv a[L], b[L];
#pragma GCC unroll 8
  for (int i = 0; i < L; i += 2) {
    a[i] = __builtin_shuffle(r[i].v, r[i + 1].v, (iv){0, 8, 1, 9, 4, 12, 5, 13});
    a[i + 1] = __builtin_shuffle(r[i].v, r[i + 1].v, (iv){2, 10, 3, 11, 6, 14, 7, 15});
  }
#pragma GCC unroll 8
  for (int i = 0; i < L; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = __builtin_shuffle(a[i + j], a[i + j + 2], (iv){0, 1, 8, 9, 4, 5, 12, 13});
      b[i + 2 * j + 1] = __builtin_shuffle(a[i + j], a[i + j + 2], (iv){2, 3, 10, 11, 6, 7, 14, 15});
    }
#pragma GCC unroll 8
  for (int i = 0; i < L / 2; i++) {
    r[i].v = __builtin_shuffle(b[i], b[i + 4], (iv){0, 1, 2, 3, 8, 9, 10, 11});
    r[i + 4].v = __builtin_shuffle(b[i], b[i + 4], (iv){4, 5, 6, 7, 12, 13, 14, 15});
  }
}
#else
// log2(L) rounds of a perfect shuffle.
KV void transpose(vf* r) {
#pragma GCC unroll 4
  for (int s = 1; s < L; s *= 2) {
    fv t[L];
#pragma GCC unroll 8
    for (int i = 0; i < L / 2; i++) {
      t[2 * i] = __builtin_shuffle(r[i].v, r[i + L / 2].v, KV_LOW);
      t[2 * i + 1] = __builtin_shuffle(r[i].v, r[i + L / 2].v, KV_HIGH);
    }
#pragma GCC unroll 16
    for (int i = 0; i < L; i++) r[i].v = t[i];
  }
}
#endif
KV vf narrow(dv x) { return vf(__builtin_convertvector(x, fv)); }
}
"""
