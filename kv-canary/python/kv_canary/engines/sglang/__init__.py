"""The canary inside a stock SGLang, loaded by the entry point `sglang.srt.plugins`.

SGLang is never imported by name. `hooks_of.py` declares and checks what is used of it;
the rest is read through the objects that its methods pass.
"""
