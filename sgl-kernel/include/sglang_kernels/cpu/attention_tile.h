// Register tiles of the attention kernels: products of a few query rows with a block of
// columns, and squares of keys transposed in registers. One accumulator per output.
#pragma once

#include "vec.h"

namespace sglk {
namespace SGLK_LEVEL {

constexpr int kTileRows = 6;   // query rows of a register tile
constexpr int kTileVecs = VL == 16 ? 4 : 2;

// acc[m][v] += a[m][k] * b(k)[v] for k in 0 .. n - 1.
template <int M, int NV, class B>
SGLK_INLINE void tile(const float* a, int64_t lda, B b, int64_t n, float* c, int64_t ldc,
                      bool accumulate) {
  vf acc[M][NV];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++)
      acc[m][v] = accumulate ? load(c + m * ldc + v * VL) : zero();
  for (int64_t k = 0; k < n; k++) {
    const float* row = b(k);
    vf x[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) x[v] = load(row + v * VL);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const vf s = splat(a[m * lda + k]);
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) acc[m][v] = fma(s, x[v], acc[m][v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) store(c + m * ldc + v * VL, acc[m][v]);
}

template <int NV, class B>
SGLK_INLINE void tile_rows(int rows, const float* a, int64_t lda, B b, int64_t n, float* c,
                           int64_t ldc, bool accumulate) {
  switch (rows) {
    case 1: return tile<1, NV>(a, lda, b, n, c, ldc, accumulate);
    case 2: return tile<2, NV>(a, lda, b, n, c, ldc, accumulate);
    case 3: return tile<3, NV>(a, lda, b, n, c, ldc, accumulate);
    case 4: return tile<4, NV>(a, lda, b, n, c, ldc, accumulate);
    case 5: return tile<5, NV>(a, lda, b, n, c, ldc, accumulate);
    default: return tile<6, NV>(a, lda, b, n, c, ldc, accumulate);
  }
}

// The same over `vecs` registers of columns; b(k, column) points at row k.
template <class B>
__attribute__((noinline)) void tile_block(int rows, int vecs, const float* a, int64_t lda,
                                          B b, int64_t n, float* c, int64_t ldc,
                                          bool accumulate) {
  for (int v = 0; v < vecs;) {
    const int64_t column = int64_t(v) * VL;
    const auto at = [&](int64_t k) { return b(k, column); };
    if (vecs - v >= kTileVecs) {
      tile_rows<kTileVecs>(rows, a, lda, at, n, c + column, ldc, accumulate);
      v += kTileVecs;
    } else {
      tile_rows<1>(rows, a, lda, at, n, c + column, ldc, accumulate);
      v += 1;
    }
  }
}

// r[d][k] = from[k][offset + d] for a VL x VL square; d >= dims is zero.
template <class T>
SGLK_INLINE void transpose(const T* const* from, int64_t offset, int dims, vf (&r)[VL]) {
#pragma GCC unroll 16
  for (int i = 0; i < VL; i++)
    r[i] = dims == VL ? load(from[i] + offset) : load_first(from[i] + offset, dims);
#if defined(__AVX512F__)
  __m512 s[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    s[i] = _mm512_unpacklo_ps(__m512(r[i]), __m512(r[i + 1]));
    s[i + 1] = _mm512_unpackhi_ps(__m512(r[i]), __m512(r[i + 1]));
  }
  // u[i + j]: column j of each 4 x 4 square in rows i .. i + 3.
  __m512 u[16];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    u[i] = _mm512_shuffle_ps(s[i], s[i + 2], 0x44);
    u[i + 1] = _mm512_shuffle_ps(s[i], s[i + 2], 0xee);
    u[i + 2] = _mm512_shuffle_ps(s[i + 1], s[i + 3], 0x44);
    u[i + 3] = _mm512_shuffle_ps(s[i + 1], s[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const __m512 a = _mm512_shuffle_f32x4(u[j], u[4 + j], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(u[j], u[4 + j], 0xdd);
    const __m512 c = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0x88);
    const __m512 d = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0xdd);
    r[j] = vf(_mm512_shuffle_f32x4(a, c, 0x88));
    r[4 + j] = vf(_mm512_shuffle_f32x4(b, d, 0x88));
    r[8 + j] = vf(_mm512_shuffle_f32x4(a, c, 0xdd));
    r[12 + j] = vf(_mm512_shuffle_f32x4(b, d, 0xdd));
  }
#elif defined(__AVX2__)
  __m256 s[8];
  __m256 u[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    s[i] = _mm256_unpacklo_ps(__m256(r[i]), __m256(r[i + 1]));
    s[i + 1] = _mm256_unpackhi_ps(__m256(r[i]), __m256(r[i + 1]));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    r[j] = vf(_mm256_permute2f128_ps(u[j], u[4 + j], 0x20));
    r[4 + j] = vf(_mm256_permute2f128_ps(u[j], u[4 + j], 0x31));
  }
#else
  float square[VL][VL];
  for (int i = 0; i < VL; i++) store(&square[i][0], r[i]);
  for (int d = 0; d < VL; d++)
    for (int i = 0; i < VL; i++) r[d][i] = square[i][d];
#endif
}

// Scores of M queries against VL keys, without moving the keys through memory.
template <int M, class T>
void score_keys(const T* const* keys, int64_t dim, const float* query, int64_t ldq,
                float* scores, int64_t lds) {
  vf acc[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) acc[m] = zero();
  int64_t d = 0;
  for (; d + VL <= dim; d += VL) {
    vf r[VL];
    transpose(keys, d, VL, r);
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++)
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) acc[m] = fma(splat(query[m * ldq + d + i]), r[i], acc[m]);
  }
  if (d < dim) {
    vf r[VL];
    transpose(keys, d, int(dim - d), r);
    for (int i = 0; i < dim - d; i++)
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) acc[m] = fma(splat(query[m * ldq + d + i]), r[i], acc[m]);
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) store(scores + m * lds, acc[m]);
}

template <class T>
void score_few(int rows, const T* const* keys, int64_t dim, const float* query, int64_t ldq,
               float* scores, int64_t lds) {
  switch (rows) {
    case 1: return score_keys<1>(keys, dim, query, ldq, scores, lds);
    case 2: return score_keys<2>(keys, dim, query, ldq, scores, lds);
    case 3: return score_keys<3>(keys, dim, query, ldq, scores, lds);
    case 4: return score_keys<4>(keys, dim, query, ldq, scores, lds);
    case 5: return score_keys<5>(keys, dim, query, ldq, scores, lds);
    case 6: return score_keys<6>(keys, dim, query, ldq, scores, lds);
    case 7: return score_keys<7>(keys, dim, query, ldq, scores, lds);
    default: return score_keys<8>(keys, dim, query, ldq, scores, lds);
  }
}

}  // namespace SGLK_LEVEL
}  // namespace sglk
