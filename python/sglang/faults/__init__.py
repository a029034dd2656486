"""The room of faults: plants the faults of `kv_canary.faults.catalogue` in this engine.

It lies above all layers and wraps their methods from outside; nothing below imports it.
Its door is `sglang.srt.kv_canary.perturb`.
"""
