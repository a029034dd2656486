"""Turns a log's references into a record: plain data, without clients' words unless
reports may contain tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sglang.srt.managers.batch.req import namespace_of
from sglang.srt.managers.messages.errors import CLIENT_ABORT_STATUS
from sglang.srt.managers.messages.io_struct import (
    AbortReq,
    FlushCacheReq,
    GenerateBatch,
    GenerateReq,
    PauseReq,
)
from sglang.srt.replay.recording.pseudonyms import Pseudonyms
from sglang.srt.replay.recording.record_file import (
    Checkpoint,
    Origin,
    RecordedLaunch,
    RecordedRequest,
    RecordedRound,
    RecordFile,
)

if TYPE_CHECKING:
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.saved_tree import SavedTree
    from sglang.srt.replay.recording.log import LoggedLaunch, Noted, Round

# Sampling parameters with client text or tokens.
_WORDS: dict[str, Any] = {
    "stop": [],
    "stop_regex": [],
    "stop_token_ids": [],
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "logit_bias": None,
}


def to_record(
    *,
    origin: Origin,
    checkpoint: Checkpoint | None,
    obstacle: str | None,
    requests: dict[int, Noted],
    rounds: Sequence[Round],
    managers: Sequence[CanaryManager],
) -> RecordFile:
    """Build the record of a log.

    Args:
        requests: requests by serial. managers: canary managers of the pools, target
            first.
    """
    # Clients are anonymized but stay distinct, because turns depend on that.
    clients: dict[str, str] = {}
    for _, noted in sorted(requests.items()):
        clients.setdefault(noted.request.client, str(len(clients)))
    written = [
        _request(serial, noted, origin, client=clients[noted.request.client])
        for serial, noted in sorted(requests.items())
    ]
    if not origin.has_tokens:
        tree = None if checkpoint is None else checkpoint.tree
        written, tree = _with_pseudonyms(written, requests, tree, origin.vocab_size)
        checkpoint = None if checkpoint is None else replace(checkpoint, tree=tree)
    return RecordFile(
        origin=origin,
        checkpoint=checkpoint,
        obstacle=obstacle,
        requests=written,
        rounds=[_round(round_, requests) for round_ in rounds],
        armed=[[] for _ in managers],
    )


def _request(
    serial: int, noted: Noted, origin: Origin, *, client: str
) -> RecordedRequest:
    request = noted.request
    params = request.sampling_params
    embeds, named = request.input_embeds, request.token_ids_logprob
    if not origin.has_tokens:
        params = msgspec.structs.replace(params, **_WORDS)
        embeds = None if embeds is None else bytes(len(embeds))
        named = []
    message = msgspec.structs.replace(
        request,
        input_ids=[],
        sampling_params=params,
        input_embeds=embeds,
        token_ids_logprob=named,
        client=client,
    )
    end, length, status = noted.end or (None, 0, None)
    return RecordedRequest(
        serial=serial,
        rid=request.rid,
        message=msgspec.msgpack.encode(message),
        tokens=np.array(noted.tokens, dtype=np.int64),
        prompt_len=noted.prompt_len,
        end=end,
        end_len=length,
        is_own=end == "stop" or (end == "abort" and status != CLIENT_ABORT_STATUS),
        waits_for_grammar=request.sampling_params.grammar_key is not None,
    )


def _with_pseudonyms(
    written: list[RecordedRequest],
    requests: dict[int, Noted],
    tree: SavedTree | None,
    vocab_size: int,
) -> tuple[list[RecordedRequest], SavedTree | None]:
    """Return the same requests and tree with other tokens. The tree's elements are
    tokens, because with speculation there is no record without the real tokens.
    """
    names = Pseudonyms(vocab_size)
    for request in written:
        root = names.root(_namespace(requests[request.serial].request))
        names.add(request.tokens, after=root, start=0)
    states: list[np.uint64] = []
    runs = [] if tree is None else tree.runs
    for run in runs:
        before = names.root(run.namespace) if run.parent < 0 else states[run.parent]
        states.append(names.add(run.elements, after=before, start=run.start))
    replaced = names.replace()
    of_requests, of_runs = replaced[: len(written)], replaced[len(written) :]
    named = [replace(r, tokens=t) for r, t in zip(written, of_requests, strict=True)]
    if tree is None:
        return named, None
    pairs = zip(runs, of_runs, strict=True)
    return named, replace(tree, runs=[run._replace(elements=e) for run, e in pairs])


def _namespace(request: GenerateReq) -> str | None:
    return namespace_of(request.extra_key, request.lora).name


def _round(round_: Round, requests: dict[int, Noted]) -> RecordedRound:
    return RecordedRound(
        resolves=round_.resolves,
        events=list(_events(round_, requests)),
        launches=[] if round_.launch is None else [_launch(round_.launch)],
        shape=round_.shape,
    )


def _events(
    round_: Round, requests: dict[int, Noted]
) -> Iterator[tuple[str, int | str]]:
    by_rid = {noted.request.rid: serial for serial, noted in requests.items()}
    for decision in round_.grammars:
        if decision.error is None and decision.rid in by_rid:
            yield "ready", by_rid[decision.rid]
    accepted = list(round_.accepted)
    for message in round_.messages:
        match message:
            case GenerateReq():
                arrived = [message.rid]
            case GenerateBatch():
                arrived = [packed.rid for packed in message.requests]
            case AbortReq():
                yield ("abort_all", "") if message.abort_all else ("abort", message.rid)
                continue
            case FlushCacheReq():
                yield "flush", ""
                continue
            case PauseReq():
                yield ("pause", message.mode) if message.is_pause else ("continue", "")
                continue
            case _:
                continue
        for rid in arrived:
            # Other values were rejected.
            if accepted and requests[accepted[0]].request.rid == rid:
                yield "arrive", accepted.pop(0)


def _launch(launch: LoggedLaunch) -> RecordedLaunch:
    return RecordedLaunch(
        mode=launch.mode,
        clocks=launch.clocks,
        serials=launch.serials,
        starts=launch.starts,
        ends=launch.ends,
        taken=_joined(launch.taken),
        given=_joined(launch.given),
    )


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.empty(0, dtype=np.int64), *arrays])
