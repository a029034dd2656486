// The KV canary's checks and record writes, torch-free: words and tensors as declared by the
// Python package `kv_canary` (canary_words.h), results equal to its torch references. Knows
// nothing of threads or of who owns a request.
#pragma once

#include <cstdint>

#include "sglang_kernels/cpu/canary_words.h"
#include "sglang_kernels/cpu/kernels.h"
#include "sglang_kernels/cpu/mix.h"

namespace sglk::canary {

inline int64_t pack_word0(int64_t token, int64_t position) {
  return word(bits(position) << kHalfBits | bits(token & kTokenMask));
}

inline int64_t unpack_position(int64_t word0) { return word0 >> kHalfBits; }

inline int64_t pack_word3(int64_t clock, int64_t kind, int64_t serial) {
  return word(bits(clock) << kClockShift) | (kind << kSerialBits) | (serial & kSerialMask);
}

inline int64_t unpack_clock(int64_t word3) { return word3 >> kClockShift & kClockMask; }

// A lineage term of a packed word 0, given mix64(salt ^ kSaltKey).
inline uint64_t lineage_term(int64_t word0, uint64_t salt) {
  return mix64(mix64(bits(word0)) ^ salt);
}

struct Rows : RowTensors {
  int64_t count, tokens, seed_rows, max_depth;
  int64_t shifts;  // in column_shift, of a row

  int64_t start(int64_t r) const { return qo_indptr ? qo_indptr[r] : r; }
  // The row's new tokens, cut where [T] ends.
  int64_t extend(int64_t r) const {
    const int64_t left = tokens - start(r);
    return extend_lens[r] < left ? extend_lens[r] : left;
  }
  int64_t lineage_row(int64_t r) const { return lineage_rows ? lineage_rows[r] : req_rows[r]; }
  int64_t published_row(int64_t r) const {
    return publish_rows ? publish_rows[r] : lineage_row(r);
  }
  // By how much its prefix can grow in this forward.
  int64_t max_advance(int64_t r) const {
    const int64_t all = extend(r);
    return parent_index && all > max_depth + 1 ? max_depth + 1 : all;
  }
  // The new tokens that its lineage goes on from.
  int64_t staying(int64_t r) const {
    const int64_t all = extend(r);
    return stay_lens && stay_lens[r] < all ? stay_lens[r] : all;
  }
  uint64_t seed(int64_t r) const {
    return bits(seed_table ? seed_table[req_rows[r]] : seeds ? seeds[r] : 0);
  }
  uint64_t salt(int64_t r) const { return mix64(bits(salts[r]) ^ bits(kSaltKey)); }
};

// int32 or int64 values.
struct Indices {
  const void* data;
  bool wide;
  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct Table {
  Indices entries;  // page table, or flat slot indices
  const int64_t *read_lens, *row_index, *indptr, *first, *prev_slots;
  const int64_t *prefix_lens, *positions;  // as attention counts them; null: not compared
  int64_t rows, columns, row_stride, column_stride, page_size;  // flat: columns entries
  int64_t entry_size;  // flat: elements of an entry
  int64_t reach;  // negative: rows may begin anywhere
  bool paged, takes_new;

  // -1 past the table, and where it has no page.
  int64_t slot(int64_t r, int64_t i) const {
    if (!paged) {
      const int64_t at = indptr[r] + i / entry_size;
      const int64_t entry = at >= 0 && at < columns ? entries[at] : -1;
      return entry < 0 ? -1 : entry * entry_size + i % entry_size;
    }
    const int64_t row = row_index ? row_index[r] : r;
    // A division per element would cost as much as its checks.
    const int64_t column = page_size == 1 ? i : i / page_size;
    if (row < 0 || row >= rows || column >= columns) return -1;
    const int64_t entry = entries[row * row_stride + column * column_stride];
    return entry < 0 ? -1 : entry + (i - column * page_size);
  }

  // `slot` of elements i .. i + count - 1, without a division for each.
  void slots(int64_t r, int64_t i, int64_t count, int64_t* to) const {
    const int64_t size = paged ? page_size : entry_size;
    if (size == 1) {
      for (int64_t j = 0; j < count; j++) to[j] = slot(r, i + j);
      return;
    }
    for (int64_t j = 0, offset = i % size; j < count; offset = 0) {
      const int64_t first = slot(r, i + j - offset);
      for (; j < count && offset < size; j++, offset++) to[j] = first < 0 ? -1 : first + offset;
    }
  }
};

// An int32 matrix with a row per request: req_to_token, or token ids.
struct Columns {
  const int32_t* data;  // null: absent
  int64_t stride, width;
  // -1 outside.
  int64_t at(int64_t row, int64_t column) const {
    return column >= 0 && column < width ? data[row * stride + column] : -1;
  }
};

inline int64_t shift_column(const Rows& rows, int64_t r, int64_t p) {
  if (!rows.shift_from || p < rows.shift_from[r]) return p;
  const int64_t place = p - rows.shift_from[r], last = rows.shifts - 1;
  return p + rows.column_shift[r * rows.shifts + (place < last ? place : last)];
}

struct Words {
  const int64_t* data;
  const uint64_t* keys;  // word_key(layer, index), layer after layer
  int64_t layer_stride, slot_stride, count;  // strides in words; words of a slot and layer

  const int64_t* at(int64_t slot, int64_t layer) const {
    return data + layer * layer_stride + slot * slot_stride;
  }
};

struct Bytes {
  int64_t mode, layers, period;
  Words k, v;
  // That of the SIMD level in use (kernels.h), for all words of a slot and layer.
  uint64_t (*hash_words)(const int64_t* words, const uint64_t* keys, int64_t count);
};

inline uint64_t word_key(int64_t layer, int64_t index) {
  return mix64(bits(layer) << kHalfBits | bits(index));
}

// Sum of two hashed words.
inline uint64_t sum_words(const int64_t* words, const uint64_t* keys) {
  return mix64(bits(words[0]) ^ keys[0]) + mix64(bits(words[1]) ^ keys[1]);
}

// The same for a slot, from `first` on.
inline uint64_t sum_sample(const Words& w, int64_t slot, int64_t layer, int64_t first) {
  return sum_words(w.at(slot, layer) + first, w.keys + layer * w.count + first);
}

// The words that `partial` covers: two of K and of V each.
struct Sample {
  int64_t layer, k_word, v_word;
};

inline Sample sample_place(const Bytes& bytes, int64_t lineage) {
  const uint64_t spread = mix64(bits(lineage));
  const uint64_t low = spread & bits(kTokenMask), high = spread >> kHalfBits;
  // Multiply and shift: a place in 0 .. n - 1 without a division.
  const auto scale = [](uint64_t half, int64_t n) { return word(half * bits(n) >> kHalfBits); };
  return {
      scale(low, bytes.layers), scale(high, bytes.k.count / 2) * 2,
      scale(high, bytes.v.count / 2) * 2};
}

inline int64_t pack_fingerprint(uint64_t k, uint64_t v) {
  return word((k & bits(kTokenMask)) | v << kHalfBits);
}

inline int64_t fingerprint(const Bytes& bytes, int64_t slot, int64_t lineage) {
  uint64_t k = 0, v = 0;
  if (bytes.mode == FingerprintMode::kPartial) {
    const Sample at = sample_place(bytes, lineage);
    k = sum_sample(bytes.k, slot, at.layer, at.k_word);
    v = sum_sample(bytes.v, slot, at.layer, at.v_word);
  } else if (bytes.mode != FingerprintMode::kNone) {
    for (int64_t layer = 0; layer < bytes.layers; layer++) {
      const auto sum = [&](const Words& w) {
        return bytes.hash_words(w.at(slot, layer), w.keys + layer * w.count, w.count);
      };
      k += sum(bytes.k);
      v += sum(bytes.v);
    }
  }
  return pack_fingerprint(k, v);
}

// A ring entry whose launch and row `report` fills in.
struct Found : RingEntry {
  Found() : RingEntry{} { slot = position = expected_slot = -1; }
};

// The launch that finds something.
struct Site {
  int64_t clock, tag;
  int64_t* verdicts = nullptr;  // by row of the batch; null: those of the state
};

inline void report(
    const State& s, const Site& site, const Found& f, int64_t req_row, int64_t serial,
    int64_t batch_row) {
  if (site.verdicts)
    __atomic_fetch_or(&site.verdicts[batch_row], f.reasons, __ATOMIC_RELAXED);
  else
    __atomic_fetch_or(
        &s.verdict[req_row], static_cast<int32_t>(f.reasons), __ATOMIC_RELAXED);
  const int64_t at = __atomic_fetch_add(s.ring_count, 1, __ATOMIC_RELAXED);
  if (at >= s.ring_capacity) return;
  RingEntry& entry = s.ring[at];
  entry = f;
  entry.req_row = req_row;
  entry.serial = serial;
  entry.batch_row = batch_row;
  entry.clock = site.clock;
  entry.tag = site.tag;
}

inline void count(const State& s, int64_t counter, int64_t by) {
  if (by) __atomic_fetch_add(&s.counters[counter], by, __ATOMIC_RELAXED);
}

// Moves the manager's phase from `due` to `next`; a breach is reported and repaired.
inline void step_phase(
    const State& s, const Site& site, int64_t manager, int32_t due, int32_t next) {
  if (manager == kNoManager) return;
  if (s.phase[manager] != due) {
    Found f;
    f.reasons = Reason::kPhase;
    f.expected_word0 = due;
    f.found_word0 = s.phase[manager];
    report(s, site, f, 0, 0, -1);
  }
  s.phase[manager] = next;
}

struct VerifyArgs {
  State state;
  Rows rows;
  Table table;
  Bytes bytes;
  Columns slots, tokens;  // slots absent: a sweep, whose rows belong to no request
  int64_t token_offset;
};

void verify_row(const VerifyArgs& args, const Site& site, int64_t r);

struct WriteArgs {
  State state;
  Rows rows;
  Bytes bytes;
  Columns slots;      // absent: columns are not checked
  Columns published;  // tokens by position that the inputs must be; absent: not known
  const int64_t *oracle_tokens, *oracle_positions;
  const bool* tree_mask;  // [tokens, mask_width]; absent: not compared
  int64_t mask_width, page_size, writer_kind, token_offset;
};

// Checks of the head write; stores nothing in the records.
void check_head_row(const WriteArgs& args, const Site& site, int64_t r);
void store_head_row(const WriteArgs& args, const Site& site, int64_t r);
void check_tail_row(const WriteArgs& args, const Site& site, int64_t r);
void store_tail_row(const WriteArgs& args, const Site& site, int64_t r);

// The paths that a verification accepted in trees of `nodes` nodes; see AcceptedPath.
struct Path {
  const int64_t *req_rows, *serials, *prefix_lens, *tokens, *parent_index, *predict,
      *accept_index, *accept_lens, *gained, *choices;
  int64_t count, nodes, width;
};

void check_path(const State& s, const Site& site, const Path& path, int64_t q);

// The state that a forward leaves for a later one; see CarriedRows. `group` rows per request.
struct Carried {
  const int64_t *places, *req_rows, *serials, *positions;
  const int32_t *words, *bits;
  const int64_t* ids;
  int64_t* sums;
  int64_t count, num_sums, group, known, width, row_stride;
};

// The term of a 32-bit or 64-bit word at a place of its row.
inline uint64_t carried_term(int64_t value, int64_t place) {
  const uint64_t mixed = (bits(value) + bits(place + 1) * bits(kCarriedKey)) * bits(kCarriedFactor);
  return bits(word(mixed) ^ (word(mixed) >> 32));
}

// Whether row i counts, that is, it is neither padding nor left out.
bool is_carried(const Carried& rows, int64_t i);
int64_t carried_sum(const Carried& rows, int64_t i);
void check_carried(const State& s, const Site& site, const Carried& rows, int64_t i);

// A matrix with contiguous rows.
struct Matrix {
  const void* data;  // null: absent
  int64_t rows, columns, row_bytes;

  // Null if there is no such row.
  const void* row(int64_t r) const {
    const bool is_there = data && r >= 0 && r < rows;
    return is_there ? static_cast<const char*>(data) + r * row_bytes : nullptr;
  }
};

// Tokens and what they were drawn from; see DrawnTokens. `width` tokens per row.
struct Drawn {
  const int64_t *req_rows, *serials, *prefix_lens, *extend_lens, *tokens, *logits_rows,
      *hidden_ends, *edited_rows, *sampling;
  Matrix logits, inputs, hidden, edited, kept, masks;
  DType dtype;  // of the logits
  int64_t count, width, hidden_words;
  bool draws;
  const RowScans* scans;  // of the SIMD level in use
};

void check_drawn(const State& s, const Site& site, const Drawn& drawn, int64_t i);

// The row's lineage after the new tokens that stay, given its lineage before them.
uint64_t lineage_after(const State& s, const Rows& rows, int64_t r);

}  // namespace sglk::canary
