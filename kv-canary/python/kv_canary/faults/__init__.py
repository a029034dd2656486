"""The room of faults: one catalogue, and what plants it in a pool or in another engine.

Nothing else in this package imports it. `catalogue` is data alone; `pool` damages the
bytes and records of any pool; `sglang` and `vllm` are the self-tests of the plugins.
"""
