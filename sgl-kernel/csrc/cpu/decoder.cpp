// The layer stack of a dense decoder as one op: it launches the ops of its parts in the same
// order and on the same arguments, so that its bits match theirs. A plan holds the weights,
// checked once; a forward brings rows, slots and the pool.
#include "launch.h"

#include <cstring>

namespace sglk {
namespace {

constexpr int64_t kPanel = 32;
constexpr int64_t kMagic = 0x73676c6b64656331;  // guards against tensors that are not plans

// Places of a layer's weights in the list that a plan is made from.
enum Place {
  kInputNorm, kQkv, kQkvBias, kCosSin, kQNorm, kKNorm, kO, kOBias,
  kPostNorm, kGateUp, kGateUpBias, kDown, kDownBias, kPlaces
};

struct Matrix {
  const void* weight;
  const float* bias;  // null if there is none
  int64_t is_bf16, n, k;
};

struct LayerWeights {
  const float *input_norm, *post_norm, *q_norm, *k_norm, *cos_sin;
  int64_t cos_sin_rows, rotary_dim;
  Matrix qkv, o, gate_up, down;
};

struct StackHead {
  int64_t magic, layers, hidden, q_heads, kv_heads, dim, inner;
  int64_t first;  // width of the first layer's input in place of the normed stream; 0: none
  const float* final_norm;  // null to return the stream as it is
  double eps, scale;
  Activation activation;
};

constexpr int64_t kHeadWords = (sizeof(StackHead) + 7) / 8;
constexpr int64_t kLayerWords = sizeof(LayerWeights) / 8;

int64_t decoder_plan_words(int64_t layers) { return kHeadWords + layers * kLayerWords; }

using OptionalTensors = std::vector<OptionalTensor>;

// Reads one layer's weights from the list; every failure names layer and part.
class LayerReader {
 public:
  LayerReader(const OptionalTensors& weights, int64_t layer)
      : weights_(weights), first_(layer * kPlaces) {}

  const float* vector(const char* name, Place place, int64_t size) const {
    const OptionalTensor& t = at(place);
    if (!t) return nullptr;
    check_vector("decoder_plan", name, *t, ScalarType::Float, size);
    return static_cast<const float*>(t->const_data_ptr());
  }

  Matrix matrix(const char* name, Place place, int64_t n, int64_t k) const {
    const Tensor& t = needed(name, place);
    const bool is_bf16 = t.scalar_type() == ScalarType::BFloat16;
    SGLK_CHECK(
        t.dim() == 3 && t.size(0) == (n + kPanel - 1) / kPanel && t.size(1) == k &&
            t.size(2) == kPanel && t.is_contiguous() &&
            (is_bf16 || t.scalar_type() == ScalarType::Float),
        "decoder_plan", name, t, "packed float32 or bfloat16 [ceil(N / 32), K, 32]");
    return {t.const_data_ptr(), vector(name, Place(place + 1), n), is_bf16, n, k};
  }

  const Tensor& needed(const char* name, Place place) const {
    SGLK_REQUIRE(at(place), "decoder_plan: ", name, " of a layer is absent");
    return *at(place);
  }

  const OptionalTensor& at(Place place) const { return weights_[first_ + place]; }

 private:
  const OptionalTensors& weights_;
  const int64_t first_;
};

// Args: given: width of the layer's input in place of the normed stream; 0: none.
LayerWeights read_layer(const LayerReader& from, const StackHead& head, int64_t given) {
  const int64_t q_width = head.q_heads * head.dim;
  LayerWeights w{};
  if (given == 0) from.needed("input_norm", kInputNorm);
  from.needed("post_norm", kPostNorm);
  w.input_norm = from.vector("input_norm", kInputNorm, head.hidden);
  w.post_norm = from.vector("post_norm", kPostNorm, head.hidden);
  w.q_norm = from.vector("q_norm", kQNorm, head.dim);
  w.k_norm = from.vector("k_norm", kKNorm, head.dim);
  w.qkv = from.matrix(
      "qkv", kQkv, q_width + 2 * head.kv_heads * head.dim, given ? given : head.hidden);
  w.o = from.matrix("o", kO, head.hidden, q_width);
  w.gate_up = from.matrix("gate_up", kGateUp, 2 * head.inner, head.hidden);
  w.down = from.matrix("down", kDown, head.hidden, head.inner);
  if (const OptionalTensor& t = from.at(kCosSin)) {
    SGLK_CHECK(
        t->dim() == 2 && t->scalar_type() == ScalarType::Float && t->is_contiguous() &&
            t->size(1) % 2 == 0 && t->size(1) <= head.dim,
        "decoder_plan", "cos_sin_cache", *t,
        "contiguous float32 [positions, rot], rot even and <= dim");
    w.cos_sin = static_cast<const float*>(t->const_data_ptr());
    w.cos_sin_rows = t->size(0);
    w.rotary_dim = t->size(1);
  }
  return w;
}

void decoder_plan(
    const OptionalTensors& weights, const std::vector<int64_t>& sizes, double eps,
    double scale, const Tensor& plan) {
  SGLK_REQUIRE(
      sizes.size() == 8, "decoder_plan: got ", sizes.size(), " sizes, expected 8");
  StackHead head{kMagic,   sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],
                 sizes[5], sizes[7], nullptr,  eps,      scale,    Activation(sizes[6])};
  SGLK_REQUIRE(
      head.layers > 0 && int64_t(weights.size()) == head.layers * kPlaces + 1,
      "decoder_plan: got ", weights.size(), " weights for ", head.layers,
      " layers, expected ", kPlaces, " per layer and the final norm");
  SGLK_REQUIRE(
      head.hidden > 0 && head.inner > 0 && head.kv_heads > 0 && head.first >= 0 &&
          head.q_heads % head.kv_heads == 0 && head.q_heads / head.kv_heads <= 256 &&
          head.dim % 8 == 0 && head.dim >= 8 && head.dim <= 1024,
      "decoder_plan: query heads must be a multiple of the KV heads, at most 256 times "
      "as many, and the head size a multiple of 8 from 8 to 1024");
  SGLK_REQUIRE(
      sizes[6] == int64_t(Activation::silu) || sizes[6] == int64_t(Activation::gelu),
      "decoder_plan: activation is ", sizes[6], ", expected 0 (silu) or 1 (gelu)");
  check_vector(
      "decoder_plan", "plan", plan, ScalarType::Long, decoder_plan_words(head.layers));
  if (const OptionalTensor& norm = weights.back()) {
    check_vector("decoder_plan", "final_norm", *norm, ScalarType::Float, head.hidden);
    head.final_norm = static_cast<const float*>(norm->const_data_ptr());
  }
  int64_t* words = static_cast<int64_t*>(plan.mutable_data_ptr());
  for (int64_t i = 0; i < head.layers; i++) {
    const LayerWeights layer = read_layer({weights, i}, head, i == 0 ? head.first : 0);
    std::memcpy(words + kHeadWords + i * kLayerWords, &layer, sizeof layer);
  }
  std::memcpy(words, &head, sizeof head);
}

// Buffers of a forward: [tokens, width] each, one after the other.
struct Scratch {
  float *qkv, *heads, *gate_up, *inner;
};

// Layers whose inputs are wanted, from `next` on, and where the next layer's input begins:
// [tokens, count, hidden].
struct Capture {
  const int64_t *next, *end;
  int64_t count;
  float* out;
};

int64_t qkv_width(const StackHead& h) { return (h.q_heads + 2 * h.kv_heads) * h.dim; }

class StackRun {
 public:
  StackRun(
      const char* op, const StackHead& head, const LayerWeights* layers,
      const AttentionRows& rows)
      : op_(op), head_(head), layers_(layers), rows_(rows), q_width_(head.q_heads * head.dim) {}

  void set_stream(const Tensor& x, const Tensor& out, const Tensor& scratch) {
    const int64_t tokens = x.dim() == 2 ? x.size(0) : 0;
    for (const Tensor* t : {&x, &out})
      SGLK_CHECK(
          t->dim() == 2 && t->size(0) == tokens && t->size(1) == head_.hidden &&
              t->scalar_type() == ScalarType::Float && t->is_contiguous(),
          op_, t == &x ? "x" : "out", *t, "contiguous float32 [T, hidden]");
    const int64_t width = qkv_width(head_) + q_width_ + 3 * head_.inner;
    check_vector(op_, "scratch", scratch, ScalarType::Float, tokens * width);
    rows_.tokens = tokens;
    residual_ = static_cast<float*>(x.mutable_data_ptr());
    x_ = static_cast<float*>(out.mutable_data_ptr());
    float* at = static_cast<float*>(scratch.mutable_data_ptr());
    scratch_.qkv = at;
    scratch_.heads = scratch_.qkv + tokens * qkv_width(head_);
    scratch_.gate_up = scratch_.heads + tokens * q_width_;
    scratch_.inner = scratch_.gate_up + tokens * 2 * head_.inner;
  }

  void set_first(const OptionalTensor& first) {
    SGLK_REQUIRE(
        bool(first) == (head_.first > 0), op_, ": first is ", first ? "given" : "absent",
        ", but the first layer of the plan reads ", head_.first ? "it" : "the normed stream");
    if (!first) return;
    SGLK_CHECK(
        first->dim() == 2 && first->size(0) == rows_.tokens && first->size(1) == head_.first &&
            first->scalar_type() == ScalarType::Float && first->is_contiguous(),
        op_, "first", *first, "contiguous float32 [T, its channels in the plan]");
    first_ = static_cast<const float*>(first->const_data_ptr());
  }

  void set_capture(const std::vector<int64_t>& layers, const OptionalTensor& captured) {
    SGLK_REQUIRE(
        bool(captured) == !layers.empty(), op_, ": captured must be given with its layers");
    if (!captured) return;
    SGLK_CHECK(
        captured->dim() == 3 && captured->size(0) == rows_.tokens &&
            captured->size(1) == int64_t(layers.size()) && captured->size(2) == head_.hidden &&
            captured->scalar_type() == ScalarType::Float && captured->is_contiguous(),
        op_, "captured", *captured, "contiguous float32 [T, layers, hidden]");
    int64_t least = 0;
    for (const int64_t layer : layers) {
      SGLK_REQUIRE(
          layer >= least && layer <= head_.layers, op_, ": captured_layers has ", layer,
          ", expected ascending numbers up to ", head_.layers);
      least = layer + 1;
    }
    capture_ = {layers.data(), layers.data() + layers.size(), int64_t(layers.size()),
                static_cast<float*>(captured->mutable_data_ptr())};
  }

  void set_slots(const Tensor& positions, const Tensor& slots) {
    check_vector(op_, "positions", positions, ScalarType::Long, rows_.tokens);
    check_vector(op_, "out_cache_loc", slots, ScalarType::Long, rows_.tokens);
    positions_ = static_cast<const int64_t*>(positions.const_data_ptr());
    slots_ = static_cast<const int64_t*>(slots.const_data_ptr());
    for (int64_t i = 0; i < head_.layers; i++)
      if (layers_[i].cos_sin && (i == 0 || layers_[i].cos_sin_rows != layers_[i - 1].cos_sin_rows))
        check_indices(op_, "positions", positions_, rows_.tokens, layers_[i].cos_sin_rows);
  }

  void set_table(const Tensor& table, int64_t page_size, const OptionalTensor& tree_mask) {
    SGLK_CHECK(
        table.dim() == 2 && table.scalar_type() == ScalarType::Int, op_, "page_table", table,
        "int32 [rows, columns]");
    SGLK_REQUIRE(page_size > 0, op_, ": page_size is ", page_size, ", expected at least 1");
    rows_.table_rows = table.size(0);
    rows_.table_columns = table.size(1);
    attention_.page_table = static_cast<const int32_t*>(table.const_data_ptr());
    attention_.table_row_stride = table.stride(0);
    attention_.table_column_stride = table.stride(1);
    attention_.page_size = page_size;
    if (!tree_mask) return;
    SGLK_CHECK(
        rows_.bounds && tree_mask->dim() == 3 && tree_mask->scalar_type() == ScalarType::Bool &&
            tree_mask->size(0) == rows_.count && tree_mask->size(1) == tree_mask->size(2) &&
            tree_mask->is_contiguous(),
        op_, "tree_mask", *tree_mask, "contiguous bool [rows, N, N], of an extend");
    attention_.tree_mask = static_cast<const uint8_t*>(tree_mask->const_data_ptr());
    attention_.tree_width = tree_mask->size(1);
  }

  void run(const std::vector<Tensor>& k_caches, const std::vector<Tensor>& v_caches) {
    for (const auto* caches : {&k_caches, &v_caches})
      SGLK_REQUIRE(
          int64_t(caches->size()) == head_.layers, op_, ": got ", caches->size(),
          " K or V caches, expected one for each of ", head_.layers, " layers");
    if (rows_.tokens == 0) return;
    for (int64_t i = 0; i < head_.layers; i++) check_pool(k_caches[i], v_caches[i]);
    if (!first_) norm(residual_, nullptr, layers_[0].input_norm, x_);
    for (int64_t i = 0; i < head_.layers; i++) {
      const LayerWeights& layer = layers_[i];
      if (i > 0) norm(x_, residual_, layer.input_norm, x_);
      capture(i);
      linear(layer.qkv, i == 0 && first_ ? first_ : x_, scratch_.qkv);
      store(layer, k_caches[i], v_caches[i]);
      attend(k_caches[i], v_caches[i]);
      linear(layer.o, scratch_.heads, x_);
      norm(x_, residual_, layer.post_norm, x_);
      linear(layer.gate_up, x_, scratch_.gate_up);
      launch_gated(
          {DType::f32, head_.activation, scratch_.gate_up, scratch_.inner, 2 * head_.inner,
           head_.inner},
          rows_.tokens);
      linear(layer.down, scratch_.inner, x_);
    }
    if (head_.final_norm)
      norm(x_, residual_, head_.final_norm, x_);
    else
      for (int64_t i = 0; i < rows_.tokens * head_.hidden; i++) x_[i] = residual_[i] += x_[i];
    capture(head_.layers);
  }

 private:
  // Rows of the stream that a layer reads, if wanted: a norm has just added the previous
  // layer's result to the stream.
  void capture(int64_t layer) {
    if (capture_.next == capture_.end || *capture_.next != layer) return;
    capture_.next++;
    const int64_t width = head_.hidden;
    for (int64_t t = 0; t < rows_.tokens; t++)
      std::memcpy(
          capture_.out + t * capture_.count * width, residual_ + t * width,
          width * sizeof(float));
    capture_.out += width;
  }

  void check_pool(const Tensor& k_cache, const Tensor& v_cache) const {
    for (const Tensor* cache : {&k_cache, &v_cache}) {
      const char* name = cache == &k_cache ? "k_cache" : "v_cache";
      check_heads(op_, name, *cache, ScalarType::Float, head_.dim);
      SGLK_CHECK(
          cache->size(1) == head_.kv_heads && cache->size(0) == k_cache.size(0), op_, name,
          *cache, "the KV heads of the plan and the slots of k_cache");
    }
    check_indices(op_, "out_cache_loc", slots_, rows_.tokens, k_cache.size(0));
  }

  // Like `rmsnorm`, or with a residual like `fused_add_rmsnorm`.
  void norm(const float* x, float* residual, const float* weight, float* out) const {
    launch_norm(
        {DType::f32, x, residual, weight, out, head_.hidden, head_.hidden, float(head_.eps)},
        rows_.tokens);
  }

  void linear(const Matrix& matrix, const float* x, float* out) const {
    LinearArgs args{};
    args.x = x;
    args.x_stride = matrix.k;
    args.weight = matrix.weight;
    args.weight_bf16 = matrix.is_bf16;
    args.bias = matrix.bias;
    args.out = out;
    args.out_stride = matrix.n;
    args.rows = rows_.tokens;
    args.n = matrix.n;
    args.k = matrix.k;
    launch_linear(args);
  }

  void store(const LayerWeights& layer, const Tensor& k_cache, const Tensor& v_cache) const {
    const int64_t width = qkv_width(head_);
    RopeStoreArgs args{};
    args.dtype = DType::f32;
    args.q = scratch_.qkv;
    args.k = scratch_.qkv + q_width_;
    args.v = scratch_.qkv + q_width_ + head_.kv_heads * head_.dim;
    args.q_stride = args.k_stride = args.v_stride = width;
    args.k_cache = k_cache.mutable_data_ptr();
    args.v_cache = v_cache.mutable_data_ptr();
    args.k_slot_stride = k_cache.stride(0);
    args.v_slot_stride = v_cache.stride(0);
    args.positions = positions_;
    args.slots = slots_;
    args.cos_sin = layer.cos_sin;
    args.cos_sin_stride = layer.rotary_dim;
    args.q_norm = layer.q_norm;
    args.k_norm = layer.k_norm;
    args.q_heads = int32_t(head_.q_heads);
    args.kv_heads = int32_t(head_.kv_heads);
    args.dim = int32_t(head_.dim);
    args.rotary_dim = int32_t(layer.rotary_dim);
    args.eps = float(head_.eps);
    launch_rope_store(args, rows_.tokens);
  }

  void attend(const Tensor& k_cache, const Tensor& v_cache) const {
    AttentionArgs args = attention_;
    args.dtype = DType::f32;
    args.q = scratch_.qkv;
    args.out = scratch_.heads;
    args.q_stride = qkv_width(head_);
    args.out_stride = q_width_;
    args.k_cache = k_cache.const_data_ptr();
    args.v_cache = v_cache.const_data_ptr();
    args.k_slot_stride = k_cache.stride(0);
    args.v_slot_stride = v_cache.stride(0);
    args.k_head_stride = args.v_head_stride = head_.dim;
    args.slots = k_cache.size(0);
    args.window = -1;
    args.q_heads = int32_t(head_.q_heads);
    args.kv_heads = int32_t(head_.kv_heads);
    args.dim = args.v_dim = int32_t(head_.dim);
    args.scale = float(head_.scale);
    launch_attention(op_, args, rows_);
  }

  const char* op_;
  const StackHead& head_;
  const LayerWeights* layers_;
  AttentionRows rows_;
  const int64_t q_width_;
  AttentionArgs attention_{};
  Scratch scratch_{};
  Capture capture_{};
  const float* first_ = nullptr;
  float* residual_ = nullptr;
  float* x_ = nullptr;
  const int64_t* positions_ = nullptr;
  const int64_t* slots_ = nullptr;
};

const StackHead& read_head(const char* op, const Tensor& plan) {
  SGLK_CHECK(
      plan.dim() == 1 && plan.scalar_type() == ScalarType::Long && plan.is_contiguous() &&
          plan.size(0) > kHeadWords,
      op, "plan", plan, "what decoder_plan fills");
  const StackHead& head = *static_cast<const StackHead*>(plan.const_data_ptr());
  SGLK_REQUIRE(
      head.magic == kMagic && plan.size(0) == decoder_plan_words(head.layers), op,
      ": plan was not filled by decoder_plan");
  return head;
}

void decoder_stack(
    const Tensor& plan, const Tensor& x, const Tensor& scratch, const Tensor& out,
    const std::vector<Tensor>& k_caches, const std::vector<Tensor>& v_caches,
    const Tensor& positions, const Tensor& slots, const Tensor& page_table,
    const OptionalTensor& row_index, const Tensor& lens, const OptionalTensor& qo_indptr,
    const OptionalTensor& tree_mask, int64_t page_size, const OptionalTensor& first,
    const std::vector<int64_t>& captured_layers, const OptionalTensor& captured) {
  const char* op = "decoder_stack";
  const StackHead& head = read_head(op, plan);
  const auto* layers = reinterpret_cast<const LayerWeights*>(
      static_cast<const int64_t*>(plan.const_data_ptr()) + kHeadWords);
  AttentionRows rows{};
  rows.count = lens.numel();
  check_vector(op, qo_indptr ? "prefix_lens" : "read_lens", lens, ScalarType::Long, rows.count);
  rows.lens = static_cast<const int64_t*>(lens.const_data_ptr());
  if (row_index) {
    check_vector(op, "row_index", *row_index, ScalarType::Long, rows.count);
    rows.row_index = static_cast<const int64_t*>(row_index->const_data_ptr());
  }
  if (qo_indptr) {
    check_vector(op, "qo_indptr", *qo_indptr, ScalarType::Long, rows.count + 1);
    rows.bounds = static_cast<const int64_t*>(qo_indptr->const_data_ptr());
  } else {
    SGLK_CHECK(x.size(0) == rows.count, op, "x", x, "one token per row");
  }
  StackRun run(op, head, layers, rows);
  run.set_stream(x, out, scratch);
  run.set_first(first);
  run.set_capture(captured_layers, captured);
  run.set_slots(positions, slots);
  run.set_table(page_table, page_size, tree_mask);
  run.run(k_caches, v_caches);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sglang_kernels, m) {
  m.def("decoder_plan_words(int layers) -> int");
  m.def(
      "decoder_plan(Tensor?[] weights, int[] sizes, float eps, float scale, "
      "Tensor(a!) plan) -> ()");
  m.def(
      "decoder_stack(Tensor plan, Tensor(a!) x, Tensor(b!) scratch, Tensor(c!) out, "
      "Tensor[] k_caches, Tensor[] v_caches, Tensor positions, Tensor out_cache_loc, "
      "Tensor page_table, Tensor? row_index, Tensor lens, Tensor? qo_indptr, "
      "Tensor? tree_mask, int page_size, Tensor? first, int[] captured_layers, "
      "Tensor(d!)? captured) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sglang_kernels, CompositeExplicitAutograd, m) {
  m.impl("decoder_plan_words", TORCH_BOX(&decoder_plan_words));
}

STABLE_TORCH_LIBRARY_IMPL(sglang_kernels, CPU, m) {
  m.impl("decoder_plan", TORCH_BOX(&decoder_plan));
  m.impl("decoder_stack", TORCH_BOX(&decoder_stack));
}

}  // namespace sglk
