// Arithmetic of the mock model, one row at a time. Torch-free; mirrors mock_math.py and
// mock_draft_math.py of sglang/srt/models, which explain it. T is an element type that
// converts to and from float; every number that is written is exact in bf16.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "sglang_kernels/cpu/mix.h"

namespace sglk::mock {

constexpr int kLayers = 2, kHeads = 8, kKvHeads = 2, kDim = 64;
constexpr int kGroup = kHeads / kKvHeads, kHidden = kHeads * kDim;
constexpr int kQkv = (kHeads + 2 * kKvHeads) * kDim;
constexpr int kTokenBits = 12, kMaxVocab = 1 << kTokenBits;
constexpr int kSigns = 4, kBlock = kDim / kSigns;
constexpr uint64_t kHeadStep = 1000003;
constexpr float kQuery = 240.0f;
// Channels of the hidden state that hold the bits of X_0 and X_1.
constexpr int kFoldBits = 64, kFoldChannels[kLayers] = {64, 128};
// Captured states: each is turned by this many channels more than the one before.
constexpr int kStates = kLayers + 1, kAuxTurn = 192;

// ---- signs -----------------------------------------------------------------------------

template <class T>
void write_signs(T* out, uint64_t value, int count) {
  for (int i = 0; i < count; i++) out[i] = T(value >> i & 1 ? 1.0f : -1.0f);
}

template <class T>
uint64_t read_signs(const T* code, int count) {
  uint64_t value = 0;
  for (int i = 0; i < count; i++) value |= uint64_t(float(code[i]) > 0) << i;
  return value;
}

// Calls body(KV head, channel, whether it is negative) for every sign of the signature of x.
template <class Body>
void each_sign(uint64_t x, const Body& body) {
  for (int h = 0; h < kKvHeads; h++) {
    const uint64_t hash = mix64(x + h * kHeadStep);
    for (int i = 0; i < kSigns; i++)
      body(h, int(hash >> 8 * i & 0xF) + kBlock * i, (hash >> (8 * i + 7) & 1) != 0);
  }
}

// ---- keys ------------------------------------------------------------------------------

inline int64_t key_layer0(uint64_t token, int64_t position) {
  return word(mix64((position ? token + 1 : 0) + (bits(position) << 32)));
}

inline int64_t key_layer1(int64_t fold0, int64_t position) {
  return word(mix64(bits(fold0) ^ bits(position) << 40 ^ 12345));
}

// out [8 + 2 + 2, 64]: query, key and value.
template <class T>
void write_qkv(T* out, int64_t x, int layer) {
  for (int i = 0; i < kQkv; i++) out[i] = T(0.0f);
  for (int h = 0; h < kHeads; h++) out[h * kDim + kDim - 1] = T(kQuery);
  const auto write = [](T* heads, uint64_t seed) {
    each_sign(seed, [&](int head, int channel, bool is_negative) {
      heads[head * kDim + channel] = T(is_negative ? -1.0f : 1.0f);
    });
  };
  write(out + kHeads * kDim, mix64(bits(x) + 99));
  write(out + (kHeads + kKvHeads) * kDim, bits(x));
  for (int h = 0; h < kKvHeads; h++)
    out[(kHeads + h) * kDim + kDim - 1] = T(-(1.0f + float(layer)));
}

// ---- folds -----------------------------------------------------------------------------

struct FoldWeights {
  uint64_t of[kLayers][kHidden];
};

constexpr FoldWeights make_fold_weights() {
  FoldWeights weights{};
  for (uint64_t layer = 0; layer < kLayers; layer++)
    for (uint64_t i = 0; i < kHidden; i++)
      weights.of[layer][i] = mix64(i + (layer + 1) * 7919) | 1;
  return weights;
}

constexpr FoldWeights kFoldWeights = make_fold_weights();

// An integer for every float, as torch's nan_to_num and conversion give it on x86.
inline int64_t to_integer(float x) {
  if (std::fabs(x) < 0x1p62f) return std::lrint(x);
  if (std::isnan(x)) return 3000000;
  if (std::isinf(x)) return x > 0 ? 5000000 : -5000000;
  return std::fabs(x) < 0x1p63f ? int64_t(x) : INT64_MIN;
}

// X_l of attention means [8 * 64] over `count` elements.
template <class T>
int64_t fold(const T* mean, int64_t count, int layer) {
  const float elements = float(count);
  uint64_t sum = 0;
  for (int i = 0; i < kHidden; i++)
    sum += bits(to_integer(float(mean[i]) * elements)) * kFoldWeights.of[layer][i];
  return word(sum);
}

// The term in X_l of one element with key x.
inline int64_t term(int64_t x, int layer) {
  uint64_t sum = 0;
  each_sign(bits(x), [&](int head, int channel, bool is_negative) {
    uint64_t shared = 0;
    for (int g = 0; g < kGroup; g++)
      shared += kFoldWeights.of[layer][(head * kGroup + g) * kDim + channel];
    sum += is_negative ? -shared : shared;
  });
  return word(sum);
}

// Whether attention read only written slots, judging by its mean: no sum is infinite or NaN,
// and at least one does not round to zero.
template <class T>
bool is_plausible(const T* mean, int64_t count) {
  const float elements = float(count);
  bool finite = true, any = false;
  for (int i = 0; i < kHidden; i++) {
    const float sum = std::fabs(float(mean[i]) * elements);
    finite &= sum <= FLT_MAX;
    any |= sum > 0.5f;
  }
  return finite && any;
}

// A number that no oracle predicts.
inline int64_t spoilt(int64_t fold) { return word(mix64(bits(fold) ^ 0x5BAD)); }

// ---- hidden states ---------------------------------------------------------------------

inline int64_t next_token(int64_t fold0, int64_t fold1, int64_t position, int64_t vocab) {
  const uint64_t hash = mix64(bits(fold0) + 3 * bits(fold1) + bits(position));
  return int64_t(hash & INT64_MAX) % vocab;
}

// out [512]: the code of a token, whose bit i weighs weight(i), and the bits of the folds.
template <class T, class Weight>
void write_hidden(T* out, int64_t code, const int64_t (&folds)[kLayers], Weight weight) {
  for (int i = 0; i < kHidden; i++) out[i] = T(0.0f);
  for (int i = 0; i < kTokenBits; i++) out[i] = T(code >> i & 1 ? weight(i) : -weight(i));
  for (int layer = 0; layer < kLayers; layer++)
    write_signs(out + kFoldChannels[layer], bits(folds[layer]), kFoldBits);
}

struct AuxSigns {
  float of[kStates][kHidden];
};

// All +, all -, and alternating.
constexpr AuxSigns make_aux_signs() {
  AuxSigns signs{};
  for (int index = 0; index < kStates; index++)
    for (int c = 0; c < kHidden; c++)
      signs.of[index][c] = (index + c * (index / 2)) % 2 ? -1.0f : 1.0f;
  return signs;
}

constexpr AuxSigns kAuxSigns = make_aux_signs();

// Computes captured state `index` of a hidden state by turning it.
template <class T>
void write_aux(T* out, const T* hidden, int index) {
  const auto write = [&](int begin, int end, const T* from) {
    for (int c = begin; c < end; c++)
      out[c] = T(float(from[c - begin]) * kAuxSigns.of[index][c]);
  };
  const int turn = kAuxTurn * index;
  write(0, turn, hidden + kHidden - turn);
  write(turn, kHidden, hidden);
}

// X_0 and X_1 in a state; `whole`: all of their bits are +1 or -1.
struct Folds {
  uint64_t of[kLayers];
  bool whole;
};

// Reads them from captured state `index` (0: a hidden state).
template <class T>
Folds read_folds(const T* state, int index) {
  Folds folds{{}, true};
  for (int layer = 0; layer < kLayers; layer++) {
    // No fold lies across the turn: both are multiples of 64 channels.
    const int first = (kFoldChannels[layer] + kAuxTurn * index) % kHidden;
    for (int i = 0; i < kFoldBits; i++) {
      const float x = float(state[first + i]) * kAuxSigns.of[index][first + i];
      folds.of[layer] |= uint64_t(x > 0) << i;
      folds.whole &= std::fabs(x) == 1.0f;
    }
  }
  return folds;
}

// ---- drafts ----------------------------------------------------------------------------

// The acceptance table of a draft, as shares of 2^30: a draw below `first` proposes the truth,
// below `near` a token that has the truth among its next ranks, and any other misses it.
struct Acceptance {
  int64_t vocab, first, near;
};

constexpr int kDrawBits = 30, kMaxFlips = 7;

// Bits in which the proposed code differs from the truth.
inline int64_t flips(uint64_t draw, const Acceptance& a) {
  int width = 1;
  while (width < kTokenBits && (a.vocab - 1) >> width) width++;
  const int64_t share = int64_t(draw & ((1ull << kDrawBits) - 1));
  if (share < a.first) return 0;
  if (share >= a.near) return width > 1 ? int64_t(3) << (width - 2) : 1;
  const int ranks = width < kMaxFlips ? width : kMaxFlips;
  return int64_t(1) << (draw >> kDrawBits & 0xFFFF) % ranks;
}

// The hidden state [512] of a proposal: its code's bits weigh 1 to 2, by a hash.
template <class T>
void write_proposal(
    T* out, const int64_t (&folds)[kLayers], int64_t position, const Acceptance& a) {
  const int64_t truth = next_token(folds[0], folds[1], position, a.vocab);
  const int64_t code = truth ^ flips(mix64(bits(folds[0]) ^ 77), a);
  const uint64_t drawn = mix64(bits(folds[0]) ^ 78);
  write_hidden(out, code, folds, [&](int i) {
    return 1.0f + float(int(drawn >> 2 * i & 3) + 8 * i) / 128.0f;
  });
}

}  // namespace sglk::mock
