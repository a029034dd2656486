// Argument checks and launches of the KV canary. The state is one arena. The tensors of a
// forward and of its attention arrive as lists, in the order of canary_words.h.
#include <algorithm>
#include <cstring>
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

// The numbers of launches that write, and of launches that also read, in arrival order.
struct WriteNumbers {
  canary::ForwardNumbers forward;
  canary::CheckNumbers checks;
};

struct ReadNumbers : WriteNumbers {
  canary::ReadNumbers table;
};

// Time of one thread, for the decision to split; measured within a factor 2.
constexpr double kMicrosecondsPerElement = 4e-2;
constexpr double kMicrosecondsPerWord = 1e-3;
constexpr double kMicrosecondsPerLogit = 1e-4;

template <class T>
T unpack(const char* op, const Numbers& numbers) {
  constexpr size_t kCount = sizeof(T) / sizeof(int64_t);
  SGLK_REQUIRE(
      numbers.size() == kCount, op, ": numbers has ", numbers.size(), " values, expected ",
      kCount);
  T unpacked;
  std::memcpy(&unpacked, numbers.data(), sizeof(T));
  return unpacked;
}

template <class T>
T* vector_data(
    const char* op, const char* name, const Tensor& t, ScalarType type, int64_t size) {
  check_vector(op, name, t, type, size);
  return static_cast<T*>(t.mutable_data_ptr());
}

const int64_t* longs(
    const char* op, const char* name, const OptionalTensor& t, int64_t size) {
  return t ? vector_data<const int64_t>(op, name, *t, ScalarType::Long, size) : nullptr;
}

canary::State read_state(const char* op, const Tensor& t) {
  int64_t* begin = vector_data<int64_t>(op, "state", t, ScalarType::Long, t.numel());
  SGLK_CHECK(t.numel() > canary::kHeaderWords, op, "state", t, "a header and its parts");
  canary::Arena arena(begin);
  const canary::State s = canary::take_state(arena);
  SGLK_CHECK(
      arena.end() == begin + t.numel(), op, "state", t, "the words that its header announces");
  return s;
}

// The tensors of a view in declaration order, without absent ones at the end.
class TensorList {
 public:
  TensorList(const char* op, const char* name, const OptionalTensors& given, int64_t most)
      : given_(given) {
    const int64_t size = static_cast<int64_t>(given.size());
    SGLK_REQUIRE(
        size <= most, op, ": ", name, " has ", size, " tensors, expected at most ", most);
  }

  const OptionalTensor& operator[](int64_t i) const {
    static const OptionalTensor absent;
    return i < static_cast<int64_t>(given_.size()) ? given_[i] : absent;
  }

 private:
  const OptionalTensors& given_;
};

int64_t count_elements(const OptionalTensor& t) { return t ? t->numel() : 0; }

void check_lineage_row(
    const char* op, const canary::State& s, int64_t r, const char* verb, int64_t row) {
  SGLK_REQUIRE(
      row >= 0 && row < s.lineage_rows, op, ": row ", r, verb, row, ", expected 0 .. ",
      s.lineage_rows - 1);
}

void check_rows(const char* op, const canary::Rows& rows, const canary::State& s) {
  for (int64_t r = 0; r < rows.count; r++) {
    const int64_t req = rows.req_rows[r], start = rows.start(r);
    check_lineage_row(op, s, r, " has lineage row ", rows.lineage_row(r));
    check_lineage_row(op, s, r, " publishes lineage row ", rows.published_row(r));
    SGLK_REQUIRE(
        !rows.seed_table || (req >= 0 && req < rows.seed_rows), op, ": req_rows[", r,
        "] is ", req, ", outside of seed_table");
    SGLK_REQUIRE(
        start >= 0 && (start <= rows.tokens || req == 0), op, ": qo_indptr[", r, "] is ",
        start, ", expected 0 .. ", rows.tokens);
  }
}

canary::Rows read_rows(
    const char* op, const OptionalTensors& given, int64_t max_depth,
    const canary::State& s) {
  using canary::Length;
  using canary::Row;
  const TensorList t(op, "rows", given, Row::kCount);
  canary::Rows rows{};
  rows.count = count_elements(t[Row::kReqRows]);
  rows.tokens = count_elements(t[Row::kInputIds]);
  rows.seed_rows = count_elements(t[Row::kSeedTable]);
  rows.max_depth = max_depth;
  const int64_t shifts = count_elements(t[Row::kColumnShift]);
  SGLK_REQUIRE(
      rows.count ? shifts % rows.count == 0 : shifts == 0, op, ": column_shift has ", shifts,
      " elements for ", rows.count, " rows");
  rows.shifts = rows.count ? shifts / rows.count : 0;
  SGLK_REQUIRE(
      !t[Row::kShiftFrom] || rows.shifts || !rows.count, op, ": shift_from without column_shift");
  const auto get_length = [&](Length length, const OptionalTensor& tensor) {
    switch (length) {
      case Length::kRows: return rows.count;
      case Length::kRowEnds: return rows.count + 1;
      case Length::kTokens: return rows.tokens;
      case Length::kAny: break;
    }
    return count_elements(tensor);
  };
  canary::visit_rows(
      rows, [&](const int64_t*& to, int64_t index, const char* name, Length length,
                bool is_required) {
        const OptionalTensor& tensor = t[index];
        SGLK_REQUIRE(tensor || !is_required, op, ": ", name, " is missing");
        to = longs(op, name, tensor, get_length(length, tensor));
      });
  check_rows(op, rows, s);
  return rows;
}

void check_req_rows(const char* op, const canary::Rows& rows, int64_t limit) {
  for (int64_t r = 0; r < rows.count; r++)
    SGLK_REQUIRE(
        rows.req_rows[r] >= 0 && rows.req_rows[r] < limit, op, ": req_rows[", r, "] is ",
        rows.req_rows[r], ", expected 0 .. ", limit - 1);
}

canary::Columns read_columns(
    const char* op, const char* name, const OptionalTensor& t, const canary::Rows& rows) {
  if (!t) return {};
  SGLK_CHECK(
      t->dim() == 2 && t->scalar_type() == ScalarType::Int && t->stride(1) == 1, op, name,
      *t, "int32 [rows, columns] with contiguous rows");
  check_req_rows(op, rows, t->size(0));
  return {static_cast<const int32_t*>(t->const_data_ptr()), t->stride(0), t->size(1)};
}

void set_pages(
    const char* op, const Tensor& pages, const OptionalTensor& row_index, int64_t rows,
    canary::Table& table) {
  table.paged = true;
  table.rows = pages.size(0);
  table.columns = pages.size(1);
  table.row_stride = pages.stride(0);
  table.column_stride = pages.stride(1);
  table.row_index = longs(op, "row_index", row_index, rows);
}

void set_flat(
    const char* op, const Tensor& entries, const Tensor& indptr, int64_t rows,
    canary::Table& table) {
  check_vector(op, "slot_indices", entries, entries.scalar_type(), entries.numel());
  table.columns = entries.numel();
  SGLK_CHECK(indptr.numel() >= rows, op, "indptr", indptr, "at least one entry per row");
  table.indptr = longs(op, "indptr", indptr, indptr.numel());
}

canary::Table read_table(
    const char* op, const OptionalTensors& given, const canary::Rows& of,
    const canary::ReadNumbers& n) {
  using canary::Read;
  const int64_t rows = of.count;
  const TensorList t(op, "table", given, Read::kCount);
  SGLK_REQUIRE(t[Read::kReadLens], op, ": read_lens is missing");
  SGLK_REQUIRE(
      n.entry_size > 0, op, ": entry size is ", n.entry_size, ", expected at least 1");
  const OptionalTensor &pages = t[Read::kPageTable], &indptr = t[Read::kIndptr];
  const OptionalTensor& flat =
      t[Read::kSlotIndices] ? t[Read::kSlotIndices] : t[Read::kPageIndices];
  SGLK_REQUIRE(pages || (indptr && flat), op, ": neither page_table nor indptr");
  const Tensor& entries = pages ? *pages : *flat;
  const ScalarType type = entries.scalar_type();
  SGLK_CHECK(
      entries.dim() == (pages ? 2 : 1) &&
          (type == ScalarType::Int || type == ScalarType::Long),
      op, pages ? "page_table" : "slot_indices", entries, "int32 or int64 indices");
  canary::Table table{};
  table.entries = {entries.const_data_ptr(), type == ScalarType::Long};
  table.read_lens = longs(op, "read_lens", t[Read::kReadLens], rows);
  table.first = longs(op, "first_position", t[Read::kFirstPosition], rows);
  table.prev_slots = longs(op, "prev_slots", t[Read::kPrevSlots], rows);
  table.prefix_lens = longs(op, "prefix_lens", t[Read::kPrefixLens], rows);
  table.positions = longs(op, "positions", t[Read::kPositions], of.tokens);
  table.page_size = n.page_size;
  table.entry_size = n.entry_size;
  table.takes_new = n.takes_new != 0;
  table.reach = n.reach;
  if (pages) set_pages(op, entries, t[Read::kRowIndex], rows, table);
  else set_flat(op, entries, *indptr, rows, table);
  return table;
}

// Keys that tell the words of a slot apart, hashed once for each shape of a pool.
const uint64_t* get_keys(int64_t layers, int64_t count) {
  static std::mutex mutex;
  static std::map<std::pair<int64_t, int64_t>, std::vector<uint64_t>> known;
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<uint64_t>& keys = known[{layers, count}];
  if (keys.empty())
    for (int64_t layer = 0; layer < layers; layer++)
      for (int64_t i = 0; i < count; i++) keys.push_back(canary::word_key(layer, i));
  return keys.data();
}

canary::Words read_words(const char* op, const char* name, const Tensor& t, int64_t slots) {
  SGLK_CHECK(
      t.dim() == 3 && t.scalar_type() == ScalarType::Long && t.stride(2) == 1 &&
          t.size(1) >= slots,
      op, name, t, "int64 [layers, slots, words] with contiguous words");
  return {
      static_cast<const int64_t*>(t.const_data_ptr()), get_keys(t.size(0), t.size(2)),
      t.stride(0), t.stride(1), t.size(2)};
}

canary::Bytes read_bytes(
    const char* op, const OptionalTensor& k, const OptionalTensor& v,
    const canary::CheckNumbers& n, int64_t slots) {
  canary::Bytes bytes{};
  bytes.mode = n.mode;
  bytes.period = n.rotation_period;
  if (n.mode == canary::FingerprintMode::kNone) return bytes;
  SGLK_REQUIRE(k && v && bytes.period > 0, op, ": fingerprints need K, V and a period");
  bytes.k = read_words(op, "k_words", *k, slots);
  bytes.v = read_words(op, "v_words", *v, slots);
  SGLK_CHECK(v->size(0) == k->size(0), op, "v_words", *v, "the layers of k_words");
  bytes.layers = k->size(0);
  bytes.hash_words = kernels().hash_words;
  return bytes;
}

double words_per_hash(const canary::Bytes& bytes) {
  if (bytes.mode == canary::FingerprintMode::kNone) return 0;
  if (bytes.mode == canary::FingerprintMode::kPartial) return 4;
  return double(bytes.layers * (bytes.k.count + bytes.v.count));
}

void check_manager(const char* op, const canary::State& s, int64_t manager) {
  SGLK_REQUIRE(
      manager >= canary::kNoManager && manager < s.num_managers, op, ": manager is ",
      manager, ", expected ", canary::kNoManager, " .. ", s.num_managers - 1);
}

canary::Site make_site(const canary::State& s, int64_t launch, int64_t manager) {
  using namespace canary;
  const int64_t of_manager = (manager & kTagManagerMask) << kTagManagerShift;
  return {*s.clock, launch | of_manager | s.pool << kTagPoolShift};
}

void run_verify(const canary::VerifyArgs& a, int64_t manager) {
  using canary::Counter;
  using canary::Launch;
  const bool sweep = !a.slots.data;
  const canary::Site site =
      make_site(a.state, sweep ? Launch::kSweep : Launch::kVerify, manager);
  canary::step_phase(
      a.state, site, manager, canary::Phase::kIdle, canary::Phase::kAfterVerify);
  canary::count(a.state, sweep ? Counter::kSweepLaunches : Counter::kVerifyLaunches, 1);
  int64_t elements = 0;
  for (int64_t r = 0; r < a.rows.count; r++)
    if (a.rows.req_rows[r]) elements += a.table.read_lens[r];
  const bool is_rotating = a.bytes.mode == canary::FingerprintMode::kRotate;
  const double hashed = is_rotating ? 1.0 / double(a.bytes.period) : 1.0;
  const double each =
      kMicrosecondsPerElement + kMicrosecondsPerWord * hashed * words_per_hash(a.bytes);
  run_split(a.rows.count, split_for(double(elements) * each), [&](int64_t b, int64_t e) {
    for (int64_t r = b; r < e; r++) canary::verify_row(a, site, r);
  });
}

void canary_verify(
    const Tensor& state, const OptionalTensors& rows, const OptionalTensors& table,
    const OptionalTensor& k, const OptionalTensor& v, const OptionalTensor& req_to_token,
    const OptionalTensor& tokens, const Numbers& numbers, bool steps_phase) {
  const char* op = "canary_verify";
  const auto n = unpack<ReadNumbers>(op, numbers);
  canary::VerifyArgs a{};
  a.state = read_state(op, state);
  a.rows = read_rows(op, rows, n.forward.max_depth, a.state);
  check_req_rows(op, a.rows, a.state.req_rows);
  check_manager(op, a.state, n.forward.manager);
  a.table = read_table(op, table, a.rows, n.table);
  a.bytes = read_bytes(op, k, v, n.checks, a.state.num_slots);
  a.slots = read_columns(op, "req_to_token", req_to_token, a.rows);
  a.tokens = read_columns(op, "tokens", tokens, a.rows);
  a.token_offset = n.checks.token_offset;
  run_verify(a, steps_phase ? n.forward.manager : canary::kNoManager);
}

canary::WriteArgs write_args(
    const char* op, const Tensor& state, const OptionalTensors& rows,
    const WriteNumbers& n) {
  canary::WriteArgs a{};
  a.state = read_state(op, state);
  a.rows = read_rows(op, rows, n.forward.max_depth, a.state);
  check_req_rows(op, a.rows, a.state.req_rows);
  check_manager(op, a.state, n.forward.manager);
  a.page_size = n.checks.page_size;
  a.writer_kind = n.forward.writer_kind;
  a.token_offset = n.checks.token_offset;
  return a;
}

void set_mask(const char* op, canary::WriteArgs& a, const OptionalTensor& mask) {
  if (!mask) return;
  SGLK_CHECK(
      mask->dim() == 2 && mask->scalar_type() == ScalarType::Bool &&
          mask->size(0) == a.rows.tokens && mask->is_contiguous() && a.rows.parent_index,
      op, "tree_mask", *mask, "contiguous bool [tokens, width], with parent_index");
  a.tree_mask = static_cast<const bool*>(mask->const_data_ptr());
  a.mask_width = mask->size(1);
}

using RowWork = void (*)(const canary::WriteArgs&, const canary::Site&, int64_t);

void run_rows(
    const canary::WriteArgs& a, const canary::Site& site, double words, RowWork work) {
  const double each = kMicrosecondsPerElement + kMicrosecondsPerWord * words;
  run_split(
      a.rows.count, split_for(double(a.rows.tokens) * each), [&](int64_t b, int64_t e) {
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
  const canary::Site site = make_site(a.state, canary::Launch::kHead, manager);
  canary::step_phase(
      a.state, site, manager, canary::Phase::kAfterVerify, canary::Phase::kAfterHead);
  canary::count(a.state, canary::Counter::kHeadLaunches, 1);
  // All checks see the records as they were before the launch.
  run_rows(a, site, 0, canary::check_head_row);
  run_rows(a, site, 0, canary::store_head_row);
}

void canary_write_head(
    const Tensor& state, const OptionalTensors& rows, const OptionalTensor& k,
    const OptionalTensor& v, const OptionalTensor& req_to_token,
    const OptionalTensor& published, const OptionalTensor& tree_mask,
    const OptionalTensor& oracle_tokens, const OptionalTensor& oracle_positions,
    const Numbers& numbers) {
  const char* op = "canary_write_head";
  const auto n = unpack<WriteNumbers>(op, numbers);
  canary::WriteArgs a = write_args(op, state, rows, n);
  a.bytes = read_bytes(op, k, v, n.checks, a.state.num_slots);
  set_mask(op, a, tree_mask);
  a.slots = read_columns(op, "req_to_token", req_to_token, a.rows);
  a.published = read_columns(op, "published", published, a.rows);
  set_oracle(op, a, oracle_tokens, oracle_positions);
  run_head(a, n.forward.manager);
}

// `canary_verify`, then `canary_write_head`, with their arguments read once.
void canary_before_model(
    const Tensor& state, const OptionalTensors& rows, const OptionalTensors& table,
    const OptionalTensor& k, const OptionalTensor& v, const Tensor& req_to_token,
    const OptionalTensor& tokens, const OptionalTensor& published,
    const OptionalTensor& tree_mask, const OptionalTensor& oracle_tokens,
    const OptionalTensor& oracle_positions, const Numbers& numbers) {
  const char* op = "canary_before_model";
  const auto n = unpack<ReadNumbers>(op, numbers);
  canary::WriteArgs w = write_args(op, state, rows, n);
  w.slots = read_columns(op, "req_to_token", req_to_token, w.rows);
  w.published = read_columns(op, "published", published, w.rows);
  set_oracle(op, w, oracle_tokens, oracle_positions);
  canary::VerifyArgs a{};
  a.state = w.state;
  a.rows = w.rows;
  a.slots = w.slots;
  a.table = read_table(op, table, a.rows, n.table);
  a.bytes = w.bytes = read_bytes(op, k, v, n.checks, a.state.num_slots);
  a.tokens = read_columns(op, "tokens", tokens, a.rows);
  a.token_offset = n.checks.token_offset;
  set_mask(op, w, tree_mask);
  run_verify(a, n.forward.manager);
  run_head(w, n.forward.manager);
}

void advance_lineages(const canary::State& s, const canary::Rows& rows) {
  for (int64_t r = 0; r < rows.count; r++)
    if (rows.req_rows[r])
      s.expected_lineage[rows.published_row(r)] =
          word(canary::lineage_after(s, rows, r));
}

// Counters, ring entries and verdicts of the rows, which are cleared.
void take_findings(
    const char* op, const canary::State& s, const int64_t* req_rows, int64_t count,
    const Tensor& findings) {
  SGLK_CHECK(
      findings.numel() > count + canary::Counter::kCount, op, "findings", findings,
      "room for a status and the verdicts of the rows");
  int64_t* to =
      vector_data<int64_t>(op, "findings", findings, ScalarType::Long, findings.numel());
  for (int64_t i = 0; i < canary::Counter::kCount; i++) *to++ = s.counters[i];
  *to++ = *s.ring_count;
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
    const OptionalTensor& v, const OptionalTensor& findings, const Numbers& numbers,
    bool advance) {
  const char* op = "canary_write_tail";
  const auto n = unpack<WriteNumbers>(op, numbers);
  const int64_t manager = n.forward.manager;
  canary::WriteArgs a = write_args(op, state, rows, n);
  a.bytes = read_bytes(op, k, v, n.checks, a.state.num_slots);
  const canary::Site site = make_site(a.state, canary::Launch::kTail, manager);
  canary::step_phase(
      a.state, site, manager, canary::Phase::kAfterHead, canary::Phase::kIdle);
  canary::count(a.state, canary::Counter::kTailLaunches, 1);
  run_rows(a, site, 0, canary::check_tail_row);
  run_rows(a, site, words_per_hash(a.bytes), canary::store_tail_row);
  ++*a.state.clock;
  if (advance) advance_lineages(a.state, a.rows);
  if (findings) take_findings(op, a.state, a.rows.req_rows, a.rows.count, *findings);
}

void canary_poison(
    const Tensor& state, const Tensor& slots, const OptionalTensor& n_live) {
  const char* op = "canary_poison";
  const canary::State s = read_state(op, state);
  const int64_t* at = longs(op, "slots", slots, slots.numel());
  const int64_t* live = longs(op, "n_live", n_live, 1);
  const int64_t count = live && *live < slots.numel() ? *live : slots.numel();
  for (int64_t i = 0; i < count; i++) {
    if (at[i] < 0 || at[i] >= s.num_slots) continue;
    for (canary::Record* record : {s.head + at[i], s.tail + at[i]}) {
      if (record->word0 == canary::kPoisonWord) continue;
      record->word0 = canary::kPoisonWord;
      record->word3 =
          canary::pack_word3(*s.clock, canary::WriterKind::kPoison, record->word3);
    }
  }
}

void canary_gather_findings(
    const Tensor& state, const Tensor& req_rows, const Tensor& findings) {
  const char* op = "canary_gather_findings";
  const int64_t n = req_rows.numel();
  take_findings(op, read_state(op, state), longs(op, "req_rows", req_rows, n), n, findings);
}

void canary_finish_step(
    const Tensor& state, const OptionalTensors& rows, const Tensor& findings,
    int64_t max_depth) {
  const char* op = "canary_finish_step";
  const canary::State s = read_state(op, state);
  const canary::Rows r = read_rows(op, rows, max_depth, s);
  advance_lineages(s, r);
  take_findings(op, s, r.req_rows, r.count, findings);
}

// Records the token that row r must have next, or -1, and marks the row.
void note(
    const char* op, const canary::State& s, int64_t req, int64_t serial, int64_t token,
    int64_t position, int64_t* mark_serial, int64_t* mark_word0) {
  SGLK_REQUIRE(
      req >= 0 && req < s.req_rows, op, ": a req_row is ", req, ", expected 0 .. ",
      s.req_rows - 1);
  *mark_serial = serial;
  *mark_word0 = token < 0 ? canary::kUnknown : canary::pack_word0(token, position);
  if (req) s.requests[req].next_word0 = *mark_word0;
}

// `values`: the rows of `Expected`, one after the other.
void canary_expect_rows(
    const Tensor& state, const Tensor& rows, const Tensor& values,
    const OptionalTensor& seeds) {
  using canary::Expected;
  const char* op = "canary_expect_rows";
  const canary::State s = read_state(op, state);
  const int64_t count = rows.numel();
  const int64_t* row = longs(op, "rows", rows, count);
  SGLK_CHECK(
      values.scalar_type() == ScalarType::Long && values.is_contiguous() &&
          values.numel() == Expected::kCount * count,
      op, "values", values, "contiguous int64, the rows of Expected");
  const int64_t* value = static_cast<const int64_t*>(values.const_data_ptr());
  int64_t* seed = seeds ? vector_data<int64_t>(op, "seeds", *seeds, ScalarType::Long, s.req_rows)
                        : nullptr;
  for (int64_t i = 0; i < count; i++) {
    const int64_t r = row[i];
    SGLK_REQUIRE(
        r >= 0 && r < s.req_rows, op, ": rows[", i, "] is ", r, ", expected 0 .. ",
        s.req_rows - 1);
    s.expected_lineage[r] = value[Expected::kLineage * count + i];
    s.requests[r] = {value[Expected::kSerial * count + i], canary::kUnknown};
    if (seed) seed[r] = value[Expected::kSeed * count + i];
  }
}

int64_t* read_marks(const char* op, const Tensor& marks, int64_t count) {
  SGLK_CHECK(
      marks.scalar_type() == ScalarType::Long && marks.is_contiguous() &&
          marks.numel() == 2 * count,
      op, "marks", marks, "contiguous int64 [2, rows]");
  return static_cast<int64_t*>(marks.mutable_data_ptr());
}

void canary_note_tokens(
    const Tensor& state, const Tensor& req_rows, const Tensor& serials,
    const Tensor& tokens, const Tensor& prefix_lens, const Tensor& extend_lens,
    const Tensor& marks) {
  const char* op = "canary_note_tokens";
  const canary::State s = read_state(op, state);
  const int64_t count = req_rows.numel();
  const int64_t* rows = longs(op, "req_rows", req_rows, count);
  const int64_t* serial = longs(op, "serials", serials, count);
  const int64_t* token = longs(op, "tokens", tokens, count);
  const int64_t* prefix = longs(op, "prefix_lens", prefix_lens, count);
  const int64_t* extend = longs(op, "extend_lens", extend_lens, count);
  int64_t* mark = read_marks(op, marks, count);
  for (int64_t r = 0; r < count; r++)
    note(
        op, s, rows[r], serial[r], token[r], prefix[r] + extend[r], mark + r,
        mark + count + r);
}

const int64_t* matrix(
    const char* op, const char* name, const OptionalTensor& t, int64_t rows, int64_t columns) {
  if (!t) return nullptr;
  SGLK_CHECK(
      t->scalar_type() == ScalarType::Long && t->is_contiguous() &&
          t->numel() == rows * columns,
      op, name, *t, "contiguous int64 [rows, columns] of the path");
  return static_cast<const int64_t*>(t->const_data_ptr());
}

// `path`: the tensors of an AcceptedPath, in order.
void canary_note_accepted(
    const Tensor& state, const OptionalTensors& path, const Tensor& marks) {
  const char* op = "canary_note_accepted";
  const canary::State s = read_state(op, state);
  constexpr int64_t kTensors = 10;
  SGLK_REQUIRE(path.size() == kTensors, op, ": expected ", kTensors, " tensors");
  for (int64_t i = 0; i < kTensors - 1; i++)
    SGLK_REQUIRE(path[i], op, ": tensor ", i, " of the path is missing");
  canary::Path p{};
  p.count = path[0]->numel();
  SGLK_REQUIRE(p.count == 0 || (path[3]->dim() == 2 && path[6]->dim() == 2),
               op, ": tokens and accept_index must have two dimensions");
  p.nodes = path[3]->size(1);
  p.width = path[6]->size(1);
  const char* rows_only = "path";
  p.req_rows = longs(op, rows_only, path[0], p.count);
  p.serials = longs(op, rows_only, path[1], p.count);
  p.prefix_lens = longs(op, rows_only, path[2], p.count);
  p.tokens = matrix(op, "tokens", path[3], p.count, p.nodes);
  p.parent_index = matrix(op, "parent_index", path[4], p.count, p.nodes);
  p.predict = matrix(op, "predict", path[5], p.count, p.nodes);
  p.accept_index = matrix(op, "accept_index", path[6], p.count, p.width);
  p.accept_lens = longs(op, rows_only, path[7], p.count);
  p.gained = matrix(op, "gained", path[8], p.count, p.width);
  p.choices = matrix(op, "choices", path[9], p.count, p.nodes);
  int64_t* mark = read_marks(op, marks, p.count);
  // The verification's own tail has already advanced the clock.
  canary::Site site = make_site(s, canary::Launch::kAccept, canary::kNoManager);
  site.clock--;
  for (int64_t q = 0; q < p.count; q++) {
    canary::check_path(s, site, p, q);
    const int64_t length = std::clamp<int64_t>(p.accept_lens[q], 1, p.width);
    note(
        op, s, p.req_rows[q], p.serials[q], p.gained[q * p.width + length - 1],
        p.prefix_lens[q] + p.accept_lens[q], mark + q, mark + p.count + q);
  }
}

template <typename T>
const T* words(const char* op, const OptionalTensor& t, ScalarType type) {
  if (!t) return nullptr;
  SGLK_CHECK(t->scalar_type() == type && t->dim() == 2, op, "rows", *t,
             "the tensors of CarriedRows");
  return static_cast<const T*>(t->const_data_ptr());
}

// `given`: tensors of a CarriedRows, floats as int32; `numbers`: its numbers.
void canary_carry(
    const Tensor& state, const OptionalTensors& given, const Tensor& sums,
    const std::vector<int64_t>& numbers, bool checks) {
  const char* op = "canary_carry";
  const canary::State s = read_state(op, state);
  SGLK_REQUIRE(given.size() == 7 && numbers.size() == 5, op, ": not those of CarriedRows");
  for (int64_t i = 0; i < 4; i++) SGLK_REQUIRE(given[i], op, ": tensor ", i, " is missing");
  canary::Carried c{};
  c.count = given[0]->numel();
  const int64_t requests = given[1]->numel();
  c.places = longs(op, "places", given[0], c.count);
  c.req_rows = longs(op, "req_rows", given[1], requests);
  c.serials = longs(op, "serials", given[2], requests);
  c.positions = longs(op, "positions", given[3], requests);
  c.words = words<int32_t>(op, given[4], ScalarType::Int);
  c.ids = words<int64_t>(op, given[5], ScalarType::Long);
  c.bits = words<int32_t>(op, given[6], ScalarType::Int);
  c.num_sums = sums.numel();
  c.sums = vector_data<int64_t>(op, "sums", sums, ScalarType::Long, c.num_sums);
  c.group = numbers[0];
  c.known = numbers[1];
  c.width = numbers[2];
  c.row_stride = numbers[3];
  SGLK_REQUIRE(c.count == c.group * requests, op, ": ", c.count, " rows of ", requests);
  canary::Site site = make_site(s, canary::Launch::kCarried, canary::kNoManager);
  site.clock += numbers[4];
  for (int64_t i = 0; i < c.count; i++) {
    if (!canary::is_carried(c, i)) continue;
    SGLK_REQUIRE(c.places[i] < c.num_sums, op, ": places[", i, "] is ", c.places[i],
                 ", but there are ", c.num_sums, " sums");
    if (checks)
      canary::check_carried(s, site, c, i);
    else
      c.sums[c.places[i]] = canary::carried_sum(c, i);
  }
}

canary::Matrix read_matrix(
    const char* op, const char* name, const OptionalTensor& t, int64_t rows, int64_t columns,
    ScalarType type) {
  if (!t) return {};
  const int64_t width = t->dim() == 2 ? t->size(1) : -1;
  SGLK_CHECK(
      width == columns && t->scalar_type() == type && (rows < 0 || t->size(0) == rows) &&
          (width <= 1 || t->stride(1) == 1),
      op, name, *t,
      std::string(torch::headeronly::toString(type)) + " [" +
          (rows < 0 ? "*" : std::to_string(rows)) + ", " + std::to_string(columns) +
          "] with contiguous rows");
  const int64_t row_bytes = t->stride(0) * int64_t(t->element_size());
  return {t->const_data_ptr(), t->size(0), width, row_bytes};
}

// What the head read, and what it must have read, as 32-bit words.
void set_hidden(
    const char* op, canary::Drawn& d, const OptionalTensor& inputs,
    const OptionalTensor& hidden) {
  if (!inputs || !hidden) return;
  SGLK_CHECK(inputs->dim() == 2, op, "inputs", *inputs, "two dimensions");
  const ScalarType type = inputs->scalar_type();
  const int64_t columns = inputs->size(1);
  d.inputs = read_matrix(op, "inputs", inputs, d.logits.rows, columns, type);
  d.hidden = read_matrix(op, "hidden", hidden, -1, columns, type);
  const int64_t bytes = columns * int64_t(inputs->element_size());
  constexpr int64_t kWord = sizeof(int32_t);
  d.hidden_words = bytes / kWord;
  for (const canary::Matrix* m : {&d.inputs, &d.hidden})
    SGLK_REQUIRE(
        bytes % kWord == 0 && (m->rows <= 1 || m->row_bytes % kWord == 0) &&
            reinterpret_cast<uintptr_t>(m->data) % kWord == 0,
        op, ": rows of inputs and hidden must be whole 32-bit words");
}

// `given`: tensors of a DrawnTokens, in order.
canary::Drawn read_drawn(
    const char* op, const OptionalTensors& given, int64_t req_rows, bool draws) {
  enum { kReqRows, kSerials, kPrefixLens, kExtendLens, kTokens, kLogitsRows, kLogits, kInputs,
         kHidden, kHiddenEnds, kEdited, kEditedRows, kKept, kMasks, kSampling, kTensors };
  SGLK_REQUIRE(given.size() == kTensors, op, ": expected ", int(kTensors), " tensors");
  for (int64_t i : {kReqRows, kSerials, kPrefixLens, kExtendLens, kTokens, kLogits, kSampling})
    SGLK_REQUIRE(given[i], op, ": tensor ", i, " is missing");
  canary::Drawn d{};
  const int64_t rows = given[kReqRows]->numel();
  d.count = given[kTokens]->numel();
  d.width = rows ? d.count / rows : 1;
  SGLK_REQUIRE(
      d.count == rows * d.width && d.width > 0, op, ": ", d.count, " tokens of ", rows, " rows");
  d.req_rows = longs(op, "req_rows", given[kReqRows], rows);
  d.serials = longs(op, "serials", given[kSerials], rows);
  d.prefix_lens = longs(op, "prefix_lens", given[kPrefixLens], rows);
  d.extend_lens = longs(op, "extend_lens", given[kExtendLens], rows);
  d.tokens = longs(op, "tokens", given[kTokens], d.count);
  d.logits_rows = longs(op, "logits_rows", given[kLogitsRows], d.count);
  d.hidden_ends = longs(op, "hidden_ends", given[kHiddenEnds], d.count);
  const Tensor& logits = *given[kLogits];
  SGLK_CHECK(logits.dim() == 2, op, "logits", logits, "two dimensions");
  const int64_t vocab = logits.size(1);
  d.dtype = float_type(op, "logits", logits);
  d.logits = read_matrix(op, "logits", logits, -1, vocab, logits.scalar_type());
  set_hidden(op, d, given[kInputs], given[kHidden]);
  d.edited = read_matrix(op, "edited", given[kEdited], -1, vocab, ScalarType::Float);
  d.edited_rows = longs(op, "edited_rows", given[kEditedRows], d.count);
  SGLK_REQUIRE(
      bool(given[kEdited]) == bool(given[kEditedRows]), op,
      ": edited and edited_rows belong together");
  d.kept = read_matrix(op, "kept", given[kKept], d.logits.rows, vocab, ScalarType::Float);
  if (const OptionalTensor& masks = given[kMasks]) {
    const int64_t words = masks->dim() == 2 ? masks->size(1) : 0;
    SGLK_CHECK(
        words >= (vocab + 31) / 32 + canary::MaskWord::kCount, op, "masks", *masks,
        "a bit per id and the words of MaskWord in each row");
    d.masks = read_matrix(op, "masks", masks, d.logits.rows, words, ScalarType::Int);
  }
  const Tensor& sampling = *given[kSampling];
  SGLK_CHECK(
      sampling.scalar_type() == ScalarType::Long && sampling.is_contiguous() &&
          sampling.dim() == 2 && sampling.size(1) == canary::Sampling::kCount,
      op, "sampling", sampling, "contiguous int64 [rows, words of Sampling]");
  d.sampling = static_cast<const int64_t*>(sampling.const_data_ptr());
  check_indices(op, "req_rows", d.req_rows, rows, std::min(req_rows, sampling.size(0)));
  d.draws = draws;
  d.scans = &kernels().scans;
  return d;
}

void canary_check_drawn(
    const Tensor& state, const OptionalTensors& given, const OptionalTensor& findings,
    bool draws) {
  const char* op = "canary_check_drawn";
  const canary::State s = read_state(op, state);
  const canary::Drawn d = read_drawn(op, given, s.req_rows, draws);
  canary::Site site = make_site(s, canary::Launch::kDrawn, canary::kNoManager);
  // The forward's own tail has already advanced the clock.
  site.clock--;
  int64_t* gathered = nullptr;
  if (findings) {
    SGLK_CHECK(
        findings->numel() > canary::Counter::kCount + d.count / d.width, op, "findings",
        *findings, "room for a status and the verdicts of the rows");
    gathered = vector_data<int64_t>(
        op, "findings", *findings, ScalarType::Long, findings->numel());
    site.verdicts = gathered + canary::Counter::kCount + 1;
  }
  const int64_t before = *s.ring_count;
  const double each = kMicrosecondsPerLogit * double(d.logits.columns);
  run_split(d.count, split_for(double(d.count) * each), [&](int64_t b, int64_t e) {
    for (int64_t i = b; i < e; i++)
      if (d.req_rows[i / d.width]) canary::check_drawn(s, site, d, i);
  });
  if (gathered && *s.ring_count != before) {
    int64_t& told = gathered[canary::Counter::kCount];
    told = std::max(told, *s.ring_count);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sglang_kernels, m) {
  m.def(
      "canary_verify(Tensor(a!) state, Tensor?[] rows, Tensor?[] table, Tensor? k_words, "
      "Tensor? v_words, Tensor? req_to_token, Tensor? tokens, int[] numbers, "
      "bool steps_phase) -> ()");
  m.def(
      "canary_write_head(Tensor(a!) state, Tensor?[] rows, Tensor? k_words, "
      "Tensor? v_words, Tensor? req_to_token, Tensor? published, Tensor? tree_mask, "
      "Tensor? oracle_tokens, Tensor? oracle_positions, int[] numbers) -> ()");
  m.def(
      "canary_write_tail(Tensor(a!) state, Tensor?[] rows, Tensor? k_words, "
      "Tensor? v_words, Tensor(b!)? findings, int[] numbers, bool advance) -> ()");
  m.def(
      "canary_before_model(Tensor(a!) state, Tensor?[] rows, Tensor?[] table, "
      "Tensor? k_words, Tensor? v_words, Tensor req_to_token, Tensor? tokens, "
      "Tensor? published, Tensor? tree_mask, Tensor? oracle_tokens, "
      "Tensor? oracle_positions, int[] numbers) -> ()");
  m.def(
      "canary_expect_rows(Tensor(a!) state, Tensor rows, Tensor values, "
      "Tensor(b!)? seeds) -> ()");
  m.def(
      "canary_note_tokens(Tensor(a!) state, Tensor req_rows, Tensor serials, "
      "Tensor tokens, Tensor prefix_lens, Tensor extend_lens, Tensor(b!) marks) -> ()");
  m.def(
      "canary_note_accepted(Tensor(a!) state, Tensor?[] path, Tensor(b!) marks) -> ()");
  m.def(
      "canary_carry(Tensor(a!) state, Tensor?[] rows, Tensor(b!) sums, int[] numbers, "
      "bool checks) -> ()");
  m.def(
      "canary_check_drawn(Tensor(a!) state, Tensor?[] drawn, Tensor(b!)? findings, "
      "bool draws) -> ()");
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
  m.impl("canary_expect_rows", TORCH_BOX(&canary_expect_rows));
  m.impl("canary_note_tokens", TORCH_BOX(&canary_note_tokens));
  m.impl("canary_note_accepted", TORCH_BOX(&canary_note_accepted));
  m.impl("canary_carry", TORCH_BOX(&canary_carry));
  m.impl("canary_check_drawn", TORCH_BOX(&canary_check_drawn));
  m.impl("canary_poison", TORCH_BOX(&canary_poison));
  m.impl("canary_gather_findings", TORCH_BOX(&canary_gather_findings));
  m.impl("canary_finish_step", TORCH_BOX(&canary_finish_step));
}

}  // namespace sglk
