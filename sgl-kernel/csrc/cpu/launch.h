// Launches of checked arguments, shared by the op of a whole layer stack and the ops of its
// parts. Each divides its work among the threads.
#pragma once

#include "torch_api.h"

namespace sglk {

void launch_linear(const LinearArgs& args);
void launch_norm(const NormArgs& args, int64_t rows);
void launch_gated(const GatedArgs& args, int64_t rows);
void launch_rope_store(const RopeStoreArgs& args, int64_t tokens);

// The rows of a batch as attention takes them.
struct AttentionRows {
  int64_t count, tokens;
  int64_t table_rows, table_columns;
  const int64_t* row_index;  // [count] rows of the page table; null: row r
  const int64_t* bounds;     // [count + 1] offsets in the tokens; null: one each (decode)
  // [count] KV elements before the first new token; in a decode those that are read.
  const int64_t* lens;
};

// Checks the rows, and the slots that their page table names.
void launch_attention(const char* op, AttentionArgs args, const AttentionRows& rows);

}  // namespace sglk
