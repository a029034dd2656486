#define SGLK_LEVEL avx512
#include "sglang_kernels/cpu/level.h"

namespace sglk {
const KernelTable& avx512_kernels() {
  static constexpr KernelTable table = avx512::make_table("avx512");
  return table;
}
}  // namespace sglk
