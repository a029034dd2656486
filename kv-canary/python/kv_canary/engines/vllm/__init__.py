"""The canary inside vLLM, loaded by the entry point `vllm.general_plugins`.

vLLM is never imported by name. `hooks_of.py` declares and checks what is used of it;
the rest is read through the objects that its methods pass.
"""
