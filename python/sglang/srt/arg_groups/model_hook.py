"""Checks and resolves the flags that name the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.utils.gguf_header import is_gguf
from sglang.srt.utils.json_file import read_text_file
from sglang.srt.utils.paths import bundled_demo_model_path, resolve_gguf_file

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def handle_model(server_args: ServerArgs) -> None:
    """Resolve the model, its tokenizer and its template.

    Raises:
        ValueError: a file is missing or not of the named kind.
    """
    if server_args.model_path is None:
        server_args.model_path = str(bundled_demo_model_path())
        server_args.served_model_name = server_args.served_model_name or "demo"
    if server_args.load_format == "gguf":
        server_args.model_path = str(resolve_gguf_file(server_args.model_path))
    model = server_args.model_path
    if server_args.load_format == "safetensors" and is_gguf(Path(model)):
        raise ValueError(
            f"--load-format safetensors: --model-path {model} is a GGUF file; use "
            "--load-format gguf or auto"
        )
    server_args.tokenizer_path = server_args.tokenizer_path or model
    server_args.served_model_name = server_args.served_model_name or model
    template = server_args.chat_template
    if template is not None and "{" not in template:
        try:
            server_args.chat_template = read_text_file(Path(template))
        except ValueError as error:
            raise ValueError(
                f"--chat-template {error}; name a file, or write a jinja template: "
                "{{ messages }} and so on"
            ) from error
