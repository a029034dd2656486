"""Paths of SGLang's and OpenAI's APIs that this server rejects by name."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sglang.srt.entrypoints.endpoint import Endpoint
from sglang.srt.managers.messages.errors import BadRequest

_NO_EMBEDDINGS = "the model generates text and gives no embeddings"
_NO_SCORES = "the model generates text; probabilities of tokens are in /v1/score"
_NO_UPDATES = "weights stay as they were loaded; start a server with the new ones"
_NO_LORA = "adapters are read from folders; use /load_lora_adapter"
_NO_MEDIA = "text only: neither audio nor images"
_NO_STORE = "the server stores nothing between requests"
_NO_SLEEP = "memory is kept while the server runs"
_NO_SESSIONS = "there are no sessions; prefixes are cached by themselves"
_NO_EXPERTS = "experts are not recorded"

# Path -> reason. Any method gets the same answer: 400, which clients do not retry.
REFUSED: dict[str, str] = {
    "/v1/embeddings": _NO_EMBEDDINGS,
    "/encode": _NO_EMBEDDINGS,
    "/classify": _NO_EMBEDDINGS,
    "/v1/classify": _NO_EMBEDDINGS,
    "/v1/rerank": _NO_SCORES,
    "/update_weights_from_disk": _NO_UPDATES,
    "/update_weights_from_tensor": _NO_UPDATES,
    "/update_weights_from_distributed": _NO_UPDATES,
    "/init_weights_update_group": _NO_UPDATES,
    "/get_weights_by_name": _NO_UPDATES,
    "/load_lora_adapter_from_tensors": _NO_LORA,
    "/v1/audio/transcriptions": _NO_MEDIA,
    "/v1/audio/translations": _NO_MEDIA,
    "/v1/audio/speech": _NO_MEDIA,
    "/v1/images/generations": _NO_MEDIA,
    "/v1/files": _NO_STORE,
    "/v1/batches": _NO_STORE,
    "/release_memory_occupation": _NO_SLEEP,
    "/resume_memory_occupation": _NO_SLEEP,
    "/open_session": _NO_SESSIONS,
    "/close_session": _NO_SESSIONS,
    "/start_expert_distribution_record": _NO_EXPERTS,
    "/stop_expert_distribution_record": _NO_EXPERTS,
    "/dump_expert_distribution_record": _NO_EXPERTS,
}


def refused_routes() -> list[BaseRoute]:
    return [
        Endpoint(
            path,
            _refuse,
            methods=["GET", "POST"],
            summary=f"Not served: {reason}",
            errors=(400,),
            is_refused=True,
        )
        for path, reason in REFUSED.items()
    ]


async def _refuse(request: Request) -> Response:
    path = request.url.path
    raise BadRequest(f"{path} is not served: {REFUSED[path]}")
