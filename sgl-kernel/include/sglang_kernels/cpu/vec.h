// One SIMD register of floats and the few operations that the kernels need. Compiled once per
// level inside `namespace sglk::SGLK_LEVEL`. Everything here has internal meaning only for that
// level, so no function of one level can be linked into another.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define SGLK_INLINE inline __attribute__((always_inline))

namespace sglk {
namespace SGLK_LEVEL {

#if defined(__AVX512F__)
constexpr int VL = 16;
#elif defined(__AVX2__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));

struct bf16_t {
  uint16_t bits;
};
struct f16_t {
  uint16_t bits;
};

template <class V>
SGLK_INLINE V load_raw(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

template <class V>
SGLK_INLINE void store_raw(void* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

SGLK_INLINE vf splat(float x) {
#if defined(__AVX512F__)
  return vf(_mm512_set1_ps(x));
#elif defined(__AVX2__)
  return vf(_mm256_set1_ps(x));
#else
  return vf{} + x;
#endif
}

SGLK_INLINE vf zero() { return vf{}; }

// a * b + c. Fused where the level has it: every output of every kernel goes through this
// one function, so that tiles of different shapes round alike.
SGLK_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return vf(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif defined(__AVX2__)
  return vf(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#else
  return a * b + c;
#endif
}

// Lanes where `mask` is set take a, the others b.
SGLK_INLINE vf select(vi mask, vf a, vf b) { return mask ? a : b; }

// The larger value; m if x is NaN.
SGLK_INLINE vf max_ignoring_nan(vf x, vf m) { return x > m ? x : m; }

SGLK_INLINE float sum_lanes(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(__m512(v));
#else
  float lane[VL];
  store_raw(lane, v);
  for (int width = VL / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lane[i] += lane[i + width];
  return lane[0];
#endif
}

// The largest lane; no lane may be NaN.
SGLK_INLINE float max_lanes(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(__m512(v));
#else
  float lane[VL];
  store_raw(lane, v);
  float best = lane[0];
  for (int i = 1; i < VL; i++) best = lane[i] > best ? lane[i] : best;
  return best;
#endif
}

// ---- element types ---------------------------------------------------------------------

SGLK_INLINE vf widen(vh h, const bf16_t*) {
  return vf(__builtin_convertvector(h, vu) << 16);
}

SGLK_INLINE vh narrow(vf v, const bf16_t*) {
  const vu bits = vu(v);
  const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const vu quiet = (bits >> 16) | 0x40;
  const vu result = (v == v) ? rounded : quiet;
  return __builtin_convertvector(result, vh);
}

SGLK_INLINE vf widen(vh h, const f16_t*) {
#if defined(__AVX512F__)
  return vf(_mm512_cvtph_ps(__m256i(h)));
#elif defined(__AVX2__)
  return vf(_mm256_cvtph_ps(__m128i(h)));
#else
  const vu x = __builtin_convertvector(h, vu);
  const vu magnitude = (x & 0x7fff) << 13;
  const vf scaled = vf(magnitude) * 0x1p112f;  // subnormal halves come out exact
  const vu special = magnitude | 0x7f800000u;  // infinity and NaN
  const vu finite = vu(scaled);
  const vu bits = (magnitude >= 0x0f800000u) ? special : finite;
  return vf(bits | ((x & 0x8000) << 16));
#endif
}

SGLK_INLINE vh narrow(vf v, const f16_t*) {
#if defined(__AVX512F__)
  return vh(_mm512_cvtps_ph(__m512(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__)
  return vh(_mm256_cvtps_ph(__m256(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const vu bits = vu(v);
  const vu sign = (bits >> 16) & 0x8000;
  const vu magnitude = bits & 0x7fffffff;
  // Adding 0.5 puts the last bit of a subnormal half at the last bit of the float.
  const vu tiny = vu(vf(magnitude) + 0.5f) - 0x3f000000u;
  const vu normal = (magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const vu infinite = vu{} + 0x7c00u;
  const vu nan = vu{} + 0x7e00u;
  vu result = (magnitude < 0x38800000u) ? tiny : normal;
  result = (magnitude >= 0x47800000u) ? infinite : result;
  result = (magnitude > 0x7f800000u) ? nan : result;
  return __builtin_convertvector(result | sign, vh);
#endif
}

template <class T>
SGLK_INLINE vf load(const T* p) {
  return widen(load_raw<vh>(p), static_cast<const T*>(nullptr));
}
template <>
SGLK_INLINE vf load<float>(const float* p) {
  return load_raw<vf>(p);
}

template <class T>
SGLK_INLINE void store(T* p, vf v) {
  store_raw(p, narrow(v, static_cast<const T*>(nullptr)));
}
template <>
SGLK_INLINE void store<float>(float* p, vf v) {
  store_raw(p, v);
}

// The first n < VL elements; the other lanes are zero and their memory is not touched.
template <class T>
SGLK_INLINE vf load_first(const T* p, int n) {
  T lane[VL] = {};
  for (int i = 0; i < n; i++) lane[i] = p[i];
  return load(lane);
}

template <class T>
SGLK_INLINE void store_first(T* p, vf v, int n) {
  T lane[VL];
  store(lane, v);
  for (int i = 0; i < n; i++) p[i] = lane[i];
}

#if defined(__AVX512F__)
template <>
SGLK_INLINE vf load_first<float>(const float* p, int n) {
  return vf(_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p));
}
template <>
SGLK_INLINE void store_first<float>(float* p, vf v, int n) {
  _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), __m512(v));
}
#endif

// ---- exponential -----------------------------------------------------------------------

// p * 2^n for integers n from -126 to 128; NaN in p stays NaN.
SGLK_INLINE vf scale_by_power(vf p, vf n) {
#if defined(__AVX512F__)
  return vf(_mm512_scalef_ps(__m512(p), __m512(n)));
#else
  // Two factors, because 2^128 is not a float.
  const vi exponent = vi(n + 12582912.0f) - 0x4b400000;
  const vi half = exponent >> 1;
  return p * vf((half + 127) << 23) * vf((exponent - half + 127) << 23);
#endif
}

// exp(x) to about one unit in the last place; NaN stays NaN, results below the smallest
// normal float are zero, above the largest infinite.
SGLK_INLINE vf exp(vf x) {
  const vf lowest = splat(-87.33654f);
  const vf highest = splat(89.0f);
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf above = lowest > x ? lowest : x;
  const vf bounded = highest < above ? highest : above;
  const vf n = fma(bounded, splat(1.44269504f), magic) - magic;
  vf r = fma(n, splat(-0.693145752f), bounded);
  r = fma(n, splat(-1.42860677e-6f), r);
  // Minimax for (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2.
  vf p = splat(0.0013814467238262296f);
  p = fma(p, r, splat(0.008368780836462975f));
  p = fma(p, r, splat(0.04166839271783829f));
  p = fma(p, r, splat(0.1666651964187622f));
  p = fma(p, r, splat(0.4999999403953552f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  return select(x < lowest, zero(), scale_by_power(p, n));
}

SGLK_INLINE float exp_scalar(float x) { return exp(splat(x))[0]; }

}  // namespace SGLK_LEVEL
}  // namespace sglk
