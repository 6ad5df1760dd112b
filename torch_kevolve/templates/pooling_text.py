"""Pooling text: small C++ functions of the pooling family."""

HELPERS = r"""
#include <algorithm>
#include <type_traits>
namespace kv {
// How many places a window that starts at `start` counts; with `whole`, padding inside the padded input counts too.
KV int64_t places(int64_t start, int64_t window, int64_t size, int64_t pad, bool whole) {
  if (whole) return std::min(start + window, size + pad) - start;
  return std::min(start + window, size) - std::max<int64_t>(start, 0);
}
// The first place of a window that lies inside the input.
KV int64_t inside(int64_t start, int64_t dilation) { return start < 0 ? (-start + dilation - 1) / dilation : 0; }
// 2 L neighbours: those at even places, those at odd ones.
KV void halves(vf low, vf high, vf& even, vf& odd) {
  fv a = low.v, b = high.v;
#if LANES == 8
  even = vf(__builtin_shuffle(a, b, (iv){0, 2, 4, 6, 8, 10, 12, 14}));
  odd = vf(__builtin_shuffle(a, b, (iv){1, 3, 5, 7, 9, 11, 13, 15}));
#else
  even = vf(__builtin_shuffle(a, b, (iv){0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}));
  odd = vf(__builtin_shuffle(a, b, (iv){1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31}));
#endif
}
KV void newer(vf x, int32_t here, vf& best, iv& place) {
  vm wins = or_(gt(x, best), ne(x, x));
  best = select(wins, x, best);
  place = wins.v ? (iv{} + here) : place;
}
// Lane q is row[start + q * stride]; -inf where that lies outside.
template <class T> KV vf edge(const T* row, int64_t start, int64_t stride, int64_t step, int64_t size, int many) {
  if (start >= 0 && start + (L - 1) * stride < size) return load_step(row + start * step, stride * step, L);
  fv r = fv{} - __builtin_inff();
  for (int q = 0; q < many; q++) {
    int64_t p = start + q * stride;
    if (p >= 0 && p < size) r[q] = load_one(row + p * step).v[0];
  }
  return vf(r);
}
}
"""
