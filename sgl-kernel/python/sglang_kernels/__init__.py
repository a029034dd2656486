"""Native kernels of sglang-canary: `sglang_kernels.ops` loads the library."""
