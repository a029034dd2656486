"""The request parser: h11, minus anything that intermediaries may parse differently."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer

HEADER_FIELDS_TOO_LARGE = 431
# Lines must end with both characters; h11 accepts the second one alone.
_BARE_LF = re.compile(rb"(?<!\r)\n")
_END_OF_LINES = b"\r\n\r\n"
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
# A size with more digits may overflow to a different number elsewhere.
_CHUNK_HEADER = re.compile(rb"[0-9A-Fa-f]{1,16}(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?\r\n")
_LENGTH = re.compile(rb"content-length:[ \t]*[0-9]+[ \t]*", re.IGNORECASE)
_LENGTH_NAME = re.compile(rb"content-length[ \t]*:", re.IGNORECASE)
MAX_SHOWN_BYTES = 60


class StrictBuffer(ReceiveBuffer):
    """The unparsed bytes of a connection. Lines must end with CRLF, contain no control
    characters except tabs, and must not be folded.

    Raises:
        LocalProtocolError: raised by all methods; h11 reports it as the client's error.
    """

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Extract the lines of a head or of a trailer."""
        if self._data[:2] == b"\r\n":
            self._extract(2)
            return []
        end = self._data.find(_END_OF_LINES, max(self._multiple_lines_search - 3, 0))
        searched = len(self._data) if end < 0 else end
        bare = _BARE_LF.search(self._data, self._multiple_lines_search, searched)
        if bare is not None:
            raise h11.LocalProtocolError("a line ends with LF alone")
        self._multiple_lines_search = searched
        if end < 0:
            return None
        lines = self._extract(end + len(_END_OF_LINES))[:end].split(b"\r\n")
        _check_lines(lines)
        return lines

    def maybe_extract_next_line(self) -> bytearray | None:
        """Extract the line before a chunk."""
        line = super().maybe_extract_next_line()
        found = self._data if line is None else line
        if line is None and not _BARE_LF.search(found):
            return None
        if not _CHUNK_HEADER.fullmatch(found):
            shown = bytes(found[:MAX_SHOWN_BYTES])
            raise h11.LocalProtocolError(f"illegal chunk header: {shown!r}")
        return line


def _check_lines(lines: Sequence[bytearray]) -> None:
    lengths = [line for line in lines[1:] if _LENGTH_NAME.match(line)]
    if len(lengths) > 1 or not all(map(_LENGTH.fullmatch, lengths)):
        raise h11.LocalProtocolError("bad or repeated Content-Length")
    for line in lines:
        if line.startswith((b" ", b"\t")):
            raise h11.LocalProtocolError("a folded header")
        if _CONTROL.search(line):
            shown = bytes(line[:MAX_SHOWN_BYTES])
            raise h11.LocalProtocolError(f"a control character in {shown!r}")


class StrictParser(h11.Connection):
    """h11's parser, which also counts bytes and rejects ambiguous framing.

    Attributes:
        refusal: why the last request was rejected. num_received, num_sent: byte counts
        of the connection.
    """

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._receive_buffer = StrictBuffer()
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
        # h11 limits only an incomplete head, not one that arrives all at once.
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
        # A proxy that trusts the other header sees different requests in the same
        # bytes.
        if b"content-length" in names:
            raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        if request.http_version < b"1.1":
            raise h11.RemoteProtocolError("Transfer-Encoding before HTTP/1.1")
