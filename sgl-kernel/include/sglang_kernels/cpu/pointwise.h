// Norms, gated activation, and rotary embedding with the write into the KV pool.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace sglk {
namespace SGLK_LEVEL {

constexpr int kNormAccumulators = 4;

// Calls body(i, n) for each register of a row: n == VL, or the number of lanes left.
template <class Body>
SGLK_INLINE void for_each_vector(int64_t width, Body body) {
  int64_t i = 0;
  for (; i + VL <= width; i += VL) body(i, VL);
  if (i < width) body(i, int(width - i));
}

template <class T>
SGLK_INLINE vf load_some(const T* p, int n) {
  return n == VL ? load(p) : load_first(p, n);
}

template <class T>
SGLK_INLINE void store_some(T* p, vf v, int n) {
  if (n == VL)
    store(p, v);
  else
    store_first(p, v, n);
}

// 1 / sqrt(mean(x^2) + eps)
template <class T>
SGLK_INLINE float inverse_rms(const T* x, int64_t width, float eps) {
  vf acc[kNormAccumulators] = {};
  int64_t i = 0;
  for (; i + kNormAccumulators * VL <= width; i += kNormAccumulators * VL)
    for (int a = 0; a < kNormAccumulators; a++) {
      const vf v = load(x + i + a * VL);
      acc[a] = fma(v, v, acc[a]);
    }
  for (; i < width; i += VL) {
    const int n = int(width - i < VL ? width - i : VL);
    const vf v = load_some(x + i, n);
    acc[0] = fma(v, v, acc[0]);
  }
  const float sum = sum_lanes((acc[0] + acc[1]) + (acc[2] + acc[3]));
  return 1.0f / __builtin_sqrtf(sum / float(width) + eps);
}

template <class T>
void norm_rows(const NormArgs& a, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(a.weight);
  for (int64_t row = begin; row < end; row++) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    T* out = static_cast<T*>(a.out) + row * a.width;
    if (a.residual) {
      T* residual = static_cast<T*>(a.residual) + row * a.width;
      for_each_vector(a.width, [&](int64_t i, int n) {
        const vf sum = load_some(residual + i, n) + load_some(x + i, n);
        store_some(residual + i, sum, n);
      });
      x = residual;
    }
    const vf scale = splat(inverse_rms(x, a.width, a.eps));
    for_each_vector(a.width, [&](int64_t i, int n) {
      const vf v = load_some(x + i, n) * scale * load_some(weight + i, n);
      store_some(out + i, v, n);
    });
  }
}

SGLK_INLINE vf silu(vf x) { return x / (exp(-x) + 1.0f); }

// 0.5 x (1 + tanh(u)) = x * sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
SGLK_INLINE vf gelu(vf x) {
  constexpr float kTwice = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  return x / (exp(x * (x * x * 0.044715f + 1.0f) * -kTwice) + 1.0f);
}

template <class T, vf (*kActivation)(vf)>
void gated_rows(const GatedArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const T* gate = static_cast<const T*>(a.x) + row * a.x_stride;
    const T* up = gate + a.width;
    T* out = static_cast<T*>(a.out) + row * a.width;
    for_each_vector(a.width, [&](int64_t i, int n) {
      const vf gated = kActivation(load_some(gate + i, n));
      store_some(out + i, gated * load_some(up + i, n), n);
    });
  }
}

void weighted_sum(const WeightedSumArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; t++) {
    const int32_t* place = a.place + t * a.terms;
    const float* weights = a.weights + t * a.terms;
    for_each_vector(a.width, [&](int64_t i, int n) {
      vf sum = zero();
      for (int64_t j = 0; j < a.terms; j++)
        sum = fma(splat(weights[j]), load_some(a.y + place[j] * a.width + i, n), sum);
      store_some(a.out + t * a.width + i, sum, n);
    });
  }
}

// One head: from -> to (may be the same), normed and rotated as asked.
template <class T>
SGLK_INLINE void rope_head(
    const RopeStoreArgs& a, const T* from, T* to, const T* norm, const float* cos_sin) {
  const int dim = a.dim;
  const float scale = norm ? inverse_rms(from, dim, a.eps) : 1.0f;
  const auto read = [&](int64_t i, int n) {
    const vf v = load_some(from + i, n);
    if (!norm) return v;
    // Rounded to the element type, as if a norm had stored its result.
    T lane[VL];
    store(lane, v * splat(scale) * load_some(norm + i, n));
    return load(lane);
  };
  const int half = cos_sin ? a.rotary_dim / 2 : 0;
  for_each_vector(half, [&](int64_t i, int n) {
    const vf x = read(i, n);
    const vf y = read(half + i, n);
    const vf c = load_some(cos_sin + i, n);
    const vf s = load_some(cos_sin + half + i, n);
    store_some(to + i, fma(x, c, -(y * s)), n);
    store_some(to + half + i, fma(y, c, x * s), n);
  });
  if (from == to && !norm) return;
  for_each_vector(dim - 2 * half, [&](int64_t i, int n) {
    store_some(to + 2 * half + i, read(2 * half + i, n), n);
  });
}

template <class T>
void rope_store_tokens(const RopeStoreArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; t++) {
    const float* cos_sin =
        a.cos_sin ? a.cos_sin + a.positions[t] * a.cos_sin_stride : nullptr;
    T* q = static_cast<T*>(a.q) + t * a.q_stride;
    if (cos_sin || a.q_norm)
      for (int h = 0; h < a.q_heads; h++)
        rope_head(a, q + h * a.dim, q + h * a.dim, static_cast<const T*>(a.q_norm), cos_sin);
    const T* k = static_cast<const T*>(a.k) + t * a.k_stride;
    T* k_to = static_cast<T*>(a.k_cache) + a.slots[t] * a.k_slot_stride;
    for (int h = 0; h < a.kv_heads; h++)
      rope_head(a, k + h * a.dim, k_to + h * a.dim, static_cast<const T*>(a.k_norm), cos_sin);
    std::memcpy(
        static_cast<T*>(a.v_cache) + a.slots[t] * a.v_slot_stride,
        static_cast<const T*>(a.v) + t * a.v_stride,
        sizeof(T) * a.kv_heads * a.dim);
  }
}

template <class T>
void latent_store_tokens(const LatentStoreArgs& a, int64_t begin, int64_t end) {
  const int64_t width = a.rank + a.rope;
  RopeStoreArgs rotation{};
  rotation.dim = rotation.rotary_dim = a.rope;
  for (int64_t t = begin; t < end; t++) {
    const float* cos_sin = a.cos_sin + a.positions[t] * a.cos_sin_stride;
    T* q = static_cast<T*>(a.q) + t * a.q_stride + a.q_width - a.rope;
    for (int h = 0; h < a.q_heads; h++, q += a.q_width)
      rope_head<T>(rotation, q, q, nullptr, cos_sin);
    const T* k = static_cast<const T*>(a.k) + t * a.k_stride;
    T* to = static_cast<T*>(a.cache) + a.slots[t] * a.slot_stride;
    norm_rows<T>({a.dtype, k, nullptr, a.norm, to, width, a.rank, a.eps}, 0, 1);
    rope_head<T>(rotation, k + a.rank, to + a.rank, nullptr, cos_sin);
  }
}

void norm(const NormArgs& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case DType::f32: return norm_rows<float>(a, begin, end);
    case DType::bf16: return norm_rows<bf16_t>(a, begin, end);
    case DType::f16: return norm_rows<f16_t>(a, begin, end);
  }
}

template <class T>
void gated_by(const GatedArgs& a, int64_t begin, int64_t end) {
  switch (a.activation) {
    case Activation::silu: return gated_rows<T, silu>(a, begin, end);
    case Activation::gelu: return gated_rows<T, gelu>(a, begin, end);
  }
}

void gated(const GatedArgs& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case DType::f32: return gated_by<float>(a, begin, end);
    case DType::bf16: return gated_by<bf16_t>(a, begin, end);
    case DType::f16: return gated_by<f16_t>(a, begin, end);
  }
}

void rope_store(const RopeStoreArgs& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case DType::f32: return rope_store_tokens<float>(a, begin, end);
    case DType::bf16: return rope_store_tokens<bf16_t>(a, begin, end);
    case DType::f16: return rope_store_tokens<f16_t>(a, begin, end);
  }
}

void latent_store(const LatentStoreArgs& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case DType::f32: return latent_store_tokens<float>(a, begin, end);
    case DType::bf16: return latent_store_tokens<bf16_t>(a, begin, end);
    case DType::f16: return latent_store_tokens<f16_t>(a, begin, end);
  }
}

void exp_array(const float* x, float* y, int64_t n) {
  for_each_vector(
      n, [&](int64_t i, int lanes) { store_some(y + i, exp(load_some(x + i, lanes)), lanes); });
}

}  // namespace SGLK_LEVEL
}  // namespace sglk
