"""The canary inside vLLM, loaded by the entry point `vllm.general_plugins`.

vLLM is never imported by name: what is used of it is declared in `hooks_of.py`, checked
there, and read through the objects that its methods hand over.
"""
