"""The canary inside a stock SGLang, loaded by the entry point `sglang.srt.plugins`.

SGLang is never imported by name: what is used of it is declared in `hooks_of.py`,
checked there, and read through the objects that its methods hand over.
"""
