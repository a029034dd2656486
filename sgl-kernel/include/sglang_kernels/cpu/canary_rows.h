// The new tokens of a forward's rows and their lineages.
#pragma once

#include "sglang_kernels/cpu/canary.h"

namespace sglk::canary {

// The lineage before the row's new tokens.
inline uint64_t load_base_lineage(const State& s, const Rows& rows, int64_t r) {
  return rows.prefix_lens[r] > 0 ? bits(s.expected_lineage[rows.lineage_row(r)])
                                 : rows.seed(r);
}

// body(token index, number in the row, lineage) for the row's new tokens in order.
template <class Body>
void for_each_token(const State& s, const Rows& rows, int64_t r, const Body& body) {
  if (rows.req_rows[r] == 0) return;
  const int64_t start = rows.start(r), extend = rows.extend(r);
  const uint64_t salt = rows.salt(r), base = load_base_lineage(s, rows, r);
  const auto term = [&](int64_t t) {
    return lineage_term(pack_word0(rows.input_ids[t], rows.positions[t]), salt);
  };
  uint64_t sum = base;
  for (int64_t j = 0; j < extend; j++) {
    const int64_t t = start + j;
    if (!rows.parent_index) {
      sum += term(t);
    } else {
      sum = base + term(t);
      int64_t parent = rows.parent_index[t];
      for (int64_t depth = 0; depth < rows.max_depth; depth++) {
        if (parent < start || parent >= start + extend) break;
        sum += term(parent);
        parent = rows.parent_index[parent];
      }
    }
    body(t, j, sum);
  }
}

}  // namespace sglk::canary
