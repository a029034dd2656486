"""Finds, checks and completes a draft model: its configuration against the target's,
the modules that both share, and the user's token map.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sglang.srt.arg_groups.arg_parser import flag_name
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.vocab_embedding import LMHead
from sglang.srt.model_loader.quantized_layouts import plain_names
from sglang.srt.model_loader.weight_utils import tensor_names
from sglang.srt.models.draft import DraftModel, strip_prefix
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
from sglang.srt.models.nextn import HEADS, NEXTN, PARTS
from sglang.srt.models.registry import (
    CausalLM,
    draft_architectures,
    head_of_checkpoint,
)
from sglang.srt.speculative.eagle_utils import STANDALONE
from sglang.srt.utils.json_file import read_json, read_json_object
from sglang.srt.utils.paths import resolve_model_path

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Stands in for a file without a list of integers.
_TOKEN_MAP_ERRORS = (ValueError, TypeError, RuntimeError, OSError)
FLAG = flag_name("speculative_draft_model_path")


def draft_model_config(server_args: ServerArgs, target: ModelConfig) -> ModelConfig:
    """Read --speculative-draft-model-path's configuration, with the target's context.

    Raises:
        ValueError: it is not a draft of the algorithm's kind, or not for this target.
            The message says what differs.
    """
    path, algorithm = (
        server_args.speculative_draft_model_path,
        server_args.speculative_algorithm,
    )
    assert path is not None and algorithm is not None
    folder = resolve_model_path(path, flag=FLAG)
    config = ModelConfig.from_path(
        folder, quantization=server_args.speculative_draft_model_quantization
    )
    if algorithm in _RESOLVERS:
        config = _RESOLVERS[algorithm](config, server_args)
    known = draft_architectures(algorithm)
    if config.architecture not in known:
        raise ValueError(
            f"{FLAG} {path}: {config.architecture} is not a draft of "
            f"--speculative-algorithm {algorithm}, which takes {', '.join(known)}"
        )
    if config.context_len != target.context_len:
        if config.context_len < target.context_len:
            logger.info(
                "The draft was configured for %d positions; its rotary table is "
                "extended to the target's %d",
                config.context_len,
                target.context_len,
            )
        config = config.with_context(target.context_len)
    if algorithm == STANDALONE:
        _check_vocabulary(config, target, server_args)
    return config


def _head_config(config: ModelConfig, server_args: ServerArgs) -> ModelConfig:
    """Return the shape of the head in the checkpoint that `config` was read from.

    Raises:
        ValueError: there is none. The message names the first tensor that is missing.
    """
    path = server_args.speculative_draft_model_path
    given = f"{FLAG} {path}" if path != server_args.model_path else "--model-path"
    where = f"{config.path} ({given}) has no head for --speculative-algorithm {NEXTN}"
    head = head_of_checkpoint(config.architecture)
    if head is None:
        known = ", ".join(each.target.__name__ for each in HEADS)
        raise ValueError(
            f"{where}: {config.architecture} is not one of the models whose heads are "
            f"served, {known}; use another algorithm"
        )
    if server_args.draft_load_format != "dummy":
        stored, names = head.tensors.names(config), _weight_names(config)
        missing = next((x for x in map(stored.stored, PARTS) if x not in names), None)
        if missing is not None:
            raise ValueError(
                f"{where}: tensor {missing} is missing; name a folder that has it "
                f"with {FLAG}, or use another algorithm"
            )
    return config.head(head.__name__)


def _weight_names(config: ModelConfig) -> set[str]:
    """Return the tensors of a checkpoint as they are called where none is quantised."""
    return plain_names(tensor_names(config.path), config.quantization)


def _with_head_architecture(
    config: ModelConfig, server_args: ServerArgs
) -> ModelConfig:
    """Correct the architecture of published EAGLE heads that carry their target's
    class."""
    if config.architecture != LlamaForCausalLM.__name__:
        return config
    names = {strip_prefix(name) for name in _weight_names(config)}
    if "fc.weight" not in names:
        return config
    return config.with_architecture(LlamaForCausalLMEagle.__name__)


# What config.json of a draft means with an algorithm, if not what it says.
_RESOLVERS = {NEXTN: _head_config, "EAGLE": _with_head_architecture}


def _check_vocabulary(
    draft: ModelConfig, target: ModelConfig, server_args: ServerArgs
) -> None:
    """Check token ids: a language model can only draft if ids mean the same to both."""
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"{FLAG} {draft.path}: its vocabulary has {draft.vocab_size} tokens, the "
            f"target's {target.vocab_size}; a STANDALONE draft needs the target's "
            "tokenizer"
        )
    assert server_args.tokenizer_path is not None
    own = draft.path / "tokenizer.json"
    other = Path(server_args.tokenizer_path) / "tokenizer.json"
    if not (own.is_file() and other.is_file()):
        return
    if _token_ids(own) != _token_ids(other):
        raise ValueError(
            f"{FLAG} {draft.path}: its tokenizer.json numbers tokens differently from "
            f"{other}; a STANDALONE draft needs the target's tokenizer"
        )


def _token_ids(path: Path) -> dict[str, Any]:
    raw = read_json_object(path)
    model = raw.get("model")
    return {
        "added_tokens": raw.get("added_tokens"),
        "vocab": model.get("vocab") if isinstance(model, dict) else None,
    }


def share_embedding_and_head(
    draft: DraftModel, target: CausalLM, *, token_map: Tensor | None
) -> None:
    """Give a head those of the target's modules that its own checkpoint lacks.

    Args:
        token_map: int64 [n], target tokens that the draft may propose. The head then
            gets these rows of the target's head.
    """
    assert not isinstance(target, DraftModel)
    embed_tokens, lm_head = target.embed_and_head()
    if token_map is not None:
        rows = lm_head.rows(token_map)
        with torch.device(rows.device):
            sliced = LMHead(*rows.shape)
        assert sliced.weight is not None
        sliced.weight.data = rows
        sliced.process_weights_after_loading()
        lm_head = sliced
    draft.set_embed_and_head(embed_tokens, lm_head)


def check_top_k(topk: int, *, num_tokens: int) -> None:
    """Check that a draft can propose `topk` of its `num_tokens` tokens.

    Raises:
        ValueError: it has fewer tokens.
    """
    if topk > num_tokens:
        raise ValueError(
            f"--speculative-eagle-topk {topk} asks for more tokens than the "
            f"{num_tokens} that the draft can propose; use at most {num_tokens}"
        )


def load_token_map(path: str, *, vocab_size: int, device: torch.device | str) -> Tensor:
    """Load the token ids that a draft may propose, int64 [n].

    Args:
        path: a .json file with a list of ids, or a .safetensors file with one tensor.

    Raises:
        ValueError: the file is neither, or an id is outside the target's vocabulary or
            occurs twice.
    """
    flag = f"--speculative-token-map {path}"
    file = Path(path)
    try:
        if file.suffix == ".safetensors":
            if not file.is_file():  # a pipe would never end
                raise ValueError("no such file")
            (ids,) = load_file(file).values()
        else:
            ids = torch.tensor(read_json(file))
    except (*_TOKEN_MAP_ERRORS, SafetensorError) as error:
        raise ValueError(
            f"{flag} must be a .json list of token ids or a .safetensors file with one "
            f"tensor of them: {error}"
        ) from error
    if ids.dim() != 1 or ids.is_floating_point() or not len(ids):
        raise ValueError(f"{flag} must hold a list of token ids, got {ids.shape}")
    ids = ids.long()
    outside = (ids < 0) | (ids >= vocab_size)
    if bool(outside.any()):
        raise ValueError(
            f"{flag}: token id {int(ids[outside][0])} is outside the target's "
            f"vocabulary of {vocab_size}"
        )
    if len(ids.unique()) != len(ids):
        raise ValueError(f"{flag}: a token id occurs more than once")
    return ids.to(device)
