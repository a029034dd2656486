// The hash of 64-bit words shared by the canary and the mock model. Torch-free.
#pragma once

#include <cstdint>

namespace sglk {

// splitmix64's finalizer.
constexpr uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// Words are signed, hashes unsigned.
constexpr uint64_t bits(int64_t word) { return static_cast<uint64_t>(word); }
constexpr int64_t word(uint64_t bits) { return static_cast<int64_t>(bits); }

}  // namespace sglk
