// Scans of rows of logits and weights. Compiled once per SIMD level, like everything in
// `level.h`.
#pragma once

#include <limits>

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

// Weights of VL ids of a row, 0 for lanes that do not count.
template <class T>
struct Weights {
  explicit Weights(const WeightArgs& args)
      : a(args),
        x(static_cast<const T*>(args.logits)),
        temperature(splat(args.temperature)),
        own(splat(value_in<T>(args.logits, args.token)) / temperature) {}

  SGLK_INLINE vf at(int64_t i, int n) const {
    vi counts = lane_numbers() < n;
    if (a.mask) counts &= allowed_lanes(a.mask, i);
    return select(counts, exp(load_some(x + i, n) / temperature - own), zero());
  }

  // Lanes of ids before the token.
  SGLK_INLINE vi is_lower(int64_t i) const {
    const int64_t left = a.token - i;
    return lane_numbers() < int32_t(left < VL ? (left > 0 ? left : 0) : VL);
  }

  const WeightArgs& a;
  const T* x;
  const vf temperature, own;
};

// Longer sums in float32 would lose more than a draw may miss.
constexpr int64_t kSumChunk = 64 * VL;

template <class T>
WeightSums sum_weights_in(const WeightArgs& a) {
  const Weights<T> weights(a);
  WeightSums sums{};
  vf largest = zero();
  for (int64_t begin = 0; begin < a.count; begin += kSumChunk) {
    vf total = zero(), lower = zero();
    const int64_t size = a.count - begin < kSumChunk ? a.count - begin : kSumChunk;
    for_each_vector(size, [&](int64_t j, int n) {
      const vf w = weights.at(begin + j, n);
      total += w;
      lower += select(weights.is_lower(begin + j), w, zero());
      largest = max_ignoring_nan(w, largest);
    });
    sums.total += double(sum_lanes(total));
    sums.lower += double(sum_lanes(lower));
  }
  sums.largest = max_lanes(largest);
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

template <class T>
KeptSums sum_kept_in(const WeightArgs& a, const float* kept, float slack, float tiny) {
  const Weights<T> weights(a);
  const vf own = splat(kept[a.token]);
  KeptSums sums{};
  vf smallest = splat(std::numeric_limits<float>::infinity()), dropped = zero();
  vi count{}, others{};
  for (int64_t begin = 0; begin < a.count; begin += kSumChunk) {
    vf total = zero(), lower = zero(), mass = zero();
    const int64_t size = a.count - begin < kSumChunk ? a.count - begin : kSumChunk;
    for_each_vector(size, [&](int64_t j, int n) {
      const int64_t i = begin + j;
      const vf w = weights.at(i, n), p = load_some(kept + i, n);
      const vi stays = vi(p > zero());
      const vf off = p - w * own, most = p * splat(slack) + splat(tiny);
      others |= stays & (vi(off > most) | vi(zero() - off > most));
      total += p;
      lower += select(weights.is_lower(i), p, zero());
      mass += select(stays, w, zero());
      count -= stays;
      dropped = max_ignoring_nan(select(stays, zero(), w), dropped);
      smallest = select(stays & vi(w < smallest), w, smallest);
    });
    sums.total += double(sum_lanes(total));
    sums.lower += double(sum_lanes(lower));
    sums.mass += double(sum_lanes(mass));
  }
  sums.smallest = smallest[0];
  for (int i = 0; i < VL; i++) {
    sums.count += count[i];
    sums.smallest = smallest[i] < sums.smallest ? smallest[i] : sums.smallest;
  }
  sums.dropped = max_lanes(dropped);
  sums.is_other = any_lane(others);
  return sums;
}

KeptSums sum_kept(const WeightArgs& a, const float* kept, float slack, float tiny) {
  switch (a.dtype) {
    case DType::f32: return sum_kept_in<float>(a, kept, slack, tiny);
    case DType::bf16: return sum_kept_in<bf16_t>(a, kept, slack, tiny);
    case DType::f16: return sum_kept_in<f16_t>(a, kept, slack, tiny);
  }
  return {};
}

}  // namespace SGLK_LEVEL
}  // namespace sglk
