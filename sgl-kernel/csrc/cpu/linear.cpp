// Checks and launch of the product with a packed weight.
#include "launch.h"

namespace sglk {
namespace {

constexpr int64_t kPanel = 32;
// Time of one thread: per weight byte from the third-level cache, per multiply-add.
constexpr double kMicrosecondsPerByte = 3e-5;
constexpr double kMicrosecondsPerMultiplyAdd = 1.2e-5;
// With fewer units per thread, dividing only the columns is not even enough.
constexpr int64_t kUnitsPerThread = 4;

}  // namespace

void launch_linear(const LinearArgs& args) {
  const double cells = double(args.n) * double(args.k);
  const Split split = split_for(
      cells * (args.weight_bf16 ? 2 : 4) * kMicrosecondsPerByte +
      cells * double(args.rows) * kMicrosecondsPerMultiplyAdd);
  const KernelTable& table = kernels();
  const int64_t units = table.linear_units(args.n);
  if (units >= kUnitsPerThread * split.threads || args.rows < 2 * split.threads) {
    run_split(units, split, [&](int64_t begin, int64_t end) {
      table.linear(args, 0, args.rows, begin, end);
    });
  } else {
    run_split(args.rows, split, [&](int64_t begin, int64_t end) {
      table.linear(args, begin, end, 0, units);
    });
  }
}

namespace {

void packed_linear(
    const Tensor& x, const Tensor& weight, int64_t n, const OptionalTensor& bias,
    const Tensor& out) {
  const char* op = "packed_linear";
  const int64_t dims = x.dim();
  SGLK_CHECK(
      dims >= 1 && x.scalar_type() == ScalarType::Float && x.size(dims - 1) > 0, op, "x", x,
      "float32 [..., K]");
  LinearArgs args{};
  args.k = x.size(dims - 1);
  args.n = n;
  args.rows = x.numel() / args.k;
  args.x_stride = args.k;
  if (!x.is_contiguous()) {
    SGLK_CHECK(
        dims == 2 && x.stride(1) == 1, op, "x", x,
        "a contiguous tensor, or two dimensions with contiguous rows");
    args.x_stride = x.stride(0);
  }
  args.weight_bf16 = weight.scalar_type() == ScalarType::BFloat16;
  SGLK_CHECK(
      n > 0 && weight.dim() == 3 && weight.size(0) == (n + kPanel - 1) / kPanel &&
          weight.size(1) == args.k && weight.size(2) == kPanel && weight.is_contiguous() &&
          (args.weight_bf16 || weight.scalar_type() == ScalarType::Float),
      op, "weight", weight,
      "packed float32 or bfloat16 [ceil(N / 32), K, 32] with the K of x");
  SGLK_CHECK(
      out.is_contiguous() && out.scalar_type() == ScalarType::Float &&
          out.numel() == args.rows * n,
      op, "out", out, "contiguous float32 [..., N]");
  if (bias) check_vector(op, "bias", *bias, ScalarType::Float, n);
  args.x = static_cast<const float*>(x.const_data_ptr());
  args.weight = weight.const_data_ptr();
  args.bias = bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr;
  args.out = static_cast<float*>(out.mutable_data_ptr());
  args.out_stride = n;
  if (args.rows > 0) launch_linear(args);
}

// [T, heads, dim] of floats whose channels are contiguous.
void check_head_rows(
    const char* op, const char* name, const Tensor& t, int64_t tokens, int64_t heads,
    int64_t dim) {
  SGLK_CHECK(
      t.dim() == 3 && t.scalar_type() == ScalarType::Float && t.size(0) == tokens &&
          t.size(1) == heads && t.size(2) == dim && t.stride(2) == 1,
      op, name, t,
      "float32 [" + std::to_string(tokens) + ", " + std::to_string(heads) + ", " +
          std::to_string(dim) + "] with contiguous channels");
}

void packed_head_linear(
    const Tensor& x, const Tensor& weight, int64_t n, const Tensor& out) {
  const char* op = "packed_head_linear";
  SGLK_CHECK(x.dim() == 3, op, "x", x, "float32 [T, heads, K]");
  const int64_t rows = x.size(0), heads = x.size(1);
  check_head_rows(op, "x", x, rows, heads, x.size(2));
  check_head_rows(op, "out", out, rows, heads, n);
  LinearArgs args{};
  args.rows = rows;
  args.n = n;
  args.k = x.size(2);
  args.weight_bf16 = weight.scalar_type() == ScalarType::BFloat16;
  SGLK_CHECK(
      n > 0 && weight.dim() == 4 && weight.size(0) == heads &&
          weight.size(1) == (n + kPanel - 1) / kPanel && weight.size(2) == args.k &&
          weight.size(3) == kPanel && weight.is_contiguous() &&
          (args.weight_bf16 || weight.scalar_type() == ScalarType::Float),
      op, "weight", weight,
      "packed float32 or bfloat16 [heads, ceil(N / 32), K, 32] with the K of x");
  if (rows == 0) return;
  args.x_stride = x.stride(0);
  args.out_stride = out.stride(0);
  const float* from = static_cast<const float*>(x.const_data_ptr());
  float* to = static_cast<float*>(out.mutable_data_ptr());
  const int64_t x_head = x.stride(1), out_head = out.stride(1);
  const int64_t head_bytes =
      weight.size(1) * args.k * kPanel * (args.weight_bf16 ? 2 : 4);
  const char* weights = static_cast<const char*>(weight.const_data_ptr());
  const KernelTable& table = kernels();
  const int64_t units = table.linear_units(n);
  const Split split = split_for(
      double(heads * head_bytes) * kMicrosecondsPerByte +
      double(heads * n) * double(args.k) * double(rows) * kMicrosecondsPerMultiplyAdd);
  run_split(heads * units, split, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t head = begin / units;
      const int64_t stop = std::min(end, (head + 1) * units);
      LinearArgs part = args;
      part.x = from + head * x_head;
      part.out = to + head * out_head;
      part.weight = weights + head * head_bytes;
      table.linear(part, 0, rows, begin - head * units, stop - head * units);
      begin = stop;
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sglang_kernels, m) {
  m.def("packed_linear(Tensor x, Tensor weight, int n, Tensor? bias, Tensor(a!) out) -> ()");
  m.def("packed_head_linear(Tensor x, Tensor weight, int n, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sglang_kernels, CPU, m) {
  m.impl("packed_linear", TORCH_BOX(&packed_linear));
  m.impl("packed_head_linear", TORCH_BOX(&packed_head_linear));
}

}  // namespace sglk
