// Checks and launch of the product of few rows with a plain weight.
#include "torch_api.h"

namespace sglk {
namespace {

// Time of one thread: per weight byte from the third-level cache, per multiply-add.
constexpr double kMicrosecondsPerByte = 2e-5;
constexpr double kMicrosecondsPerMultiplyAdd = 1.5e-5;

void plain_linear(
    const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& out) {
  const char* op = "plain_linear";
  const ScalarType type = x.scalar_type();
  SGLK_CHECK(
      x.dim() == 2 && x.size(1) > 0 && x.stride(1) == 1 &&
          (type == ScalarType::BFloat16 || type == ScalarType::Half),
      op, "x", x, "bfloat16 or float16 [rows, K] with contiguous rows");
  SGLK_CHECK(
      weight.dim() == 2 && weight.scalar_type() == type && weight.size(1) == x.size(1) &&
          weight.is_contiguous(),
      op, "weight", weight, "contiguous [N, K] of the dtype and the K of x");
  GemvArgs args{};
  args.dtype = float_type(op, "x", x);
  args.rows = x.size(0);
  args.k = x.size(1);
  args.n = weight.size(0);
  args.x_stride = x.stride(0);
  SGLK_CHECK(
      out.scalar_type() == type && out.is_contiguous() && out.numel() == args.rows * args.n, op,
      "out", out, "contiguous [rows, N] of the dtype of x");
  if (bias) check_vector(op, "bias", *bias, type, args.n);
  args.x = x.const_data_ptr();
  args.weight = weight.const_data_ptr();
  args.bias = bias ? bias->const_data_ptr() : nullptr;
  args.out = out.mutable_data_ptr();
  if (args.rows == 0) return;
  const double cells = double(args.n) * double(args.k);
  const Split split = split_for(
      cells * 2 * kMicrosecondsPerByte +
      cells * double(args.rows) * kMicrosecondsPerMultiplyAdd);
  run_split(args.n, split, [&](int64_t begin, int64_t end) { kernels().gemv(args, begin, end); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sglang_kernels, m) {
  m.def("plain_linear(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sglang_kernels, CPU, m) {
  m.impl("plain_linear", TORCH_BOX(&plain_linear));
}

}  // namespace sglk
