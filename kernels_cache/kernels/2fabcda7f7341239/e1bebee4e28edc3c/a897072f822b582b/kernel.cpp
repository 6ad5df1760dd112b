#include <cstdint>
#include <cstring>
#include <cstdlib>
#include <cmath>
#include <omp.h>
#pragma GCC optimize("fp-contract=fast", "no-math-errno", "no-trapping-math")
#define LANES 8
#define EXP_DEGREE 7

#define KV inline __attribute__((always_inline))
#if defined(__AVX2__) && LANES == 8 && defined(__GNUC__) && !defined(__clang__)
#define KV_AVX2
#endif
namespace kv {
constexpr int L = LANES;
typedef float fv __attribute__((vector_size(4 * L)));
typedef int32_t iv __attribute__((vector_size(4 * L)));
typedef uint32_t uv __attribute__((vector_size(4 * L)));
typedef int64_t lv __attribute__((vector_size(8 * L)));
typedef double dv __attribute__((vector_size(8 * L)));
typedef uint16_t hv __attribute__((vector_size(2 * L)));
typedef struct { uint16_t bits; } bf16;
typedef _Float16 fp16;

struct vm { iv v; static KV vm all() { return {iv{} - 1}; } static KV vm none() { return {iv{}}; } };
struct vi {
  lv v;
  KV vi() {}
  KV vi(lv x) : v(x) {}
  KV explicit vi(int64_t x) : v(lv{} + x) {}
  KV explicit vi(int x) : v(lv{} + (int64_t)x) {}
  static KV vi seq(int64_t from) { lv s; for (int k = 0; k < L; k++) s[k] = from + k; return vi(s); }
};
struct vf {
  fv v;
  KV vf() {}
  KV vf(fv x) : v(x) {}
  KV explicit vf(float x) : v(fv{} + x) {}
};
// Broadcasting by `fv{} + x` turns -0.0 into 0.0: constants that are -0.0 go through this one.
KV vf splat(float x) { fv r; for (int k = 0; k < L; k++) r[k] = x; return vf(r); }
KV vf operator+(vf a, vf b) { return vf(a.v + b.v); }
KV vf operator-(vf a, vf b) { return vf(a.v - b.v); }
KV vf operator*(vf a, vf b) { return vf(a.v * b.v); }
KV vf operator/(vf a, vf b) { return vf(a.v / b.v); }
KV vf operator-(vf a) { return vf(-a.v); }
KV vi operator+(vi a, vi b) { return vi(a.v + b.v); }
KV vi operator-(vi a, vi b) { return vi(a.v - b.v); }
KV vi operator*(vi a, vi b) { return vi(a.v * b.v); }
KV vi operator-(vi a) { return vi(-a.v); }
KV vi operator/(vi a, vi b) { lv r; for (int k = 0; k < L; k++) r[k] = b.v[k] ? a.v[k] / b.v[k] : 0; return vi(r); }
KV vi operator&(vi a, vi b) { return vi(a.v & b.v); }
KV vi operator|(vi a, vi b) { return vi(a.v | b.v); }
KV vi operator^(vi a, vi b) { return vi(a.v ^ b.v); }
KV vi operator~(vi a) { return vi(~a.v); }
KV vm narrow(lv m) { return {__builtin_convertvector(m, iv)}; }
#define KV_COMPARE(name, op) \
  KV vm name(vf a, vf b) { return {(iv)(a.v op b.v)}; } \
  KV vm name(vi a, vi b) { return narrow(a.v op b.v); }
KV_COMPARE(eq, ==) KV_COMPARE(ne, !=) KV_COMPARE(lt, <) KV_COMPARE(le, <=) KV_COMPARE(gt, >) KV_COMPARE(ge, >=)
KV vm and_(vm a, vm b) { return {a.v & b.v}; }
KV vm or_(vm a, vm b) { return {a.v | b.v}; }
KV vm xor_(vm a, vm b) { return {a.v ^ b.v}; }
KV vm not_(vm a) { return {~a.v}; }
KV vm eq(vm a, vm b) { return {~(a.v ^ b.v)}; }
KV vm ne(vm a, vm b) { return {a.v ^ b.v}; }
KV vi and_(vi a, vi b) { return a & b; }
KV vi or_(vi a, vi b) { return a | b; }
KV vi xor_(vi a, vi b) { return a ^ b; }
KV vi not_(vi a) { return ~a; }
KV vf select(vm m, vf a, vf b) { return vf(m.v ? a.v : b.v); }
KV vi select(vm m, vi a, vi b) { return vi(__builtin_convertvector(m.v, lv) ? a.v : b.v); }
KV vm select(vm m, vm a, vm b) { return {(m.v & a.v) | (~m.v & b.v)}; }
KV vf bits(iv x) { return vf((fv)x); }
KV iv bits(vf x) { return (iv)x.v; }
KV vf to_float(vf x) { return x; }
KV vf to_float(vi x) { return vf(__builtin_convertvector(x.v, fv)); }
KV vf to_float(vm x) { return bits((iv)(x.v & 0x3f800000)); }
KV vi to_int(vi x) { return x; }
KV vi to_int(vm x) { return vi(-__builtin_convertvector(x.v, lv)); }
KV vi to_int(vf x) { return vi(__builtin_convertvector(x.v, lv)); }
KV vm to_mask(vm x) { return x; }
KV vf abs(vf x) { return bits(bits(x) & 0x7fffffff); }
KV vi abs(vi x) { return vi(x.v < 0 ? -x.v : x.v); }
// Where either is NaN: b. That is what maxps and minps do, in one instruction; g++ 12 does not find it by itself.
#if defined(KV_AVX2)
KV vf max(vf a, vf b) { return vf(__builtin_ia32_maxps256(a.v, b.v)); }
KV vf min(vf a, vf b) { return vf(__builtin_ia32_minps256(a.v, b.v)); }
#else
KV vf max(vf a, vf b) { return vf(a.v > b.v ? a.v : b.v); }
KV vf min(vf a, vf b) { return vf(a.v < b.v ? a.v : b.v); }
#endif
KV vi max(vi a, vi b) { return vi(a.v > b.v ? a.v : b.v); }
KV vi min(vi a, vi b) { return vi(a.v < b.v ? a.v : b.v); }
// A NaN on either side wins: `!(a <= b)` is true for a NaN in a, and b's own NaN is kept by the sum.
KV vf max_nan(vf a, vf b) { return vf(a.v != a.v ? a.v : max(a, b).v); }
KV vf min_nan(vf a, vf b) { return vf(a.v != a.v ? a.v : min(a, b).v); }
}

namespace kv {
KV vf copysign(vf x, vf s) { return bits((bits(x) & 0x7fffffff) | (bits(s) & (int32_t)0x80000000)); }
KV vf each(vf x, float (*f)(float)) { fv r; for (int k = 0; k < L; k++) r[k] = f(x.v[k]); return vf(r); }
KV vf each(vf x, vf y, float (*f)(float, float)) {
  fv r; for (int k = 0; k < L; k++) r[k] = f(x.v[k], y.v[k]); return vf(r);
}
// Rounding to even by the carry out of 2^23; numbers above it are whole already.
KV vf rint(vf x) {
  vf a = abs(x), r = (a + vf(8388608.0f)) - vf(8388608.0f);
  return select(lt(a, vf(8388608.0f)), copysign(r, x), x);
}
KV vf floor(vf x) { vf r = rint(x); return copysign(r - select(gt(r, x), vf(1.0f), vf(0.0f)), x); }
KV vf ceil(vf x) { vf r = rint(x); return copysign(r + select(lt(r, x), vf(1.0f), vf(0.0f)), x); }
KV vf trunc(vf x) { vf a = abs(x), r = rint(a); return copysign(r - select(gt(r, a), vf(1.0f), vf(0.0f)), x); }
#if defined(KV_AVX2)
KV vf sqrt(vf x) { return vf(__builtin_ia32_sqrtps256(x.v)); }
#else
KV vf sqrt(vf x) { fv r; for (int k = 0; k < L; k++) r[k] = __builtin_sqrtf(x.v[k]); return vf(r); }
#endif
KV vf rsqrt(vf x) { return vf(1.0f) / sqrt(x); }
// Coefficients of q in 2^f = 1 + f q(f), least maximum relative error: on [-1/2, 1/2] for D up to 7 (3: 1.0e-4,
// 4: 2.8e-6, 5: 9.3e-8, 6: 3e-9, 7: 2e-10), on [-1, 1] for one degree more.
template <int D> KV vf half_poly(vf f) {
  if (D >= 7) return ((((((vf(1.43202133e-5f) * f + vf(1.54520952e-4f)) * f + vf(1.33379723e-3f)) * f +
    vf(9.61808674e-3f)) * f + vf(5.55040501e-2f)) * f + vf(2.40226507e-1f)) * f + vf(6.93147182e-1f));
  if (D == 6) return (((((vf(1.53264627e-4f) * f + vf(1.33908063e-3f)) * f + vf(9.61850584e-3f)) * f +
    vf(5.55035993e-2f)) * f + vf(2.40226477e-1f)) * f + vf(6.93147182e-1f));
  if (D == 5) return ((((vf(1.32695353e-3f) * f + vf(9.67129227e-3f)) * f + vf(5.55071086e-2f)) * f +
    vf(2.40222469e-1f)) * f + vf(6.93147004e-1f));
  if (D == 4) return (((vf(9.58313607e-3f) * f + vf(5.59064932e-2f)) * f + vf(2.40240917e-1f)) * f +
    vf(6.93124175e-1f));
  return ((vf(5.5009041e-2f) * f + vf(2.42210954e-1f)) * f + vf(6.93282902e-1f));
}
template <int D> KV vf whole_poly(vf f) {
  if (D >= 7) return (((((((vf(1.30473779e-6f) * f + vf(1.54342488e-5f)) * f + vf(1.54074572e-4f)) * f +
    vf(1.33326871e-3f)) * f + vf(9.61811282e-3f)) * f + vf(5.55041134e-2f)) * f + vf(2.40226507e-1f)) * f +
    vf(6.93147182e-1f));
  if (D == 6) return ((((((vf(1.49169628e-5f) * f + vf(1.56452923e-4f)) * f + vf(1.33417198e-3f)) * f +
    vf(9.61684436e-3f)) * f + vf(5.5503659e-2f)) * f + vf(2.40226686e-1f)) * f + vf(6.93147242e-1f));
  if (D == 5) return (((((vf(1.51912798e-4f) * f + vf(1.3587015e-3f)) * f + vf(9.62314103e-3f)) * f +
    vf(5.54926544e-2f)) * f + vf(2.40224749e-1f)) * f + vf(6.93148315e-1f));
  if (D == 4) return ((((vf(1.3065252e-3f) * f + vf(9.82899126e-3f)) * f + vf(5.55546284e-2f)) * f +
    vf(2.40163952e-1f)) * f + vf(6.93134606e-1f));
  return (((vf(9.45637748e-3f) * f + vf(5.70363253e-2f)) * f + vf(2.40471974e-1f)) * f + vf(6.92844272e-1f));
}
// 2^n as a float from the low bits of n + 1.5 * 2^23. A NaN in n gives any number.
KV vf power(vf t) { return bits((bits(t) << 23) + 0x3f800000); }
// 2^n in two factors gives denormal results and overflow the right value. Degree 7: x log2(e) = n + f with |f| <= 1/2.
// Below it 2 n + f with |f| <= 1, which saves the halving of n and costs up to half an ulp more.
template <int D> KV vf exp_(vf x) {
  x = max(vf(-104.0f), min(vf(89.0f), x));
  vf magic = vf(12582912.0f);
  if (D >= 7) {
    vf t = x * vf(1.44269502162933350f) + magic, n = t - magic, f = x * vf(1.44269502162933350f) - n;
    f = x * vf(1.92596303e-8f) + f;
    iv i = bits(t) - 0x4b400000, h = i >> 1;
    return (half_poly<7>(f) * f + vf(1.0f)) * bits((h + 127) << 23) * bits((i - h + 127) << 23);
  }
  vf t = x * vf(0.5f * 1.44269504088896341f) + magic, n = t - magic;
  vf f = x * vf(1.44269502162933350f) - (n + n);
  f = x * vf(1.92596303e-8f) + f;
  vf s = power(t);
  return (whole_poly<D>(f) * f + vf(1.0f)) * s * s;
}
// For x <= 0 next to which 1 is not small (a row's maximum was taken off): results below 2^-126 become 0.
template <int D> KV vf exp_low(vf x) {
  vf c = max(vf(-88.0f), x), magic = vf(12582912.0f), t = c * vf(1.44269502162933350f) + magic, n = t - magic;
  vf f = c * vf(1.44269502162933350f) - n, s = power(t);
  return half_poly<D>(f) * (s * f) + s;
}
KV vf exp_low(vf x) { return exp_low<EXP_DEGREE>(x); }
KV vf exp(vf x) { return exp_<EXP_DEGREE>(x); }
KV vf exp2(vf x) {
  x = max(vf(-151.0f), min(vf(129.0f), x));
  vf magic = vf(12582912.0f), t = x * vf(0.5f) + magic, n = t - magic, f = x - (n + n), s = power(t);
  return (whole_poly<7>(f) * f + vf(1.0f)) * s * s;
}
KV vf expm1(vf x) {
  vf p = vf(1.9841270e-4f); p = p * x + vf(1.3888889e-3f); p = p * x + vf(8.3333333e-3f); p = p * x + vf(4.1666667e-2f);
  p = p * x + vf(1.6666667e-1f); p = p * x + vf(0.5f); p = p * (x * x) + x;
  return select(lt(abs(x), vf(0.35f)), p, exp_<7>(x) - vf(1.0f));
}
KV vf log(vf x) {
  vm tiny = lt(x, vf(1.17549435e-38f));
  vf y = select(tiny, x * vf(8388608.0f), x);
  iv b = bits(y) - 0x3f3504f3;
  vf e = vf(__builtin_convertvector(b >> 23, fv)) - select(tiny, vf(23.0f), vf(0.0f));
  vf m = bits((b & 0x007fffff) + 0x3f3504f3) - vf(1.0f), z = m * m;
  vf p = vf(7.0376836292e-2f); p = p * m + vf(-1.1514610310e-1f); p = p * m + vf(1.1676998740e-1f);
  p = p * m + vf(-1.2420140846e-1f); p = p * m + vf(1.4249322787e-1f); p = p * m + vf(-1.6668057665e-1f);
  p = p * m + vf(2.0000714765e-1f); p = p * m + vf(-2.4999993993e-1f); p = p * m + vf(3.3333331174e-1f);
  vf r = p * m * z + e * vf(-2.12194440e-4f) - vf(0.5f) * z + m + e * vf(0.693359375f);
  r = select(eq(x, vf(__builtin_inff())), x, r);
  r = select(eq(x, vf(0.0f)), vf(-__builtin_inff()), r);
  return select(or_(lt(x, vf(0.0f)), ne(x, x)), vf(__builtin_nanf("")), r);
}
KV vf log2(vf x) { return each(x, [](float a) { return __builtin_log2f(a); }); }
KV vf log1p(vf x) {
  vf u = vf(1.0f) + x, d = u - vf(1.0f);
  vf y = select(eq(d, vf(0.0f)), x, log(u) * (x / d));
  return select(eq(u, vf(__builtin_inff())), u, y);
}
KV vf sigmoid(vf x) { return vf(1.0f) / (vf(1.0f) + exp(-x)); }
KV vf tanh(vf x) {
  vf a = abs(x), z = x * x;
  vf p = vf(-5.70498872745e-3f); p = p * z + vf(2.06390887954e-2f); p = p * z + vf(-5.37397155531e-2f);
  p = p * z + vf(1.33314422036e-1f); p = p * z + vf(-3.33332819422e-1f); p = p * z * x + x;
  vf b = copysign(vf(1.0f) - vf(2.0f) / (exp_<7>(a + a) + vf(1.0f)), x);
  return select(lt(a, vf(0.625f)), p, select(ne(x, x), x, b));
}
// Two ranges: a polynomial in x^2 below 0.921875, 1 - exp(polynomial in |x|) above.
KV vf erf(vf a) {
  vf t = abs(a), s = a * a;
  vf r = vf(-1.72853470e-5f) * t + vf(3.83197126e-4f), u = vf(-3.88396438e-3f) * t + vf(2.42546219e-2f);
  r = r * s + u; r = r * t + vf(-1.06777877e-1f); r = r * t + vf(-6.34846687e-1f); r = r * t + vf(-1.28717512e-1f);
  r = r * t - t;
  r = copysign(vf(1.0f) - exp_<7>(r), a);
  vf q = vf(-5.96761703e-4f); q = q * s + vf(4.99119423e-3f); q = q * s + vf(-2.67681349e-2f);
  q = q * s + vf(1.12819925e-1f);
  q = q * s + vf(-3.76125336e-1f); q = q * s + vf(1.28379166e-1f); q = q * a + a;
  return select(gt(t, vf(0.927734375f)), r, q);
}
KV vf sin(vf x) { return each(x, [](float a) { return __builtin_sinf(a); }); }
KV vf cos(vf x) { return each(x, [](float a) { return __builtin_cosf(a); }); }
KV vf pow(vf x, vf y) { return each(x, y, [](float a, float b) { return __builtin_powf(a, b); }); }
KV vf fmod(vf x, vf y) { return each(x, y, [](float a, float b) { return __builtin_fmodf(a, b); }); }
KV vf remainder(vf x, vf y) {
  vf m = fmod(x, y); vm fix = and_(ne(m, vf(0.0f)), lt(m * y, vf(0.0f))); return select(fix, m + y, m);
}
KV vf floor_div(vf x, vf y) { return floor((x - remainder(x, y)) / y); }
KV vi floor_div(vi a, vi b) { vi q = a / b, r = a - q * b; return q - to_int(and_(ne(r, vi(0)), lt(r ^ b, vi(0)))); }
KV vi remainder(vi a, vi b) { return a - floor_div(a, b) * b; }
}

namespace kv {
// To the nearest bfloat16, ties to even; a NaN stays one (its quiet bit is set before the low half goes).
KV uv nearest_bf16(vf x) {
  uv u = (uv)x.v, r = u + 0x7fff + ((u >> 16) & 1);
  return (uv)(x.v != x.v ? (iv)(u | 0x400000) : (iv)r) >> 16;
}
#if defined(KV_AVX2)
typedef short sv __attribute__((vector_size(16)));
typedef int qv __attribute__((vector_size(16)));
KV vf widen(hv h) { return bits((iv)__builtin_ia32_pmovzxwd256((sv)h) << 16); }
KV hv round_bits(vf x) {
  uv r = nearest_bf16(x);
  qv low, high;
  memcpy(&low, &r, 16); memcpy(&high, (const char*)&r + 16, 16);
  return (hv)__builtin_ia32_packusdw128(low, high);
}
#else
KV vf widen(hv h) { return bits((iv)(__builtin_convertvector(h, uv) << 16)); }
KV hv round_bits(vf x) { return __builtin_convertvector(nearest_bf16(x), hv); }
#endif
KV vf round_bf16(vf x) { return widen(round_bits(x)); }
KV vf round_fp16(vf x) { fv r; for (int k = 0; k < L; k++) r[k] = (float)(fp16)x.v[k]; return vf(r); }
KV vf load(const float* p) { fv r; memcpy(&r, p, sizeof r); return vf(r); }
KV vf load(const bf16* p) { hv r; memcpy(&r, p, sizeof r); return widen(r); }
KV vf load(const fp16* p) { fv r; for (int k = 0; k < L; k++) r[k] = (float)p[k]; return vf(r); }
KV vi load(const int64_t* p) { lv r; memcpy(&r, p, sizeof r); return vi(r); }
template <class T> KV vi load_ints(const T* p) { lv r; for (int k = 0; k < L; k++) r[k] = p[k]; return vi(r); }
KV vi load(const int32_t* p) { return load_ints(p); }
KV vi load(const int16_t* p) { return load_ints(p); }
KV vi load(const int8_t* p) { return load_ints(p); }
KV vi load(const uint8_t* p) { return load_ints(p); }
KV vm load(const bool* p) { iv r; for (int k = 0; k < L; k++) r[k] = -(int32_t)(p[k] != 0); return {r}; }
template <class T> KV auto load_n(const T* p, int n) {
  T b[L]; memset(b, 0, sizeof b); memcpy(b, p, n * sizeof(T)); return load(b);
}
template <class T> KV auto load_step(const T* p, int64_t s, int n) {
  T b[L]; memset(b, 0, sizeof b); for (int k = 0; k < n; k++) b[k] = p[k * s]; return load(b);
}
template <class T> KV auto load_one(const T* p) { T b[L]; for (int k = 0; k < L; k++) b[k] = *p; return load(b); }
KV vf load_one(const float* p) { return vf(*p); }
KV vf load_one(const bf16* p) { return bits(iv{} + ((int32_t)p->bits << 16)); }
KV vi load_one(const int64_t* p) { return vi(*p); }
KV void store(float* p, vf x) { memcpy(p, &x.v, sizeof x.v); }
KV void store(bf16* p, vf x) { hv r = round_bits(x); memcpy(p, &r, sizeof r); }
KV void store(fp16* p, vf x) { for (int k = 0; k < L; k++) p[k] = (fp16)x.v[k]; }
KV void store(int64_t* p, vi x) { memcpy(p, &x.v, sizeof x.v); }
template <class T> KV void store_ints(T* p, vi x) { for (int k = 0; k < L; k++) p[k] = (T)x.v[k]; }
KV void store(int32_t* p, vi x) { store_ints(p, x); }
KV void store(int16_t* p, vi x) { store_ints(p, x); }
KV void store(int8_t* p, vi x) { store_ints(p, x); }
KV void store(uint8_t* p, vi x) { store_ints(p, x); }
KV void store(bool* p, vm x) { for (int k = 0; k < L; k++) p[k] = x.v[k] != 0; }
template <class T, class V> KV void store_n(T* p, V x, int n) { T b[L]; store(b, x); memcpy(p, b, n * sizeof(T)); }
template <class T, class V> KV void store_step(T* p, int64_t s, V x, int n) {
  T b[L]; store(b, x); for (int k = 0; k < n; k++) p[k * s] = b[k];
}
template <class T, class V> KV void store_one(T* p, V x) { T b[L]; store(b, x); *p = b[0]; }
typedef double half_dv __attribute__((vector_size(4 * L)));
KV double hsum(dv x) {
  half_dv a, b; memcpy(&a, &x, sizeof a); memcpy(&b, (const char*)&x + sizeof a, sizeof b);
  a += b; double s = 0; for (int k = 0; k < L / 2; k++) s += a[k]; return s;
}
KV dv wide(vf x) { return __builtin_convertvector(x.v, dv); }
// The maximum of what is no NaN.
KV float hmax(vf x) {
  float b[L], r; memcpy(b, &x.v, sizeof b);
  r = b[0]; for (int k = 1; k < L; k++) r = b[k] > r ? b[k] : r; return r;
}
KV float hmax_nan(vf x) {
  vf m = x; float r = m.v[0];
  for (int k = 1; k < L; k++) r = (m.v[k] > r || m.v[k] != m.v[k]) && r == r ? m.v[k] : r;
  return r;
}
KV float hmin_nan(vf x) {
  float r = x.v[0];
  for (int k = 1; k < L; k++) r = (x.v[k] < r || x.v[k] != x.v[k]) && r == r ? x.v[k] : r;
  return r;
}
// The lane with number n: none where n is below 0 or too large.
KV vm place(int64_t n) {
  int32_t at = (uint64_t)n < (uint64_t)L ? (int32_t)n : -1; iv r;
  for (int k = 0; k < L; k++) r[k] = k;
  return {(iv)(r == at)};
}
KV vm first(int n) { iv r; for (int k = 0; k < L; k++) r[k] = -(int32_t)(k < n); return {r}; }
// An aligned store that goes past the caches; buffers may be handed in at any address, so alignment is looked at.
KV void stream(float* p, vf x) {
  if ((uintptr_t)p % (4 * L)) return store(p, x);
#if defined(__AVX512F__) && LANES == 16
  __builtin_ia32_movntps512(p, (float __attribute__((vector_size(64))))x.v);
#elif defined(__AVX__) && LANES == 8
  __builtin_ia32_movntps256(p, (float __attribute__((vector_size(32))))x.v);
#else
  store(p, x);
#endif
}
KV void stream(bf16* p, vf x) {
#if defined(KV_AVX2)
  if ((uintptr_t)p % 16) return store(p, x);
  typedef long long pair __attribute__((vector_size(16)));
  __builtin_ia32_movntdq((pair*)p, (pair)round_bits(x));
#else
  store(p, x);
#endif
}
template <class T, class V> KV void stream(T* p, V x) { store(p, x); }
// Two vectors that lie one behind the other.
template <class T, class V> KV void store_pair(T* p, V a, V b) { store(p, a); store(p + L, b); }
template <class T, class V> KV void stream_pair(T* p, V a, V b) { stream(p, a); stream(p + L, b); }
#if defined(KV_AVX2)
// One check for a NaN and one pack for both: 16 instructions where two single stores take 26.
typedef long long ov __attribute__((vector_size(32)));
typedef short pv __attribute__((vector_size(32)));
KV uv finite_bits(vf x) { uv u = (uv)x.v; return (u + 0x7fff + ((u >> 16) & 1)) >> 16; }
KV bool some_nan(vf a, vf b) { return __builtin_ia32_movmskps256((fv)__builtin_ia32_cmpps256(a.v, b.v, 3)) != 0; }
KV ov pair_bits(vf a, vf b) {
  return __builtin_ia32_permdi256((ov)(pv)__builtin_ia32_packusdw256((iv)finite_bits(a), (iv)finite_bits(b)), 0xd8);
}
KV void store_pair(bf16* p, vf a, vf b) {
  if (__builtin_expect(some_nan(a, b), 0)) { store(p, a); store(p + L, b); return; }
  ov r = pair_bits(a, b); memcpy(p, &r, sizeof r);
}
KV void stream_pair(bf16* p, vf a, vf b) {
  if (__builtin_expect((uintptr_t)p % 32 || some_nan(a, b), 0)) { store(p, a); store(p + L, b); return; }
  __builtin_ia32_movntdq256((ov*)p, pair_bits(a, b));
}
#endif
// Asks for the cache line at p + n, which may lie past the end of the buffer.
template <class T> KV void ahead(const T* p, int64_t n) { __builtin_prefetch((const char*)p + n * (int64_t)sizeof(T)); }
KV void fence() {
#if defined(__SSE2__)
  __builtin_ia32_sfence();
#endif
}
}

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

extern "C" void scan_cpp(const float* __restrict__ x0, float* __restrict__ t0) {
#define KV_FROM(v) (int64_t)0
#define KV_END(v) 4096
#define KV_ROW(v) (v)
const int64_t rows = 4096 * 1;
#pragma omp parallel for schedule(static) if (16777216 > 16384)
for (int64_t v = 0; v < rows; v += kv::L) {
const int many = rows - v < kv::L ? (int)(rows - v) : kv::L;
double d[kv::L]; for (int k = 0; k < many; k++) d[k] = 0;
int64_t done = 0;
if (many == kv::L) {
int64_t least = KV_END(v) - KV_FROM(v);
for (int k = 1; k < kv::L; k++) least = std::min(least, KV_END(v + k) - KV_FROM(v + k));
constexpr int parts = 16 / kv::L;
kv::dv s; for (int k = 0; k < kv::L; k++) s[k] = d[k];
for (; done + parts * kv::L <= least; done += parts * kv::L) {
kv::vf x[parts][kv::L];
#pragma GCC unroll 16
for (int k = 0; k < kv::L; k++) { const int64_t i0 = KV_ROW(v + k), i2 = 0, at = KV_FROM(v + k) + done; (void)i0; (void)i2;
{ const int64_t c = at;
kv::ahead(x0 + i0 * 4096 + c, 32);
}
#pragma GCC unroll 2
for (int p = 0; p < parts; p++) { const int64_t c = at + p * kv::L;
const auto e0 = kv::load(x0 + i0 * 4096 + c);
const auto in = (e0);
x[p][k] = in; } }
#pragma GCC unroll 2
for (int p = 0; p < parts; p++) {
kv::transpose(x[p]);
#pragma GCC unroll 16
for (int k = 0; k < kv::L; k++) {
s = s + kv::wide(x[p][k]); x[p][k] = kv::narrow(s); }
kv::transpose(x[p]); }
#pragma GCC unroll 16
for (int k = 0; k < kv::L; k++) { const int64_t i0 = KV_ROW(v + k), i2 = 0, at = KV_FROM(v + k) + done; (void)i0; (void)i2;
#pragma GCC unroll 2
for (int p = 0; p < parts; p++) { const int64_t c = at + p * kv::L;
const kv::vf acc = x[p][k];
kv::store(t0 + i0 * 4096 + c, acc);
} } }
for (int k = 0; k < kv::L; k++) d[k] = s[k];
}
for (int k = 0; k < many; k++) {
const int64_t i0 = KV_ROW(v + k), end = KV_END(v + k), i2 = 0; (void)i0; (void)i2;
for (int64_t c = KV_FROM(v + k) + done; c < end; c += kv::L) {
const int n = end - c < kv::L ? (int)(end - c) : kv::L;
float b[kv::L];
{
const auto e0 = kv::load_n(x0 + i0 * 4096 + c, n);
const auto in = (e0);
kv::store(b, in); }
for (int j = 0; j < n; j++) { d[k] = d[k] + b[j]; b[j] = d[k]; }
const auto acc = kv::load(b);
kv::store_n(t0 + i0 * 4096 + c, acc, n);
} }
}
}
