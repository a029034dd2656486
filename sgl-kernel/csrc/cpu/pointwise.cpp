// Checks and launches of the norms, the gated activation and rotary + KV store.
#include "launch.h"

namespace sglk {
namespace {

// Time of one thread per element, for the decision to split; measured within a factor 2.
constexpr double kMicrosecondsPerNormElement = 1.5e-4;
constexpr double kMicrosecondsPerActivation = 4e-4;
constexpr double kMicrosecondsPerRopeElement = 2e-4;

}  // namespace

void launch_norm(const NormArgs& args, int64_t rows) {
  const Split split =
      split_for(double(rows * args.width) * kMicrosecondsPerNormElement);
  run_split(rows, split, [&](int64_t begin, int64_t end) {
    kernels().norm(args, begin, end);
  });
}

void launch_gated(const GatedArgs& args, int64_t rows) {
  const Split split = split_for(double(rows * args.width) * kMicrosecondsPerActivation);
  run_split(rows, split, [&](int64_t begin, int64_t end) {
    kernels().gated(args, begin, end);
  });
}

void launch_rope_store(const RopeStoreArgs& args, int64_t tokens) {
  const double elements = double(tokens) * (args.q_heads + 2 * args.kv_heads) * args.dim;
  run_split(
      tokens, split_for(elements * kMicrosecondsPerRopeElement),
      [&](int64_t begin, int64_t end) { kernels().rope_store(args, begin, end); });
}

namespace {

struct Rows {
  int64_t count, width, stride;
};

// [..., width] as rows; leading dimensions must collapse into one stride.
Rows read_rows(const char* op, const char* name, const Tensor& t) {
  const int64_t dim = t.dim();
  SGLK_CHECK(dim >= 1 && t.size(dim - 1) > 0, op, name, t, "a non-empty last dimension");
  const int64_t width = t.size(dim - 1);
  if (t.is_contiguous()) return {t.numel() / width, width, width};
  SGLK_CHECK(
      dim == 2 && t.stride(1) == 1, op, name, t,
      "a contiguous tensor, or two dimensions with contiguous rows");
  return {t.size(0), width, t.stride(0)};
}

void check_like(
    const char* op, const char* name, const Tensor& t, const Tensor& like, int64_t numel) {
  SGLK_CHECK(
      t.scalar_type() == like.scalar_type() && t.is_contiguous() && t.numel() == numel, op,
      name, t, "contiguous, of the dtype of x and the size of the result");
}

void rmsnorm(const Tensor& x, const Tensor& weight, double eps, const Tensor& out) {
  const Rows rows = read_rows("rmsnorm", "x", x);
  const DType dtype = float_type("rmsnorm", "x", x);
  check_vector("rmsnorm", "weight", weight, x.scalar_type(), rows.width);
  check_like("rmsnorm", "out", out, x, x.numel());
  launch_norm(
      {dtype, x.const_data_ptr(), nullptr, weight.const_data_ptr(), out.mutable_data_ptr(),
       rows.stride, rows.width, float(eps)},
      rows.count);
}

void fused_add_rmsnorm(
    const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  const Rows rows = read_rows("fused_add_rmsnorm", "x", x);
  const DType dtype = float_type("fused_add_rmsnorm", "x", x);
  SGLK_CHECK(x.is_contiguous(), "fused_add_rmsnorm", "x", x, "a contiguous tensor");
  check_vector("fused_add_rmsnorm", "weight", weight, x.scalar_type(), rows.width);
  check_like("fused_add_rmsnorm", "residual", residual, x, x.numel());
  void* data = x.mutable_data_ptr();
  launch_norm(
      {dtype, data, residual.mutable_data_ptr(), weight.const_data_ptr(), data, rows.width,
       rows.width, float(eps)},
      rows.count);
}

void gated(const char* op, Activation activation, const Tensor& x, const Tensor& out) {
  const Rows rows = read_rows(op, "x", x);
  const DType dtype = float_type(op, "x", x);
  SGLK_CHECK(rows.width % 2 == 0, op, "x", x, "an even last dimension");
  check_like(op, "out", out, x, x.numel() / 2);
  const GatedArgs args{dtype, activation, x.const_data_ptr(), out.mutable_data_ptr(),
                       rows.stride, rows.width / 2};
  launch_gated(args, rows.count);
}

void silu_and_mul(const Tensor& x, const Tensor& out) {
  gated("silu_and_mul", Activation::silu, x, out);
}

void gelu_and_mul(const Tensor& x, const Tensor& out) {
  gated("gelu_and_mul", Activation::gelu, x, out);
}

// The part of a cache [slots, heads, dim] that the store relies on; returns slot stride.
int64_t check_cache(const char* name, const Tensor& cache, const Tensor& k) {
  check_heads("rope_store_kv", name, cache, k.scalar_type(), k.size(2));
  SGLK_CHECK(cache.size(1) == k.size(1), "rope_store_kv", name, cache, "the heads of k");
  return cache.stride(0);
}

void rope_store_kv(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& positions,
    const OptionalTensor& cos_sin, const Tensor& k_cache, const Tensor& v_cache,
    const Tensor& slots, const OptionalTensor& q_norm, const OptionalTensor& k_norm,
    double eps) {
  const char* op = "rope_store_kv";
  const DType dtype = float_type(op, "q", q);
  SGLK_CHECK(q.dim() == 3, op, "q", q, "[T, heads, dim]");
  const int64_t tokens = q.size(0), dim = q.size(2);
  check_heads(op, "q", q, q.scalar_type(), dim);
  check_heads(op, "k", k, q.scalar_type(), dim);
  check_heads(op, "v", v, q.scalar_type(), dim);
  SGLK_CHECK(k.size(0) == tokens, op, "k", k, "the tokens of q");
  SGLK_CHECK(
      v.size(0) == tokens && v.size(1) == k.size(1), op, "v", v, "the shape of k");
  check_vector(op, "positions", positions, ScalarType::Long, tokens);
  check_vector(op, "out_cache_loc", slots, ScalarType::Long, tokens);
  RopeStoreArgs args{};
  args.k_slot_stride = check_cache("k_cache", k_cache, k);
  args.v_slot_stride = check_cache("v_cache", v_cache, k);
  SGLK_CHECK(
      v_cache.size(0) == k_cache.size(0), op, "v_cache", v_cache, "the slots of k_cache");
  if (q_norm) check_vector(op, "q_norm_weight", *q_norm, q.scalar_type(), dim);
  if (k_norm) check_vector(op, "k_norm_weight", *k_norm, q.scalar_type(), dim);
  args.dtype = dtype;
  args.positions = static_cast<const int64_t*>(positions.const_data_ptr());
  args.slots = static_cast<const int64_t*>(slots.const_data_ptr());
  if (cos_sin) {
    SGLK_CHECK(
        cos_sin->dim() == 2 && cos_sin->scalar_type() == ScalarType::Float &&
            cos_sin->size(1) % 2 == 0 && cos_sin->size(1) <= dim && cos_sin->stride(1) == 1,
        op, "cos_sin_cache", *cos_sin, "float32 [positions, rot], rot even and <= dim");
    check_indices(op, "positions", args.positions, tokens, cos_sin->size(0));
    args.cos_sin = static_cast<const float*>(cos_sin->const_data_ptr());
    args.cos_sin_stride = cos_sin->stride(0);
    args.rotary_dim = int32_t(cos_sin->size(1));
  }
  check_indices(op, "out_cache_loc", args.slots, tokens, k_cache.size(0));
  args.q = q.mutable_data_ptr();
  args.k = k.const_data_ptr();
  args.v = v.const_data_ptr();
  args.q_stride = q.stride(0);
  args.k_stride = k.stride(0);
  args.v_stride = v.stride(0);
  args.k_cache = k_cache.mutable_data_ptr();
  args.v_cache = v_cache.mutable_data_ptr();
  args.q_norm = q_norm ? q_norm->const_data_ptr() : nullptr;
  args.k_norm = k_norm ? k_norm->const_data_ptr() : nullptr;
  args.q_heads = int32_t(q.size(1));
  args.kv_heads = int32_t(k.size(1));
  args.dim = int32_t(dim);
  args.eps = float(eps);
  launch_rope_store(args, tokens);
}

void latent_store(
    const Tensor& q, const Tensor& k, const Tensor& positions, const Tensor& cos_sin,
    const Tensor& cache, const Tensor& slots, const Tensor& norm, double eps) {
  const char* op = "latent_store";
  const DType dtype = float_type(op, "q", q);
  SGLK_CHECK(q.dim() == 3, op, "q", q, "[T, heads, channels]");
  SGLK_CHECK(k.dim() == 3, op, "k", k, "[T, 1, rank + rope]");
  const int64_t tokens = q.size(0), q_width = q.size(2), width = k.size(2);
  check_heads(op, "q", q, q.scalar_type(), q_width);
  check_heads(op, "k", k, q.scalar_type(), width);
  check_heads(op, "k_cache", cache, q.scalar_type(), width);
  SGLK_CHECK(k.size(0) == tokens && k.size(1) == 1, op, "k", k, "one head for each token of q");
  SGLK_CHECK(cache.size(1) == 1, op, "k_cache", cache, "one head");
  SGLK_CHECK(
      cos_sin.dim() == 2 && cos_sin.scalar_type() == ScalarType::Float &&
          cos_sin.size(1) % 2 == 0 && cos_sin.size(1) < width &&
          cos_sin.size(1) <= q_width && cos_sin.stride(1) == 1,
      op, "cos_sin_cache", cos_sin, "float32 [positions, rope], rope even and below dim");
  const int64_t rope = cos_sin.size(1);
  check_vector(op, "k_norm_weight", norm, q.scalar_type(), width - rope);
  check_vector(op, "positions", positions, ScalarType::Long, tokens);
  check_vector(op, "out_cache_loc", slots, ScalarType::Long, tokens);
  const LatentStoreArgs args{
      dtype,
      q.mutable_data_ptr(),
      k.const_data_ptr(),
      q.stride(0),
      k.stride(0),
      cache.mutable_data_ptr(),
      cache.stride(0),
      static_cast<const int64_t*>(positions.const_data_ptr()),
      static_cast<const int64_t*>(slots.const_data_ptr()),
      static_cast<const float*>(cos_sin.const_data_ptr()),
      cos_sin.stride(0),
      norm.const_data_ptr(),
      int32_t(q.size(1)),
      int32_t(q_width),
      int32_t(width - rope),
      int32_t(rope),
      float(eps)};
  check_indices(op, "positions", args.positions, tokens, cos_sin.size(0));
  check_indices(op, "out_cache_loc", args.slots, tokens, cache.size(0));
  const double elements = double(tokens) * double(args.q_heads * rope + width);
  run_split(
      tokens, split_for(elements * kMicrosecondsPerRopeElement),
      [&](int64_t begin, int64_t end) { kernels().latent_store(args, begin, end); });
}

void exp_values(const Tensor& x, const Tensor& out) {
  check_vector("exp", "x", x, ScalarType::Float, x.numel());
  check_vector("exp", "out", out, ScalarType::Float, x.numel());
  kernels().exp(
      static_cast<const float*>(x.const_data_ptr()),
      static_cast<float*>(out.mutable_data_ptr()), x.numel());
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sglang_kernels, m) {
  m.def("rmsnorm(Tensor x, Tensor weight, float eps, Tensor(a!) out) -> ()");
  m.def(
      "fused_add_rmsnorm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()");
  m.def("silu_and_mul(Tensor x, Tensor(a!) out) -> ()");
  m.def("gelu_and_mul(Tensor x, Tensor(a!) out) -> ()");
  m.def(
      "rope_store_kv(Tensor(a!) q, Tensor k, Tensor v, Tensor positions, "
      "Tensor? cos_sin_cache, Tensor(b!) k_cache, Tensor(c!) v_cache, "
      "Tensor out_cache_loc, Tensor? q_norm_weight, Tensor? k_norm_weight, float eps) -> ()");
  m.def(
      "latent_store(Tensor(a!) q, Tensor k, Tensor positions, Tensor cos_sin_cache, "
      "Tensor(b!) k_cache, Tensor out_cache_loc, Tensor k_norm_weight, float eps) -> ()");
  m.def("exp(Tensor x, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sglang_kernels, CPU, m) {
  m.impl("rmsnorm", TORCH_BOX(&rmsnorm));
  m.impl("fused_add_rmsnorm", TORCH_BOX(&fused_add_rmsnorm));
  m.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
  m.impl("gelu_and_mul", TORCH_BOX(&gelu_and_mul));
  m.impl("rope_store_kv", TORCH_BOX(&rope_store_kv));
  m.impl("latent_store", TORCH_BOX(&latent_store));
  m.impl("exp", TORCH_BOX(&exp_values));
}

}  // namespace sglk
