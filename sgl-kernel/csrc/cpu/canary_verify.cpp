// The KV canary's read check, one row at a time.
#include <algorithm>
#include <limits>

#include "sglang_kernels/cpu/canary.h"

namespace sglk::canary {
namespace {

struct Truth {
  bool known;
  uint64_t lineage;
};

// The lineage before element i of the row's view, if known.
Truth before(const VerifyArgs& a, int64_t r, int64_t i, int64_t p, int64_t previous) {
  const State& s = a.state;
  if (p == 0) return {true, a.rows.seed(r)};
  int64_t slot = previous;
  if (i == 0) {
    if (a.table.prev_slots) slot = a.table.prev_slots[r];
    else if (a.slots.data)
      slot = a.slots.at(a.rows.req_rows[r], shift_column(a.rows, r, p - 1));
    else slot = -1;
  }
  if (slot < a.table.page_size || slot >= s.num_slots) return {false, 0};
  const Record& record = s.tail[slot];
  return {record.word0 != kPoisonWord, bits(record.lineage)};
}

// Whether the row compares the slot's bytes now. With kRotate each slot gets one turn while the
// row grows by a period, in steps of any size.
bool is_due(const VerifyArgs& a, int64_t r, int64_t slot) {
  if (a.bytes.mode != FingerprintMode::kRotate) return a.bytes.mode != FingerprintMode::kNone;
  const int64_t period = a.bytes.period;
  const int64_t since = (slot + a.rows.prefix_lens[r]) % period;
  return (period - since) % period < a.rows.max_advance(r);
}

// Whether a record can be read: neither freed nor half freed.
bool check_halves(const Record& head, const Record& tail, Found& f) {
  const bool has_head = head.word0 != kPoisonWord, has_tail = tail.word0 != kPoisonWord;
  if (!has_head && !has_tail) {
    f.reasons |= Reason::kVerifyFreed;
  } else if (
      tail.word0 != head.word0 || tail.lineage != head.lineage || tail.word3 != head.word3) {
    f.reasons |= Reason::kVerifyTorn;
  }
  return has_head && has_tail;
}

// Compares the lineage of element i with the preceding record, and the last lineage of a
// prefix with the row's.
void check_lineages(
    const VerifyArgs& a, int64_t r, int64_t i, int64_t p, int64_t previous,
    const Record& tail, Found& f) {
  const Truth parent = before(a, r, i, p, previous);
  if (parent.known) {
    f.expected_lineage = word(parent.lineage + lineage_term(tail.word0, a.rows.salt(r)));
    if (f.expected_lineage != tail.lineage) f.reasons |= Reason::kVerifyLineage;
  }
  if (a.slots.data && p == a.rows.prefix_lens[r] - 1) {
    f.expected_lineage = a.state.expected_lineage[a.rows.lineage_row(r)];
    if (f.expected_lineage != tail.lineage) f.reasons |= Reason::kVerifyToken;
  }
}

// Compares the token at position p with the host's, if known.
void check_tokens(
    const VerifyArgs& a, int64_t r, int64_t p, const Record& tail, Found& f) {
  const int64_t token = a.tokens.at(a.rows.req_rows[r], p + a.token_offset);
  if (token < 0) return;
  f.expected_word0 = pack_word0(token, p);
  if (token != (tail.word0 & kTokenMask)) f.reasons |= Reason::kVerifyToken;
}

// Compares the bytes of a slot with its fingerprint if they are due. Returns how many slots
// were hashed whole.
int64_t check_bytes(
    const VerifyArgs& a, int64_t r, int64_t slot, const Record& tail, Found& f) {
  if (!is_due(a, r, slot)) return 0;
  f.computed_fingerprint = fingerprint(a.bytes, slot, tail.lineage);
  if (f.computed_fingerprint != tail.fingerprint) f.reasons |= Reason::kVerifyRealKv;
  return a.bytes.mode != FingerprintMode::kPartial;
}

// Checks a record against its row and fills in its words of the entry. Returns how many
// slots were hashed whole.
int64_t check_record(
    const VerifyArgs& a, int64_t r, int64_t i, int64_t p, int64_t slot, int64_t previous,
    Found& f) {
  const Record& tail = a.state.tail[slot];
  f.found_word0 = tail.word0;
  f.found_lineage = tail.lineage;
  f.found_word3 = tail.word3;
  f.found_fingerprint = tail.fingerprint;
  if (!check_halves(a.state.head[slot], tail, f)) return 0;
  if (unpack_position(tail.word0) != p) f.reasons |= Reason::kVerifyPosition;
  check_lineages(a, r, i, p, previous, tail, f);
  if (a.tokens.data) check_tokens(a, r, p, tail, f);
  return check_bytes(a, r, slot, tail, f);
}

// The records and bytes of a long row are spread over a pool that no cache holds. So a row is
// checked in blocks, three at a time: with every element that is compared, the sampled bytes
// of an element in the next block are prefetched, and the records of one in the block after
// that. If a whole block were prefetched at once, its loads would wait for each other.
constexpr int64_t kBlock = 32;

struct Block {
  int64_t begin = 0, count = 0;  // elements of the row
  bool in_range = false;         // all slots are in the pool and beyond the scratch page
  int64_t slots[kBlock];
  const int64_t *k[kBlock], *v[kBlock];  // the sampled words
  const uint64_t *k_keys[kBlock], *v_keys[kBlock];
};

// The lineage of the last element that was compared. Any bit in `wrong` means that some
// element so far is in doubt.
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

  // Prefetches the bytes that `partial` covers.
  void fetch_bytes(Block& b, int64_t j) const {
    const Bytes& bytes = a_.bytes;
    const int64_t slot = b.slots[j];
    const Sample at = sample_place(bytes, tail_[slot].lineage);
    b.k[j] = bytes.k.at(slot, at.layer) + at.k_word;
    b.v[j] = bytes.v.at(slot, at.layer) + at.v_word;
    b.k_keys[j] = bytes.k.keys + at.layer * bytes.k.count + at.k_word;
    b.v_keys[j] = bytes.v.keys + at.layer * bytes.v.count + at.v_word;
    __builtin_prefetch(b.k[j]);
    __builtin_prefetch(b.v[j]);
  }

  // The chain before a block; `previous` is the slot of the element before it.
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
    uint64_t wrong = bits(unpack_position(tail.word0) ^ (first_ + b.begin + j));
    wrong |= bits(
        (tail.word0 ^ head.word0) | (tail.lineage ^ head.lineage) | (tail.word3 ^ head.word3));
    wrong |= (chain.lineage + lineage_term(tail.word0, salt_)) ^ bits(tail.lineage);
    chain.lineage = bits(tail.lineage);
    if (samples_) {
      const uint64_t k = sum_words(b.k[j], b.k_keys[j]), v = sum_words(b.v[j], b.v_keys[j]);
      wrong |= bits(pack_fingerprint(k, v) ^ tail.fingerprint);
    }
    chain.wrong |= wrong;
  }

  // Whether every element of the block, which lies in the prefix, is sound, as in nearly
  // every block. `check_record` looks at anything unusual.
  bool is_sound(const Block& b, const Chain& chain) const {
    if (!a_.slots.data) return chain.wrong == 0;
    const int64_t req = a_.rows.req_rows[r_], p0 = first_ + b.begin;
    uint64_t wrong = chain.wrong;
    for (int64_t j = 0; j < b.count; j++)
      wrong |= bits(b.slots[j] ^ a_.slots.at(req, shift_column(a_.rows, r_, p0 + j)));
    if (p0 + b.count == a_.rows.prefix_lens[r_])
      wrong |= chain.lineage ^ bits(a_.state.expected_lineage[a_.rows.lineage_row(r_)]);
    return wrong == 0;
  }

  // Prefetches records of `incoming` and bytes of `sampled`, and returns whether `due` is
  // sound.
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

// Compares the slot of the element at position p with the table of requests, or with where the
// forward writes. Returns whether its record must be checked.
bool check_slots(const VerifyArgs& a, int64_t r, int64_t p, int64_t slot, Found& f) {
  const int64_t new_token = p - a.rows.prefix_lens[r];
  const bool in_range = slot >= 0 && slot < a.state.num_slots;
  if (new_token >= 0) {
    if (new_token < a.rows.extend(r))
      f.expected_slot = a.rows.out_cache_loc[a.rows.start(r) + new_token];
    if (!in_range || slot != f.expected_slot) f.reasons = Reason::kReadSet;
    return false;
  }
  if (a.slots.data)
    f.expected_slot = a.slots.at(a.rows.req_rows[r], shift_column(a.rows, r, p));
  if (!in_range || (a.slots.data && slot != f.expected_slot)) f.reasons |= Reason::kReadSet;
  const bool is_scratch = in_range && slot < a.table.page_size;
  if (is_scratch) f.reasons |= Reason::kReadScratch;
  return in_range && !is_scratch;
}

// Checks element i of a row; `previous` is the slot of the element before it.
void check_element(
    const VerifyArgs& a, const Site& site, int64_t r, int64_t i, int64_t slot,
    int64_t previous, Seen& seen) {
  const int64_t p = (a.table.first ? a.table.first[r] : 0) + i;
  Found f;
  f.slot = slot;
  f.position = p;
  f.expected_word0 = pack_word0(-1, p);
  seen.visited += p < a.rows.prefix_lens[r];
  if (check_slots(a, r, p, slot, f))
    seen.rehashed += check_record(a, r, i, p, slot, previous, f);
  if (!f.reasons) return;
  report(a.state, site, f, a.slots.data ? a.rows.req_rows[r] : 0, a.rows.serials[r], r);
}

// Checks elements [begin, end) one by one.
void check_elements(
    const VerifyArgs& a, const Site& site, int64_t r, int64_t begin, int64_t end,
    int64_t previous, Seen& seen) {
  for (int64_t i = begin; i < end; i++) {
    const int64_t slot = a.table.slot(r, i);
    check_element(a, site, r, i, slot, previous, seen);
    previous = slot;
  }
}

// Checks the first `end` elements of a row, all in its prefix, in blocks.
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

// Reports a read of a row that misses a position.
void report_row(const VerifyArgs& a, const Site& site, int64_t r, int64_t position) {
  Found f;
  f.reasons = Reason::kReadSet;
  f.position = position;
  f.expected_word0 = pack_word0(-1, position);
  report(a.state, site, f, a.slots.data ? a.rows.req_rows[r] : 0, a.rows.serials[r], r);
}

// A row must reach its last new token, or the end of its prefix if the view excludes new
// tokens, and begin where the reach of the view demands.
void check_length(
    const VerifyArgs& a, const Site& site, int64_t r, int64_t first, int64_t length) {
  const int64_t prefix = a.rows.prefix_lens[r], end = first + length;
  const int64_t due = std::max<int64_t>(prefix - a.table.reach, 0);
  const bool is_late = a.table.reach >= 0 && first > due;
  const bool is_short =
      end < prefix + a.rows.extend(r) && (a.table.takes_new || end != prefix);
  if (is_late || is_short) report_row(a, site, r, is_late ? due : end);
}

// Attention must count the prefix and the new tokens from the first element on, as the forward
// does. The first due position that differs is reported.
void check_counting(const VerifyArgs& a, const Site& site, int64_t r, int64_t first) {
  constexpr int64_t kNowhere = std::numeric_limits<int64_t>::max();
  const Table& table = a.table;
  const int64_t prefix = a.rows.prefix_lens[r];
  int64_t differs = kNowhere;
  if (table.prefix_lens && first + table.prefix_lens[r] != prefix) differs = prefix;
  const int64_t begin = a.rows.start(r), end = begin + (table.positions ? a.rows.extend(r) : 0);
  for (int64_t i = begin; i < end; i++) {
    const int64_t due = a.rows.positions[i];
    if (first + table.positions[i] != due) differs = std::min(differs, due);
  }
  if (differs != kNowhere) report_row(a, site, r, differs);
}

}  // namespace

void verify_row(const VerifyArgs& a, const Site& site, int64_t r) {
  const State& s = a.state;
  if (a.rows.req_rows[r] == 0) return;
  const int64_t first = a.table.first ? a.table.first[r] : 0;
  const int64_t prefix = a.rows.prefix_lens[r];
  const int64_t length = std::max<int64_t>(a.table.read_lens[r], 0);
  const bool is_plain = !a.tokens.data && (a.bytes.mode == FingerprintMode::kPartial ||
                                           a.bytes.mode == FingerprintMode::kNone);
  const int64_t old = is_plain ? std::min(std::max<int64_t>(prefix - first, 0), length) : 0;
  Seen seen;
  check_blocks(a, site, r, old, seen);
  check_elements(a, site, r, old, length, old > 0 ? a.table.slot(r, old - 1) : -1, seen);
  check_length(a, site, r, first, length);
  check_counting(a, site, r, first);
  count(s, a.slots.data ? Counter::kVerifiedSlots : Counter::kSweptSlots, seen.visited);
  count(s, Counter::kRehashedSlots, seen.rehashed);
}

}  // namespace sglk::canary
