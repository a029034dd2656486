// The sum behind fingerprints, several words at a time. Compiled once per SIMD level, like
// everything in `level.h`.
#pragma once

#include "vec.h"

namespace sglk {
namespace SGLK_LEVEL {

typedef uint64_t vw __attribute__((vector_size(VL * 4)));
constexpr int64_t kWordLanes = VL / 2;

// splitmix64's finalizer, of a word or of a register of them (`mix64` in mix.h).
template <class W>
SGLK_INLINE W mix_words(W x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

inline uint64_t hash_words(const int64_t* words, const uint64_t* keys, int64_t count) {
  uint64_t sum = 0;
  int64_t i = 0;
#if defined(__AVX2__)
  // Two sums, so that one product need not wait for the other.
  vw low = {}, high = {};
  for (; i + 2 * kWordLanes <= count; i += 2 * kWordLanes) {
    const int64_t j = i + kWordLanes;
    low += mix_words(load_raw<vw>(words + i) ^ load_raw<vw>(keys + i));
    high += mix_words(load_raw<vw>(words + j) ^ load_raw<vw>(keys + j));
  }
  const vw both = low + high;
  for (int64_t lane = 0; lane < kWordLanes; lane++) sum += both[lane];
#endif
  for (; i < count; i++) sum += mix_words(uint64_t(words[i]) ^ keys[i]);
  return sum;
}

}  // namespace SGLK_LEVEL
}  // namespace sglk
