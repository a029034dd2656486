// Checks and launch of the product with a packed weight.
#include "torch_api.h"

namespace sglk {
namespace {

constexpr int64_t kPanel = 32;
// Time of one thread: per weight byte from the third-level cache, per multiply-add.
constexpr double kMicrosecondsPerByte = 3e-5;
constexpr double kMicrosecondsPerMultiplyAdd = 1.2e-5;
// Units per thread from which dividing the columns alone is even enough.
constexpr int64_t kUnitsPerThread = 4;

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
  if (args.rows == 0) return;

  const double cells = double(args.n) * double(args.k);
  const Split split = split_for(
      cells * (args.weight_bf16 ? 2 : 4) * kMicrosecondsPerByte +
      cells * double(args.rows) * kMicrosecondsPerMultiplyAdd);
  const KernelTable& table = kernels();
  const int64_t units = table.linear_units(n);
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

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sglang_kernels, m) {
  m.def("packed_linear(Tensor x, Tensor weight, int n, Tensor? bias, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sglang_kernels, CPU, m) {
  m.impl("packed_linear", TORCH_BOX(&packed_linear));
}

}  // namespace sglk
