// The lineages of rows at the end of a forward.
#include "sglang_kernels/cpu/canary_rows.h"

namespace sglk::canary {

uint64_t lineage_after(const State& s, const Rows& rows, int64_t r) {
  uint64_t last = load_base_lineage(s, rows, r);
  const int64_t end = rows.start(r) + rows.staying(r);
  for_each_token(s, rows, r, [&](int64_t t, int64_t, uint64_t sum) {
    if (t < end) last = sum;
  });
  return last;
}

}  // namespace sglk::canary
