// Paged attention in chunks of KV elements. An item is a tile of query rows (tokens x the
// heads of one group) that share their K and V. Per chunk: scores of the tile against the
// transposed keys, softmax numerators, weighted sum of the values, merge.
//
// Two rules shape the code. Every output is one accumulator over ascending elements, so
// results do not depend on the shape of a tile. And no value outside the attended set is
// multiplied by anything, because a zero weight would not silence a NaN.
#pragma once

#include "attention_tile.h"
#include "kernels.h"

namespace sglk {
namespace SGLK_LEVEL {

constexpr int kKeyBlock = 64;  // keys whose transpose is held at a time
constexpr int kFewRows = 8;  // up to here keys are transposed in registers, per query tile
constexpr float kMinusInfinity = -__builtin_inff();

SGLK_INLINE int padded_dim(int dim) { return (dim + VL - 1) / VL * VL; }

struct Range {
  int64_t begin, end;
};

SGLK_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
SGLK_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// The elements that new token `j` of a row, `token` of q, may attend, ignoring the mask.
SGLK_INLINE Range attended(const AttentionArgs& a, int64_t prefix, int64_t j,
                           int64_t token) {
  const int64_t end = prefix + (a.tree_mask ? a.tree_width : j + 1);
  return {first_attended(a, prefix, j, token), end};
}

SGLK_INLINE vf tanh(vf x) {
  const vf e = exp(vf(vi(x) & 0x7fffffff) * -2.0f);
  const vf t = (splat(1.0f) - e) / (splat(1.0f) + e);
  return select(x < zero(), -t, t);
}

// Everything that one item needs while its chunks are processed.
template <class T>
class ItemRun {
 public:
  ItemRun(const AttentionArgs& args, const AttentionItem& item, float* scratch)
      : a_(args), item_(item), group_(args.q_heads / args.kv_heads),
        rows_(item.tokens * group_), padded_(padded_dim(args.dim)),
        v_padded_(padded_dim(args.v_dim)) {
    const auto take = [&](int64_t floats) {
      float* p = scratch;
      scratch += floats;
      return p;
    };
    query_ = take(int64_t(max_rows()) * padded_);
    scores_ = take(int64_t(max_rows()) * kChunk);
    keys_ = take(int64_t(kKeyBlock) * padded_);
    value_ = take(int64_t(max_rows()) * v_padded_);
    max_ = take(max_rows());
    sum_ = take(max_rows());
    row_scores_ = take(kChunk);
    values_ = take(kChunk * v_padded_);
    float* zeros = take(padded_);
    std::memset(zeros, 0, sizeof(float) * padded_);
    zeros_ = reinterpret_cast<const T*>(zeros);
    load_queries();
  }

  static size_t scratch_floats(const AttentionArgs& a) {
    const int64_t rows = larger(kItemRows, a.q_heads / a.kv_heads);
    const int64_t padded = padded_dim(a.dim), v_padded = padded_dim(a.v_dim);
    return size_t(
        rows * (padded + v_padded + kChunk + 2 + VL) + (kKeyBlock + 1) * padded +
        kChunk * (v_padded + 1));
  }

  void run(int64_t begin, int64_t end, const AttentionState& state, BadSlot* bad) {
    for (int64_t chunk = begin; chunk < end; chunk++) {
      base_ = chunk * kChunk;
      lo_ = larger(item_.element_begin - base_, 0);
      hi_ = smaller(item_.element_end - base_, kChunk);
      if (!locate(bad)) return;
      score();
      if (a_.logit_cap > 0) cap_scores();
      for (int r = 0; r < rows_; r++) soften(r);
      weigh();
      merge_chunk(state);
    }
  }

 private:
  int max_rows() const { return int(larger(kItemRows, group_)); }

  void load_queries() {
    const vf scale = splat(a_.scale);
    for (int r = 0; r < rows_; r++) {
      const T* from = static_cast<const T*>(a_.q) +
                      (item_.first_token + r / group_) * a_.q_stride +
                      int64_t(item_.kv_head * group_ + r % group_) * a_.dim;
      for (int d = 0; d < a_.dim; d += VL) {
        const int n = a_.dim - d;
        const vf v = n >= VL ? load(from + d) : load_first(from + d, n);
        store(query_ + int64_t(r) * padded_ + d, v * scale);
      }
    }
  }

  // Pointers to the K and V of elements lo_ .. hi_ - 1 of this chunk.
  bool locate(BadSlot* bad) {
    const T* k = static_cast<const T*>(a_.k_cache) + item_.kv_head * a_.k_head_stride;
    const T* v = static_cast<const T*>(a_.v_cache) + item_.kv_head * a_.v_head_stride;
    const int32_t* table = a_.page_table + item_.table_row * a_.table_row_stride;
    int64_t page = (base_ + lo_) / a_.page_size;
    int64_t offset = (base_ + lo_) % a_.page_size;
    for (int64_t i = lo_; i < hi_; i++) {
      const int64_t slot = table[page * a_.table_column_stride] + offset;
      if (uint64_t(slot) >= uint64_t(a_.slots)) {
        *bad = {true, item_.table_row, base_ + i, slot};
        return false;
      }
      key_at_[i] = k + slot * a_.k_slot_stride;
      value_in_[i] = v + slot * a_.v_slot_stride;
      if (++offset == a_.page_size) {
        offset = 0;
        page++;
      }
    }
    return true;
  }

  // scores_[r][i] = query r . key i, for whole registers that cover lo_ .. hi_ - 1.
  void score() {
    for (int64_t block = lo_ / kKeyBlock * kKeyBlock; block < hi_; block += kKeyBlock) {
      const int64_t first = block + larger(lo_ - block, 0) / VL * VL;
      const int64_t last = smaller(hi_, block + kKeyBlock);
      if (rows_ <= kFewRows) {
        for (int64_t i = first; i < last; i += VL) {
          const T* from[VL];
          keys_at(i, from);
          prefetch_keys(i + VL);
          score_few(rows_, from, a_.dim, query_, padded_, scores_ + i, kChunk);
        }
        continue;
      }
      for (int64_t i = first; i < last; i += VL) transpose_keys(i, keys_ + i - first);
      const auto at = [=](int64_t d, int64_t column) {
        return keys_ + d * kKeyBlock + column;
      };
      for (int r = 0; r < rows_; r += kTileRows)
        tile_block(int(smaller(kTileRows, rows_ - r)), int((last - first + VL - 1) / VL),
                   query_ + int64_t(r) * padded_, padded_, at, a_.dim,
                   scores_ + int64_t(r) * kChunk + first, kChunk, false);
    }
  }

  void cap_scores() {
    const vf cap = splat(a_.logit_cap);
    const vf per_cap = splat(1.0f / a_.logit_cap);
    for (int r = 0; r < rows_; r++) {
      float* s = scores_ + int64_t(r) * kChunk;
      for (int64_t i = lo_ / VL * VL; i < hi_; i += VL)
        store(s + i, cap * tanh(load(s + i) * per_cap));
    }
  }

  // Keys i .. i + VL - 1; zeros for those outside lo_ .. hi_ - 1.
  void keys_at(int64_t i, const T** from) const {
    for (int k = 0; k < VL; k++)
      from[k] = i + k >= lo_ && i + k < hi_ ? key_at_[i + k] : zeros_;
  }

  // Slots are scattered, which leaves little for the hardware prefetcher.
  void prefetch_keys(int64_t i) const {
    for (int64_t k = i; k < smaller(i + VL, hi_); k++)
      for (int64_t line = 0; line < int64_t(sizeof(T)) * a_.dim; line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(key_at_[k]) + line);
  }

  void transpose_keys(int64_t i, float* to) const {
    const T* from[VL];
    keys_at(i, from);
    for (int d = 0; d < a_.dim; d += VL) {
      vf r[VL];
      const int dims = int(smaller(VL, a_.dim - d));
      transpose(from, d, dims, r);
      for (int j = 0; j < dims; j++) store(to + (d + j) * kKeyBlock, r[j]);
    }
  }

  Range row_range(int r) const {
    const int64_t t = r / group_;
    const Range all =
        attended(a_, item_.prefix, item_.first_new + t, item_.first_token + t);
    const int64_t begin = smaller(larger(all.begin - base_, lo_), hi_);
    return {begin, smaller(larger(all.end - base_, begin), hi_)};
  }

  const uint8_t* mask_row(int r) const {
    const int64_t j = item_.first_new + r / group_;
    return a_.tree_mask + (item_.row * a_.tree_width + j) * a_.tree_width;
  }

  // Element `prefix` relative to the chunk: where the tree mask begins to matter.
  int64_t masked_from() const {
    return a_.tree_mask ? larger(item_.prefix - base_, 0) : kChunk;
  }

  // Turns a row of scores into softmax numerators; updates the row's max_, sum_ and seen_.
  void soften(int r) {
    float* s = scores_ + int64_t(r) * kChunk;
    const Range range = row_range(r);
    int64_t attends = range.end - range.begin;
    if (a_.tree_mask) {
      const uint8_t* mask = mask_row(r);
      for (int64_t i = larger(masked_from(), range.begin); i < range.end; i++)
        if (!mask[base_ + i - item_.prefix]) {
          s[i] = kMinusInfinity;
          attends--;
        }
    }
    seen_[r] = attends > 0;
    if (!seen_[r]) return;
    // Whole registers from here on; lanes outside the range count for nothing.
    const int64_t first = range.begin / VL * VL;
    const int64_t last = (range.end + VL - 1) / VL * VL;
    for (int64_t i = first; i < range.begin; i++) s[i] = kMinusInfinity;
    for (int64_t i = range.end; i < last; i++) s[i] = kMinusInfinity;
    vf m = splat(kMinusInfinity);
    for (int64_t i = first; i < last; i += VL) m = max_ignoring_nan(load(s + i), m);
    max_[r] = max_lanes(m);
    const vf peak = splat(max_[r]);
    vf total = zero();
    for (int64_t i = first; i < last; i += VL) {
      const vf p = exp(load(s + i) - peak);
      store(s + i, p);
      total = total + p;
    }
    sum_[r] = sum_lanes(total);
  }

  // V as float rows of `v_padded_` channels; the pool itself if it has that form.
  void prepare_values() {
    if (direct_values()) {
      for (int64_t i = lo_; i < hi_; i++)
        value_at_[i] = reinterpret_cast<const float*>(value_in_[i]);
      return;
    }
    for (int64_t i = lo_; i < hi_; i++) {
      float* to = values_ + i * v_padded_;
      for (int d = 0; d < a_.v_dim; d += VL) {
        const int n = a_.v_dim - d;
        store(to + d, n >= VL ? load(value_in_[i] + d) : load_first(value_in_[i] + d, n));
      }
      value_at_[i] = to;
    }
  }

  bool direct_values() const { return sizeof(T) == 4 && a_.v_dim == v_padded_; }

  // value_[r] (+)= scores_[r][i] * V[i] for i in [begin, end), rows r .. r + n - 1.
  void add_values(int r, int n, int64_t begin, int64_t end, bool accumulate) {
    const float* const* rows = value_at_ + begin;
    const auto at = [=](int64_t k, int64_t column) { return rows[k] + column; };
    tile_block(n, v_padded_ / VL, scores_ + int64_t(r) * kChunk + begin, kChunk, at,
               larger(end - begin, 0), value_ + int64_t(r) * v_padded_, v_padded_,
               accumulate);
  }

  void weigh() {
    prepare_values();
    const int64_t masked = masked_from();
    for (int r = 0; r < rows_; r += kTileRows) {
      const int n = int(smaller(kTileRows, rows_ - r));
      // Ranges move forward from row to row: the last one begins last, the first one ends
      // first. In a tree they all end together, and any may begin last.
      const Range first = row_range(r);
      const Range last = row_range(r + n - 1);
      int64_t begin = last.begin;
      if (a_.positions)
        for (int i = r; i < r + n - 1; i++) begin = larger(begin, row_range(i).begin);
      const int64_t end = smaller(first.end, masked);
      if (begin >= end) {
        for (int i = r; i < r + n; i++) {
          const Range range = row_range(i);
          add_values(i, 1, range.begin, smaller(range.end, masked), false);
        }
      } else if (!a_.positions && first.begin == begin && last.end == first.end) {
        add_values(r, n, begin, end, false);
      } else {
        for (int i = r; i < r + n; i++) add_values(i, 1, row_range(i).begin, begin, false);
        add_values(r, n, begin, end, true);
        for (int i = r; i < r + n; i++)
          add_values(i, 1, end, smaller(row_range(i).end, masked), true);
      }
    }
    if (masked < hi_)
      for (int r = 0; r < rows_; r++) add_tree_values(r);
  }

  // The new tokens that the mask lets row r see, and no others.
  void add_tree_values(int r) {
    const uint8_t* mask = mask_row(r);
    const float* s = scores_ + int64_t(r) * kChunk;
    const float* chosen[kChunk];
    int64_t n = 0;
    for (int64_t i = larger(masked_from(), lo_); i < hi_; i++)
      if (mask[base_ + i - item_.prefix]) {
        chosen[n] = value_at_[i];
        row_scores_[n++] = s[i];
      }
    const auto at = [&](int64_t k, int64_t column) { return chosen[k] + column; };
    tile_block(1, v_padded_ / VL, row_scores_, 0, at, n, value_ + int64_t(r) * v_padded_,
               v_padded_, true);
  }

  void merge_chunk(const AttentionState& state);

  const AttentionArgs& a_;
  const AttentionItem& item_;
  const int group_, rows_, padded_, v_padded_;
  int64_t base_ = 0, lo_ = 0, hi_ = 0;
  float *query_, *scores_, *keys_, *value_, *max_, *sum_, *row_scores_, *values_;
  const T* zeros_;
  const T* key_at_[kChunk];
  const T* value_in_[kChunk];
  const float* value_at_[kChunk];
  uint8_t seen_[256];
};

// The online softmax: weights of both sides are taken relative to the larger maximum.
void attention_merge(int32_t rows, int32_t padded, const AttentionState& into,
                     const AttentionState& from) {
  for (int r = 0; r < rows; r++) {
    if (!from.seen[r]) continue;
    float* to = into.value + int64_t(r) * padded;
    const float* add = from.value + int64_t(r) * padded;
    if (!into.seen[r]) {
      into.seen[r] = 1;
      into.max[r] = from.max[r];
      into.sum[r] = from.sum[r];
      std::memcpy(to, add, sizeof(float) * padded);
      continue;
    }
    const float peak = from.max[r] > into.max[r] ? from.max[r] : into.max[r];
    const float keep = exp_scalar(into.max[r] - peak);
    const float take = exp_scalar(from.max[r] - peak);
    into.max[r] = peak;
    into.sum[r] = into.sum[r] * keep + from.sum[r] * take;
    for (int d = 0; d < padded; d += VL)
      store(to + d, fma(load(to + d), splat(keep), load(add + d) * splat(take)));
  }
}

template <class T>
void ItemRun<T>::merge_chunk(const AttentionState& state) {
  attention_merge(rows_, v_padded_, state, {max_, sum_, value_, seen_});
}

// Factor on the weighted values of a query row: one over the sum of its weights, plus the sink
// of query head `head`.
SGLK_INLINE float weight_scale(const AttentionArgs& a, int head, float max, float sum) {
  if (!a.sinks) return 1.0f / sum;
  const float sink = a.sinks[head];
  const float peak = sink > max ? sink : max;
  const float keep = exp_scalar(max - peak);
  return keep / (sum * keep + exp_scalar(sink - peak));
}

template <class T>
void finish_item(const AttentionArgs& a, const AttentionItem& item,
                 const AttentionState& state) {
  const int group = a.q_heads / a.kv_heads;
  const int padded = padded_dim(a.v_dim);
  for (int r = 0; r < item.tokens * group; r++) {
    const int head = item.kv_head * group + r % group;
    T* out = static_cast<T*>(a.out) + (item.first_token + r / group) * a.out_stride +
             int64_t(head) * a.v_dim;
    const float* value = state.value + int64_t(r) * padded;
    const vf scale = splat(
        state.seen[r] ? weight_scale(a, head, state.max[r], state.sum[r]) : 0.0f);
    for (int d = 0; d < a.v_dim; d += VL) {
      const vf v = state.seen[r] ? load(value + d) * scale : zero();
      if (a.v_dim - d >= VL)
        store(out + d, v);
      else
        store_first(out + d, v, a.v_dim - d);
    }
  }
}

void attention_chunks(const AttentionArgs& a, const AttentionItem& item, int64_t begin,
                      int64_t end, const AttentionState& state, float* scratch,
                      BadSlot* bad) {
  switch (a.dtype) {
    case DType::f32: return ItemRun<float>(a, item, scratch).run(begin, end, state, bad);
    case DType::bf16: return ItemRun<bf16_t>(a, item, scratch).run(begin, end, state, bad);
    case DType::f16: return ItemRun<f16_t>(a, item, scratch).run(begin, end, state, bad);
  }
}

void attention_finish(const AttentionArgs& a, const AttentionItem& item,
                      const AttentionState& state) {
  switch (a.dtype) {
    case DType::f32: return finish_item<float>(a, item, state);
    case DType::bf16: return finish_item<bf16_t>(a, item, state);
    case DType::f16: return finish_item<f16_t>(a, item, state);
  }
}

size_t attention_scratch(const AttentionArgs& a) {
  return ItemRun<float>::scratch_floats(a);
}

int32_t attention_padded_dim(int32_t dim) { return padded_dim(dim); }

}  // namespace SGLK_LEVEL
}  // namespace sglk
