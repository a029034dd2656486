// Checks of arguments and launches of the KV canary. The state is one arena (kernels/state.py);
// other tensors arrive as lists in the order of CanaryRows and KVReadView (kernels/native.py).
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "sglang_kernels/cpu/canary.h"
#include "torch_api.h"

namespace sglk {
namespace {

using OptionalTensors = std::vector<OptionalTensor>;
using Numbers = std::vector<int64_t>;

// Time of one thread, for the decision to split; measured within a factor 2.
constexpr double kMicrosecondsPerElement = 4e-2;
constexpr double kMicrosecondsPerWord = 1e-3;

template <class T>
T* vector_data(
    const char* op, const char* name, const Tensor& t, ScalarType type, int64_t size) {
  check_vector(op, name, t, type, size);
  return (T*)t.mutable_data_ptr();
}

const int64_t* longs(
    const char* op, const char* name, const OptionalTensor& t, int64_t size) {
  return t ? vector_data<const int64_t>(op, name, *t, ScalarType::Long, size) : nullptr;
}

// The parts of an arena, in the order and with the alignment of `_Layout` in state.py.
canary::State state_of(const char* op, const Tensor& arena) {
  constexpr int64_t kHeaderWords = 8, kAlignWords = 8, kRecordWords = 4;
  int64_t* at = vector_data<int64_t>(op, "state", arena, ScalarType::Long, arena.numel());
  SGLK_CHECK(arena.numel() > kHeaderWords, op, "state", arena, "a header and its parts");
  const int64_t* header = at;
  const int64_t* end = at + arena.numel();
  const auto take = [&](int64_t words) {
    int64_t* part = at;
    at += (words + kAlignWords - 1) / kAlignWords * kAlignWords;
    return part;
  };
  canary::State s{};
  take(kHeaderWords);
  s.num_slots = header[0];
  s.lineage_rows = header[1];
  s.req_rows = header[2];
  s.capacity = header[3];
  s.managers = header[4];
  s.pool = header[5];
  s.head = take(s.num_slots * kRecordWords);
  s.tail = take(s.num_slots * kRecordWords);
  s.expected_lineage = take(s.lineage_rows);
  s.ring = take(s.capacity * canary::kRingWords);
  s.ring_count = take(1);
  s.counters = take(canary::kNumCounters);
  s.clock = take(1);
  s.verdict = (int32_t*)take((s.req_rows + 1) / 2);
  s.phase = (int32_t*)take((s.managers + 1) / 2);
  // Scratch of the GPU's tail launch: a ticket, lineages to come.
  take(1);
  take(s.req_rows > s.lineage_rows ? s.req_rows : s.lineage_rows);
  SGLK_CHECK(at == end, op, "state", arena, "the words that its header announces");
  return s;
}

canary::Rows rows_of(
    const char* op, const OptionalTensors& t, int64_t max_depth, const canary::State& s) {
  SGLK_REQUIRE(t.size() == 17, op, ": rows has ", t.size(), " tensors, expected 17");
  for (int i = 0; i < 8; i++)
    SGLK_REQUIRE(t[i], op, ": tensor ", i, " of rows is missing");
  canary::Rows rows{};
  const int64_t n = rows.count = t[0]->numel(), tokens = rows.tokens = t[3]->numel();
  rows.req_rows = longs(op, "req_rows", t[0], n);
  rows.prefix_lens = longs(op, "prefix_lens", t[1], n);
  rows.extend_lens = longs(op, "extend_lens", t[2], n);
  rows.input_ids = longs(op, "input_ids", t[3], tokens);
  rows.positions = longs(op, "positions", t[4], tokens);
  rows.locs = longs(op, "out_cache_loc", t[5], tokens);
  rows.serials = longs(op, "serials", t[6], n);
  rows.salts = longs(op, "salts", t[7], n);
  rows.indptr = longs(op, "qo_indptr", t[8], n + 1);
  rows.parents = longs(op, "parent_index", t[9], tokens);
  rows.seeds = longs(op, "seeds", t[10], n);
  rows.lineage_rows = longs(op, "lineage_rows", t[11], n);
  rows.shift_from = longs(op, "shift_from", t[12], n);
  rows.column_shift = longs(op, "column_shift", t[13], n);
  rows.publish_rows = longs(op, "publish_rows", t[14], n);
  rows.stay_lens = longs(op, "stay_lens", t[15], n);
  rows.seed_table = longs(op, "seed_table", t[16], t[16] ? t[16]->numel() : 0);
  rows.max_depth = max_depth;
  for (int64_t r = 0; r < n; r++) {
    const int64_t row = rows.lineage_row(r), first = rows.start(r);
    SGLK_REQUIRE(
        row >= 0 && row < s.lineage_rows, op, ": row ", r, " has lineage row ", row,
        ", expected 0 .. ", s.lineage_rows - 1);
    SGLK_REQUIRE(
        rows.published_row(r) >= 0 && rows.published_row(r) < s.lineage_rows, op, ": row ",
        r, " publishes lineage row ", rows.published_row(r), ", expected 0 .. ",
        s.lineage_rows - 1);
    SGLK_REQUIRE(
        !t[16] || (rows.req_rows[r] >= 0 && rows.req_rows[r] < t[16]->numel()), op,
        ": req_rows[", r, "] is ", rows.req_rows[r], ", outside of seed_table");
    SGLK_REQUIRE(
        first >= 0 && (first <= tokens || rows.req_rows[r] == 0), op, ": qo_indptr[", r,
        "] is ", first, ", expected 0 .. ", tokens);
  }
  return rows;
}

void check_req_rows(const char* op, const canary::Rows& rows, int64_t limit) {
  for (int64_t r = 0; r < rows.count; r++)
    SGLK_REQUIRE(
        rows.req_rows[r] >= 0 && rows.req_rows[r] < limit, op, ": req_rows[", r, "] is ",
        rows.req_rows[r], ", expected 0 .. ", limit - 1);
}

canary::Columns columns_of(
    const char* op, const char* name, const OptionalTensor& t, const canary::Rows& rows) {
  if (!t) return {};
  SGLK_CHECK(
      t->dim() == 2 && t->scalar_type() == ScalarType::Int && t->stride(1) == 1, op, name,
      *t, "int32 [rows, columns] with contiguous rows");
  check_req_rows(op, rows, t->size(0));
  return {(const int32_t*)t->const_data_ptr(), t->stride(0), t->size(1)};
}

canary::Table table_of(const char* op, const OptionalTensors& t, int64_t page, int64_t rows) {
  SGLK_REQUIRE(t.size() == 7, op, ": table has ", t.size(), " tensors, expected 7");
  SGLK_REQUIRE(t[0], op, ": read_lens is missing");
  canary::Table table{};
  table.read_lens = longs(op, "read_lens", t[0], rows);
  table.page_size = page;
  table.paged = t[1].has_value();
  SGLK_REQUIRE(table.paged || (t[3] && t[4]), op, ": neither page_table nor indptr");
  const Tensor& entries = table.paged ? *t[1] : *t[4];
  const ScalarType type = entries.scalar_type();
  SGLK_CHECK(
      entries.dim() == (table.paged ? 2 : 1) &&
          (type == ScalarType::Int || type == ScalarType::Long),
      op, table.paged ? "page_table" : "slot_indices", entries, "int32 or int64 indices");
  table.entries = {entries.const_data_ptr(), type == ScalarType::Long};
  if (table.paged) {
    table.rows = entries.size(0);
    table.columns = entries.size(1);
    table.row_stride = entries.stride(0);
    table.column_stride = entries.stride(1);
    table.row_index = longs(op, "row_index", t[2], rows);
  } else {
    check_vector(op, "slot_indices", entries, type, entries.numel());
    table.columns = entries.numel();
    SGLK_CHECK(t[3]->numel() >= rows, op, "indptr", *t[3], "at least one entry per row");
    table.indptr = longs(op, "indptr", t[3], t[3]->numel());
  }
  table.first = longs(op, "first_position", t[5], rows);
  table.prev_slots = longs(op, "prev_slots", t[6], rows);
  return table;
}

// What tells the words of a slot apart, hashed once for each shape of a pool.
const uint64_t* keys_of(int64_t layers, int64_t count) {
  static std::mutex mutex;
  static std::map<std::pair<int64_t, int64_t>, std::vector<uint64_t>> known;
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<uint64_t>& keys = known[{layers, count}];
  if (keys.empty())
    for (int64_t layer = 0; layer < layers; layer++)
      for (int64_t i = 0; i < count; i++) keys.push_back(canary::key_of(layer, i));
  return keys.data();
}

canary::Words words_of(const char* op, const char* name, const Tensor& t, int64_t slots) {
  SGLK_CHECK(
      t.dim() == 3 && t.scalar_type() == ScalarType::Long && t.stride(2) == 1 &&
          t.size(1) >= slots,
      op, name, t, "int64 [layers, slots, words] with contiguous words");
  return {
      (const int64_t*)t.const_data_ptr(), keys_of(t.size(0), t.size(2)), t.stride(0),
      t.stride(1), t.size(2)};
}

canary::Bytes bytes_of(
    const char* op, const OptionalTensor& k, const OptionalTensor& v, int64_t mode,
    int64_t period, int64_t slots) {
  canary::Bytes bytes{};
  bytes.mode = mode;
  bytes.period = period;
  if (mode == canary::kNoBytes) return bytes;
  SGLK_REQUIRE(k && v && period > 0, op, ": fingerprints need K, V and a period");
  bytes.k = words_of(op, "k_words", *k, slots);
  bytes.v = words_of(op, "v_words", *v, slots);
  SGLK_CHECK(v->size(0) == k->size(0), op, "v_words", *v, "the layers of k_words");
  bytes.layers = k->size(0);
  bytes.hash_words = kernels().hash_words;
  return bytes;
}

double words_per_hash(const canary::Bytes& bytes) {
  if (bytes.mode == canary::kNoBytes) return 0;
  if (bytes.mode == canary::kPartial) return 4;
  return (double)(bytes.layers * (bytes.k.count + bytes.v.count));
}

void check_manager(const char* op, const canary::State& s, int64_t manager) {
  SGLK_REQUIRE(
      manager >= -1 && manager < s.managers, op, ": manager is ", manager,
      ", expected -1 .. ", s.managers - 1);
}

canary::Site site_of(const canary::State& s, int64_t launch, int64_t manager) {
  return {*s.clock, launch | (manager & 255) << 8 | s.pool << 16};
}

// numbers: page size, token offset, mode, period, max depth, manager, entry size
canary::VerifyArgs verify_args(
    const char* op, const Tensor& state, const OptionalTensors& rows,
    const OptionalTensors& table, const OptionalTensor& k, const OptionalTensor& v,
    const OptionalTensor& req_to_token, const OptionalTensor& tokens, const Numbers& n) {
  SGLK_REQUIRE(n.size() >= 7, op, ": numbers has ", n.size(), " values, expected 7");
  canary::VerifyArgs a{};
  a.state = state_of(op, state);
  a.rows = rows_of(op, rows, n[4], a.state);
  check_req_rows(op, a.rows, a.state.req_rows);
  check_manager(op, a.state, n[5]);
  a.table = table_of(op, table, n[0], a.rows.count);
  SGLK_REQUIRE(n[6] > 0, op, ": entry size is ", n[6], ", expected at least 1");
  a.table.entry_size = n[6];
  a.bytes = bytes_of(op, k, v, n[2], n[3], a.state.num_slots);
  a.slots = columns_of(op, "req_to_token", req_to_token, a.rows);
  a.tokens = columns_of(op, "tokens", tokens, a.rows);
  a.token_offset = n[1];
  return a;
}

void run_verify(const canary::VerifyArgs& a, int64_t manager) {
  const bool sweep = !a.slots.data;
  const canary::Site site =
      site_of(a.state, sweep ? canary::kSweepLaunch : canary::kVerifyLaunch, manager);
  canary::step_phase(a.state, site, manager, canary::kIdle, canary::kAfterVerify);
  canary::count(a.state, sweep ? canary::kSweepLaunches : canary::kVerifyLaunches, 1);
  int64_t elements = 0;
  for (int64_t r = 0; r < a.rows.count; r++)
    if (a.rows.req_rows[r]) elements += a.table.read_lens[r];
  const double hashed = a.bytes.mode == canary::kRotate ? 1.0 / (double)a.bytes.period : 1.0;
  const double each =
      kMicrosecondsPerElement + kMicrosecondsPerWord * hashed * words_per_hash(a.bytes);
  run_split(a.rows.count, threads_for((double)elements * each), [&](int64_t b, int64_t e) {
    for (int64_t r = b; r < e; r++) canary::verify_row(a, site, r);
  });
}

void canary_verify(
    const Tensor& state, const OptionalTensors& rows, const OptionalTensors& table,
    const OptionalTensor& k, const OptionalTensor& v, const OptionalTensor& req_to_token,
    const OptionalTensor& tokens, const Numbers& n) {
  run_verify(
      verify_args("canary_verify", state, rows, table, k, v, req_to_token, tokens, n), n[5]);
}

// numbers: page size, writer kind, mode, period, max depth, manager, advance (tail only)
canary::WriteArgs write_args(
    const char* op, const Tensor& state, const OptionalTensors& rows, const Numbers& n) {
  SGLK_REQUIRE(n.size() >= 6, op, ": numbers has ", n.size(), " values, expected 6");
  canary::WriteArgs a{};
  a.state = state_of(op, state);
  a.rows = rows_of(op, rows, n[4], a.state);
  check_req_rows(op, a.rows, a.state.req_rows);
  check_manager(op, a.state, n[5]);
  a.page_size = n[0];
  a.kind = n[1];
  return a;
}

using RowWork = void (*)(const canary::WriteArgs&, const canary::Site&, int64_t);

void run_rows(
    const canary::WriteArgs& a, const canary::Site& site, double words, RowWork work) {
  const double each = kMicrosecondsPerElement + kMicrosecondsPerWord * words;
  run_split(
      a.rows.count, threads_for((double)a.rows.tokens * each), [&](int64_t b, int64_t e) {
        for (int64_t r = b; r < e; r++) work(a, site, r);
      });
}

void set_oracle(
    const char* op, canary::WriteArgs& a, const OptionalTensor& tokens,
    const OptionalTensor& positions) {
  a.oracle_tokens = longs(op, "oracle tokens", tokens, a.rows.tokens);
  a.oracle_positions = longs(op, "oracle positions", positions, a.rows.tokens);
  SGLK_REQUIRE(
      !a.oracle_tokens == !a.oracle_positions, op, ": half of the oracle is missing");
}

void run_head(const canary::WriteArgs& a, int64_t manager) {
  const canary::Site site = site_of(a.state, canary::kHeadLaunch, manager);
  canary::step_phase(a.state, site, manager, canary::kAfterVerify, canary::kAfterHead);
  canary::count(a.state, canary::kHeadLaunches, 1);
  // All checks see the records as they were before the launch.
  run_rows(a, site, 0, canary::check_head_row);
  run_rows(a, site, 0, canary::store_head_row);
}

void canary_write_head(
    const Tensor& state, const OptionalTensors& rows, const OptionalTensor& req_to_token,
    const OptionalTensor& published, const OptionalTensor& oracle_tokens,
    const OptionalTensor& oracle_positions, const Numbers& n) {
  const char* op = "canary_write_head";
  canary::WriteArgs a = write_args(op, state, rows, n);
  a.slots = columns_of(op, "req_to_token", req_to_token, a.rows);
  a.published = columns_of(op, "published", published, a.rows);
  set_oracle(op, a, oracle_tokens, oracle_positions);
  run_head(a, n[5]);
}

// `canary_verify`, then `canary_write_head`, their arguments read once.
// numbers: those of verify, then the writer kind and the page size of writes
void canary_before_model(
    const Tensor& state, const OptionalTensors& rows, const OptionalTensors& table,
    const OptionalTensor& k, const OptionalTensor& v, const Tensor& req_to_token,
    const OptionalTensor& tokens, const OptionalTensor& published,
    const OptionalTensor& oracle_tokens, const OptionalTensor& oracle_positions,
    const Numbers& n) {
  const char* op = "canary_before_model";
  SGLK_REQUIRE(n.size() == 9, op, ": numbers has ", n.size(), " values, expected 9");
  const canary::VerifyArgs a =
      verify_args(op, state, rows, table, k, v, req_to_token, tokens, n);
  run_verify(a, n[5]);
  canary::WriteArgs w{};
  w.state = a.state;
  w.rows = a.rows;
  w.slots = a.slots;
  w.published = columns_of(op, "published", published, a.rows);
  w.page_size = n[8];
  w.kind = n[7];
  set_oracle(op, w, oracle_tokens, oracle_positions);
  run_head(w, n[5]);
}

void advance_lineages(const canary::State& s, const canary::Rows& rows) {
  for (int64_t r = 0; r < rows.count; r++)
    if (rows.req_rows[r])
      s.expected_lineage[rows.published_row(r)] = (int64_t)canary::lineage_after(s, rows, r);
}

// Entries in the ring, counters, verdicts of the rows, which are cleared.
void take_findings(
    const char* op, const canary::State& s, const int64_t* req_rows, int64_t count,
    const Tensor& findings) {
  SGLK_CHECK(
      findings.numel() > count + canary::kNumCounters, op, "findings", findings,
      "room for a status and the verdicts of the rows");
  int64_t* to =
      vector_data<int64_t>(op, "findings", findings, ScalarType::Long, findings.numel());
  *to++ = *s.ring_count;
  for (int64_t i = 0; i < canary::kNumCounters; i++) *to++ = s.counters[i];
  for (int64_t r = 0; r < count; r++) {
    const int64_t req = req_rows[r];
    SGLK_REQUIRE(
        req >= 0 && req < s.req_rows, op, ": req_rows[", r, "] is ", req,
        ", expected 0 .. ", s.req_rows - 1);
    to[r] = req ? s.verdict[req] : 0;
    if (req) s.verdict[req] = 0;
  }
}

void canary_write_tail(
    const Tensor& state, const OptionalTensors& rows, const OptionalTensor& k,
    const OptionalTensor& v, const OptionalTensor& findings, const Numbers& n) {
  const char* op = "canary_write_tail";
  SGLK_REQUIRE(n.size() == 7, op, ": numbers has ", n.size(), " values, expected 7");
  canary::WriteArgs a = write_args(op, state, rows, n);
  a.bytes = bytes_of(op, k, v, n[2], n[3], a.state.num_slots);
  const canary::Site site = site_of(a.state, canary::kTailLaunch, n[5]);
  canary::step_phase(a.state, site, n[5], canary::kAfterHead, canary::kIdle);
  canary::count(a.state, canary::kTailLaunches, 1);
  run_rows(a, site, 0, canary::check_tail_row);
  run_rows(a, site, words_per_hash(a.bytes), canary::store_tail_row);
  ++*a.state.clock;
  if (n[6]) advance_lineages(a.state, a.rows);
  if (findings) take_findings(op, a.state, a.rows.req_rows, a.rows.count, *findings);
}

void canary_poison(
    const Tensor& state, const Tensor& slots, const OptionalTensor& n_live) {
  const char* op = "canary_poison";
  const canary::State s = state_of(op, state);
  const int64_t* at = longs(op, "slots", slots, slots.numel());
  const int64_t* live = longs(op, "n_live", n_live, 1);
  const int64_t count = live && *live < slots.numel() ? *live : slots.numel();
  for (int64_t i = 0; i < count; i++) {
    if (at[i] < 0 || at[i] >= s.num_slots) continue;
    for (int64_t* record : {s.head + at[i] * 4, s.tail + at[i] * 4}) {
      if (record[0] == canary::kPoison) continue;
      record[0] = canary::kPoison;
      record[3] = canary::pack_word3(*s.clock, canary::kPoisonKind, record[3]);
    }
  }
}

void canary_gather_findings(
    const Tensor& state, const Tensor& req_rows, const Tensor& findings) {
  const char* op = "canary_gather_findings";
  const int64_t n = req_rows.numel();
  take_findings(op, state_of(op, state), longs(op, "req_rows", req_rows, n), n, findings);
}

void canary_finish_step(
    const Tensor& state, const OptionalTensors& rows, const Tensor& findings,
    int64_t max_depth) {
  const char* op = "canary_finish_step";
  const canary::State s = state_of(op, state);
  const canary::Rows r = rows_of(op, rows, max_depth, s);
  advance_lineages(s, r);
  take_findings(op, s, r.req_rows, r.count, findings);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sglang_kernels, m) {
  m.def(
      "canary_verify(Tensor(a!) state, Tensor?[] rows, Tensor?[] table, Tensor? k_words, "
      "Tensor? v_words, Tensor? req_to_token, Tensor? tokens, int[] numbers) -> ()");
  m.def(
      "canary_write_head(Tensor(a!) state, Tensor?[] rows, Tensor? req_to_token, "
      "Tensor? published, Tensor? oracle_tokens, Tensor? oracle_positions, int[] numbers) -> ()");
  m.def(
      "canary_write_tail(Tensor(a!) state, Tensor?[] rows, Tensor? k_words, "
      "Tensor? v_words, Tensor(b!)? findings, int[] numbers) -> ()");
  m.def(
      "canary_before_model(Tensor(a!) state, Tensor?[] rows, Tensor?[] table, "
      "Tensor? k_words, Tensor? v_words, Tensor req_to_token, Tensor? tokens, "
      "Tensor? published, Tensor? oracle_tokens, Tensor? oracle_positions, "
      "int[] numbers) -> ()");
  m.def("canary_poison(Tensor(a!) state, Tensor slots, Tensor? n_live) -> ()");
  m.def(
      "canary_gather_findings(Tensor(a!) state, Tensor req_rows, Tensor(b!) findings) -> ()");
  m.def(
      "canary_finish_step(Tensor(a!) state, Tensor?[] rows, Tensor(b!) findings, "
      "int max_depth) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sglang_kernels, CPU, m) {
  m.impl("canary_verify", TORCH_BOX(&canary_verify));
  m.impl("canary_write_head", TORCH_BOX(&canary_write_head));
  m.impl("canary_write_tail", TORCH_BOX(&canary_write_tail));
  m.impl("canary_before_model", TORCH_BOX(&canary_before_model));
  m.impl("canary_poison", TORCH_BOX(&canary_poison));
  m.impl("canary_gather_findings", TORCH_BOX(&canary_gather_findings));
  m.impl("canary_finish_step", TORCH_BOX(&canary_finish_step));
}

}  // namespace sglk
