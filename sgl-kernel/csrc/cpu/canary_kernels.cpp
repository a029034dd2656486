// The KV canary's checks and record writes, one row at a time.
#include "sglang_kernels/cpu/canary.h"

#include <algorithm>

namespace sglk::canary {
namespace {

struct Truth {
  bool known;
  uint64_t lineage;
};

// Lineage before element i of the row's view.
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
  const Record& record = s.tail[slot];
  return {record.word0 != kPoisonWord, bits(record.lineage)};
}

// Whether the row looks at the slot's bytes now. In kRotate each slot has its turn while the
// row grows by a period, whatever its steps.
bool is_due(const VerifyArgs& a, int64_t r, int64_t slot) {
  if (a.bytes.mode != FingerprintMode::kRotate) return a.bytes.mode != FingerprintMode::kNone;
  const int64_t period = a.bytes.period;
  const int64_t since = (slot + a.rows.prefix_lens[r]) % period;
  return (period - since) % period < a.rows.max_advance(r);
}

// The checks of a record against its row; fills in its words of the entry. Returns how many
// slots were hashed whole.
int64_t check_record(
    const VerifyArgs& a, int64_t r, int64_t i, int64_t p, int64_t slot, int64_t previous,
    Found& f) {
  const State& s = a.state;
  const Record &tail = s.tail[slot], &head = s.head[slot];
  const int64_t req = a.rows.req_rows[r];
  f.found_word0 = tail.word0;
  f.found_lineage = tail.lineage;
  f.found_word3 = tail.word3;
  f.found_fingerprint = tail.fingerprint;
  if (tail.word0 == kPoisonWord && head.word0 == kPoisonWord) {
    f.reasons |= Reason::kVerifyFreed;
    return 0;
  }
  if (tail.word0 == kPoisonWord || head.word0 == kPoisonWord) {
    f.reasons |= Reason::kVerifyTorn;
    return 0;
  }
  if (tail.word0 != head.word0 || tail.lineage != head.lineage || tail.word3 != head.word3)
    f.reasons |= Reason::kVerifyTorn;
  if (position_of(tail.word0) != p) f.reasons |= Reason::kVerifyPosition;
  const uint64_t term = term_of(tail.word0, a.rows.salt(r));
  const Truth parent = before(a, r, i, p, previous);
  if (parent.known) {
    f.expected_lineage = word(parent.lineage + term);
    if (f.expected_lineage != tail.lineage) f.reasons |= Reason::kVerifyLineage;
  }
  if (a.slots.data && p == a.rows.prefix_lens[r] - 1) {
    f.expected_lineage = s.expected_lineage[a.rows.lineage_row(r)];
    if (f.expected_lineage != tail.lineage) f.reasons |= Reason::kVerifyToken;
  }
  if (a.tokens.data) {
    const int64_t token = a.tokens.at(req, p + a.token_offset);
    if (token >= 0) {
      f.expected_word0 = pack_word0(token, p);
      if (token != (tail.word0 & kTokenMask)) f.reasons |= Reason::kVerifyToken;
    }
  }
  if (!is_due(a, r, slot)) return 0;
  f.computed_fingerprint = fingerprint(a.bytes, slot, tail.lineage);
  if (f.computed_fingerprint != tail.fingerprint) f.reasons |= Reason::kVerifyRealKv;
  return a.bytes.mode != FingerprintMode::kPartial;
}

// Records and bytes of a long row lie everywhere in a pool that no cache holds, so that a
// row is checked in blocks, three of which are under way: with every element that is
// compared, the sampled bytes of one in the next block are sent for, and the records of one
// in the block after it. Sent for a block at once, they would wait for each other.
constexpr int64_t kBlock = 32;

struct Block {
  int64_t begin = 0, count = 0;  // elements of the row
  bool in_range = false;         // all slots are in the pool and beyond the scratch page
  int64_t slots[kBlock];
  const int64_t *k[kBlock], *v[kBlock];  // the sampled words
  const uint64_t *k_keys[kBlock], *v_keys[kBlock];
};

// Lineage of the last element that was compared; bits of `wrong` say that some element
// before it is not beyond doubt.
struct Chain {
  uint64_t lineage, wrong;
};

class Scan {
 public:
  Scan(const VerifyArgs& args, int64_t row)
      : a_(args),
        head_(args.state.head),
        tail_(args.state.tail),
        r_(row),
        salt_(args.rows.salt(row)),
        first_(args.table.first ? args.table.first[row] : 0),
        samples_(args.bytes.mode == FingerprintMode::kPartial) {}

  // Looks up the slots of elements begin .. begin + count - 1.
  void start(Block& b, int64_t begin, int64_t count) const {
    b.begin = begin;
    b.count = count;
    a_.table.slots(r_, begin, count, b.slots);
    b.in_range = true;
    for (int64_t j = 0; j < count; j++) b.in_range &= is_readable(b.slots[j]);
  }

  void fetch_records(const Block& b, int64_t j) const {
    __builtin_prefetch(tail_ + b.slots[j]);
    __builtin_prefetch(head_ + b.slots[j]);
  }

  // Sends for the bytes that `partial` covers.
  void fetch_bytes(Block& b, int64_t j) const {
    const Bytes& bytes = a_.bytes;
    const int64_t slot = b.slots[j];
    const Sample at = sample_of(bytes, tail_[slot].lineage);
    b.k[j] = bytes.k.at(slot, at.layer) + at.k_word;
    b.v[j] = bytes.v.at(slot, at.layer) + at.v_word;
    b.k_keys[j] = bytes.k.keys + at.layer * bytes.k.count + at.k_word;
    b.v_keys[j] = bytes.v.keys + at.layer * bytes.v.count + at.v_word;
    __builtin_prefetch(b.k[j]);
    __builtin_prefetch(b.v[j]);
  }

  // The chain before a block's elements; `previous`: slot of the element before it.
  Chain open(const Block& b, int64_t previous) const {
    if (!b.in_range) return {0, 1};
    if (first_ + b.begin == 0) return {a_.rows.seed(r_), 0};
    if (b.begin == 0 || !is_readable(previous)) return {0, 1};
    const Record& tail = tail_[previous];
    return {bits(tail.lineage), tail.word0 == kPoisonWord};
  }

  void compare(const Block& b, int64_t j, Chain& chain) const {
    const Record &tail = tail_[b.slots[j]], &head = head_[b.slots[j]];
    // Poison has position -1, which no element has.
    uint64_t wrong = bits(position_of(tail.word0) ^ (first_ + b.begin + j));
    wrong |= bits(
        (tail.word0 ^ head.word0) | (tail.lineage ^ head.lineage) | (tail.word3 ^ head.word3));
    wrong |= (chain.lineage + term_of(tail.word0, salt_)) ^ bits(tail.lineage);
    chain.lineage = bits(tail.lineage);
    if (samples_) {
      const uint64_t k = sum_words(b.k[j], b.k_keys[j]), v = sum_words(b.v[j], b.v_keys[j]);
      wrong |= bits(pack_fingerprint(k, v) ^ tail.fingerprint);
    }
    chain.wrong |= wrong;
  }

  // Whether every element of the block, all of the prefix, is beyond doubt, as in nearly
  // every block. Anything unusual is left to `check_record`.
  bool is_sound(const Block& b, const Chain& chain) const {
    if (!a_.slots.data) return chain.wrong == 0;
    const int64_t req = a_.rows.req_rows[r_], p0 = first_ + b.begin;
    uint64_t wrong = chain.wrong;
    for (int64_t j = 0; j < b.count; j++)
      wrong |= bits(b.slots[j] ^ a_.slots.at(req, column_of(a_.rows, r_, p0 + j)));
    if (p0 + b.count == a_.rows.prefix_lens[r_])
      wrong |= chain.lineage ^ bits(a_.state.expected_lineage[a_.rows.lineage_row(r_)]);
    return wrong == 0;
  }

  // Takes a step with each of the three blocks: records of `incoming`, bytes of `sampled`,
  // and the comparison of `due`, whose outcome it returns.
  bool advance(
      const Block& incoming, Block& sampled, const Block& due, int64_t previous) const {
    const int64_t records = incoming.in_range ? incoming.count : 0;
    const int64_t bytes = samples_ && sampled.in_range ? sampled.count : 0;
    Chain chain = open(due, previous);
    const int64_t compared = chain.wrong ? 0 : due.count;
    for (int64_t j = 0; j < kBlock; j++) {
      if (j < records) fetch_records(incoming, j);
      if (j < bytes) fetch_bytes(sampled, j);
      if (j < compared) compare(due, j, chain);
    }
    return is_sound(due, chain);
  }

 private:
  bool is_readable(int64_t slot) const {
    return slot >= a_.table.page_size && slot < a_.state.num_slots;
  }

  const VerifyArgs& a_;
  const Record *head_, *tail_;
  int64_t r_;
  uint64_t salt_;
  int64_t first_;
  bool samples_;
};

// Elements counted so far.
struct Seen {
  int64_t visited = 0, rehashed = 0;
};

// The checks of element i of a row, `previous` being the slot of the one before it.
void check_element(
    const VerifyArgs& a, const Site& site, int64_t r, int64_t i, int64_t slot,
    int64_t previous, Seen& seen) {
  const State& s = a.state;
  const int64_t req = a.rows.req_rows[r], start = a.rows.start(r);
  const int64_t p = (a.table.first ? a.table.first[r] : 0) + i;
  const int64_t new_token = p - a.rows.prefix_lens[r];
  Found f;
  f.slot = slot;
  f.position = p;
  f.expected_word0 = pack_word0(-1, p);
  const bool in_range = slot >= 0 && slot < s.num_slots;
  if (new_token >= 0) {
    if (new_token < a.rows.extend(r)) f.expected_slot = a.rows.out_cache_loc[start + new_token];
    if (!in_range || slot != f.expected_slot) f.reasons = Reason::kReadSet;
  } else {
    seen.visited++;
    if (a.slots.data) f.expected_slot = a.slots.at(req, column_of(a.rows, r, p));
    if (!in_range || (a.slots.data && slot != f.expected_slot)) f.reasons |= Reason::kReadSet;
    if (in_range && slot < a.table.page_size) f.reasons |= Reason::kReadScratch;
    else if (in_range)
      seen.rehashed += check_record(a, r, i, p, slot, previous, f);
  }
  if (f.reasons) report(s, site, f, a.slots.data ? req : 0, a.rows.serials[r], r);
}

// Elements begin .. end - 1, one after the other.
void check_elements(
    const VerifyArgs& a, const Site& site, int64_t r, int64_t begin, int64_t end,
    int64_t previous, Seen& seen) {
  for (int64_t i = begin; i < end; i++) {
    const int64_t slot = a.table.slot(r, i);
    check_element(a, site, r, i, slot, previous, seen);
    previous = slot;
  }
}

// The first `end` elements of a row, all of its prefix, in blocks.
void check_blocks(
    const VerifyArgs& a, const Site& site, int64_t r, int64_t end, Seen& seen) {
  const Scan scan(a, r);
  Block blocks[3];
  const int64_t count = (end + kBlock - 1) / kBlock;
  int64_t previous = -1;
  for (int64_t n = 0; n < count + 2; n++) {
    Block &incoming = blocks[n % 3], &due = blocks[(n + 1) % 3];
    const int64_t begin = n * kBlock;
    scan.start(incoming, begin, std::max<int64_t>(std::min(kBlock, end - begin), 0));
    const bool is_sound = scan.advance(incoming, blocks[(n + 2) % 3], due, previous);
    if (n < 2) continue;
    if (is_sound) seen.visited += due.count;
    else check_elements(a, site, r, due.begin, due.begin + due.count, previous, seen);
    previous = due.slots[due.count - 1];
  }
}

}  // namespace

void verify_row(const VerifyArgs& a, const Site& site, int64_t r) {
  const State& s = a.state;
  const int64_t req = a.rows.req_rows[r];
  if (req == 0) return;
  const int64_t first = a.table.first ? a.table.first[r] : 0;
  const int64_t prefix = a.rows.prefix_lens[r], extend = a.rows.extend(r);
  const int64_t length = std::max<int64_t>(a.table.read_lens[r], 0);
  const bool is_plain = !a.tokens.data && (a.bytes.mode == FingerprintMode::kPartial ||
                                           a.bytes.mode == FingerprintMode::kNone);
  const int64_t old = is_plain ? std::min(std::max<int64_t>(prefix - first, 0), length) : 0;
  Seen seen;
  check_blocks(a, site, r, old, seen);
  check_elements(a, site, r, old, length, old > 0 ? a.table.slot(r, old - 1) : -1, seen);
  const int64_t end = first + length;
  const int64_t due = std::max<int64_t>(prefix - a.table.reach, 0);
  const bool is_late = a.table.reach >= 0 && first > due;
  if (is_late || (end < prefix + extend && (a.table.takes_new || end != prefix))) {
    Found f;
    f.reasons = Reason::kReadSet;
    f.position = is_late ? due : end;
    f.expected_word0 = pack_word0(-1, f.position);
    report(s, site, f, a.slots.data ? req : 0, a.rows.serials[r], r);
  }
  count(s, a.slots.data ? Counter::kVerifiedSlots : Counter::kSweptSlots, seen.visited);
  count(s, Counter::kRehashedSlots, seen.rehashed);
}

namespace {

uint64_t base_of(const State& s, const Rows& rows, int64_t r) {
  return rows.prefix_lens[r] > 0 ? bits(s.expected_lineage[rows.lineage_row(r)])
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
    if (!rows.parent_index) {
      sum += term(t);
    } else {
      sum = base + term(t);
      int64_t parent = rows.parent_index[t];
      for (int64_t depth = 0; depth < rows.max_depth; depth++) {
        if (parent < start || parent >= start + extend) break;
        sum += term(parent);
        parent = rows.parent_index[parent];
      }
    }
    body(t, j, sum);
  }
}

bool is_writable(const WriteArgs& a, int64_t slot) {
  return slot >= a.page_size && slot < a.state.num_slots;
}

// The record of new token t of a row, without a fingerprint.
Record own_record(
    const WriteArgs& a, const Site& site, int64_t r, int64_t t, uint64_t lineage) {
  return {
      pack_word0(a.rows.input_ids[t], a.rows.positions[t]), word(lineage), 0,
      pack_word3(site.clock, a.writer_kind, a.rows.serials[r])};
}

// A padded row may write nothing but scratch.
void check_padded_row(const WriteArgs& a, const Site& site, int64_t r) {
  const Rows& rows = a.rows;
  const int64_t end = rows.qo_indptr ? std::min(rows.qo_indptr[r + 1], rows.tokens) : r + 1;
  for (int64_t t = rows.start(r); t < end; t++) {
    const int64_t slot = rows.out_cache_loc[t];
    if (slot >= 0 && slot < a.page_size) continue;
    Found f;
    f.reasons = Reason::kWriteForeign;
    f.slot = slot;
    f.position = rows.positions[t];
    f.expected_word0 = pack_word0(rows.input_ids[t], f.position);
    report(a.state, site, f, 0, 0, r);
  }
}

// Whether the old record of `slot` says that it holds what this request has there, or reads
// there: that it may not be written now.
bool is_taken(const WriteArgs& a, const Site& site, int64_t r, int64_t slot) {
  const Record& old = a.state.head[slot];
  if (old.word0 == kPoisonWord) return false;
  // A record of this very forward is an alias, which the tail write reports.
  if (clock_of(old.word3) == (site.clock & kClockMask)) return false;
  if ((old.word3 ^ a.rows.serials[r]) & kSerialMask) return true;
  const int64_t p = position_of(old.word0);
  return a.slots.data && p < a.rows.prefix_lens[r] &&
         a.slots.at(a.rows.req_rows[r], column_of(a.rows, r, p)) == slot;
}

// Notes that the input of new token t is not what is due.
void expect_input(const WriteArgs& a, int64_t t, int64_t due, int64_t reasons, Found& f) {
  if (!reasons) return;
  f.reasons |= reasons;
  f.expected_word0 = due;
  f.found_word0 = pack_word0(a.rows.input_ids[t], a.rows.positions[t]);
}

// Ancestors of a token within its row, and whether they precede their children up to one
// without a parent.
struct Depth {
  int64_t ancestors;
  bool is_sound;
};

Depth depth_of(const Rows& rows, int64_t start, int64_t t) {
  int64_t child = t, parent = rows.parent_index[t], ancestors = 0;
  for (; ancestors < rows.max_depth && parent >= start && parent < child; ancestors++) {
    child = parent;
    parent = rows.parent_index[parent];
  }
  return {ancestors, parent == -1};
}

// Whether token j of a row, at t, attends to what its parent does and itself.
bool has_sound_mask(const WriteArgs& a, int64_t t, int64_t j, int64_t start) {
  const int64_t parent = a.rows.parent_index[t];
  const bool* own = a.tree_mask + t * a.mask_width;
  const bool* of_parent =
      parent >= start && parent < t ? a.tree_mask + parent * a.mask_width : nullptr;
  bool wrong = false;
  for (int64_t i = 0; i < a.mask_width; i++)
    wrong |= own[i] != ((of_parent && of_parent[i]) || i == j);
  return !wrong;
}

// The place of new token j of a row: its position, in a tree also its parent and its mask.
void check_shape(const WriteArgs& a, int64_t r, int64_t t, int64_t j, Found& f) {
  const Rows& rows = a.rows;
  const int64_t position = rows.positions[t];
  int64_t reasons = 0, due = rows.prefix_lens[r] + j;
  if (rows.parent_index) {
    const int64_t start = rows.start(r);
    const Depth depth = depth_of(rows, start, t);
    const bool is_orphan = j && rows.parent_index[t] == -1;
    due = is_orphan ? position : rows.prefix_lens[r] + depth.ancestors;
    if (is_orphan || !depth.is_sound || (a.tree_mask && !has_sound_mask(a, t, j, start)))
      reasons |= Reason::kTreeShape;
  }
  if (due != position) reasons |= Reason::kWritePosition;
  expect_input(a, t, pack_word0(rows.input_ids[t], due), reasons, f);
}

// The first new token of a row against what is known of its request; branches have none of
// their own.
void check_request(const WriteArgs& a, int64_t r, int64_t t, Found& f) {
  if (a.rows.lineage_rows) return;
  const Request& known = a.state.requests[a.rows.req_rows[r]];
  int64_t reasons = 0;
  if (known.serial != kUnknown && known.serial != a.rows.serials[r])
    f.reasons |= Reason::kRowOwner;
  const int64_t own = pack_word0(a.rows.input_ids[t], a.rows.positions[t]);
  const int64_t unlike = known.next_word0 == kUnknown ? 0 : known.next_word0 ^ own;
  if (unlike & kTokenMask) reasons |= Reason::kWriteToken;
  if (position_of(unlike)) reasons |= Reason::kWritePosition;
  expect_input(a, t, known.next_word0, reasons, f);
}

// The input of new token j of a row against what was published; a draft step, and a
// verification after its roots, read proposals.
void check_published(const WriteArgs& a, int64_t r, int64_t t, int64_t j, Found& f) {
  if (a.writer_kind == WriterKind::kDraft) return;
  if (a.writer_kind == WriterKind::kVerify && j) return;
  const int64_t position = a.rows.prefix_lens[r] + j;
  const int64_t token = a.published.at(a.rows.req_rows[r], position + a.token_offset);
  if (token < 0 || token == a.rows.input_ids[t]) return;
  expect_input(a, t, pack_word0(token, position), Reason::kWriteToken, f);
}

// The input of new token t against the oracle.
void check_oracle(const WriteArgs& a, int64_t t, int64_t own_word0, Found& f) {
  const int64_t token = a.oracle_tokens[t], position = a.oracle_positions[t];
  if (token >= 0 && token != a.rows.input_ids[t]) f.reasons |= Reason::kWriteToken;
  if (position >= 0 && position != a.rows.positions[t]) f.reasons |= Reason::kWritePosition;
  f.expected_word0 = pack_word0(token, position);
  if (f.reasons & (Reason::kWriteToken | Reason::kWritePosition)) f.found_word0 = own_word0;
}

// Body(words of a layer's K or V in the slot, how many) where all bytes are covered.
template <class Body>
void for_each_part(const Bytes& bytes, int64_t slot, const Body& body) {
  if (bytes.mode != FingerprintMode::kAll) return;
  for (int64_t layer = 0; layer < bytes.layers; layer++)
    for (const Words* words : {&bytes.k, &bytes.v}) body(words->at(slot, layer), words->count);
}

// Makes a store that does not happen show.
void fill_sentinel(const Bytes& bytes, int64_t slot) {
  for_each_part(bytes, slot, [](const int64_t* words, int64_t count) {
    // The one launch that writes what it otherwise reads.
    std::fill_n(const_cast<int64_t*>(words), count, kSentinel);
  });
}

// Whether the first or the last word of a part still is the sentinel.
bool has_sentinel(const Bytes& bytes, int64_t slot) {
  bool found = false;
  for_each_part(bytes, slot, [&](const int64_t* words, int64_t count) {
    found |= words[0] == kSentinel || words[count - 1] == kSentinel;
  });
  return found;
}

// The slot of new token j of a row: whether it may be written, and whether it is due.
void check_slot(const WriteArgs& a, const Site& site, int64_t r, int64_t j, Found& f) {
  const int64_t slot = f.slot;
  if (slot >= 0 && slot < a.page_size) {
    f.reasons |= Reason::kWriteScratch;
  } else if (slot < 0 || slot >= a.state.num_slots) {
    f.reasons |= Reason::kWriteForeign;
  } else {
    const Record& old = a.state.head[slot];
    f.found_word0 = old.word0;
    f.found_lineage = old.lineage;
    f.found_word3 = old.word3;
    if (is_taken(a, site, r, slot)) f.reasons |= Reason::kWriteForeign;
  }
  if (!a.slots.data) return;
  const int64_t column = column_of(a.rows, r, a.rows.prefix_lens[r] + j);
  f.expected_slot = a.slots.at(a.rows.req_rows[r], column);
  if (slot != f.expected_slot && !(f.reasons & Reason::kWriteScratch))
    f.reasons |= Reason::kWriteForeign;
}

}  // namespace

void check_head_row(const WriteArgs& a, const Site& site, int64_t r) {
  if (a.rows.req_rows[r] == 0) check_padded_row(a, site, r);
  for_each_token(a.state, a.rows, r, [&](int64_t t, int64_t j, uint64_t lineage) {
    const int64_t own = pack_word0(a.rows.input_ids[t], a.rows.positions[t]);
    Found f;
    f.slot = a.rows.out_cache_loc[t];
    f.position = a.rows.positions[t];
    f.expected_word0 = own;
    f.expected_lineage = word(lineage);
    check_slot(a, site, r, j, f);
    check_shape(a, r, t, j, f);
    if (j == 0) check_request(a, r, t, f);
    if (a.published.data) check_published(a, r, t, j, f);
    if (a.oracle_tokens) check_oracle(a, t, own, f);
    if (f.reasons) report(a.state, site, f, a.rows.req_rows[r], a.rows.serials[r], r);
  });
}

void store_head_row(const WriteArgs& a, const Site& site, int64_t r) {
  int64_t written = 0;
  for_each_token(a.state, a.rows, r, [&](int64_t t, int64_t, uint64_t lineage) {
    const int64_t slot = a.rows.out_cache_loc[t];
    if (!is_writable(a, slot)) return;
    a.state.head[slot] = own_record(a, site, r, t, lineage);
    fill_sentinel(a.bytes, slot);
    written++;
  });
  count(a.state, Counter::kHeadSlots, written);
}

void check_tail_row(const WriteArgs& a, const Site& site, int64_t r) {
  for_each_token(a.state, a.rows, r, [&](int64_t t, int64_t, uint64_t lineage) {
    const int64_t slot = a.rows.out_cache_loc[t];
    if (!is_writable(a, slot)) return;
    const Record &head = a.state.head[slot], own = own_record(a, site, r, t, lineage);
    Found f;
    if (head.word0 != own.word0 || head.lineage != own.lineage || head.word3 != own.word3)
      f.reasons |= Reason::kWriteAlias;
    if (has_sentinel(a.bytes, slot)) f.reasons |= Reason::kWriteMissing;
    if (!f.reasons) return;
    f.slot = slot;
    f.position = a.rows.positions[t];
    f.expected_word0 = own.word0;
    f.found_word0 = head.word0;
    f.expected_lineage = own.lineage;
    f.found_lineage = head.lineage;
    f.found_word3 = head.word3;
    report(a.state, site, f, a.rows.req_rows[r], a.rows.serials[r], r);
  });
}

void store_tail_row(const WriteArgs& a, const Site& site, int64_t r) {
  int64_t written = 0;
  for_each_token(a.state, a.rows, r, [&](int64_t t, int64_t, uint64_t lineage) {
    const int64_t slot = a.rows.out_cache_loc[t];
    if (!is_writable(a, slot)) return;
    Record own = own_record(a, site, r, t, lineage);
    own.fingerprint = fingerprint(a.bytes, slot, own.lineage);
    a.state.tail[slot] = own;
    written++;
  });
  count(a.state, Counter::kTailSlots, written);
}

void check_path(const State& s, const Site& site, const Path& path, int64_t q) {
  if (path.req_rows[q] == 0) return;
  const int64_t root = q * path.nodes, end = root + path.nodes;
  const int64_t length = path.accept_lens[q];
  const int64_t *accepted = path.accept_index + q * path.width,
                *gained = path.gained + q * path.width;
  int64_t before = root, due = 0;
  const auto doubt = [&](int64_t i, int64_t wanted, int64_t found) {
    Found f;
    f.reasons = Reason::kAcceptPath;
    f.position = path.prefix_lens[q] + i;
    f.expected_word0 = pack_word0(wanted, f.position + 1);
    f.found_word0 = pack_word0(found, f.position + 1);
    report(s, site, f, path.req_rows[q], path.serials[q], q);
  };
  if (length < 1 || length > path.width) return doubt(0, -1, length);
  for (int64_t i = 0; i < length; i++) {
    const int64_t node = accepted[i];
    const bool inside = node >= root && node < end;
    const int64_t at = inside ? node : root;
    const int64_t follows = path.predict[at];
    const int64_t choice = path.choices ? path.choices[at] : follows;
    bool wrong = i == 0 ? node != root
                        : !inside || path.parent_index[at] != before || path.tokens[at] != due;
    wrong |= gained[i] != follows || choice != follows;
    if (wrong) return doubt(i, choice, gained[i]);
    before = at;
    due = follows;
  }
  if (!path.choices || length == path.width) return;
  const int64_t choice = path.choices[before];
  for (int64_t node = root; node < end; node++)
    if (path.parent_index[node] == before && path.tokens[node] == choice)
      return doubt(length - 1, choice, -1);
}

bool is_carried(const Carried& rows, int64_t i) {
  return rows.places[i] >= 0 && rows.req_rows[i / rows.group] != 0;
}

int64_t carried_sum(const Carried& rows, int64_t i) {
  const auto term = [](int64_t word, int64_t place) {
    const uint64_t key = static_cast<uint64_t>(place + 1) * kCarriedKey;
    const auto mixed = static_cast<int64_t>((word + key) * kCarriedFactor);
    return static_cast<uint64_t>(mixed ^ (mixed >> 32));
  };
  uint64_t sum = term(rows.serials[i / rows.group], -1);
  for (int64_t j = 0; j < rows.width; j++)
    sum += term(rows.words[i * rows.row_stride + j], j);
  for (int64_t k = 0; k < rows.known; k++) {
    sum += term(rows.ids[i * rows.known + k], rows.width + 2 * k);
    sum += term(rows.bits[i * rows.known + k], rows.width + 2 * k + 1);
  }
  return static_cast<int64_t>(sum);
}

void check_carried(const State& s, const Site& site, const Carried& rows, int64_t i) {
  const int64_t due = rows.sums[rows.places[i]], found = carried_sum(rows, i);
  if (due == found) return;
  const int64_t request = i / rows.group;
  Found f;
  f.reasons = Reason::kCarriedState;
  f.position = rows.positions[request];
  f.expected_lineage = due;
  f.found_lineage = found;
  report(s, site, f, rows.req_rows[request], rows.serials[request], request);
}

uint64_t lineage_after(const State& s, const Rows& rows, int64_t r) {
  uint64_t last = base_of(s, rows, r);
  const int64_t end = rows.start(r) + rows.staying(r);
  for_each_token(s, rows, r, [&](int64_t t, int64_t, uint64_t sum) {
    if (t < end) last = sum;
  });
  return last;
}

}  // namespace sglk::canary
