// Argument checks and launches of the tree ops.
#include "sglang_kernels/cpu/tree.h"

#include <vector>

#include "torch_api.h"

namespace sglk {
namespace {

using Tensors = std::vector<Tensor>;

// Time of one thread, for the decision to split; measured within a factor 2.
constexpr double kMicrosecondsPerLogit = 1.5e-3;
constexpr double kMicrosecondsPerCandidate = 2e-2;
constexpr double kMicrosecondsPerWeight = 2e-3;
constexpr int64_t kMaxTopK = 32;
constexpr int64_t kChunk = 1024;

template <class T>
T* matrix(
    const char* op, const char* name, const Tensor& t, ScalarType type, int64_t rows,
    int64_t width) {
  SGLK_CHECK(
      t.scalar_type() == type && t.is_contiguous() && t.numel() == rows * width, op, name, t,
      std::string("contiguous ") + torch::headeronly::toString(type) + " [" +
          std::to_string(rows) + ", " + std::to_string(width) + "]");
  return static_cast<T*>(t.mutable_data_ptr());
}

int64_t* longs(
    const char* op, const char* name, const Tensor& t, int64_t rows, int64_t width) {
  return matrix<int64_t>(op, name, t, ScalarType::Long, rows, width);
}

float as_float(DType dtype, const void* data, int64_t i) {
  if (dtype == DType::f32) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  if (dtype == DType::bf16) {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    __builtin_memcpy(&x, &wide, 4);
    return x;
  }
  return float(static_cast<const c10::Half*>(data)[i]);
}

// A row of logits; `chunk` gives a part of it as float32.
struct LogitRow {
  DType dtype;
  const void* data;
  int64_t size;

  const float* chunk(int64_t begin, int64_t count, float* space) const {
    if (dtype == DType::f32) return static_cast<const float*>(data) + begin;
    for (int64_t i = 0; i < count; i++) space[i] = as_float(dtype, data, begin + i);
    return space;
  }
};

// Sum of e ** (x - base) over a row.
double sum_of_exp(const LogitRow& row, float base) {
  float space[kChunk], shifted[kChunk], powers[kChunk];
  double sum = 0;
  for (int64_t begin = 0; begin < row.size; begin += kChunk) {
    const int64_t count = std::min(kChunk, row.size - begin);
    const float* x = row.chunk(begin, count, space);
    for (int64_t i = 0; i < count; i++) shifted[i] = tree::nan_last(x[i]) - base;
    kernels().exp(shifted, powers, count);
    // Sums that do not wait for each other.
    float parts[8] = {};
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
      for (int64_t j = 0; j < 8; j++) parts[j] += powers[i + j];
    for (; i < count; i++) parts[0] += powers[i];
    for (const float part : parts) sum += part;
  }
  return sum;
}

void top_k_row(const LogitRow& row, int64_t k, float* probs, int64_t* ids) {
  float values[kMaxTopK] = {}, space[kChunk];
  tree::Best best{k, values, ids};
  for (int64_t begin = 0; begin < row.size; begin += kChunk) {
    const int64_t count = std::min(kChunk, row.size - begin);
    best.offer_all(row.chunk(begin, count, space), count, begin);
  }
  if (k == 1) {
    probs[0] = 1.0f;
    return;
  }
  const double sum = sum_of_exp(row, values[0]);
  for (int64_t j = 0; j < k; j++) {
    const double p = std::exp(double(values[j]) - values[0]) / sum;
    probs[j] = std::isfinite(p) ? float(p) : 0.0f;
  }
}

void tree_top_k(const Tensor& logits, const Tensor& probs, const Tensor& ids) {
  const char* op = "tree_top_k";
  SGLK_CHECK(
      logits.dim() == 2 && (logits.size(1) <= 1 || logits.stride(1) == 1), op, "logits",
      logits, "[rows, vocab] with contiguous rows");
  SGLK_CHECK(ids.dim() == 2, op, "ids", ids, "[rows, topk]");
  const int64_t rows = logits.size(0), vocab = logits.size(1), k = ids.size(1);
  SGLK_CHECK(
      k >= 1 && k <= kMaxTopK && k <= vocab, op, "ids", ids,
      "1 .. " + std::to_string(std::min(kMaxTopK, vocab)) + " columns");
  const DType dtype = float_type(op, "logits", logits);
  int64_t* to_ids = longs(op, "ids", ids, rows, k);
  float* to_probs = matrix<float>(op, "probs", probs, ScalarType::Float, rows, k);
  const int64_t bytes = logits.stride(0) * (dtype == DType::f32 ? 4 : 2);
  const char* first = static_cast<const char*>(logits.const_data_ptr());
  const double each = kMicrosecondsPerLogit * double(vocab);
  run_split(rows, split_for(double(rows) * each), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      top_k_row({dtype, first + r * bytes, vocab}, k, to_probs + r * k, to_ids + r * k);
    }
  });
}

struct Levels {
  float* scores;
  int64_t *tokens, *parents;
  int64_t rows, candidates, groups;
};

Levels read_levels(const char* op, const Tensors& t, size_t count) {
  SGLK_REQUIRE(
      t.size() == count, op, ": levels has ", t.size(), " tensors, expected ", count);
  SGLK_CHECK(t[0].dim() == 2, op, "scores", t[0], "[requests, candidates]");
  SGLK_CHECK(t[2].dim() == 2, op, "parents", t[2], "[requests, groups]");
  Levels levels{};
  levels.rows = t[0].size(0);
  levels.candidates = t[0].size(1);
  levels.groups = t[2].size(1);
  levels.scores = matrix<float>(
      op, "scores", t[0], ScalarType::Float, levels.rows, levels.candidates);
  levels.tokens = longs(op, "tokens", t[1], levels.rows, levels.candidates);
  levels.parents = longs(op, "parents", t[2], levels.rows, levels.groups);
  return levels;
}

void tree_select(
    int64_t level, int64_t steps, const Tensor& topk_p, const Tensor& topk_index,
    const OptionalTensor& hot, const Tensors& level_tensors, const Tensor& input_ids,
    const Tensor& hidden_rows) {
  const char* op = "tree_select";
  const Levels to = read_levels(op, level_tensors, 4);
  SGLK_CHECK(topk_p.dim() == 2, op, "topk_p", topk_p, "[rows, topk]");
  const int64_t k = topk_p.size(1), groups = level ? k : 1, size = groups * k;
  SGLK_REQUIRE(
      k >= 1 && k <= kMaxTopK && level >= 0 && level < steps &&
          to.candidates == k + k * k * (steps - 1) && to.groups == 1 + k * (steps - 1),
      op, ": level ", level, ", topk ", k, " and steps ", steps,
      " do not fit levels of ", to.candidates, " candidates and ", to.groups, " groups");
  const float* p =
      matrix<float>(op, "topk_p", topk_p, ScalarType::Float, to.rows * groups, k);
  const int64_t* index = longs(op, "topk_index", topk_index, to.rows * groups, k);
  float* beam =
      matrix<float>(op, "beam_scores", level_tensors[3], ScalarType::Float, to.rows, k);
  int64_t* ids = longs(op, "input_ids", input_ids, to.rows, k);
  int64_t* hidden = longs(op, "hidden_rows", hidden_rows, to.rows, k);
  const int64_t* map = nullptr;
  int64_t map_size = 0;
  if (hot) {
    map_size = hot->numel();
    map = longs(op, "hot_token_id", *hot, 1, map_size);
    for (int64_t i = 0; i < to.rows * size; i++)
      SGLK_REQUIRE(
          index[i] >= 0 && index[i] < map_size, op, ": topk_index holds ", index[i],
          ", expected 0 .. ", map_size - 1);
  }
  const int64_t first = level ? k + k * k * (level - 1) : 0;
  for (int64_t q = 0; q < to.rows; q++) {
    float* scores = to.scores + q * to.candidates + first;
    int64_t* tokens = to.tokens + q * to.candidates + first;
    int64_t* parents = to.parents + q * to.groups;
    for (int64_t i = 0; i < size; i++) {
      scores[i] = level ? beam[q * k + i / k] * p[q * size + i] : p[q * size + i];
      tokens[i] = map ? map[index[q * size + i]] : index[q * size + i];
    }
    int64_t chosen[kMaxTopK];
    float values[kMaxTopK] = {};
    if (level == 0) {
      parents[0] = -1;
      for (int64_t j = 0; j < k; j++) chosen[j] = j;
    } else {
      tree::Best{k, values, chosen}.offer_all(scores, size, 0);
    }
    for (int64_t j = 0; j < k; j++) {
      if (level < steps - 1) parents[1 + k * level + j] = first + chosen[j];
      beam[q * k + j] = scores[chosen[j]];
      ids[q * k + j] = tokens[chosen[j]];
      hidden[q * k + j] = level ? q * k + chosen[j] / k : q;
    }
  }
}

void tree_build(
    const Tensors& level_tensors, int64_t topk, const Tensor& root_tokens,
    const Tensor& seq_lens, const Tensors& t) {
  const char* op = "tree_build";
  const Levels from = read_levels(op, level_tensors, 3);
  SGLK_REQUIRE(t.size() == 7, op, ": tree has ", t.size(), " tensors, expected 7");
  SGLK_CHECK(t[0].dim() == 2, op, "tokens", t[0], "[requests, nodes]");
  const int64_t rows = from.rows, n = t[0].size(1);
  SGLK_REQUIRE(
      topk >= 1 && n >= 1 && n - 1 <= from.candidates &&
          (from.candidates + topk - 1) / topk <= from.groups,
      op, ": ", n, " nodes and topk ", topk, " do not fit ", from.candidates,
      " candidates in ", from.groups, " groups");
  const tree::Shape shape{topk, n, from.candidates, from.groups};
  const int64_t* roots = longs(op, "root_tokens", root_tokens, rows, 1);
  const int64_t* lens = longs(op, "seq_lens", seq_lens, rows, 1);
  int64_t* tokens = longs(op, "tokens", t[0], rows, n);
  int64_t* positions = longs(op, "positions", t[1], rows, n);
  int64_t* parent_index = longs(op, "parent_index", t[2], rows, n);
  int64_t* next_token = longs(op, "next_token", t[3], rows, n);
  int64_t* next_sibling = longs(op, "next_sibling", t[4], rows, n);
  bool* mask = matrix<bool>(op, "mask", t[5], ScalarType::Bool, rows, n * n);
  int64_t* selected = longs(op, "selected", t[6], rows, n - 1);
  const double each =
      kMicrosecondsPerCandidate * double(from.candidates + n) + 2e-4 * double(n * n);
  run_split(rows, split_for(double(rows) * each), [&](int64_t begin, int64_t end) {
    for (int64_t q = begin; q < end; q++) {
      tree::BuildRow row{};
      row.scores = from.scores + q * from.candidates;
      row.candidate_tokens = from.tokens + q * from.candidates;
      row.group_parents = from.parents + q * from.groups;
      row.root_token = roots[q];
      row.seq_len = lens[q];
      row.first_place = q * n;
      row.tokens = tokens + q * n;
      row.positions = positions + q * n;
      row.parent_index = parent_index + q * n;
      row.next_token = next_token + q * n;
      row.next_sibling = next_sibling + q * n;
      row.mask = mask + q * n * n;
      row.selected = selected + q * (n - 1);
      tree::build_row(shape, row);
    }
  });
}

struct Verification {
  int64_t rows, nodes, steps;
  const int64_t *tokens, *parents;
  int64_t *predict, *accept_index, *accept_lens;

  tree::VerifyRow row(int64_t q) const {
    return {nodes,
            steps,
            q * nodes,
            tokens + q * nodes,
            parents + q * nodes,
            predict + q * nodes,
            accept_index + q * (steps + 1),
            accept_lens + q};
  }
};

Verification read_verification(
    const char* op, const Tensor& tokens, const Tensor& parents, const Tensors& result,
    size_t count) {
  SGLK_REQUIRE(
      result.size() == count, op, ": result has ", result.size(), " tensors, expected ",
      count);
  SGLK_CHECK(tokens.dim() == 2 && tokens.size(1) > 0, op, "tokens", tokens,
             "[requests, nodes]");
  SGLK_CHECK(result[1].dim() == 2 && result[1].size(1) > 0, op, "accept_index", result[1],
             "[requests, steps + 1]");
  Verification v{};
  v.rows = tokens.size(0);
  v.nodes = tokens.size(1);
  v.steps = result[1].size(1) - 1;
  v.tokens = longs(op, "tokens", tokens, v.rows, v.nodes);
  v.parents = longs(op, "parent_index", parents, v.rows, v.nodes);
  v.predict = longs(op, "predict", result[0], v.rows, v.nodes);
  v.accept_index = longs(op, "accept_index", result[1], v.rows, v.steps + 1);
  v.accept_lens = longs(op, "accept_lens", result[2], v.rows, 1);
  return v;
}

void tree_verify_greedy(
    const Tensor& tokens, const Tensor& parents, const Tensor& target_ids,
    const Tensors& result) {
  const char* op = "tree_verify_greedy";
  const Verification v = read_verification(op, tokens, parents, result, 3);
  const int64_t* targets = longs(op, "target_ids", target_ids, v.rows, v.nodes);
  for (int64_t q = 0; q < v.rows; q++)
    tree::verify_greedy(v.row(q), targets + q * v.nodes);
}

void tree_verify_sampled(
    const Tensor& tokens, const Tensor& parents, const Tensor& positions,
    const Tensor& probs, const Tensor& totals, const Tensor& keys,
    const std::vector<double>& thresholds, const Tensors& result) {
  const char* op = "tree_verify_sampled";
  const Verification v = read_verification(op, tokens, parents, result, 4);
  SGLK_CHECK(
      probs.dim() == 2 && probs.scalar_type() == ScalarType::Float &&
          probs.size(0) == v.rows * v.nodes && probs.size(1) > 0 &&
          (probs.size(1) == 1 || probs.stride(1) == 1),
      op, "target_probs", probs,
      "float32 [" + std::to_string(v.rows * v.nodes) + ", vocab] with contiguous rows");
  SGLK_REQUIRE(
      thresholds.size() == 2, op, ": thresholds has ", thresholds.size(),
      " values, expected 2");
  SGLK_CHECK(result[3].dim() == 2, op, "rejected", result[3], "[requests, topk]");
  const int64_t topk = result[3].size(1), stride = probs.stride(0);
  int64_t* rejected = longs(op, "rejected", result[3], v.rows, topk);
  const int64_t* at = longs(op, "positions", positions, v.rows, v.nodes);
  const int64_t* streams = longs(op, "keys", keys, v.rows, 1);
  const float* sums =
      matrix<float>(op, "totals", totals, ScalarType::Float, v.rows, v.nodes);
  const double each = kMicrosecondsPerWeight * double(probs.size(1));
  run_split(v.rows, split_for(double(v.rows) * each), [&](int64_t begin, int64_t end) {
    for (int64_t q = begin; q < end; q++) {
      tree::SampledArgs a{};
      a.probs = static_cast<const float*>(probs.const_data_ptr()) + q * v.nodes * stride;
      a.probs_stride = stride;
      a.vocab = probs.size(1);
      a.totals = sums + q * v.nodes;
      a.positions = at + q * v.nodes;
      a.key = uint64_t(streams[q]);
      a.threshold_single = thresholds[0];
      a.threshold_acc = thresholds[1];
      a.rejected = rejected + q * topk;
      a.topk = topk;
      tree::verify_sampled(v.row(q), a);
    }
  });
}

void tree_gather_accepted(
    const Tensors& result, const Tensor& tokens, const Tensor& node_rows,
    const Tensor& bonus_tokens) {
  const char* op = "tree_gather_accepted";
  SGLK_REQUIRE(
      result.size() == 3, op, ": result has ", result.size(), " tensors, expected 3");
  const int64_t rows = result[2].numel(), places = result[0].numel();
  SGLK_CHECK(
      tokens.dim() == 2 && tokens.size(0) == rows, op, "tokens", tokens,
      "int64 [requests, at least steps + 1]");
  SGLK_CHECK(node_rows.dim() == 2, op, "node_rows", node_rows, "[requests, steps + 1]");
  const int64_t width = tokens.size(1), path = node_rows.size(1);
  const int64_t* predict = longs(op, "predict", result[0], 1, places);
  const int64_t* index = longs(op, "accept_index", result[1], rows, path);
  const int64_t* lens = longs(op, "accept_lens", result[2], rows, 1);
  int64_t* to_tokens = longs(op, "tokens", tokens, rows, width);
  int64_t* to_rows = longs(op, "node_rows", node_rows, rows, path);
  int64_t* bonus = longs(op, "bonus_tokens", bonus_tokens, rows, 1);
  for (int64_t q = 0; q < rows; q++) {
    SGLK_REQUIRE(
        lens[q] >= 1 && lens[q] <= path, op, ": accept_lens[", q, "] is ", lens[q],
        ", expected 1 .. ", path);
    for (int64_t j = 0; j < std::max(width, path); j++) {
      const int64_t place = index[q * path + std::min(j, lens[q] - 1)];
      SGLK_REQUIRE(
          place >= 0 && place < places, op, ": accept_index of request ", q, " is ", place,
          ", expected 0 .. ", places - 1);
      if (j < width) to_tokens[q * width + j] = predict[place];
      if (j < path) to_rows[q * path + j] = place;
      bonus[q] = predict[place];
    }
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sglang_kernels, m) {
  m.def("tree_top_k(Tensor logits, Tensor(a!) probs, Tensor(b!) ids) -> ()");
  m.def(
      "tree_select(int level, int steps, Tensor topk_p, Tensor topk_index, Tensor? hot, "
      "Tensor(a!)[] levels, Tensor(b!) input_ids, Tensor(c!) hidden_rows) -> ()");
  m.def(
      "tree_build(Tensor[] levels, int topk, Tensor root_tokens, Tensor seq_lens, "
      "Tensor(a!)[] tree) -> ()");
  m.def(
      "tree_verify_greedy(Tensor tokens, Tensor parents, Tensor target_ids, "
      "Tensor(a!)[] result) -> ()");
  m.def(
      "tree_verify_sampled(Tensor tokens, Tensor parents, Tensor positions, Tensor probs, "
      "Tensor totals, Tensor keys, float[] thresholds, Tensor(a!)[] result) -> ()");
  m.def(
      "tree_gather_accepted(Tensor[] result, Tensor(a!) tokens, Tensor(b!) node_rows, "
      "Tensor(c!) bonus_tokens) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sglang_kernels, CPU, m) {
  m.impl("tree_top_k", TORCH_BOX(&tree_top_k));
  m.impl("tree_select", TORCH_BOX(&tree_select));
  m.impl("tree_build", TORCH_BOX(&tree_build));
  m.impl("tree_verify_greedy", TORCH_BOX(&tree_verify_greedy));
  m.impl("tree_verify_sampled", TORCH_BOX(&tree_verify_sampled));
  m.impl("tree_gather_accepted", TORCH_BOX(&tree_gather_accepted));
}

}  // namespace sglk
