"""Messages between the HTTP process and the scheduler processes.

msgspec structs, tagged, encoded with msgpack (never pickle). Owns the format between
processes; the HTTP format is in `entrypoints`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from sglang.srt.managers.messages.pool_snapshot import PoolSnapshot
from sglang.srt.managers.messages.tier_snapshot import TierSnapshot
from sglang.srt.sampling.sampling_params import MAX_SEED, SamplingParams

# One entry per token: (logprob, token id). Top entries: a list per position.
TokenLogprob = tuple[float | None, int]


class FinishReason(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Why a request ended.

    `type` is "length" (with `length`), "stop" (with `matched`: a token id, the stop
    string, or the pattern of `stop_regex`) or "abort" (with `message` and the HTTP
    `status_code` it maps to).
    """

    type: str
    length: int | None = None
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None


class LogprobDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Logprobs that were not sent before.

    `input_*` arrive once, with the first output of the request: one entry for each
    prompt position from `logprob_start_len` on; the entry of position 0 has logprob
    None (nothing precedes it). `output_*` hold one entry per new token of the message.
    `*_top` hold, per position, the `top_logprobs_num` most likely tokens, best first
    (None at position 0). `*_named` hold, per position, the tokens of
    `token_ids_logprob`, in its order; for a request without output, `output_named`
    describes the token that would have come next.
    """

    input_token: list[TokenLogprob] | None = None
    input_top: list[list[TokenLogprob] | None] | None = None
    input_named: list[list[TokenLogprob] | None] | None = None
    output_token: list[TokenLogprob] = []
    output_top: list[list[TokenLogprob]] = []
    output_named: list[list[TokenLogprob]] = []

    @property
    def size(self) -> int:
        """Number of log probabilities."""
        lists = (self.input_top, self.output_top, self.input_named, self.output_named)
        several = sum(len(entry or ()) for entries in lists for entry in entries or ())
        return len(self.input_token or ()) + len(self.output_token) + several


class LoraRef(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded adapter.

    `revision` is a digest of its content: an adapter that is loaded again under the
    same name with other content has another one.
    """

    name: str
    path: str
    revision: str


class Bootstrap(msgspec.Struct, kw_only=True, frozen=True):
    """Where a request meets itself on another engine: the address of the prefill
    engine's bootstrap server, and a number that both engines were given."""

    host: str
    port: int
    room: int


class RequestOptions(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Options of a request other than its prompt and sampling parameters.

    With `stream` False, all output is sent once, when the request has finished.
    `logprob_start_len` -1 means no input logprobs. `copy` numbers the outputs of one
    prompt; it is added to the seed of the parameters, which they share. `extra_key` is
    a digest of the client's key. `priority` None is the lowest.
    `only_last_hidden_state` sends one hidden state, at the end. `client` identifies the
    client, for fair sharing. `lora` is the adapter, or None for the base model.
    """

    rid: str
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] = []
    extra_key: str | None = None
    return_hidden_states: bool = False
    only_last_hidden_state: bool = False
    copy: int = 0
    priority: int | None = None
    client: str = ""
    lora: LoraRef | None = None
    bootstrap: Bootstrap | None = None


class GenerateReq(RequestOptions, kw_only=True, tag="generate"):
    """One tokenized request.

    `input_embeds` is float32 [len(input_ids), hidden_size], row after row; the ids are
    then their `content_ids`.
    """

    input_ids: list[int]
    sampling_params: SamplingParams
    input_embeds: bytes | None = None

    @property
    def seed(self) -> int | None:
        """Seed of this output, or None if the scheduler draws one."""
        seed = self.sampling_params.sampling_seed
        return None if seed is None else (seed + self.copy) % (MAX_SEED + 1)


class PackedPrompt(msgspec.Struct, kw_only=True, omit_defaults=True):
    input_ids: list[int]
    input_embeds: bytes | None = None


class PackedReq(RequestOptions, kw_only=True):
    """A `GenerateReq` whose prompt and parameters are indices into its batch."""

    prompt: int
    params: int


class GenerateBatch(msgspec.Struct, kw_only=True, tag="generate_batch"):
    """Requests of one call. Shared prompts and parameters are sent once, and are shared
    objects again for the receiver.
    """

    prompts: list[PackedPrompt]
    params: list[SamplingParams]
    requests: list[PackedReq]

    @classmethod
    def pack(cls, requests: Sequence[GenerateReq]) -> GenerateBatch:
        """Pack `requests`; shared parts must be the same object."""
        prompts: dict[int, tuple[int, PackedPrompt]] = {}
        params: dict[int, tuple[int, SamplingParams]] = {}
        packed = []
        for request in requests:
            ids, sampling = request.input_ids, request.sampling_params
            prompt = PackedPrompt(input_ids=ids, input_embeds=request.input_embeds)
            prompt_at, _ = prompts.setdefault(id(ids), (len(prompts), prompt))
            params_at, _ = params.setdefault(id(sampling), (len(params), sampling))
            options = {name: getattr(request, name) for name in _OPTIONS}
            packed.append(PackedReq(prompt=prompt_at, params=params_at, **options))
        return cls(
            prompts=[prompt for _, prompt in prompts.values()],
            params=[sampling for _, sampling in params.values()],
            requests=packed,
        )

    def unpack(self) -> Iterator[GenerateReq]:
        for packed in self.requests:
            prompt = self.prompts[packed.prompt]
            yield GenerateReq(
                input_ids=prompt.input_ids,
                input_embeds=prompt.input_embeds,
                sampling_params=self.params[packed.params],
                **{name: getattr(packed, name) for name in _OPTIONS},
            )


_OPTIONS = RequestOptions.__struct_fields__


class AbortReq(msgspec.Struct, kw_only=True, omit_defaults=True, tag="abort"):
    """End request `rid` (or all requests) with an abort; unknown rids are ignored."""

    rid: str = ""
    abort_all: bool = False
    message: str = "aborted by the client"


CACHE_TIERS = ("device", "host", "storage")
"""The places that keep KV of cached prefixes, the fastest one first."""


class FlushCacheReq(msgspec.Struct, kw_only=True, tag="flush_cache"):
    """`tiers`: the `CACHE_TIERS` to empty."""

    call_id: int
    tiers: tuple[str, ...] = CACHE_TIERS


class GetStateReq(msgspec.Struct, kw_only=True, tag="get_state"):
    call_id: int


class GetIncidentsReq(msgspec.Struct, kw_only=True, tag="get_incidents"):
    call_id: int


class GetSnapshotReq(msgspec.Struct, kw_only=True, tag="get_snapshot"):
    """Ask for a snapshot of the pool, with all pages if `is_whole`."""

    call_id: int
    is_whole: bool = False


class GetSlotReq(msgspec.Struct, kw_only=True, tag="get_slot"):
    """Ask for the KV canary's records of a slot, which is in the pool."""

    call_id: int
    slot: int


class GetTiersReq(msgspec.Struct, kw_only=True, tag="get_tiers"):
    """Ask for what is outside of the device."""

    call_id: int


class ProfileReq(msgspec.Struct, kw_only=True, omit_defaults=True, tag="profile"):
    """Start a profile of the scheduler processes, or stop the running one.

    Every rank writes `<folder>/<name>-TP-<rank>.trace.json.gz` after `num_steps`
    forwards or at the end. `activities` are "CPU" and "GPU".
    """

    call_id: int
    is_start: bool
    folder: str = ""
    name: str = ""
    num_steps: int = 0
    activities: list[str] = []
    with_stack: bool = False
    record_shapes: bool = False


class PauseReq(msgspec.Struct, kw_only=True, tag="pause"):
    """Launch nothing from now on, or continue.

    `mode` "abort" ends all requests, "retract" queues them again without their memory,
    "in_place" leaves them as they are.
    """

    call_id: int
    is_pause: bool
    mode: str = "abort"


class LoadLoraReq(msgspec.Struct, kw_only=True, tag="load_lora"):
    """Load the adapter in the folder `path` under a name that is not in use."""

    call_id: int
    name: str
    path: str


class UnloadLoraReq(msgspec.Struct, kw_only=True, tag="unload_lora"):
    """Forget an adapter that no request uses."""

    call_id: int
    name: str


class ShutdownReq(msgspec.Struct, kw_only=True, tag="shutdown"):
    """Leave the event loop at once and drop all requests."""


SchedulerRequest = (
    GenerateReq
    | GenerateBatch
    | AbortReq
    | FlushCacheReq
    | GetStateReq
    | GetIncidentsReq
    | GetSnapshotReq
    | GetSlotReq
    | GetTiersReq
    | ProfileReq
    | PauseReq
    | LoadLoraReq
    | UnloadLoraReq
    | ShutdownReq
)


class GrammarDecision(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The grammar of request `rid` was compiled, or failed to compile (`error`,
    returned with the HTTP `status_code`). If `is_fresh`, every rank compiles it
    (again).
    """

    rid: str
    error: str | None = None
    status_code: int = 0
    is_fresh: bool = False


class TierDecision(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the ranks do with KV in other tiers in one step.

    `arrived` has the numbers of loads that rank 0 has seen arrive. At most about
    `store_bytes` are stored. `reads` and `read` have the serials of requests for which
    files are to be read, and of those for which that is over; `received` has those of
    requests that need not wait for another engine any more.
    """

    arrived: list[int] = []
    received: list[int] = []
    store_bytes: int = 0
    reads: list[int] = []
    read: list[int] = []


class StepInput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Input of one scheduler step, which rank 0 sends to the other ranks.

    Everything that depends on time or on another thread is decided by rank 0 and sent
    in here. `grammars` were decided before `requests` arrived. `shape` is an index of
    `DraftShapes.ladder`. `history` is a digest of all earlier steps: a rank with a
    different digest has diverged.
    """

    requests: list[SchedulerRequest] = []
    grammars: list[GrammarDecision] = []
    tiers: TierDecision | None = None
    shape: int = 0
    history: int = 0


class RequestOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New output of one request since its last message.

    `output_ids` is a delta and never contains tokens beyond the finish.
    `completion_tokens` counts all tokens so far. `finish_reason` is set exactly once,
    in the last message. `digest` is the `output_digest` of all tokens so far, or None
    while the KV canary is off. `first_token_at` is set in the last message if nothing
    was sent before, in seconds of the monotonic clock, which all processes on a host
    share.
    """

    rid: str
    output_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: FinishReason | None = None
    logprobs: LogprobDelta | None = None
    hidden_states: list[list[float]] | None = None
    spec_verify_ct: int = 0
    spec_accept_tokens: int = 0
    digest: int | None = None
    first_token_at: float | None = None


class BatchOutput(msgspec.Struct, kw_only=True, tag="batch_output"):
    outputs: list[RequestOutput]


class FlushCacheRsp(msgspec.Struct, kw_only=True, tag="flush_cache_rsp"):
    """Result of a flush; `success` is False if requests were running or waiting."""

    call_id: int
    success: bool


class HistogramStats(msgspec.Struct, kw_only=True):
    """A histogram: counts[i] values in (bounds[i - 1], bounds[i]], the last one above
    all bounds; and their sum."""

    bounds: list[float]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def empty(cls, bounds: Sequence[float]) -> HistogramStats:
        return cls(bounds=list(bounds), counts=[0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        """Count `value`."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class SchedulerStats(msgspec.Struct, kw_only=True):
    """Current gauges and counters since start (`*_total` only grow)."""

    num_running_reqs: int = 0
    num_queue_reqs: int = 0
    num_queue_tokens: int = 0
    # Requests whose grammars are being compiled.
    num_grammar_queue_reqs: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    token_usage: float = 0.0
    mamba_usage: float = 0.0
    gen_throughput: float = 0.0
    cache_hit_rate: float = 0.0
    num_retracted_reqs: int = 0
    spec_accept_length: float = 0.0
    draft_never_accepted_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    cached_tokens_total: int = 0
    num_requests_total: int = 0
    num_aborted_requests_total: int = 0
    forward_passes_total: int = 0
    cuda_graph_passes_total: int = 0
    prefill_cuda_graph_passes_total: int = 0
    # Numbers of rank 0.
    kernel_loads_after_ready_total: int = 0
    kv_canary_protected_tokens_total: int = 0
    kv_canary_swept_tokens_total: int = 0
    kv_canary_sweep_passes_total: int = 0
    kv_canary_healed_tokens_total: int = 0
    kv_events_published_total: int = 0
    kv_events_dropped_total: int = 0
    kv_events_replayed_total: int = 0
    kv_events_connections: int = 0
    # KV in host memory, in tokens; damaged units.
    hicache_host_used_tokens: int = 0
    hicache_host_total_tokens: int = 0
    hicache_stored_tokens_total: int = 0
    hicache_loaded_tokens_total: int = 0
    hicache_skipped_tokens_total: int = 0
    hicache_damaged_units_total: int = 0
    # KV between engines. Requests whose units are sent or awaited, and requests that
    # did not get all of them.
    num_prefill_inflight_queue_reqs: int = 0
    num_decode_transfer_queue_reqs: int = 0
    num_transfer_failed_reqs_total: int = 0
    kv_transfer_sent_bytes_total: int = 0
    kv_transfer_received_bytes_total: int = 0
    hicache_storage_tokens: int = 0
    hicache_storage_bytes: int = 0
    hicache_written_tokens_total: int = 0
    hicache_read_tokens_total: int = 0
    hicache_unwritten_tokens_total: int = 0
    # Pages that are watched or kept out of use.
    kv_canary_quarantined_pages: int = 0
    kv_canary_quarantined_share: float = 0.0
    # Something was healed in the last minute, or pages stay out of use.
    kv_canary_is_degraded: bool = False
    kv_canary_recovery_seconds: HistogramStats | None = None
    # From a request's arrival to its first batch.
    queue_time_seconds: HistogramStats | None = None
    # By reason.
    prefill_cuda_graph_fallbacks_total: dict[str, int] = {}
    kv_canary_violations_total: dict[str, int] = {}
    # By diagnosis.
    kv_canary_heals_total: dict[str, int] = {}


class GetStateRsp(msgspec.Struct, kw_only=True, tag="get_state_rsp"):
    call_id: int
    stats: SchedulerStats


class GetIncidentsRsp(msgspec.Struct, kw_only=True, tag="get_incidents_rsp"):
    """Incidents of the KV canary, oldest first (`docs/kv_canary.md`)."""

    call_id: int
    incidents: list[dict[str, Any]]


class GetSnapshotRsp(msgspec.Struct, kw_only=True, tag="get_snapshot_rsp"):
    call_id: int
    snapshot: PoolSnapshot
    stats: SchedulerStats


class GetSlotRsp(msgspec.Struct, kw_only=True, tag="get_slot_rsp"):
    """Records of a slot in all pools; empty if the KV canary is off."""

    call_id: int
    records: list[dict[str, Any]]


class GetTiersRsp(msgspec.Struct, kw_only=True, tag="get_tiers_rsp"):
    """KV outside of the device, or None if there is none."""

    call_id: int
    tiers: TierSnapshot | None


class ProfileRsp(msgspec.Struct, kw_only=True, omit_defaults=True, tag="profile_rsp"):
    """A profile has started or stopped; `path` is rank 0's trace.

    If `error` is set, it has not, for that reason.
    """

    call_id: int
    path: str = ""
    error: str | None = None


class PauseRsp(msgspec.Struct, kw_only=True, tag="pause_rsp"):
    """The scheduler has stopped launching, or continues."""

    call_id: int


class LoraRsp(msgspec.Struct, kw_only=True, omit_defaults=True, tag="lora_rsp"):
    """An adapter was loaded (`lora`) or forgotten, or not, for the reason `error`."""

    call_id: int
    lora: LoraRef | None = None
    error: str | None = None


class EngineFailed(msgspec.Struct, kw_only=True, tag="engine_failed"):
    """The last message of a scheduler that stops because of an error. It includes the
    KV canary's incidents, as in `GetIncidentsRsp`, which cannot be requested later.
    """

    message: str
    incidents: list[dict[str, Any]] = []


SchedulerResponse = (
    BatchOutput
    | FlushCacheRsp
    | GetStateRsp
    | GetIncidentsRsp
    | GetSnapshotRsp
    | GetSlotRsp
    | GetTiersRsp
    | ProfileRsp
    | PauseRsp
    | LoraRsp
    | EngineFailed
)


class SchedulerReady(msgspec.Struct, kw_only=True):
    """The only report of a scheduler process: that it can serve, or why it cannot.

    If `error` is set, the process exits and the other fields are meaningless.
    `kv_pool_bytes` is the size of this rank's KV pool, excluding a draft's;
    `device_bytes` says where the bytes of this rank's GPU went, by use.
    """

    error: str | None = None
    context_len: int = 0
    max_req_input_len: int = 0
    max_total_num_tokens: int = 0
    max_running_requests: int = 0
    kv_pool_bytes: int = 0
    device_bytes: dict[str, int] = {}
    vocab_size: int = 0
    hidden_size: int = 0
    # The adapters of the flags.
    loras: list[LoraRef] = []
    # Where a prefill engine is asked for KV; 0 for other engines.
    bootstrap_port: int = 0


def encode(message: SchedulerRequest | SchedulerResponse | StepInput) -> bytes:
    return _ENCODER.encode(message)


def decode_request(data: bytes) -> SchedulerRequest:
    return _REQUEST_DECODER.decode(data)


def decode_response(data: bytes) -> SchedulerResponse:
    return _RESPONSE_DECODER.decode(data)


def decode_step_input(data: bytes) -> StepInput:
    return _STEP_DECODER.decode(data)


_ENCODER = msgspec.msgpack.Encoder()
_REQUEST_DECODER: msgspec.msgpack.Decoder[SchedulerRequest] = msgspec.msgpack.Decoder(
    SchedulerRequest
)
_STEP_DECODER: msgspec.msgpack.Decoder[StepInput] = msgspec.msgpack.Decoder(StepInput)
_RESPONSE_DECODER: msgspec.msgpack.Decoder[SchedulerResponse] = msgspec.msgpack.Decoder(
    SchedulerResponse
)
