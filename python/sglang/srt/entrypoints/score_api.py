"""`POST /v1/score`: how likely given tokens are after given texts."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sglang.srt.entrypoints.endpoint import ENGINE_ERRORS, Endpoint
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import (
    answer_size,
    aside,
    json_response,
    read_body,
    whole_results,
)
from sglang.srt.entrypoints.neutral_fields import SCORE, refuse_others
from sglang.srt.entrypoints.scoring import ScoreRequest
from sglang.srt.managers.messages.errors import BadRequest

# Field of `/generate` -> field of this body.
_FIELDS = {
    "text": "items",
    "input_ids": "items",
    "token_ids_logprob": "label_token_ids",
    "top_logprobs_num": "label_token_ids",
}


class ScoreUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class ScoreAnswer(msgspec.Struct, kw_only=True):
    """`scores` has a list per item, each with a number per label."""

    scores: list[list[float]]
    model: str
    usage: ScoreUsage
    object: Literal["scoring"] = "scoring"


class ScoreApi:
    """Handler of `/v1/score`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._manager = front.manager

    def routes(self) -> list[BaseRoute]:
        return [
            Endpoint(
                "/v1/score",
                self.score,
                methods=["POST"],
                summary="Probabilities of token ids after a query and each of some "
                "items",
                body=ScoreRequest,
                answer=ScoreAnswer,
                errors=ENGINE_ERRORS,
                examples={
                    "token ids": {
                        "query": [1, 2, 3],
                        "items": [[4], [5, 6]],
                        "label_token_ids": [7, 8],
                        "apply_softmax": True,
                    }
                },
            )
        ]

    async def score(self, request: Request) -> Response:
        body = await read_body(request, ScoreRequest)
        refuse_others(body, SCORE)
        self._front.check_model(body.model)
        self._manager.check_sizes(body.items, field="items")
        prompts = await aside(request, self._manager, body.prompts, self._manager.loras)
        try:
            group = await self._manager.submit(prompts)
        except BadRequest as error:
            named = _FIELDS.get(error.param or "")
            if named is not None:
                error.message = error.message.replace(error.param or "", named)
                error.param = named
            raise
        updates = await whole_results(request, self._manager, group)
        model = body.model or self._front.model_name

        def answer() -> Response:
            tokens = sum(update.prompt_tokens for update in updates)
            return json_response(
                ScoreAnswer(
                    scores=body.scores(updates),
                    model=model,
                    usage=ScoreUsage(prompt_tokens=tokens, total_tokens=tokens),
                )
            )

        return await self._manager.side_work.run(answer_size(updates), answer)
