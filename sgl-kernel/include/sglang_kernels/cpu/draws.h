// Scans of rows of logits and weights. Compiled once per SIMD level, like everything in
// `level.h`.
#pragma once

#include "kernels.h"
#include "pointwise.h"

namespace sglk {
namespace SGLK_LEVEL {

SGLK_INLINE vi lane_numbers() {
  vi lane{};
  for (int i = 0; i < VL; i++) lane[i] = i;
  return lane;
}

// Lanes of ids i .. i + VL - 1 whose bits are set; i is a multiple of VL.
SGLK_INLINE vi allowed_lanes(const int32_t* mask, int64_t i) {
  static_assert(32 % VL == 0, "lanes of one register lie in one word");
  const uint32_t bits = uint32_t(mask[i / 32]) >> (i % 32);
  return vi(((vu{} + bits) >> vu(lane_numbers())) & 1) != 0;
}

SGLK_INLINE bool any_lane(vi mask) {
  int32_t any = 0;
  for (int i = 0; i < VL; i++) any |= mask[i];
  return any != 0;
}

template <class T>
bool any_above_in(const T* x, int64_t count, float limit, const int32_t* mask) {
  const vf bound = splat(limit);
  const auto above = [&](int64_t i, int n) {
    const vf v = load_some(x + i, n);
    vi found = ~vi(v <= bound);
    if (mask) found &= allowed_lanes(mask, i);
    // The other lanes of a last register are zero.
    return n == VL ? found : found & (lane_numbers() < n);
  };
  constexpr int kAtOnce = 4;
  int64_t i = 0;
  vi found{};
  for (; i + kAtOnce * VL <= count; i += kAtOnce * VL)
    for (int a = 0; a < kAtOnce; a++) found |= above(i + a * VL, VL);
  for (; i < count; i += VL) found |= above(i, int(count - i < VL ? count - i : VL));
  return any_lane(found);
}

bool any_above(DType dtype, const void* x, int64_t count, float limit, const int32_t* mask) {
  switch (dtype) {
    case DType::f32: return any_above_in(static_cast<const float*>(x), count, limit, mask);
    case DType::bf16: return any_above_in(static_cast<const bf16_t*>(x), count, limit, mask);
    case DType::f16: return any_above_in(static_cast<const f16_t*>(x), count, limit, mask);
  }
  return true;
}

template <class T>
float value_in(const void* x, int64_t i) {
  return load_first(static_cast<const T*>(x) + i, 1)[0];
}

float value_at(DType dtype, const void* x, int64_t i) {
  switch (dtype) {
    case DType::f32: return value_in<float>(x, i);
    case DType::bf16: return value_in<bf16_t>(x, i);
    case DType::f16: return value_in<f16_t>(x, i);
  }
  return 0;
}

template <class T>
WeightSums sum_weights_in(const WeightArgs& a) {
  // Longer sums in float32 would lose more than a draw may miss.
  constexpr int64_t kChunk = 64 * VL;
  const T* x = static_cast<const T*>(a.logits);
  const vf temperature = splat(a.temperature), limit = splat(a.limit);
  const vf own = splat(value_in<T>(x, a.token)) / temperature;
  WeightSums sums{};
  vf largest = zero();
  vi count{};
  for (int64_t begin = 0; begin < a.count; begin += kChunk) {
    vf total = zero(), lower = zero(), above = zero();
    const int64_t size = a.count - begin < kChunk ? a.count - begin : kChunk;
    for_each_vector(size, [&](int64_t j, int n) {
      const int64_t i = begin + j;
      vi counts = lane_numbers() < n;
      if (a.mask) counts &= allowed_lanes(a.mask, i);
      const vf w = select(counts, exp(load_some(x + i, n) / temperature - own), zero());
      const int64_t left = a.token - i;
      const vi is_lower = lane_numbers() < int32_t(left < VL ? (left > 0 ? left : 0) : VL);
      const vi is_above = vi(w > limit);
      total += w;
      lower += select(is_lower, w, zero());
      above += select(is_above, w, zero());
      largest = max_ignoring_nan(w, largest);
      count -= is_above;
    });
    sums.total += double(sum_lanes(total));
    sums.lower += double(sum_lanes(lower));
    sums.above += double(sum_lanes(above));
  }
  sums.largest = max_lanes(largest);
  for (int i = 0; i < VL; i++) sums.num_above += count[i];
  return sums;
}

WeightSums sum_weights(const WeightArgs& a) {
  switch (a.dtype) {
    case DType::f32: return sum_weights_in<float>(a);
    case DType::bf16: return sum_weights_in<bf16_t>(a);
    case DType::f16: return sum_weights_in<f16_t>(a);
  }
  return {};
}

double sum_floats(const float* x, int64_t count) {
  constexpr int64_t kChunk = 64 * VL;
  double sum = 0;
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    vf part = zero();
    const int64_t size = count - begin < kChunk ? count - begin : kChunk;
    for_each_vector(size, [&](int64_t i, int n) { part += load_some(x + begin + i, n); });
    sum += double(sum_lanes(part));
  }
  return sum;
}

}  // namespace SGLK_LEVEL
}  // namespace sglk
