// Shared by the launchers: argument checks, the choice of the SIMD level, and parallel loops.
// Uses only torch's stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "sglang_kernels/cpu/kernels.h"
#include "sglang_kernels/cpu/thread_pool.h"

namespace sglk {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The kernels of the level in use.
const KernelTable& kernels();

inline std::string format_shape(const Tensor& t) {
  std::string text = "[";
  for (int64_t i = 0; i < t.dim(); i++)
    text += (i ? ", " : "") + std::to_string(t.size(i));
  return text + "]";
}

template <class... Parts>
[[noreturn]] __attribute__((noinline)) void raise_error(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// Raises unless `ok`. The message is built only then.
#define SGLK_REQUIRE(ok, ...)                                      \
  do {                                                             \
    if (__builtin_expect(!(ok), 0)) ::sglk::raise_error(__VA_ARGS__); \
  } while (false)

// The same for a tensor. Names the op, the argument, its dtype and shape, and the expectation.
#define SGLK_CHECK(ok, op, name, tensor, expected)                                       \
  SGLK_REQUIRE(                                                                          \
      ok, op, ": ", name, " is ", torch::headeronly::toString((tensor).scalar_type()), " ", \
      ::sglk::format_shape(tensor), ", expected ", expected)

inline DType float_type(const char* op, const char* name, const Tensor& t) {
  const ScalarType type = t.scalar_type();
  if (type == ScalarType::Float) return DType::f32;
  if (type == ScalarType::BFloat16) return DType::bf16;
  SGLK_CHECK(type == ScalarType::Half, op, name, t, "float32, bfloat16 or float16");
  return DType::f16;
}

inline void check_vector(
    const char* op, const char* name, const Tensor& t, ScalarType type, int64_t size) {
  SGLK_CHECK(
      t.dim() == 1 && t.scalar_type() == type && t.size(0) == size &&
          (size <= 1 || t.stride(0) == 1),
      op, name, t,
      std::string("contiguous ") + torch::headeronly::toString(type) + " [" +
          std::to_string(size) + "]");
}

// The data of a contiguous tensor of `size` elements that an op writes.
template <class T>
T* output(const char* op, const char* name, const Tensor& t, ScalarType type, int64_t size) {
  SGLK_CHECK(
      t.scalar_type() == type && t.is_contiguous() && t.numel() == size, op, name, t,
      std::string("contiguous ") + torch::headeronly::toString(type) + " of " +
          std::to_string(size) + " elements");
  return static_cast<T*>(t.mutable_data_ptr());
}

// [tokens, heads, dim] whose heads and channels are contiguous; any token stride.
inline void check_heads(
    const char* op, const char* name, const Tensor& t, ScalarType type, int64_t dim) {
  SGLK_CHECK(
      t.dim() == 3 && t.scalar_type() == type && t.size(2) == dim &&
          (t.numel() == 0 || (t.stride(2) == 1 && (t.size(1) == 1 || t.stride(1) == dim))),
      op, name, t,
      std::string(torch::headeronly::toString(type)) + " [*, heads, " + std::to_string(dim) +
          "] with contiguous heads and channels");
}

inline void check_indices(
    const char* op, const char* name, const int64_t* values, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; i++)
    SGLK_REQUIRE(
        values[i] >= 0 && values[i] < limit, op, ": ", name, "[", i, "] is ", values[i],
        ", expected 0 .. ", limit - 1);
}

// How work is divided: into more parts than threads if they are long enough, so that the other
// threads share the work of a late one.
struct Split {
  int64_t threads, parts;
};

// The division of work that takes one thread about `microseconds`.
inline Split split_for(double microseconds) {
  // Handing a part to a helper costs about 1 us.
  constexpr double kWorthSplitting = 8.0, kWorthSharing = 16.0;
  constexpr int64_t kPartsPerThread = 4;
  if (microseconds < kWorthSplitting) return {1, 1};
  const int64_t threads = std::min(
      int64_t(microseconds / (kWorthSplitting / 2)), int64_t(torch::stable::get_num_threads()));
  const int64_t parts = std::min(int64_t(microseconds / kWorthSharing), kPartsPerThread * threads);
  return {threads, threads > 1 ? std::max(threads, parts) : 1};
}

// body(begin, end) over [0, count) in nearly equal parts.
template <class Body>
void run_split(int64_t count, Split split, const Body& body) {
  const int64_t parts = std::min(split.parts, count);
  if (parts <= 1) {
    if (count > 0) body(int64_t(0), count);
    return;
  }
  struct Call {
    const Body& body;
    int64_t count, parts;
  };
  Call call{body, count, parts};
  run_parts(
      parts, split.threads,
      [](void* context, int64_t part) {
        const Call& c = *static_cast<Call*>(context);
        c.body(c.count * part / c.parts, c.count * (part + 1) / c.parts);
      },
      &call);
}

}  // namespace sglk
