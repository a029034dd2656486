#define SGLK_LEVEL avx2
#include "sglang_kernels/cpu/level.h"

namespace sglk {
const KernelTable& avx2_kernels() {
  static constexpr KernelTable table = avx2::make_table("avx2");
  return table;
}
}  // namespace sglk
