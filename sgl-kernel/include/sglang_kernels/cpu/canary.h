// The KV canary's checks and record writes, torch-free. Mirrors
// sglang/srt/kv_canary/kernels/records.py (words, reasons, ring columns, hashes) and the
// torch references beside it; knows nothing of threads or of who owns a request.
#pragma once

#include <cstdint>

namespace sglk::canary {

enum Reason : int64_t {
  kLineage = 1 << 0,
  kPosition = 1 << 1,
  kToken = 1 << 2,
  kRealKv = 1 << 3,
  kTorn = 1 << 4,
  kFreed = 1 << 5,
  kReadSet = 1 << 6,
  kReadScratch = 1 << 7,
  kForeign = 1 << 8,
  kAlias = 1 << 9,
  kWriteScratch = 1 << 10,
  kWriteToken = 1 << 11,
  kWritePosition = 1 << 12,
  kPhase = 1 << 13,
};

enum Counter { kVerified, kRehashed, kHeadSlots, kTailSlots, kVerifyLaunches, kHeadLaunches,
               kTailLaunches, kSwept, kSweepLaunches, kNumCounters };
enum Phase : int32_t { kIdle, kAfterVerify, kAfterHead };
enum Launch { kVerifyLaunch, kHeadLaunch, kTailLaunch, kSweepLaunch };
enum Mode { kNoBytes, kPartial, kRotate, kAll };

constexpr int64_t kPoison = -1;
constexpr int64_t kVerifyKind = 3, kPoisonKind = 15;
constexpr int64_t kSerialMask = (1 << 24) - 1;
constexpr int64_t kTokenMask = 0xFFFFFFFFll;
constexpr int64_t kClockMask = (1ll << 36) - 1;
constexpr uint64_t kSaltKey = 0x5EEDCA11AB1E0B0Eull;
constexpr int kRingWords = 16;

inline uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

inline int64_t pack_word0(int64_t token, int64_t position) {
  return (int64_t)(((uint64_t)position << 32) | (uint64_t)(token & kTokenMask));
}

inline int64_t pack_word3(int64_t clock, int64_t kind, int64_t serial) {
  return (int64_t)((uint64_t)clock << 28) | (kind << 24) | (serial & kSerialMask);
}

// A lineage term of a packed word 0, given mix64(salt ^ kSaltKey).
inline uint64_t term_of(int64_t word0, uint64_t salt) {
  return mix64(mix64((uint64_t)word0) ^ salt);
}

struct State {
  int64_t *head, *tail, *expected_lineage, *ring, *ring_count, *counters, *clock;
  int32_t *verdict, *phase;
  int64_t num_slots, lineage_rows, req_rows, capacity, managers, pool;
};

struct Rows {
  const int64_t *req_rows, *prefix_lens, *extend_lens, *input_ids, *positions, *locs,
      *serials, *salts;
  const int64_t *indptr, *parents, *seeds, *lineage_rows, *shift_from, *column_shift;
  const int64_t *publish_rows, *stay_lens, *seed_table;
  int64_t count, tokens, max_depth;

  int64_t start(int64_t r) const { return indptr ? indptr[r] : r; }
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
    return parents && all > max_depth + 1 ? max_depth + 1 : all;
  }
  // The new tokens that its lineage goes on from.
  int64_t staying(int64_t r) const {
    const int64_t all = extend(r);
    return stay_lens && stay_lens[r] < all ? stay_lens[r] : all;
  }
  uint64_t seed(int64_t r) const {
    return (uint64_t)(seed_table ? seed_table[req_rows[r]] : seeds ? seeds[r] : 0);
  }
  uint64_t salt(int64_t r) const { return mix64((uint64_t)salts[r] ^ kSaltKey); }
};

// int32 or int64 values.
struct Indices {
  const void* data;
  bool wide;
  int64_t operator[](int64_t i) const {
    return wide ? ((const int64_t*)data)[i] : ((const int32_t*)data)[i];
  }
};

struct Table {
  Indices entries;  // page table, or flat slot indices
  const int64_t *read_lens, *row_index, *indptr, *first, *prev_slots;
  int64_t rows, columns, row_stride, column_stride, page_size;  // flat: columns entries
  int64_t entry_size;  // flat: elements of an entry
  bool paged;

  // -1 beyond the table, and where it has no page.
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

inline int64_t column_of(const Rows& rows, int64_t r, int64_t p) {
  return rows.shift_from && p >= rows.shift_from[r] ? p + rows.column_shift[r] : p;
}

struct Words {
  const int64_t* data;
  const uint64_t* keys;  // key_of(layer, index), layer after layer
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

inline uint64_t key_of(int64_t layer, int64_t index) {
  return mix64((uint64_t)layer << 32 | (uint64_t)index);
}

// Two words of a slot, from `first` on.
inline uint64_t sum_sample(const Words& w, int64_t slot, int64_t layer, int64_t first) {
  const int64_t* at = w.at(slot, layer) + first;
  const uint64_t* keys = w.keys + layer * w.count + first;
  return mix64((uint64_t)at[0] ^ keys[0]) + mix64((uint64_t)at[1] ^ keys[1]);
}

// Where `partial` looks: two words of K and of V.
struct Sample {
  int64_t layer, k_word, v_word;
};

inline Sample sample_of(const Bytes& bytes, int64_t lineage) {
  const uint64_t spread = mix64((uint64_t)lineage);
  const uint64_t high = spread >> 32;
  const int64_t layer = (int64_t)(((spread & kTokenMask) * (uint64_t)bytes.layers) >> 32);
  return {
      layer, (int64_t)((high * (uint64_t)(bytes.k.count / 2)) >> 32) * 2,
      (int64_t)((high * (uint64_t)(bytes.v.count / 2)) >> 32) * 2};
}

inline int64_t fingerprint(const Bytes& bytes, int64_t slot, int64_t lineage) {
  uint64_t k = 0, v = 0;
  if (bytes.mode == kPartial) {
    const Sample at = sample_of(bytes, lineage);
    k = sum_sample(bytes.k, slot, at.layer, at.k_word);
    v = sum_sample(bytes.v, slot, at.layer, at.v_word);
  } else if (bytes.mode != kNoBytes) {
    for (int64_t layer = 0; layer < bytes.layers; layer++) {
      const auto sum = [&](const Words& w) {
        return bytes.hash_words(w.at(slot, layer), w.keys + layer * w.count, w.count);
      };
      k += sum(bytes.k);
      v += sum(bytes.v);
    }
  }
  return (int64_t)((k & kTokenMask) | (v << 32));
}

// What a ring entry says beyond its place; names are the columns.
struct Found {
  int64_t reasons = 0, slot = -1, position = -1;
  int64_t expected_word0 = 0, found_word0 = 0, expected_lineage = 0, found_lineage = 0;
  int64_t found_word3 = 0, expected_slot = -1, found_fingerprint = 0, computed = 0;
};

struct Site {
  int64_t clock, tag;
};

inline void report(
    const State& s, const Site& site, const Found& f, int64_t req_row, int64_t serial,
    int64_t batch_row) {
  __atomic_fetch_or(&s.verdict[req_row], (int32_t)f.reasons, __ATOMIC_RELAXED);
  const int64_t at = __atomic_fetch_add(s.ring_count, 1, __ATOMIC_RELAXED);
  if (at >= s.capacity) return;
  const int64_t entry[kRingWords] = {
      f.reasons, req_row, serial, f.slot, f.position, f.expected_word0, f.found_word0,
      f.expected_lineage, f.found_lineage, f.found_word3, site.clock, batch_row,
      f.expected_slot, f.found_fingerprint, f.computed, site.tag};
  for (int i = 0; i < kRingWords; i++) s.ring[at * kRingWords + i] = entry[i];
}

inline void count(const State& s, Counter which, int64_t by) {
  if (by) __atomic_fetch_add(&s.counters[which], by, __ATOMIC_RELAXED);
}

// Takes the manager's phase from `due` to `next`; a breach is reported and repaired.
inline void step_phase(
    const State& s, const Site& site, int64_t manager, int32_t due, int32_t next) {
  if (manager < 0) return;
  if (s.phase[manager] != due) {
    Found f;
    f.reasons = kPhase;
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
  int64_t page_size, kind;
};

// Checks of the head write; stores nothing in the records.
void check_head_row(const WriteArgs& args, const Site& site, int64_t r);
void store_head_row(const WriteArgs& args, const Site& site, int64_t r);
void check_tail_row(const WriteArgs& args, const Site& site, int64_t r);
void store_tail_row(const WriteArgs& args, const Site& site, int64_t r);

// The row's lineage after the new tokens that stay, from what it was before them.
uint64_t lineage_after(const State& s, const Rows& rows, int64_t r);

}  // namespace sglk::canary
