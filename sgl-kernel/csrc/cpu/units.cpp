// Sums over all bytes of slots that move between tiers.
#include <vector>

#include "sglang_kernels/cpu/mix.h"
#include "torch_api.h"

namespace sglk {
namespace {

void slot_sums(
    const Tensor& sums, const Tensor& words, const Tensor& slots, int64_t first_layer) {
  const char* op = "slot_sums";
  SGLK_CHECK(
      words.dim() == 3 && words.scalar_type() == ScalarType::Long &&
          (words.size(2) <= 1 || words.stride(2) == 1),
      op, "words", words, "int64 [layers, slots, width] with contiguous rows");
  const int64_t n = slots.numel(), layers = words.size(0), width = words.size(2);
  check_vector(op, "slots", slots, ScalarType::Long, n);
  int64_t* out = output<int64_t>(op, "sums", sums, ScalarType::Long, n);
  const int64_t* index = static_cast<const int64_t*>(slots.const_data_ptr());
  check_indices(op, "slots", index, n, words.size(1));
  const int64_t* data = static_cast<const int64_t*>(words.const_data_ptr());
  const int64_t layer_stride = words.stride(0), slot_stride = words.stride(1);
  const auto hash_words = kernels().hash_words;
  std::vector<uint64_t> keys(layers * width);
  for (int64_t layer = 0; layer < layers; layer++)
    for (int64_t i = 0; i < width; i++)
      keys[layer * width + i] = mix64(bits(first_layer + layer) << 32 | bits(i));
  const double work = 1e-3 * double(n * layers * width);
  run_split(n, split_for(work), [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; j++) {
      uint64_t sum = bits(out[j]);
      for (int64_t layer = 0; layer < layers; layer++)
        sum += hash_words(
            data + layer * layer_stride + index[j] * slot_stride, keys.data() + layer * width,
            width);
      out[j] = word(sum);
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sglang_kernels, m) {
  m.def("slot_sums(Tensor(a!) sums, Tensor words, Tensor slots, int first_layer) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sglang_kernels, CPU, m) {
  m.impl("slot_sums", TORCH_BOX(&slot_sums));
}

}  // namespace sglk
