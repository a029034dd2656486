// The KV canary's checks and record writes, one row at a time.
#include "sglang_kernels/cpu/canary.h"

namespace sglk::canary {
namespace {

struct Truth {
  bool known;
  uint64_t lineage;
};

// Lineage of what stands before element i of the row's view.
Truth before(const VerifyArgs& a, int64_t r, int64_t i, int64_t p, int64_t previous) {
  const State& s = a.state;
  if (p == 0) return {true, a.rows.seed(r)};
  int64_t slot = previous;
  if (i == 0) {
    if (a.table.prev_slots) slot = a.table.prev_slots[r];
    else if (a.slots.data)
      slot = a.slots.at(a.rows.req_rows[r], column_of(a.rows, r, p - 1));
    else slot = -1;
  }
  if (slot < a.table.page_size || slot >= s.num_slots) return {false, 0};
  const int64_t* record = s.tail + slot * 4;
  return {record[0] != kPoison, (uint64_t)record[1]};
}

// The checks of a record against its row; fills in what the entry says of it.
int64_t check_record(
    const VerifyArgs& a, const Site& site, int64_t r, int64_t i, int64_t p, int64_t slot,
    int64_t previous, Found& f) {
  const State& s = a.state;
  const int64_t *tail = s.tail + slot * 4, *head = s.head + slot * 4;
  const int64_t req = a.rows.req_rows[r];
  f.found_word0 = tail[0];
  f.found_lineage = tail[1];
  f.found_word3 = tail[3];
  f.found_fingerprint = tail[2];
  if (tail[0] == kPoison && head[0] == kPoison) {
    f.reasons |= kFreed;
    return 0;
  }
  if (tail[0] == kPoison || head[0] == kPoison) {
    f.reasons |= kTorn;
    return 0;
  }
  if (tail[0] != head[0] || tail[1] != head[1] || tail[3] != head[3]) f.reasons |= kTorn;
  if (tail[0] >> 32 != p) f.reasons |= kPosition;
  const uint64_t term = term_of(tail[0], a.rows.salt(r));
  const Truth parent = before(a, r, i, p, previous);
  if (parent.known) {
    f.expected_lineage = (int64_t)(parent.lineage + term);
    if (f.expected_lineage != tail[1]) f.reasons |= kLineage;
  }
  if (a.slots.data && p == a.rows.prefix_lens[r] - 1) {
    f.expected_lineage = s.expected_lineage[a.rows.lineage_row(r)];
    if (f.expected_lineage != tail[1]) f.reasons |= kToken;
  }
  if (a.tokens.data) {
    const int64_t token = a.tokens.at(req, p + a.token_offset);
    if (token >= 0) {
      f.expected_word0 = pack_word0(token, p);
      if (token != (tail[0] & kTokenMask)) f.reasons |= kToken;
    }
  }
  const bool due = a.bytes.mode == kPartial || a.bytes.mode == kAll ||
                   (a.bytes.mode == kRotate && (slot + site.clock) % a.bytes.period == 0);
  if (!due) return 0;
  f.computed = fingerprint(a.bytes, slot, tail[1]);
  if (f.computed != tail[2]) f.reasons |= kRealKv;
  return a.bytes.mode != kPartial;
}

}  // namespace

namespace {

// Records and bytes of a long row lie everywhere in a pool that no cache holds.
constexpr int64_t kRecordsAhead = 16, kBytesAhead = 6;

void prefetch_element(const VerifyArgs& a, int64_t r, int64_t i, int64_t length) {
  const State& s = a.state;
  if (i + kRecordsAhead < length) {
    const int64_t slot = a.table.slot(r, i + kRecordsAhead);
    if (slot >= 0 && slot < s.num_slots) {
      __builtin_prefetch(s.tail + slot * 4);
      __builtin_prefetch(s.head + slot * 4);
    }
  }
  if (a.bytes.mode != kPartial || i + kBytesAhead >= length) return;
  const int64_t slot = a.table.slot(r, i + kBytesAhead);
  if (slot < 0 || slot >= s.num_slots) return;
  const Sample at = sample_of(a.bytes, s.tail[slot * 4 + 1]);
  prefetch_words(a.bytes.k, slot, at.layer, at.k_word);
  prefetch_words(a.bytes.v, slot, at.layer, at.v_word);
}

}  // namespace

namespace {

// Whether element i of a row, at position p of its prefix, is beyond doubt: what nearly
// every element is. Anything unusual is left to `check_record`.
bool is_sound(
    const VerifyArgs& a, int64_t r, int64_t i, int64_t p, int64_t slot, int64_t previous,
    uint64_t salt) {
  const State& s = a.state;
  if (slot < a.table.page_size || slot >= s.num_slots || a.tokens.data) return false;
  if (a.bytes.mode != kPartial && a.bytes.mode != kNoBytes) return false;
  if (a.slots.data && slot != a.slots.at(a.rows.req_rows[r], column_of(a.rows, r, p)))
    return false;
  const int64_t *tail = s.tail + slot * 4, *head = s.head + slot * 4;
  if (tail[0] == kPoison || tail[0] >> 32 != p) return false;
  if ((tail[0] ^ head[0]) | (tail[1] ^ head[1]) | (tail[3] ^ head[3])) return false;
  uint64_t parent;
  if (p == 0) {
    parent = a.rows.seed(r);
  } else if (i == 0 || previous < a.table.page_size || previous >= s.num_slots) {
    return false;
  } else {
    const int64_t* record = s.tail + previous * 4;
    if (record[0] == kPoison) return false;
    parent = (uint64_t)record[1];
  }
  if (parent + term_of(tail[0], salt) != (uint64_t)tail[1]) return false;
  if (a.slots.data && p == a.rows.prefix_lens[r] - 1 &&
      s.expected_lineage[a.rows.lineage_row(r)] != tail[1])
    return false;
  return a.bytes.mode == kNoBytes || fingerprint(a.bytes, slot, tail[1]) == tail[2];
}

}  // namespace

void verify_row(const VerifyArgs& a, const Site& site, int64_t r) {
  const State& s = a.state;
  const int64_t req = a.rows.req_rows[r];
  if (req == 0) return;
  const int64_t first = a.table.first ? a.table.first[r] : 0;
  const int64_t prefix = a.rows.prefix_lens[r], start = a.rows.start(r);
  const int64_t extend = a.rows.extend(r);
  const int64_t length = a.table.read_lens[r] > 0 ? a.table.read_lens[r] : 0;
  const uint64_t salt = a.rows.salt(r);
  int64_t rehashed = 0, visited = 0, previous = -1;
  for (int64_t i = 0; i < length; i++) {
    const int64_t p = first + i, slot = a.table.slot(r, i);
    prefetch_element(a, r, i, length);
    if (p < prefix && is_sound(a, r, i, p, slot, previous, salt)) {
      visited++;
      previous = slot;
      continue;
    }
    Found f;
    f.slot = slot;
    f.position = p;
    f.expected_word0 = pack_word0(-1, p);
    const bool in_range = slot >= 0 && slot < s.num_slots;
    if (p >= prefix) {
      f.expected_slot = p - prefix < extend ? a.rows.locs[start + p - prefix] : -1;
      if (!in_range || slot != f.expected_slot) f.reasons = kReadSet;
    } else {
      visited++;
      if (a.slots.data) f.expected_slot = a.slots.at(req, column_of(a.rows, r, p));
      if (!in_range || (a.slots.data && slot != f.expected_slot)) f.reasons |= kReadSet;
      if (in_range && slot < a.table.page_size) f.reasons |= kReadScratch;
      else if (in_range)
        rehashed += check_record(a, site, r, i, p, slot, previous, f);
    }
    previous = slot;
    if (f.reasons) report(s, site, f, a.slots.data ? req : 0, a.rows.serials[r], r);
  }
  const int64_t end = first + length;
  if (end < prefix || (end > prefix && end < prefix + extend)) {
    Found f;
    f.reasons = kReadSet;
    f.position = end;
    f.expected_word0 = pack_word0(-1, end);
    report(s, site, f, a.slots.data ? req : 0, a.rows.serials[r], r);
  }
  count(s, a.slots.data ? kVerified : kSwept, visited);
  count(s, kRehashed, rehashed);
}

namespace {

uint64_t base_of(const State& s, const Rows& rows, int64_t r) {
  return rows.prefix_lens[r] > 0 ? (uint64_t)s.expected_lineage[rows.lineage_row(r)]
                                 : rows.seed(r);
}

// body(token index, number in the row, lineage) for the row's new tokens in order.
template <class Body>
void for_each_token(const State& s, const Rows& rows, int64_t r, const Body& body) {
  if (rows.req_rows[r] == 0) return;
  const int64_t start = rows.start(r), extend = rows.extend(r);
  const uint64_t salt = rows.salt(r), base = base_of(s, rows, r);
  const auto term = [&](int64_t t) {
    return term_of(pack_word0(rows.input_ids[t], rows.positions[t]), salt);
  };
  uint64_t sum = base;
  for (int64_t j = 0; j < extend; j++) {
    const int64_t t = start + j;
    if (!rows.parents) {
      sum += term(t);
    } else {
      sum = base + term(t);
      int64_t parent = rows.parents[t];
      for (int64_t depth = 0; depth < rows.max_depth; depth++) {
        if (parent < start || parent >= start + extend) break;
        sum += term(parent);
        parent = rows.parents[parent];
      }
    }
    body(t, j, sum);
  }
}

bool is_writable(const WriteArgs& a, int64_t slot) {
  return slot >= a.page_size && slot < a.state.num_slots;
}

}  // namespace

namespace {

// A padded row of a decode may write nothing but scratch.
void check_padded_row(const WriteArgs& a, const Site& site, int64_t r) {
  const int64_t slot = a.rows.locs[r], position = a.rows.positions[r];
  if (slot >= 0 && slot < a.page_size) return;
  Found f;
  f.reasons = kForeign;
  f.slot = slot;
  f.position = position;
  f.expected_word0 = pack_word0(a.rows.input_ids[r], position);
  f.expected_lineage = (int64_t)term_of(f.expected_word0, mix64(kSaltKey));
  report(a.state, site, f, 0, 0, r);
}

}  // namespace

void check_head_row(const WriteArgs& a, const Site& site, int64_t r) {
  const State& s = a.state;
  if (a.rows.req_rows[r] == 0 && !a.rows.indptr) check_padded_row(a, site, r);
  for_each_token(s, a.rows, r, [&](int64_t t, int64_t j, uint64_t lineage) {
    const int64_t slot = a.rows.locs[t], req = a.rows.req_rows[r];
    const int64_t serial = a.rows.serials[r];
    const int64_t own = pack_word0(a.rows.input_ids[t], a.rows.positions[t]);
    Found f;
    f.slot = slot;
    f.position = a.rows.positions[t];
    f.expected_word0 = own;
    f.expected_lineage = (int64_t)lineage;
    if (slot >= 0 && slot < a.page_size) f.reasons |= kWriteScratch;
    else if (slot < 0 || slot >= s.num_slots) f.reasons |= kForeign;
    else {
      const int64_t* old = s.head + slot * 4;
      f.found_word0 = old[0];
      f.found_lineage = old[1];
      f.found_word3 = old[3];
      // A record of this very forward is an alias, which the tail write reports.
      const bool is_now = (old[3] >> 28 & kClockMask) == (site.clock & kClockMask);
      if (old[0] != kPoison && !is_now && (old[3] ^ serial) & kSerialMask)
        f.reasons |= kForeign;
    }
    if (a.slots.data && !a.rows.parents) {
      f.expected_slot =
          a.slots.at(req, column_of(a.rows, r, a.rows.prefix_lens[r] + j));
      if (slot != f.expected_slot && !(f.reasons & kWriteScratch)) f.reasons |= kForeign;
    }
    if (a.oracle_tokens) {
      const int64_t token = a.oracle_tokens[t], position = a.oracle_positions[t];
      if (token >= 0 && token != a.rows.input_ids[t]) f.reasons |= kWriteToken;
      if (position >= 0 && position != a.rows.positions[t]) f.reasons |= kWritePosition;
      f.expected_word0 = pack_word0(token, position);
      if (f.reasons & (kWriteToken | kWritePosition)) f.found_word0 = own;
    }
    if (f.reasons) report(s, site, f, req, serial, r);
  });
}

void store_head_row(const WriteArgs& a, const Site& site, int64_t r) {
  int64_t written = 0;
  for_each_token(a.state, a.rows, r, [&](int64_t t, int64_t, uint64_t lineage) {
    const int64_t slot = a.rows.locs[t];
    if (!is_writable(a, slot)) return;
    int64_t* record = a.state.head + slot * 4;
    record[0] = pack_word0(a.rows.input_ids[t], a.rows.positions[t]);
    record[1] = (int64_t)lineage;
    record[2] = 0;
    record[3] = pack_word3(site.clock, a.kind, a.rows.serials[r]);
    written++;
  });
  count(a.state, kHeadSlots, written);
}

void check_tail_row(const WriteArgs& a, const Site& site, int64_t r) {
  for_each_token(a.state, a.rows, r, [&](int64_t t, int64_t, uint64_t lineage) {
    const int64_t slot = a.rows.locs[t], serial = a.rows.serials[r];
    if (!is_writable(a, slot)) return;
    const int64_t* head = a.state.head + slot * 4;
    const int64_t own = pack_word0(a.rows.input_ids[t], a.rows.positions[t]);
    if (head[0] == own && head[3] == pack_word3(site.clock, a.kind, serial)) return;
    Found f;
    f.reasons = kAlias;
    f.slot = slot;
    f.position = a.rows.positions[t];
    f.expected_word0 = own;
    f.found_word0 = head[0];
    f.expected_lineage = (int64_t)lineage;
    f.found_lineage = head[1];
    f.found_word3 = head[3];
    report(a.state, site, f, a.rows.req_rows[r], serial, r);
  });
}

void store_tail_row(const WriteArgs& a, const Site& site, int64_t r) {
  int64_t written = 0;
  for_each_token(a.state, a.rows, r, [&](int64_t t, int64_t, uint64_t lineage) {
    const int64_t slot = a.rows.locs[t];
    if (!is_writable(a, slot)) return;
    int64_t* record = a.state.tail + slot * 4;
    record[0] = pack_word0(a.rows.input_ids[t], a.rows.positions[t]);
    record[1] = (int64_t)lineage;
    record[2] = fingerprint(a.bytes, slot, (int64_t)lineage);
    record[3] = pack_word3(site.clock, a.kind, a.rows.serials[r]);
    written++;
  });
  count(a.state, kTailSlots, written);
}

uint64_t lineage_after(const State& s, const Rows& rows, int64_t r) {
  uint64_t last = base_of(s, rows, r);
  for_each_token(s, rows, r, [&](int64_t, int64_t, uint64_t sum) { last = sum; });
  return last;
}

}  // namespace sglk::canary
