// Product of few rows with a weight as the checkpoint stores it. Every output is one dot
// product, summed over the lanes of one accumulator in a fixed order.
#pragma once

#include "kernels.h"
#include "pointwise.h"
#include "vec.h"

namespace sglk {
namespace SGLK_LEVEL {

constexpr int kGemvColumns = 4;  // rows of the weight that a tile reads at once
constexpr int kGemvRows = 4;     // rows of x that it multiplies them with
constexpr int kGemvAhead = 2;    // tiles whose weight is fetched meanwhile

// Two registers of neighbours: halves of 2 * VL elements or, for bfloat16, even and odd
// elements, which a shift and a mask take out of one register. x and the weight are read
// alike, so that factors meet in either order.
SGLK_INLINE void load_pair(const bf16_t* p, vf& first, vf& second) {
  const vu pair = load_raw<vu>(p);
  first = vf(pair << 16);
  second = vf(pair & 0xffff0000u);
}
SGLK_INLINE void load_pair(const f16_t* p, vf& first, vf& second) {
  first = load(p);
  second = load(p + VL);
}

template <class T, int M, int C>
void gemv_tile(const GemvArgs& a, int64_t row, int64_t column) {
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  const T* weight = static_cast<const T*>(a.weight) + column * a.k;
  vf acc[M][C] = {};
  int64_t i = 0;
  for (; i + 2 * VL <= a.k; i += 2 * VL) {
    vf even[C], odd[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      load_pair(weight + c * a.k + i, even[c], odd[c]);
      __builtin_prefetch(weight + (c + kGemvAhead * C) * a.k + i);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      vf first, second;
      load_pair(x + m * a.x_stride + i, first, second);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++)
        acc[m][c] = fma(second, odd[c], fma(first, even[c], acc[m][c]));
    }
  }
  for (; i < a.k; i += VL) {
    const int n = int(a.k - i < VL ? a.k - i : VL);
    for (int m = 0; m < M; m++) {
      const vf v = load_some(x + m * a.x_stride + i, n);
      for (int c = 0; c < C; c++)
        acc[m][c] = fma(v, load_some(weight + c * a.k + i, n), acc[m][c]);
    }
  }
  T* out = static_cast<T*>(a.out) + row * a.n + column;
  const T* bias = static_cast<const T*>(a.bias);
  for (int m = 0; m < M; m++) {
    vf sums = zero();
    for (int c = 0; c < C; c++) sums[c] = sum_lanes(acc[m][c]);
    if (bias) sums = sums + load_first(bias + column, C);
    store_first(out + m * a.n, sums, C);
  }
}

template <class T, int C>
void gemv_rows(const GemvArgs& a, int64_t column) {
  int64_t row = 0;
  for (; row + kGemvRows <= a.rows; row += kGemvRows) gemv_tile<T, kGemvRows, C>(a, row, column);
  for (; row + 2 <= a.rows; row += 2) gemv_tile<T, 2, C>(a, row, column);
  if (row < a.rows) gemv_tile<T, 1, C>(a, row, column);
}

template <class T>
void gemv_columns(const GemvArgs& a, int64_t begin, int64_t end) {
  int64_t column = begin;
  for (; column + kGemvColumns <= end; column += kGemvColumns)
    gemv_rows<T, kGemvColumns>(a, column);
  for (; column < end; column++) gemv_rows<T, 1>(a, column);
}

void gemv(const GemvArgs& a, int64_t column_begin, int64_t column_end) {
  if (a.dtype == DType::bf16)
    gemv_columns<bf16_t>(a, column_begin, column_end);
  else
    gemv_columns<f16_t>(a, column_begin, column_end);
}

}  // namespace SGLK_LEVEL
}  // namespace sglk
