// The op namespace; each launcher file adds its ops as a fragment.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(sglang_kernels, m) { (void)m; }
