"""SGLang's names for backends, and their counterparts here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.arg_groups.arg_parser import Synonym
from sglang.srt.environ import envs

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

TOKEN_ORACLE = "token_oracle"

SAMPLING_BACKENDS = (
    Synonym("flashinfer", "pytorch", "sampling runs on torch and Triton here"),
    Synonym(TOKEN_ORACLE, "pytorch", "the oracle replaces the logits before that"),
)
GRAMMAR_BACKENDS = tuple(
    Synonym(name, "llguidance", "grammars are compiled by llguidance here")
    for name in ("xgrammar", "outlines", "auto")
)
KV_DTYPE_NAMES = (
    Synonym("bf16", "bfloat16", "it is another name"),
    Synonym("fp8", "fp8_e4m3", "it is the usual one of 8 bits"),
)
FP8_GEMM_BACKENDS = tuple(
    Synonym(name, "auto", "products of 8 bits run on torch and Triton here")
    for name in (
        "aiter",
        "cutlass",
        "deep_gemm",
        "flashinfer_cutlass",
        "flashinfer_deepgemm",
        "flashinfer_trtllm",
    )
)


def check_token_oracle(server_args: ServerArgs) -> None:
    """
    Raises:
        ValueError: the oracle is selected as a backend but not switched on.
    """
    variable = envs.SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE
    if server_args.sampling_backend == TOKEN_ORACLE and not variable.get():
        raise ValueError(
            f"--sampling-backend {TOKEN_ORACLE} needs {variable.name}=1 and "
            "--kv-canary; set them, or remove the flag"
        )
