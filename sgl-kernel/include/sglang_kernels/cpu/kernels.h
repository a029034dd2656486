// The torch-free face of the CPU kernels: argument structs and one table of functions per
// SIMD level. Work is cut into items by the caller; the kernels know nothing of threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sglk {

enum class DType : int32_t { f32, bf16, f16 };

// y = x / sqrt(mean(x^2) + eps) * weight over rows of `width` channels. With a residual:
// residual += x first, and the norm is taken of the residual as stored.
struct NormArgs {
  DType dtype;
  const void* x;
  void* residual;  // null for the plain norm
  const void* weight;
  void* out;
  int64_t x_stride;  // elements between rows of x; residual and out are contiguous
  int64_t width;
  float eps;
};

// Activations of a gate; gelu in its tanh form.
enum class Activation : int32_t { silu, gelu };

// out[t, i] = activation(x[t, i]) * x[t, width + i]
struct GatedArgs {
  DType dtype;
  Activation activation;
  const void* x;
  void* out;
  int64_t x_stride;
  int64_t width;
};

// Per-head norm (optional), rotation (optional) and the write into the pool.
struct RopeStoreArgs {
  DType dtype;
  void* q;
  const void* k;
  const void* v;
  int64_t q_stride, k_stride, v_stride;  // elements between tokens
  void* k_cache;
  void* v_cache;
  int64_t k_slot_stride, v_slot_stride;  // elements between slots
  const int64_t* positions;
  const int64_t* slots;
  const float* cos_sin;  // null: no rotation
  int64_t cos_sin_stride;
  const void* q_norm;  // null: no norm
  const void* k_norm;
  int32_t q_heads, kv_heads, dim, rotary_dim;
  float eps;
};

// The write of latents into the pool: a slot is [latent | rotated key], `rank` + `rope`
// channels. The last `rope` channels of the queries are rotated, the latent is normed.
struct LatentStoreArgs {
  DType dtype;
  void* q;
  const void* k;
  int64_t q_stride, k_stride;  // elements between tokens
  void* cache;
  int64_t slot_stride;
  const int64_t* positions;
  const int64_t* slots;
  const float* cos_sin;
  int64_t cos_sin_stride;
  const void* norm;
  int32_t q_heads, q_width, rank, rope;
  float eps;
};

// KV elements are cut into chunks at multiples of this, by absolute position. A chunk's partial
// result and the order of merging depend on nothing else. This makes a query's result
// independent of its batch, of the thread count and of decode or extend.
constexpr int64_t kChunk = 256;

struct AttentionArgs {
  DType dtype;
  const void* q;
  void* out;
  int64_t q_stride, out_stride;  // elements between tokens
  const void* k_cache;
  const void* v_cache;
  int64_t k_slot_stride, k_head_stride, v_slot_stride, v_head_stride;
  int64_t slots;
  const int32_t* page_table;
  int64_t table_row_stride, table_column_stride;
  int64_t page_size;
  const uint8_t* tree_mask;  // [rows, tree_width, tree_width] or null
  int64_t tree_width;
  int64_t window;  // elements by position, the query's own included; <= 0: none
  const int64_t* positions;  // of the new tokens; null without a window or a tree mask
  const float* sinks;  // [q_heads] logits without a value; null: none
  int32_t q_heads, kv_heads;
  int32_t dim, v_dim;  // channels of a query and of a key; of a value and of a result
  float scale;
  float logit_cap;  // scores become cap * tanh(score / cap); <= 0: none
};

// First KV element that the j-th new token of a row may attend, which is `token` of q.
// Here a window never hides new tokens of a tree; their mask does. Not shared between SIMD
// levels, which compile it for different processors.
static inline int64_t first_attended(
    const AttentionArgs& a, int64_t prefix, int64_t j, int64_t token) {
  if (a.window <= 0) return 0;
  const int64_t position = a.positions ? a.positions[token] : prefix + j;
  const int64_t begin = position + 1 - a.window;
  const int64_t latest = a.tree_mask && begin > prefix ? prefix : begin;
  return latest > 0 ? latest : 0;
}

// Consecutive new tokens of one row under one KV head: the unit of work.
struct AttentionItem {
  int64_t row;           // row of the batch (selects the tree mask)
  int64_t table_row;     // row of the page table
  int64_t prefix;        // KV elements before the row's first new token
  int64_t first_new;     // index of the first token of the item among the row's new ones
  int64_t first_token;   // its index in q and out
  int32_t tokens;
  int32_t kv_head;
  int64_t element_begin, element_end;  // union of the elements that its tokens may attend
  int64_t chunk_begin, chunk_end;
};

// Softmax state of an item's query rows: maximum, sum, weighted values.
struct AttentionState {
  float* max;
  float* sum;
  float* value;   // [rows, padded v_dim]
  uint8_t* seen;  // whether the row attended anything so far
};

// An error in an attention call: an entry of the page table outside the pool.
struct BadSlot {
  bool found;
  int64_t table_row, element, slot;
};

// Query rows (tokens x heads of a group) that one item may have, group size permitting.
constexpr int32_t kItemRows = 96;

// out [rows, n] = x [rows, k] times the rows of weight [n, k], plus bias; bf16 or f16.
struct GemvArgs {
  DType dtype;
  const void* x;
  const void* weight;
  const void* bias;  // null: none
  void* out;
  int64_t rows, n, k, x_stride;
};

// How a product with a gate and a value (`up`) per output ends.
enum class Gate : int32_t {
  none,
  silu,     // silu(gate) * up
  clamped,  // gate * sigmoid(alpha * gate) * (up + 1), gate <= limit, |up| <= limit
};

// x [rows, k] times a packed weight (see pack_weight in layers/ops/linear/op.py), plus bias. If
// it is gated, a panel has 16 columns of the gate and the same 16 of up, `bias` is in the order
// of the panels, and n counts the results.
struct LinearArgs {
  const float* x;
  int64_t x_stride;
  const void* weight;  // [ceil(n / 32), k, 32]
  bool weight_bf16;
  const float* bias;  // null: none
  float* out;
  int64_t out_stride;
  int64_t rows, n, k;
  Gate gate;
  float alpha, limit;  // of Gate::clamped
};

// out[t] = sum over j of weights[t, j] * y[place[t, j]], in the order of j.
struct WeightedSumArgs {
  const float* y;
  const int32_t* place;   // [tokens, terms]
  const float* weights;   // [tokens, terms]
  float* out;
  int64_t terms, width;
};

// Weights exp(x[v] / temperature - x[token] / temperature) of ids v in 0 .. count - 1.
struct WeightArgs {
  DType dtype;
  const void* logits;
  int64_t count, token;
  const int32_t* mask;  // bit v % 32 of word v / 32 lets id v count; null: all do
  float temperature;
};

struct WeightSums {
  double total, lower;  // lower: of ids before the token
  float largest;
};

// Probabilities `kept` that filters left, beside the weights of the same ids.
struct KeptSums {
  double total, lower;  // of probabilities; lower: of ids before the token
  double mass;          // of the weights of ids that stay
  int64_t count;        // of ids that stay
  float smallest;       // weight of an id that stays
  float dropped;        // the largest weight of an id that went
  bool is_other;        // whether a probability does not belong to its weight
};

// Scans of rows, for checks of what was drawn from them.
struct RowScans {
  float (*value_at)(DType, const void* x, int64_t i);
  // Whether any id is NaN or above `limit`; mask as in WeightArgs.
  bool (*any_above)(
      DType, const void* x, int64_t count, float limit, const int32_t* mask);
  WeightSums (*sum_weights)(const WeightArgs&);
  // `slack`, `tiny`: by which share, or how much, a probability may differ.
  KeptSums (*sum_kept)(const WeightArgs&, const float* kept, float slack, float tiny);
};

struct KernelTable {
  const char* name;
  void (*norm)(const NormArgs&, int64_t row_begin, int64_t row_end);
  void (*gated)(const GatedArgs&, int64_t row_begin, int64_t row_end);
  void (*rope_store)(const RopeStoreArgs&, int64_t token_begin, int64_t token_end);
  void (*latent_store)(const LatentStoreArgs&, int64_t token_begin, int64_t token_end);

  // Floats that `attention_chunks` needs as scratch.
  size_t (*attention_scratch)(const AttentionArgs&);
  int32_t (*attention_padded_dim)(int32_t dim);
  // Attends chunks [begin, end) of an item and merges them into `state` in order.
  void (*attention_chunks)(
      const AttentionArgs&, const AttentionItem&, int64_t begin, int64_t end,
      const AttentionState& state, float* scratch, BadSlot* bad);
  // into = merge(into, from), for `rows` query rows.
  void (*attention_merge)(
      int32_t rows, int32_t padded_dim, const AttentionState& into,
      const AttentionState& from);
  void (*attention_finish)(
      const AttentionArgs&, const AttentionItem&, const AttentionState&);

  // Column units of the packed product; `rows` x units is the space to be divided.
  int64_t (*linear_units)(int64_t n);
  void (*linear)(
      const LinearArgs&, int64_t row_begin, int64_t row_end, int64_t unit_begin,
      int64_t unit_end);
  void (*gemv)(const GemvArgs&, int64_t column_begin, int64_t column_end);
  void (*weighted_sum)(const WeightedSumArgs&, int64_t token_begin, int64_t token_end);

  void (*exp)(const float* x, float* y, int64_t n);

  // Sum of mix64(word ^ key), modulo 2^64; part of a canary's fingerprint.
  uint64_t (*hash_words)(const int64_t* words, const uint64_t* keys, int64_t count);

  RowScans scans;
};

const KernelTable& baseline_kernels();
#if defined(__x86_64__)
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();
#endif

}  // namespace sglk
