// The KV canary's record writes and their checks, one row at a time.
#include <algorithm>

#include "sglang_kernels/cpu/canary_rows.h"

namespace sglk::canary {
namespace {

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

// A padded row may write only to the scratch page.
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

// Whether the old record of `slot` shows that another request holds it, or that this one
// reads it, so that it must not be written now.
bool is_taken(const WriteArgs& a, const Site& site, int64_t r, int64_t slot) {
  const Record& old = a.state.head[slot];
  if (old.word0 == kPoisonWord) return false;
  // A record of this same forward is an alias, which the tail write reports.
  if (unpack_clock(old.word3) == (site.clock & kClockMask)) return false;
  if ((old.word3 ^ a.rows.serials[r]) & kSerialMask) return true;
  const int64_t p = unpack_position(old.word0);
  return a.slots.data && p < a.rows.prefix_lens[r] &&
         a.slots.at(a.rows.req_rows[r], shift_column(a.rows, r, p)) == slot;
}

// Records what was due as the input of new token t.
void expect_input(const WriteArgs& a, int64_t t, int64_t due, int64_t reasons, Found& f) {
  if (!reasons) return;
  f.reasons |= reasons;
  f.expected_word0 = due;
  f.found_word0 = pack_word0(a.rows.input_ids[t], a.rows.positions[t]);
}

// The number of ancestors of a token within its row, and whether each precedes its child up
// to one without a parent.
struct Depth {
  int64_t ancestors;
  bool is_sound;
};

Depth find_depth(const Rows& rows, int64_t start, int64_t t) {
  int64_t child = t, parent = rows.parent_index[t], ancestors = 0;
  for (; ancestors < rows.max_depth && parent >= start && parent < child; ancestors++) {
    child = parent;
    parent = rows.parent_index[parent];
  }
  return {ancestors, parent == -1};
}

// Whether token j of a row, at t, attends to itself and to whatever its parent attends to.
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

// Compares the position of new token j of a row, and in a tree its parent and mask, with its
// place.
void check_shape(const WriteArgs& a, int64_t r, int64_t t, int64_t j, Found& f) {
  const Rows& rows = a.rows;
  const int64_t position = rows.positions[t];
  int64_t reasons = 0, due = rows.prefix_lens[r] + j;
  if (rows.parent_index) {
    const int64_t start = rows.start(r);
    const Depth depth = find_depth(rows, start, t);
    const bool is_orphan = j && rows.parent_index[t] == -1;
    due = is_orphan ? position : rows.prefix_lens[r] + depth.ancestors;
    if (is_orphan || !depth.is_sound || (a.tree_mask && !has_sound_mask(a, t, j, start)))
      reasons |= Reason::kTreeShape;
  }
  if (due != position) reasons |= Reason::kWritePosition;
  expect_input(a, t, pack_word0(rows.input_ids[t], due), reasons, f);
}

// Compares the first new token of a row with the known state of its request. A branch belongs
// to no request.
void check_request(const WriteArgs& a, int64_t r, int64_t t, Found& f) {
  if (a.rows.lineage_rows) return;
  const Request& known = a.state.requests[a.rows.req_rows[r]];
  int64_t reasons = 0;
  if (known.serial != kUnknown && known.serial != a.rows.serials[r])
    f.reasons |= Reason::kRowOwner;
  const int64_t own = pack_word0(a.rows.input_ids[t], a.rows.positions[t]);
  const int64_t unlike = known.next_word0 == kUnknown ? 0 : known.next_word0 ^ own;
  if (unlike & kTokenMask) reasons |= Reason::kWriteToken;
  if (unpack_position(unlike)) reasons |= Reason::kWritePosition;
  expect_input(a, t, known.next_word0, reasons, f);
}

// Compares the input of new token j of a row with the published token. A draft step, and a
// verification after its roots, read proposals.
void check_published(const WriteArgs& a, int64_t r, int64_t t, int64_t j, Found& f) {
  if (a.writer_kind == WriterKind::kDraft) return;
  if (a.writer_kind == WriterKind::kVerify && j) return;
  const int64_t position = a.rows.prefix_lens[r] + j;
  const int64_t token = a.published.at(a.rows.req_rows[r], position + a.token_offset);
  if (token < 0 || token == a.rows.input_ids[t]) return;
  expect_input(a, t, pack_word0(token, position), Reason::kWriteToken, f);
}

// Compares the input of new token t with the oracle of tests.
void check_oracle(const WriteArgs& a, int64_t t, int64_t own_word0, Found& f) {
  const int64_t token = a.oracle_tokens[t], position = a.oracle_positions[t];
  if (token >= 0 && token != a.rows.input_ids[t]) f.reasons |= Reason::kWriteToken;
  if (position >= 0 && position != a.rows.positions[t]) f.reasons |= Reason::kWritePosition;
  f.expected_word0 = pack_word0(token, position);
  if (f.reasons & (Reason::kWriteToken | Reason::kWritePosition)) f.found_word0 = own_word0;
}

// body(words, count) for K and V of each layer in the slot, if all bytes are covered.
template <class Body>
void for_each_part(const Bytes& bytes, int64_t slot, const Body& body) {
  if (bytes.mode != FingerprintMode::kAll) return;
  for (int64_t layer = 0; layer < bytes.layers; layer++)
    for (const Words* words : {&bytes.k, &bytes.v}) body(words->at(slot, layer), words->count);
}

// Fills the slot so that a missing store shows.
void fill_sentinel(const Bytes& bytes, int64_t slot) {
  for_each_part(bytes, slot, [](const int64_t* words, int64_t count) {
    // Only this launch writes what the others read.
    std::fill_n(const_cast<int64_t*>(words), count, kSentinel);
  });
}

// Whether the first or last word of a part is still the sentinel.
bool has_sentinel(const Bytes& bytes, int64_t slot) {
  bool found = false;
  for_each_part(bytes, slot, [&](const int64_t* words, int64_t count) {
    found |= words[0] == kSentinel || words[count - 1] == kSentinel;
  });
  return found;
}

// Checks that the slot of new token j of a row may be written and matches its column.
void check_slots(const WriteArgs& a, const Site& site, int64_t r, int64_t j, Found& f) {
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
  const int64_t column = shift_column(a.rows, r, a.rows.prefix_lens[r] + j);
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
    check_slots(a, site, r, j, f);
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

}  // namespace sglk::canary
