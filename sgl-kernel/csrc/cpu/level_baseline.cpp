#define SGLK_LEVEL baseline
#include "sglang_kernels/cpu/level.h"

namespace sglk {
const KernelTable& baseline_kernels() {
  static constexpr KernelTable table = baseline::make_table("baseline");
  return table;
}
}  // namespace sglk
