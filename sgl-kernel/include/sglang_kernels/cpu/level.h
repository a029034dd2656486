// Defines the kernel table of one SIMD level. The including file names the level
// (SGLK_LEVEL) and is compiled with that level's instruction set; it includes nothing
// else, because an inline function of a standard header compiled for a high level could
// be picked by the linker for all of them.
#pragma once

#include <type_traits>

#include "attention.h"
#include "draws.h"
#include "gemm.h"
#include "gemv.h"
#include "hash.h"
#include "pointwise.h"

namespace sglk {
namespace SGLK_LEVEL {

constexpr KernelTable make_table(const char* name) {
  return {
      name,
      norm,
      gated,
      rope_store,
      latent_store,
      attention_scratch,
      attention_padded_dim,
      attention_chunks,
      attention_merge,
      attention_finish,
      linear_units,
      linear,
      gemv,
      weighted_sum,
      exp_array,
      hash_words,
      {value_at, any_above, sum_weights, sum_kept},
  };
}

}  // namespace SGLK_LEVEL
}  // namespace sglk
