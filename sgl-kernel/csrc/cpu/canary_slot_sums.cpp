// Sums of slots' values for the canary, wherever in a page they lie.
#include <cstdint>

#include "torch_api.h"

namespace sglk {
namespace {

// Time of one thread, for the decision to split; measured within a factor 2.
constexpr double kMicrosecondsPerValue = 6e-4;

struct SumArgs {
  const int64_t *bases, *offsets, *keys, *slots;
  int64_t layers, page_size, count, page_stride;
  int64_t* sums;
};

// Values are multiplied as signed integers, modulo 2^64.
template <class Value>
uint64_t sum_values(const Value* at, const int64_t* offsets, const int64_t* keys, int64_t count) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; i++)
    sum += uint64_t(int64_t(at[offsets[i]])) * uint64_t(keys[i]);
  return sum;
}

// Layer by layer: where a cache line holds values of many slots, they share it.
template <class Value>
void sum_part(const SumArgs& a, const Value* values, int64_t begin, int64_t end) {
  for (int64_t layer = 0; layer < a.layers; layer++) {
    const Value* of_layer = values + a.bases[layer];
    for (int64_t i = begin; i < end; i++) {
      const int64_t page = a.slots[i] / a.page_size;
      const int64_t* offsets = a.offsets + (a.slots[i] - page * a.page_size) * a.count;
      const Value* at = of_layer + page * a.page_stride;
      a.sums[i * a.layers + layer] = int64_t(sum_values(at, offsets, a.keys, a.count));
    }
  }
}

template <class Value>
void launch(const SumArgs& a, const void* values, int64_t slots) {
  const double each = kMicrosecondsPerValue * double(a.layers * a.count);
  run_split(slots, split_for(each * double(slots)), [&](int64_t begin, int64_t end) {
    sum_part(a, static_cast<const Value*>(values), begin, end);
  });
}

const int64_t* longs(const char* op, const char* name, const Tensor& t, int64_t size) {
  check_vector(op, name, t, ScalarType::Long, size);
  return static_cast<const int64_t*>(t.const_data_ptr());
}

void canary_sum_slots(
    const Tensor& values, const Tensor& bases, const Tensor& offsets, const Tensor& keys,
    const Tensor& slots, int64_t page_stride, const Tensor& sums) {
  const char* op = "canary_sum_slots";
  SGLK_CHECK(
      offsets.dim() == 2 && offsets.scalar_type() == ScalarType::Long &&
          offsets.is_contiguous() && offsets.size(0) > 0,
      op, "offsets", offsets, "contiguous int64 [page_size, values]");
  SumArgs a{};
  a.layers = bases.numel(), a.page_size = offsets.size(0), a.count = offsets.size(1);
  a.page_stride = page_stride;
  const int64_t count = slots.numel();
  a.bases = longs(op, "bases", bases, a.layers);
  a.offsets = static_cast<const int64_t*>(offsets.const_data_ptr());
  a.keys = longs(op, "keys", keys, a.count);
  a.slots = longs(op, "slots", slots, count);
  a.sums = output<int64_t>(op, "sums", sums, ScalarType::Long, count * a.layers);
  for (int64_t i = 0; i < count; i++)
    SGLK_REQUIRE(a.slots[i] >= 0, op, ": slots[", i, "] is ", a.slots[i], ", expected 0 or more");
  const void* data = values.const_data_ptr();
  switch (values.scalar_type()) {
    case ScalarType::Char: return launch<int8_t>(a, data, count);
    case ScalarType::Short: return launch<int16_t>(a, data, count);
    default: break;
  }
  check_vector(op, "values", values, ScalarType::Int, values.numel());
  launch<int32_t>(a, data, count);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sglang_kernels, m) {
  m.def(
      "canary_sum_slots(Tensor values, Tensor bases, Tensor offsets, Tensor keys, "
      "Tensor slots, int page_stride, Tensor(a!) sums) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sglang_kernels, CPU, m) {
  m.impl("canary_sum_slots", TORCH_BOX(&canary_sum_slots));
}

}  // namespace sglk
