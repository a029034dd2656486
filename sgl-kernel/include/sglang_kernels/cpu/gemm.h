// Product of float rows with a packed weight. A unit is VL pairs of output columns: lane j
// of a bfloat16 unit holds columns j and j + 16 of a panel in one 32-bit word, so that a
// shift and a mask widen them. Every output is one accumulator over ascending k.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "vec.h"

namespace sglk {
namespace SGLK_LEVEL {

constexpr int kPanel = 32;
constexpr int kUnitsPerPanel = kPanel / (2 * VL);
constexpr int kLinearRows = VL == 16 ? 12 : 6;       // rows of a register tile
constexpr int kAccumulators = VL == 16 ? 24 : 12;    // registers for sums
constexpr int64_t kPrefetch = 16;  // steps of k ahead, for tiles bound by memory
// Rows whose inputs stay in the second-level cache while the units are processed.
constexpr int64_t kRowBlockBytes = 768 << 10;

template <bool BF16>
struct UnitPointer {
  const char* at;
  static constexpr int64_t step = kPanel * (BF16 ? 2 : 4);
  SGLK_INLINE void load_pair(int64_t k, vf& low, vf& high) const {
    const char* p = at + k * step;
    if (BF16) {
      const vu pair = load_raw<vu>(p);
      low = vf(pair << 16);
      high = vf(pair & 0xffff0000u);
    } else {
      const float* floats = reinterpret_cast<const float*>(p);
      low = load(floats);
      high = load(floats + kPanel / 2);
    }
  }
};

template <bool BF16>
SGLK_INLINE UnitPointer<BF16> unit_pointer(const LinearArgs& a, int64_t unit) {
  const int64_t panel = unit / kUnitsPerPanel;
  const int64_t lanes = unit % kUnitsPerPanel * VL;
  const int64_t size = UnitPointer<BF16>::step;
  return {static_cast<const char*>(a.weight) + panel * a.k * size + lanes * 4};
}

SGLK_INLINE void finish_column(const LinearArgs& a, int64_t row, int64_t column, vf acc) {
  const int64_t left = a.n - column;
  if (left <= 0) return;
  float* out = a.out + row * a.out_stride + column;
  if (left >= VL) {
    store(out, a.bias ? acc + load(a.bias + column) : acc);
  } else {
    const int n = int(left);
    store_first(out, a.bias ? acc + load_first(a.bias + column, n) : acc, n);
  }
}

// The activation of one register of gates and of values. Not inlined, because the sums of a
// tile need all registers.
__attribute__((noinline)) void finish_gated(
    const LinearArgs& a, int64_t row, int64_t unit, vf gate, vf up) {
  const int64_t panel = unit / kUnitsPerPanel, lanes = unit % kUnitsPerPanel * VL;
  const int64_t column = panel * (kPanel / 2) + lanes;
  const int64_t left = a.n - column;
  if (left <= 0) return;
  if (a.bias) {
    const float* bias = a.bias + panel * kPanel + lanes;
    gate = gate + load(bias);
    up = up + load(bias + kPanel / 2);
  }
  vf factor = splat(1.0f);
  if (a.gate == Gate::clamped) {
    // NaN is kept.
    const vf high = splat(a.limit), low = splat(-a.limit);
    gate = gate > high ? high : gate;
    up = up > high ? high : up;
    up = (up < low ? low : up) + 1.0f;
    factor = splat(a.alpha);
  }
  const vf result = gate / (exp(-(gate * factor)) + 1.0f) * up;
  float* out = a.out + row * a.out_stride + column;
  if (left >= VL)
    store(out, result);
  else
    store_first(out, result, int(left));
}

template <int M, int U, bool BF16>
void linear_tile(const LinearArgs& a, int64_t row, int64_t unit) {
  UnitPointer<BF16> b[U];
#pragma GCC unroll 8
  for (int u = 0; u < U; u++) b[u] = unit_pointer<BF16>(a, unit + u);
  const float* x = a.x + row * a.x_stride;
  vf acc[M][2 * U];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 16
    for (int v = 0; v < 2 * U; v++) acc[m][v] = zero();
  for (int64_t k = 0; k < a.k; k++) {
    vf s[M];
    if (U > 1) {
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) s[m] = splat(x[m * a.x_stride + k]);
    }
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) {
      vf low, high;
      b[u].load_pair(k, low, high);
      if (M <= 4) __builtin_prefetch(b[u].at + (k + kPrefetch) * UnitPointer<BF16>::step);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        const vf factor = U > 1 ? s[m] : splat(x[m * a.x_stride + k]);
        acc[m][2 * u] = fma(factor, low, acc[m][2 * u]);
        acc[m][2 * u + 1] = fma(factor, high, acc[m][2 * u + 1]);
      }
    }
  }
  if (a.gate != Gate::none) {
    for (int u = 0; u < U; u++)
      for (int m = 0; m < M; m++)
        finish_gated(a, row + m, unit + u, acc[m][2 * u], acc[m][2 * u + 1]);
    return;
  }
#pragma GCC unroll 8
  for (int u = 0; u < U; u++) {
    const int64_t column = (unit + u) / kUnitsPerPanel * kPanel +
                           (unit + u) % kUnitsPerPanel * VL;
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      finish_column(a, row + m, column, acc[m][2 * u]);
      finish_column(a, row + m, column + kPanel / 2, acc[m][2 * u + 1]);
    }
  }
}

// Units that a tile of M rows takes at once: as many as the registers for sums allow.
constexpr int units_for(int rows) {
  const int units = kAccumulators / (2 * rows);
  return units < 1 ? 1 : (units > 4 ? 4 : units);
}

template <int M, bool BF16>
void linear_rows(const LinearArgs& a, int64_t row, int64_t begin, int64_t end) {
  constexpr int U = units_for(M);
  int64_t unit = begin;
  for (; unit + U <= end; unit += U) linear_tile<M, U, BF16>(a, row, unit);
  if constexpr (U > 2)
    for (; unit + 2 <= end; unit += 2) linear_tile<M, 2, BF16>(a, row, unit);
  for (; unit < end; unit++) linear_tile<M, 1, BF16>(a, row, unit);
}

using LinearRows = void (*)(const LinearArgs&, int64_t, int64_t, int64_t);

template <bool BF16, int... M>
struct LinearTable {
  static constexpr LinearRows rows[] = {linear_rows<M, BF16>...};
};

template <bool BF16>
using Table = std::conditional_t<
    kLinearRows == 12, LinearTable<BF16, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12>,
    LinearTable<BF16, 1, 2, 3, 4, 5, 6>>;

template <bool BF16>
void linear_range(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t unit_begin,
                  int64_t unit_end) {
  int64_t block = kRowBlockBytes / (a.k * 4) / kLinearRows * kLinearRows;
  if (block < kLinearRows) block = kLinearRows;
  for (int64_t first = row_begin; first < row_end; first += block) {
    const int64_t last = first + block < row_end ? first + block : row_end;
    const int64_t tiles = (last - first + kLinearRows - 1) / kLinearRows;
    if (tiles == 1) {
      Table<BF16>::rows[last - first - 1](a, first, unit_begin, unit_end);
      continue;
    }
    // Tiles of nearly equal height; all rows of a unit before the next unit.
    for (int64_t unit = unit_begin; unit < unit_end; unit++)
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t from = first + (last - first) * t / tiles;
        const int64_t to = first + (last - first) * (t + 1) / tiles;
        Table<BF16>::rows[to - from - 1](a, from, unit, unit + 1);
      }
  }
}

int64_t linear_units(int64_t n) { return (n + kPanel - 1) / kPanel * kUnitsPerPanel; }

void linear(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t unit_begin,
            int64_t unit_end) {
  if (a.weight_bf16)
    linear_range<true>(a, row_begin, row_end, unit_begin, unit_end);
  else
    linear_range<false>(a, row_begin, row_end, unit_begin, unit_end);
}

}  // namespace SGLK_LEVEL
}  // namespace sglk
