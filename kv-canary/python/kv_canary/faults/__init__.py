"""The room of faults: one catalogue, and the code that plants it in pools and engines.

Nothing else in this package imports it. `catalogue` is only data; `pool` damages the
bytes and records of any pool; `sglang` and `vllm` are the plugins' self-tests.
"""
