"""The parser of requests: h11, without what intermediaries may read in another way."""

from __future__ import annotations

from typing import Any

import h11

HEADER_FIELDS_TOO_LARGE = 431


class StrictParser(h11.Connection):
    """h11's parser, which counts bytes and refuses ambiguous framing.

    Attributes:
        refusal: why the last request was refused.
        num_received, num_sent: bytes of the connection.
    """

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._max_header_bytes = max_header_bytes
        self.refusal: h11.RemoteProtocolError | None = None
        self.num_received = 0
        self.num_sent = 0

    def receive_data(self, data: bytes) -> None:
        self.num_received += len(data)
        super().receive_data(data)

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        parts = super().send_with_data_passthrough(event)
        self.num_sent += sum(map(len, parts or ()))
        return parts

    def next_event(self) -> Any:
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._check(event)
        except h11.RemoteProtocolError as error:
            self.refusal = error
            raise
        return event

    def _check(self, request: h11.Request) -> None:
        # h11 limits a head that is incomplete, not one that arrives at once.
        size = sum(len(name) + len(value) + 4 for name, value in request.headers)
        if size + len(request.target) > self._max_header_bytes:
            raise h11.RemoteProtocolError(
                f"the head of the request is longer than {self._max_header_bytes} "
                "bytes (--max-header-bytes)",
                error_status_hint=HEADER_FIELDS_TOO_LARGE,
            )
        names = {name for name, _ in request.headers}
        if b"transfer-encoding" not in names:
            return
        # A proxy that believes the other header sees other requests in the same bytes.
        if b"content-length" in names:
            raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        if request.http_version < b"1.1":
            raise h11.RemoteProtocolError("Transfer-Encoding before HTTP/1.1")
