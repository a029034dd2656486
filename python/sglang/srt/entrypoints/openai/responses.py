"""`POST /v1/responses` without storage, and the paths that would need it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sglang.srt.entrypoints.chat_blocks import answer_blocks
from sglang.srt.entrypoints.endpoint import ENGINE_ERRORS, Endpoint
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import aside, read_body
from sglang.srt.entrypoints.neutral_fields import RESPONSES, refuse_others
from sglang.srt.entrypoints.openai.chat_submit import (
    RenderedChat,
    render_chat,
    submit_chat,
)
from sglang.srt.entrypoints.openai.responses_answer import ResponsesAnswer
from sglang.srt.entrypoints.openai.responses_input import (
    client_names,
    read_metadata,
    to_chat,
)
from sglang.srt.entrypoints.openai.responses_protocol import ResponsesRequest
from sglang.srt.entrypoints.openai.responses_types import (
    ResponseEvent,
    ResponseObject,
)
from sglang.srt.managers.messages.errors import BadRequest, NotFound

# Path of a stored response -> methods that clients use.
STORED_PATHS = {
    "/v1/responses/{response_id}": ["GET", "DELETE"],
    "/v1/responses/{response_id}/cancel": ["POST"],
    "/v1/responses/{response_id}/input_items": ["GET"],
}
EXAMPLES = {
    "text": {"input": "What is the capital of France?", "max_output_tokens": 8},
    "stream": {
        "instructions": "You answer briefly.",
        "input": [{"role": "user", "content": "Count to three."}],
        "max_output_tokens": 8,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "stream": True,
    },
    "call": {
        "input": [
            {"role": "user", "content": "What is 1 + 2?"},
            {"type": "reasoning", "summary": []},
            {
                "type": "function_call",
                "call_id": "call_1",
                "name": "add",
                "arguments": '{"a": 1, "b": 2}',
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "3"},
        ],
        "tools": [{"type": "function", "name": "add"}],
        "tool_choice": {"type": "function", "name": "add"},
        "max_output_tokens": 8,
        "stream": True,
    },
}


class ResponsesApi:
    """Handlers of the paths below `/v1/responses`."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def routes(self) -> list[BaseRoute]:
        return [
            Endpoint(
                "/v1/responses",
                self.create,
                methods=["POST"],
                summary="OpenAI's responses, without a store",
                body=ResponsesRequest,
                answer=ResponseObject,
                event=ResponseEvent,
                is_named=True,
                errors=ENGINE_ERRORS,
                examples=EXAMPLES,
            ),
            *(
                Endpoint(
                    path,
                    self.stored,
                    methods=methods,
                    summary="Not served: the server stores no responses",
                    errors=(404,),
                    is_refused=True,
                )
                for path, methods in STORED_PATHS.items()
            ),
        ]

    async def create(self, request: Request) -> Response:
        body = await read_body(request, ResponsesRequest)
        refuse_others(body, RESPONSES)
        self._front.check_model(body.model)
        metadata = read_metadata(body)
        chat = await aside(request, self._front.manager, to_chat, body)
        rendered = await render_chat(self._front, request, chat, client_names(chat))
        _check_logprobs(rendered)
        submitted = await submit_chat(self._front, rendered)
        answer = ResponsesAnswer(self._front, submitted, body, metadata=metadata)
        return await answer_blocks(self._front, request, submitted, answer)

    async def stored(self, request: Request) -> Response:
        raise NotFound(
            f"{request.method} {request.url.path}: this server stores no responses; "
            "keep the answer of POST /v1/responses, and send its output as input of "
            "the next request"
        )


def _check_logprobs(chat: RenderedChat) -> None:
    """Reject log probabilities if some tokens do not belong to the text."""
    form = chat.form
    if chat.prompt.return_logprob and (form.reasoning or form.calls):
        raise BadRequest(
            "include: log probabilities are served for outputs that are nothing but "
            "text; leave out tools (or send tool_choice none) and serve without "
            "--reasoning-parser",
            param="include",
        )
