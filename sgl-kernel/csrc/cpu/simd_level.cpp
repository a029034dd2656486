// Chooses the SIMD level: the best that the processor has, or a lower one on request.
#include "torch_api.h"

#include <atomic>

namespace sglk {
namespace {

struct Level {
  const KernelTable* table;
  bool supported;
};

// Best first.
const Level* levels(int* count) {
#if defined(__x86_64__)
  static const Level all[] = {
      {&avx512_kernels(), __builtin_cpu_supports("avx512f") &&
                              __builtin_cpu_supports("avx512bw") &&
                              __builtin_cpu_supports("avx512dq") &&
                              __builtin_cpu_supports("avx512vl")},
      // F16C came before FMA on every processor that has AVX2.
      {&avx2_kernels(),
       __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
      {&baseline_kernels(), true},
  };
#else
  static const Level all[] = {{&baseline_kernels(), true}};
#endif
  *count = int(sizeof(all) / sizeof(all[0]));
  return all;
}

const KernelTable* best() {
  int count;
  const Level* all = levels(&count);
  for (int i = 0; i < count; i++)
    if (all[i].supported) return all[i].table;
  return &baseline_kernels();
}

std::atomic<const KernelTable*> chosen{best()};

std::string simd_level() { return kernels().name; }

void set_simd_level(std::string name) {
  int count;
  const Level* all = levels(&count);
  if (name == "auto") {
    chosen = best();
    return;
  }
  for (int i = 0; i < count; i++)
    if (name == all[i].table->name) {
      SGLK_REQUIRE(
          all[i].supported, "set_simd_level: this processor has no ", name);
      chosen = all[i].table;
      return;
    }
  SGLK_REQUIRE(
      false, "set_simd_level: got ", name,
      ", expected auto, avx512, avx2 or baseline");
}

}  // namespace

const KernelTable& kernels() { return *chosen.load(std::memory_order_relaxed); }

STABLE_TORCH_LIBRARY_FRAGMENT(sglang_kernels, m) {
  m.def("simd_level() -> str");
  m.def("set_simd_level(str name) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sglang_kernels, CompositeExplicitAutograd, m) {
  m.impl("simd_level", TORCH_BOX(&simd_level));
  m.impl("set_simd_level", TORCH_BOX(&set_simd_level));
}

}  // namespace sglk
