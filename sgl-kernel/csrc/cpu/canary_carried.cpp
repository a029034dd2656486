// The KV canary's checksums of the state that a draft hands on.
#include "sglang_kernels/cpu/canary.h"

namespace sglk::canary {

bool is_carried(const Carried& rows, int64_t i) {
  return rows.places[i] >= 0 && rows.req_rows[i / rows.group] != 0;
}

int64_t carried_sum(const Carried& rows, int64_t i) {
  uint64_t sum = carried_term(rows.serials[i / rows.group], -1);
  for (int64_t j = 0; j < rows.width; j++)
    sum += carried_term(rows.words[i * rows.row_stride + j], j);
  for (int64_t k = 0; k < rows.known; k++) {
    sum += carried_term(rows.ids[i * rows.known + k], rows.width + 2 * k);
    sum += carried_term(rows.bits[i * rows.known + k], rows.width + 2 * k + 1);
  }
  return static_cast<int64_t>(sum);
}

void check_carried(const State& s, const Site& site, const Carried& rows, int64_t i) {
  const int64_t due = rows.sums[rows.places[i]], found = carried_sum(rows, i);
  if (due == found) return;
  const int64_t request = i / rows.group;
  Found f;
  f.reasons = Reason::kCarriedState;
  f.position = rows.positions[request];
  f.expected_lineage = due;
  f.found_lineage = found;
  report(s, site, f, rows.req_rows[request], rows.serials[request], request);
}

}  // namespace sglk::canary
