// Checks and launch of paged attention. Decode is extend with one new token per row. Both
// become the same list of items, which is divided among the threads by the number of KV
// elements. If a division falls inside an item, that item's chunks are kept apart and merged
// afterwards in order, so that the division never shows in a result.
#include "launch.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <mutex>
#include <vector>

namespace sglk {
namespace {

// Floats that begin at a cache line, so that no register load spans two.
class AlignedFloats {
 public:
  float* ensure(size_t count) {
    constexpr size_t kLine = 64;
    if (floats_.size() < count + kLine / sizeof(float))
      floats_.resize(count + kLine / sizeof(float));
    const uintptr_t address = reinterpret_cast<uintptr_t>(floats_.data());
    return reinterpret_cast<float*>((address + kLine - 1) / kLine * kLine);
  }

 private:
  std::vector<float> floats_;
};

// Time of one thread per multiply-add of a score or a value.
constexpr double kMicrosecondsPerMultiplyAdd = 3e-5;

// Channels of a head: a latent has 576 and more.
constexpr int64_t kMaxHeadDim = 1024;

// Arguments of decode and extend that shape the softmax.
struct SoftmaxOptions {
  double scale;
  int64_t window;
  double logit_cap;
  const OptionalTensor& sinks;
};

// The sinks as floats: the caller's, or a copy that is kept in `copy`.
const float* check_sinks(
    const char* op, const Tensor& sinks, const Tensor& q, std::vector<float>* copy) {
  const ScalarType type = sinks.scalar_type();
  check_vector(
      op, "sinks", sinks, type == ScalarType::Float ? type : q.scalar_type(), q.size(1));
  if (type == ScalarType::Float) return static_cast<const float*>(sinks.const_data_ptr());
  copy->resize(sinks.numel());
  for (size_t i = 0; i < copy->size(); i++)
    (*copy)[i] =
        type == ScalarType::Half
            ? float(static_cast<const c10::Half*>(sinks.const_data_ptr())[i])
            : float(static_cast<const c10::BFloat16*>(sinks.const_data_ptr())[i]);
  return copy->data();
}

void check_head_size(const char* op, const char* name, const Tensor& t) {
  const int64_t dim = t.size(2);
  SGLK_CHECK(
      dim % 8 == 0 && dim >= 8 && dim <= kMaxHeadDim, op, name, t,
      "a head size that is a multiple of 8 from 8 to 1024");
}

AttentionArgs check_common(
    const char* op, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
    const Tensor& page_table, int64_t page_size, const SoftmaxOptions& softmax,
    const OptionalTensor& row_index, const Tensor& out, AttentionRows* rows,
    std::vector<float>* sinks) {
  AttentionArgs args{};
  args.dtype = float_type(op, "q", q);
  SGLK_CHECK(q.dim() == 3, op, "q", q, "[tokens, heads, dim]");
  SGLK_CHECK(v_cache.dim() == 3, op, "v_cache", v_cache, "[slots, heads, dim]");
  const int64_t dim = q.size(2), v_dim = v_cache.size(2);
  check_head_size(op, "q", q);
  check_head_size(op, "v_cache", v_cache);
  check_heads(op, "q", q, q.scalar_type(), dim);
  check_heads(op, "out", out, q.scalar_type(), v_dim);
  SGLK_CHECK(
      out.size(0) == q.size(0) && out.size(1) == q.size(1), op, "out", out,
      "the tokens and heads of q");
  for (const Tensor* cache : {&k_cache, &v_cache}) {
    const char* name = cache == &k_cache ? "k_cache" : "v_cache";
    SGLK_CHECK(
        cache->dim() == 3 && cache->scalar_type() == q.scalar_type() &&
            (cache == &v_cache || cache->size(2) == dim) && cache->stride(2) == 1,
        op, name, *cache, "[slots, heads, dim] of the dtype of q, K of its head size");
    SGLK_CHECK(
        cache->size(0) == k_cache.size(0) && cache->size(1) == k_cache.size(1), op, name,
        *cache, "the slots and heads of k_cache");
  }
  const int64_t kv_heads = k_cache.size(1);
  SGLK_CHECK(
      kv_heads > 0 && q.size(1) % kv_heads == 0 && q.size(1) / kv_heads <= 256, op, "q", q,
      "a multiple of the KV heads, at most 256 times as many");
  SGLK_CHECK(
      page_table.dim() == 2 && page_table.scalar_type() == ScalarType::Int, op, "page_table",
      page_table, "int32 [rows, columns]");
  SGLK_REQUIRE(page_size > 0, op, ": page_size is ", page_size, ", expected at least 1");
  args.q = q.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.q_stride = q.stride(0);
  args.out_stride = out.stride(0);
  args.k_cache = k_cache.const_data_ptr();
  args.v_cache = v_cache.const_data_ptr();
  args.k_slot_stride = k_cache.stride(0);
  args.k_head_stride = k_cache.stride(1);
  args.v_slot_stride = v_cache.stride(0);
  args.v_head_stride = v_cache.stride(1);
  args.slots = k_cache.size(0);
  args.page_table = static_cast<const int32_t*>(page_table.const_data_ptr());
  args.table_row_stride = page_table.stride(0);
  args.table_column_stride = page_table.stride(1);
  args.page_size = page_size;
  args.window = softmax.window;
  args.logit_cap = float(softmax.logit_cap);
  if (softmax.sinks) args.sinks = check_sinks(op, *softmax.sinks, q, sinks);
  args.q_heads = int32_t(q.size(1));
  args.kv_heads = int32_t(kv_heads);
  args.dim = int32_t(dim);
  args.v_dim = int32_t(v_dim);
  args.scale = float(softmax.scale);
  rows->tokens = q.size(0);
  rows->table_rows = page_table.size(0);
  rows->table_columns = page_table.size(1);
  if (row_index) {
    check_vector(op, "row_index", *row_index, ScalarType::Long, rows->count);
    rows->row_index = static_cast<const int64_t*>(row_index->const_data_ptr());
  }
  return args;
}

// One row of the batch: `count` new tokens after `prefix` KV elements.
struct BatchRow {
  int64_t row, prefix, first_token, count;
};

class Plan {
 public:
  Plan(const char* op, const AttentionArgs& args, const AttentionRows& rows)
      : op_(op), args_(args), rows_(rows) {
    const int64_t group = args.q_heads / args.kv_heads;
    tokens_per_item_ = group < kItemRows ? kItemRows / group : 1;
  }

  void add(const BatchRow& row) {
    const int64_t table_row = rows_.row_index ? rows_.row_index[row.row] : row.row;
    SGLK_REQUIRE(
        table_row >= 0 && table_row < rows_.table_rows, op_, ": row ", row.row,
        " names row ", table_row, " of the page table, which has ", rows_.table_rows);
    const int64_t elements = row.prefix + row.count;
    SGLK_REQUIRE(
        row.prefix >= 0 && elements <= rows_.table_columns * args_.page_size, op_, ": row ",
        row.row, " has ", elements, " KV elements, expected 0 .. ",
        rows_.table_columns * args_.page_size, " (page table columns x page size)");
    for (int64_t first = 0; first < row.count; first += tokens_per_item_) {
      const int64_t left = row.count - first;
      AttentionItem item{};
      item.row = row.row;
      item.table_row = table_row;
      item.prefix = row.prefix;
      item.first_new = first;
      item.first_token = row.first_token + first;
      item.tokens = int32_t(left < tokens_per_item_ ? left : tokens_per_item_);
      item.element_end = args_.tree_mask ? elements : row.prefix + first + item.tokens;
      item.element_begin = first_attended(args_, row.prefix, first, item.first_token);
      if (args_.positions)
        for (int32_t t = 1; t < item.tokens; t++) {
          const int64_t begin =
              first_attended(args_, row.prefix, first + t, item.first_token + t);
          if (begin < item.element_begin) item.element_begin = begin;
        }
      item.chunk_begin = item.element_begin / kChunk;
      item.chunk_end = (item.element_end + kChunk - 1) / kChunk;
      add_heads(item);
    }
  }

  // A row that attends nothing yields zeros.
  void add_empty(int64_t row, int64_t token) {
    AttentionItem item{};
    item.row = row;
    item.first_token = token;
    item.tokens = 1;
    add_heads(item);
  }

  void run();

 private:
  struct Cut {
    int64_t item, chunk;
  };

  void add_heads(AttentionItem item) {
    const double weight = double(item.element_end - item.element_begin) * item.tokens;
    for (int32_t head = 0; head < args_.kv_heads; head++) {
      item.kv_head = head;
      items_.push_back(item);
      total_ += weight;
      weight_end_.push_back(total_);
    }
  }

  // Where `fraction` of all the work is done, to the nearest chunk.
  Cut cut_at(double fraction) const {
    const double target = total_ * fraction;
    size_t low = 0, high = items_.size();
    while (low < high) {
      const size_t middle = (low + high) / 2;
      if (weight_end_[middle] <= target)
        low = middle + 1;
      else
        high = middle;
    }
    if (low >= items_.size()) return {int64_t(items_.size()), 0};
    const AttentionItem& item = items_[low];
    const double start = low ? weight_end_[low - 1] : 0.0;
    const double share = (target - start) / (weight_end_[low] - start);
    const int64_t chunks = item.chunk_end - item.chunk_begin;
    const int64_t done = int64_t(share * double(chunks) + 0.5);
    if (done >= chunks) return {int64_t(low) + 1, 0};
    return {int64_t(low), done == 0 ? 0 : item.chunk_begin + done};
  }

  // Storage of the softmax state of an item's query rows.
  struct Buffer {
    AlignedFloats floats;
    std::vector<uint8_t> flags;
    AttentionState state(int64_t rows, int64_t padded) {
      float* value = floats.ensure(rows * (padded + 2));
      float* max = value + rows * padded;
      return {max, max + rows, value, flags.data()};
    }
    AttentionState reset(int64_t rows, int64_t padded) {
      flags.assign(rows, 0);
      return state(rows, padded);
    }
  };

  // Partial results of items that were divided among threads.
  struct CutItem {
    int64_t item;
    std::vector<Buffer> chunks;
  };

  int32_t count_rows(const AttentionItem& item) const {
    return item.tokens * (args_.q_heads / args_.kv_heads);
  }

  void find_cut_items();
  CutItem* cut_item(int64_t item);
  void run_part(Cut begin, Cut end);
  void run_chunks(
      int64_t item, int64_t begin, int64_t end, const AttentionState& state, float* scratch);

  const char* op_;
  const AttentionArgs& args_;
  const AttentionRows& rows_;
  int64_t tokens_per_item_;
  std::vector<AttentionItem> items_;
  std::vector<double> weight_end_;
  double total_ = 0.0;
  std::vector<Cut> cuts_;
  std::vector<CutItem> cut_items_;
  const KernelTable& table_ = kernels();
  int32_t padded_ = 0;
  std::mutex bad_mutex_;
  BadSlot bad_{};
};

void Plan::run() {
  if (items_.empty()) return;
  padded_ = table_.attention_padded_dim(args_.v_dim);
  const double multiply_adds =
      total_ * (args_.q_heads / args_.kv_heads) * (args_.dim + args_.v_dim);
  const Split split = split_for(multiply_adds * kMicrosecondsPerMultiplyAdd);
  for (int64_t t = 0; t < split.parts; t++)
    cuts_.push_back(t == 0 ? Cut{0, 0} : cut_at(double(t) / double(split.parts)));
  cuts_.push_back({int64_t(items_.size()), 0});
  find_cut_items();
  run_split(split.parts, split, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) run_part(cuts_[t], cuts_[t + 1]);
  });
  SGLK_REQUIRE(
      !bad_.found, op_, ": row ", bad_.table_row, " of the page table puts KV element ",
      bad_.element, " in slot ", bad_.slot, ", the pool has slots 0 .. ", args_.slots - 1);
  Buffer buffer;
  for (CutItem& cut : cut_items_) {
    const AttentionItem& item = items_[cut.item];
    const int32_t rows = count_rows(item);
    const AttentionState state = buffer.reset(rows, padded_);
    for (Buffer& chunk : cut.chunks)
      table_.attention_merge(rows, padded_, state, chunk.state(rows, padded_));
    table_.attention_finish(args_, item, state);
  }
}

void Plan::find_cut_items() {
  for (const Cut& cut : cuts_) {
    if (cut.chunk == 0 || cut.item >= int64_t(items_.size())) continue;
    if (!cut_items_.empty() && cut_items_.back().item == cut.item) continue;
    const AttentionItem& item = items_[cut.item];
    CutItem& added = cut_items_.emplace_back();
    added.item = cut.item;
    added.chunks.resize(item.chunk_end - item.chunk_begin);
    for (Buffer& buffer : added.chunks) buffer.reset(count_rows(item), padded_);
  }
}

Plan::CutItem* Plan::cut_item(int64_t item) {
  for (CutItem& cut : cut_items_)
    if (cut.item == item) return &cut;
  return nullptr;
}

void Plan::run_chunks(
    int64_t index, int64_t begin, int64_t end, const AttentionState& state, float* scratch) {
  BadSlot bad{};
  table_.attention_chunks(args_, items_[index], begin, end, state, scratch, &bad);
  if (!bad.found) return;
  const std::lock_guard<std::mutex> lock(bad_mutex_);
  if (!bad_.found) bad_ = bad;
}

void Plan::run_part(Cut begin, Cut end) {
  thread_local AlignedFloats memory;
  thread_local Buffer buffer;
  float* scratch = memory.ensure(table_.attention_scratch(args_));
  for (int64_t i = begin.item; i <= end.item && i < int64_t(items_.size()); i++) {
    const AttentionItem& item = items_[i];
    const int64_t first = i == begin.item && begin.chunk ? begin.chunk : item.chunk_begin;
    const int64_t last = i == end.item ? end.chunk : item.chunk_end;
    if (i == end.item && end.chunk == 0) break;
    if (CutItem* cut = cut_item(i)) {
      for (int64_t chunk = first; chunk < last; chunk++) {
        Buffer& part = cut->chunks[chunk - item.chunk_begin];
        run_chunks(i, chunk, chunk + 1, part.state(count_rows(item), padded_), scratch);
      }
      continue;
    }
    const AttentionState state = buffer.reset(count_rows(item), padded_);
    run_chunks(i, first, last, state, scratch);
    table_.attention_finish(args_, item, state);
  }
}

// The tree masks without nodes that lie outside a node's window, in `mask`.
const uint8_t* narrowed(
    const AttentionArgs& args, const int64_t* bounds, int64_t rows,
    std::vector<uint8_t>* mask) {
  const int64_t width = args.tree_width;
  mask->assign(args.tree_mask, args.tree_mask + rows * width * width);
  for (int64_t row = 0; row < rows; row++) {
    const int64_t* position = args.positions + bounds[row];
    uint8_t* cell = mask->data() + row * width * width;
    for (int64_t node = 0; node < width; node++)
      for (int64_t other = 0; other < width; other++, cell++)
        *cell &= position[other] > position[node] - args.window;
  }
  return mask->data();
}

void add_decode_rows(const char* op, const AttentionRows& rows, Plan* plan) {
  for (int64_t row = 0; row < rows.count; row++) {
    const int64_t length = rows.lens[row];
    SGLK_REQUIRE(
        length >= 0, op, ": read_lens[", row, "] is ", length, ", expected >= 0");
    if (length > 0)
      plan->add({row, length - 1, row, 1});
    else
      plan->add_empty(row, row);
  }
}

void add_extend_rows(
    const char* op, const AttentionArgs& args, const AttentionRows& rows, Plan* plan) {
  const int64_t* bounds = rows.bounds;
  SGLK_REQUIRE(
      bounds[0] == 0 && bounds[rows.count] <= rows.tokens, op, ": qo_indptr runs from ",
      bounds[0], " to ", bounds[rows.count], ", expected 0 to at most ", rows.tokens,
      " (tokens of q)");
  for (int64_t row = 0; row < rows.count; row++) {
    const int64_t count = bounds[row + 1] - bounds[row];
    SGLK_REQUIRE(count >= 0, op, ": qo_indptr decreases at row ", row);
    SGLK_REQUIRE(
        !args.tree_mask || count == args.tree_width, op, ": row ", row, " has ", count,
        " new tokens, expected ", args.tree_width, " (tree mask)");
    plan->add({row, rows.lens[row], bounds[row], count});
  }
}

}  // namespace

void launch_attention(const char* op, AttentionArgs args, const AttentionRows& rows) {
  Plan plan(op, args, rows);
  std::vector<uint8_t> narrow_mask;
  if (rows.bounds)
    add_extend_rows(op, args, rows, &plan);
  else
    add_decode_rows(op, rows, &plan);
  // A path of a tree is never longer than the tree, so only a shorter window hides nodes.
  if (args.positions && args.window < args.tree_width)
    args.tree_mask = narrowed(args, rows.bounds, rows.count, &narrow_mask);
  plan.run();
}

namespace {

void decode_attention_full(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& page_table,
    const OptionalTensor& row_index, const Tensor& read_lens, int64_t page_size, double scale,
    int64_t window, double logit_cap, const OptionalTensor& sinks, const Tensor& out) {
  const char* op = "decode_attention";
  AttentionRows rows{};
  rows.count = q.size(0);
  std::vector<float> wide_sinks;
  const AttentionArgs args = check_common(
      op, q, k_cache, v_cache, page_table, page_size, {scale, window, logit_cap, sinks},
      row_index, out, &rows, &wide_sinks);
  check_vector(op, "read_lens", read_lens, ScalarType::Long, rows.count);
  rows.lens = static_cast<const int64_t*>(read_lens.const_data_ptr());
  launch_attention(op, args, rows);
}

void extend_attention_full(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& page_table,
    const OptionalTensor& row_index, const Tensor& qo_indptr, const Tensor& prefix_lens,
    int64_t page_size, double scale, int64_t window, double logit_cap,
    const OptionalTensor& sinks, const OptionalTensor& tree_mask,
    const OptionalTensor& positions, const Tensor& out) {
  const char* op = "extend_attention";
  AttentionRows rows{};
  rows.count = prefix_lens.numel();
  std::vector<float> wide_sinks;
  AttentionArgs args = check_common(
      op, q, k_cache, v_cache, page_table, page_size, {scale, window, logit_cap, sinks},
      row_index, out, &rows, &wide_sinks);
  check_vector(op, "prefix_lens", prefix_lens, ScalarType::Long, rows.count);
  check_vector(op, "qo_indptr", qo_indptr, ScalarType::Long, rows.count + 1);
  if (tree_mask) {
    SGLK_CHECK(
        tree_mask->dim() == 3 && tree_mask->scalar_type() == ScalarType::Bool &&
            tree_mask->size(0) == rows.count && tree_mask->size(1) == tree_mask->size(2) &&
            tree_mask->is_contiguous(),
        op, "tree_mask", *tree_mask, "contiguous bool [rows, N, N]");
    args.tree_mask = static_cast<const uint8_t*>(tree_mask->const_data_ptr());
    args.tree_width = tree_mask->size(1);
  }
  if (tree_mask && window > 0) {
    SGLK_REQUIRE(
        positions, op, ": window is ", window, " with a tree mask, which needs positions");
    check_vector(op, "positions", *positions, ScalarType::Long, rows.tokens);
    args.positions = static_cast<const int64_t*>(positions->const_data_ptr());
  }
  rows.bounds = static_cast<const int64_t*>(qo_indptr.const_data_ptr());
  rows.lens = static_cast<const int64_t*>(prefix_lens.const_data_ptr());
  launch_attention(op, args, rows);
}

// The ops for most models: every argument of a call takes 0.1 to 0.2 us, which a decode step
// pays in each layer.
void decode_attention(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& page_table,
    const OptionalTensor& row_index, const Tensor& read_lens, int64_t page_size, double scale,
    int64_t window, const Tensor& out) {
  decode_attention_full(
      q, k_cache, v_cache, page_table, row_index, read_lens, page_size, scale, window, 0.0,
      std::nullopt, out);
}

void extend_attention(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& page_table,
    const OptionalTensor& row_index, const Tensor& qo_indptr, const Tensor& prefix_lens,
    int64_t page_size, double scale, int64_t window, const OptionalTensor& tree_mask,
    const Tensor& out) {
  extend_attention_full(
      q, k_cache, v_cache, page_table, row_index, qo_indptr, prefix_lens, page_size, scale,
      window, 0.0, std::nullopt, tree_mask, std::nullopt, out);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sglang_kernels, m) {
  m.def(
      "decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, "
      "Tensor? row_index, Tensor read_lens, int page_size, float sm_scale, int window, "
      "Tensor(a!) out) -> ()");
  m.def(
      "decode_attention_full(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, "
      "Tensor? row_index, Tensor read_lens, int page_size, float sm_scale, int window, "
      "float logit_cap, Tensor? sinks, Tensor(a!) out) -> ()");
  m.def(
      "extend_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, "
      "Tensor? row_index, Tensor qo_indptr, Tensor prefix_lens, int page_size, "
      "float sm_scale, int window, Tensor? tree_mask, Tensor(a!) out) -> ()");
  m.def(
      "extend_attention_full(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, "
      "Tensor? row_index, Tensor qo_indptr, Tensor prefix_lens, int page_size, "
      "float sm_scale, int window, float logit_cap, Tensor? sinks, Tensor? tree_mask, "
      "Tensor? positions, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sglang_kernels, CPU, m) {
  m.impl("decode_attention", TORCH_BOX(&decode_attention));
  m.impl("decode_attention_full", TORCH_BOX(&decode_attention_full));
  m.impl("extend_attention", TORCH_BOX(&extend_attention));
  m.impl("extend_attention_full", TORCH_BOX(&extend_attention_full));
}

}  // namespace sglk
