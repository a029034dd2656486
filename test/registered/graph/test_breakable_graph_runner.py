"""Prefill graphs replay what eager forwards compute, for every token count and mix of
requests, in any order, with the KV canary watching."""

from __future__ import annotations

import ast
import dataclasses
import gc
import importlib.util
import inspect
import random
import textwrap
import weakref

import pytest
import torch

from kv_canary.op import native_available
from sglang.srt.forward.batch import (
    CaptureHiddenMode,
    ForwardMode,
    InputEmbeds,
    InputLogprobSpan,
)
from sglang.srt.forward.graph_capture import is_capturing
from sglang.srt.model_executor.breakable_cuda_graph_runner import (
    FALLBACK_REASONS,
    HOST_BOUND_TOKENS,
    BreakableCudaGraphRunner,
)
from sglang.srt.model_executor.cuda_graph_runner import cuda_graph_backend
from sglang.srt.model_executor.memory_plan import (
    MAX_HEAD_GRAPH_TOKENS,
    MAX_WHOLE_TOKENS,
    prefill_graph_bytes,
    prefill_token_counts,
)
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.hybrid_models import write_text_model
from sglang.test.mock_oracle import next_tokens
from sglang.test.recording_backend import RecordingBackend
from sglang.test.scale import count, is_full
from sglang.test.tiny_models import (
    MOCK_STATE,
    write_mock_draft,
    write_mock_model,
    write_tiny_model,
)

register_cpu_ci(est_time=35, suite="cpu", full_time=95)
register_cuda_ci(est_time=90, suite="cuda")

VOCAB = 250
ON_GPU = torch.cuda.is_available()
MAKE_BACKEND = cuda_graph_backend if ON_GPU else RecordingBackend
ATTENTION_BACKENDS = ("triton",) if ON_GPU else ("cpu_native", "torch_native")
HAS_FLASHINFER = ON_GPU and importlib.util.find_spec("flashinfer") is not None
# With half precision and heads of 64 channels, as FlashInfer wants them.
MOCK_BACKENDS = (*ATTENTION_BACKENDS, *(("flashinfer",) if HAS_FLASHINFER else ()))
FAMILIES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "DeepseekV3ForCausalLM")
HYBRIDS = ("Lfm2ForCausalLM", "Qwen3_5ForCausalLM")
BUCKETS = [4, 8, 12, 16, 48, 64]
if ON_GPU and is_full():
    BUCKETS = prefill_token_counts(1024)
EDGES = sorted(
    {n for size in BUCKETS for n in (size - 1, size, size + 1)} - {BUCKETS[-1] + 1}
)
CONTEXT = {"max_position_embeddings": 2048}
CANARY = {"kv_canary": "raise", "kv_canary_real_data": "all"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    paths = {
        name: write_text_model(folder / name, name, **CONTEXT)
        for name in (*FAMILIES, *HYBRIDS)
    }
    for name, state in (("mock", {}), ("state", MOCK_STATE)):
        paths[name] = write_mock_model(
            folder / name, vocab_size=VOCAB, **CONTEXT, **state
        )
    return paths


def make_graphs(harness, *, token_counts=BUCKETS, **options):
    return BreakableCudaGraphRunner(
        harness.runner, token_counts=token_counts, make_backend=MAKE_BACKEND, **options
    )


def install(harness, **options):
    """Let the harness's own forwards replay."""
    graphs = make_graphs(harness, **options)
    harness.runner.prefill_graph_runner = graphs
    if harness.runner.canary_manager is not None:
        harness.runner.canary_manager.mark_init_finished()
    return graphs


def random_tokens(rng, length):
    return [rng.randrange(VOCAB) for _ in range(length)]


def partition(rng, total, parts):
    """`total` as a sum of `parts` positive numbers."""
    cuts = sorted(rng.sample(range(1, total), parts - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def mixed_batch(rng, tokens, harnesses):
    """The same rows in every harness: prompts with and without a prefix that was
    written before, `tokens` new ones in all. Returns spans."""
    parts = partition(rng, tokens, rng.randint(1, min(tokens, 32)))
    spans, prefixes = [], []
    for new in parts:
        prefix = rng.choice([0, 0, 1, 17])
        prompt = random_tokens(rng, prefix + new)
        for harness in harnesses:
            row = harness.new_row(prompt)
        spans.append((row, len(prompt)))
        if prefix:
            prefixes.append((row, prefix))
    for harness in harnesses if prefixes else ():
        graphs = harness.runner.prefill_graph_runner
        harness.runner.prefill_graph_runner = None
        harness.extend(prefixes)
        harness.runner.prefill_graph_runner = graphs
    return spans


def release(spans, *harnesses):
    for harness in harnesses:
        for row, _ in spans:
            harness.release(row)


# The native kernels multiply a row alike in every batch; the libraries do not.
def assert_same_logits(actual, expected):
    if ON_GPU or not native_available():
        torch.testing.assert_close(actual, expected, atol=2e-3, rtol=2e-3)
    else:
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_replay_equals_eager_around_every_bucket(models, family, page_size, backend):
    """Random order, so that what a larger batch left in the padding would show."""
    rng = random.Random(page_size)
    options = {
        "page_size": page_size,
        "attention_backend": backend,
        "dtype": "float32",
        "slots": 4096,
    }
    eager, graphed = (ForwardHarness(models[family], **options) for _ in range(2))
    graphs = install(graphed)
    edges = EDGES * count(ci=2 if ON_GPU else 1, full=2)
    rng.shuffle(edges)
    for tokens in edges:
        spans = mixed_batch(rng, tokens, [eager, graphed])
        expected = eager.extend(spans).clone()
        assert_same_logits(graphed.extend(spans), expected)
        # The next forward reads the KV that this one wrote to the pool.
        for harness in (eager, graphed):
            for row, _ in spans:
                harness.append(row, row % VOCAB)
        after = [(row, None) for row, _ in spans]
        expected = eager.forward(ForwardMode.DECODE, after).clone()
        assert_same_logits(graphed.forward(ForwardMode.DECODE, after), expected)
        release(spans, eager, graphed)
    assert graphs.num_replays == len(edges)
    assert not graphs.fallbacks


@pytest.mark.parametrize("canary", [{}, CANARY], ids=["plain", "canary"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("backend", MOCK_BACKENDS)
@pytest.mark.parametrize("model", ["mock", "state"])
def test_mock_model_equals_the_oracle_under_churn(
    models, model, backend, page_size, canary
):
    """Random buckets while memory is allocated and dropped around every replay."""
    rng = random.Random(7)
    harness = ForwardHarness(
        models[model],
        attention_backend=backend,
        page_size=page_size,
        slots=4096,
        disable_radix_cache=True,
        **canary,
    )
    graphs = install(harness)
    device = harness.runner.device
    kept = []
    # Fewer of recordings, whose replays run the same code as an eager forward.
    rounds = count(ci=24 if ON_GPU else 10, full=1000 if ON_GPU else 250)
    for _ in range(rounds):
        kept.append(torch.full((rng.randrange(1, 1 << 16),), 7.0, device=device))
        if len(kept) > 8:
            kept.pop(rng.randrange(len(kept)))
        spans = mixed_batch(rng, rng.randrange(1, BUCKETS[-1] + 1), [harness])
        tokens = harness.extend(spans).argmax(-1).tolist()
        for (row, _), token in zip(spans, tokens, strict=True):
            assert token == next_tokens(harness.tokens(row), vocab_size=VOCAB)[-1]
        release(spans, harness)
    assert graphs.num_replays == rounds
    manager = harness.runner.canary_manager
    assert manager is None or manager.num_forwards >= rounds


@pytest.mark.parametrize("canary", [{}, CANARY], ids=["plain", "canary"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("backend", MOCK_BACKENDS)
def test_one_request_is_one_graph_where_attention_is_captured(
    models, backend, page_size, canary
):
    """Every count around the buckets' edges over prefixes of many lengths, in random
    order, in turns with two requests, whose attention is not captured."""
    rng = random.Random(page_size)
    harness = ForwardHarness(
        models["mock"],
        attention_backend=backend,
        page_size=page_size,
        slots=4096,
        disable_radix_cache=True,
        **canary,
    )
    graphs = install(harness, token_counts=[16, 64, 128, MAX_WHOLE_TOKENS, 320])
    captures = harness.runner.attn_backend.capabilities.captures_prefill
    cases = [
        (tokens, prefix)
        for size in (16, 64, 128, MAX_WHOLE_TOKENS)
        for tokens in (size - 3, size, size + 1)
        for prefix in (0, 1, 70, 300)
    ]
    rng.shuffle(cases)
    # Fewer of recordings, whose replays run the same code as an eager forward.
    for tokens, prefix in cases[: count(ci=len(cases) if ON_GPU else 12, full=48)]:
        prompt = random_tokens(rng, prefix + tokens)
        row, other = harness.new_row(prompt), harness.new_row(prompt[:7])
        if prefix:
            harness.extend([(row, prefix)])
        replays = whole_replays(graphs)
        token = int(harness.extend([(row, len(prompt))]).argmax(-1))
        assert token == next_tokens(prompt, vocab_size=VOCAB)[-1]
        is_whole = captures and tokens <= MAX_WHOLE_TOKENS
        assert whole_replays(graphs) - replays == is_whole
        harness.append(row, token)
        harness.extend([(row, len(prompt) + 1), (other, 7)])
        assert whole_replays(graphs) - replays == is_whole
        release([(row, 0), (other, 0)], harness)
    assert not graphs.fallbacks


def whole_replays(graphs):
    return graphs.plain.whole.num_replays


def test_the_canary_sees_a_damaged_prefix_before_a_replay(models):
    harness = ForwardHarness(
        models["mock"], slots=1024, disable_radix_cache=True, **CANARY
    )
    graphs = install(harness)
    row = harness.new_row(random_tokens(random.Random(0), 24))
    harness.extend([(row, 12)])
    assert graphs.num_replays == 1
    runner = harness.runner
    slot = harness.pool.row_slots(row, 5, 6).to(runner.device)
    runner.token_to_kv_pool.get_kv_buffer(1)[0][slot] += 1
    with pytest.raises(Exception, match="verify_real_kv"):
        harness.extend([(row, 24)])


def test_chunks_of_one_prompt(models):
    """A long prompt in chunks of many sizes, each replayed over the prefix before."""
    prompt = random_tokens(random.Random(3), 200)
    harness = ForwardHarness(models["mock"], slots=512)
    graphs = install(harness)
    row = harness.new_row(prompt)
    for end in (64, 65, 73, 121, 184, 200):
        token = int(harness.extend([(row, end)]).argmax(-1))
        assert token == next_tokens(prompt[:end], vocab_size=VOCAB)[-1]
    assert graphs.num_replays == 6


def test_steps_alternate_and_captures_are_over(models):
    harness = ForwardHarness(models["LlamaForCausalLM"], dtype="float32")
    graphs = make_graphs(harness, token_counts=[4, 8])
    assert not is_capturing()
    # Two layers: embedding .. store, attend, .. store, attend, .. norm; twice. And a
    # graph of one request for each count.
    assert graphs.plain.segmented.num_segments == 6
    assert graphs.plain.whole.num_segments == 2


def test_everything_a_graph_reads_is_owned(models):
    """Catalogue case 42: buckets must not take each other's inputs for free memory."""
    harness = ForwardHarness(models["LlamaForCausalLM"], dtype="float32")
    graphs = make_graphs(harness, token_counts=[4, 8])
    bare = [*graphs.plain.segmented.graphs, *graphs.plain.whole.graphs]
    owned = [weakref.ref(t) for graph in bare for t in graph.owned]
    inputs = weakref.ref(graphs._inputs.block)
    assert inputs in owned
    del graphs
    gc.collect()
    assert all(reference() is not None for reference in owned)
    with torch.inference_mode():
        for graph in bare:
            graph.replay()


def test_stale_scalars_would_show(models):
    """A segment freezes nothing of the batch at capture: the same graph serves other
    numbers of requests, prefixes and slots."""
    rng = random.Random(11)
    eager, graphed = (
        ForwardHarness(models["Qwen3ForCausalLM"], dtype="float32") for _ in range(2)
    )
    graphs = install(graphed, token_counts=[16])
    for rows, prefix in ((1, 0), (16, 3), (2, 30), (5, 0), (1, 60)):
        spans = []
        for new in partition(rng, 16, rows) if rows > 1 else [16]:
            prompt = random_tokens(rng, prefix + new)
            for harness in (eager, graphed):
                row = harness.new_row(prompt)
                if prefix:
                    harness.extend([(row, prefix)])
            spans.append((row, len(prompt)))
        expected = eager.extend(spans).clone()
        assert_same_logits(graphed.extend(spans), expected)
        release(spans, eager, graphed)
    assert graphs.fallbacks["too_many_tokens"] == 3


@pytest.mark.parametrize("mode", [CaptureHiddenMode.FULL, CaptureHiddenMode.LAST])
@pytest.mark.parametrize("layers", [(), (0, 2)])
def test_hidden_states_are_copies(models, mode, layers):
    eager, graphed = (
        ForwardHarness(models["LlamaForCausalLM"], dtype="float32") for _ in range(2)
    )
    for harness in (eager, graphed):
        harness.runner.model.capture_layers(layers)
    graphs = install(graphed, token_counts=[8, 16], capture_hidden_mode=mode)
    rng = random.Random(1)
    prompts = [random_tokens(rng, n) for n in (3, 7)]
    outputs = []
    for harness in (eager, graphed):
        spans = [(harness.new_row(p), len(p)) for p in prompts]
        batch = harness.prepare(ForwardMode.EXTEND, spans)
        batch = dataclasses.replace(batch, capture_hidden_mode=mode)
        outputs.append(harness.run(batch).hidden_states)
    rows = 10 if mode is CaptureHiddenMode.FULL else 2
    assert outputs[1].shape == (rows, 64 * max(len(layers), 1))
    kept = outputs[1].clone()
    row = graphed.new_row(random_tokens(rng, 12))
    graphed.run(
        dataclasses.replace(
            graphed.prepare(ForwardMode.EXTEND, [(row, 12)]), capture_hidden_mode=mode
        )
    )
    assert graphs.num_replays == 2
    assert torch.equal(outputs[1], kept)
    assert_same_logits(kept, outputs[0])


def test_forwards_that_expand_latents_run_eagerly(tmp_path, monkeypatch):
    """Captured attention is absorbed; so is that of a graph that is replayed."""
    model = write_tiny_model(tmp_path, "DeepseekV2ForCausalLM")
    harness = ForwardHarness(model, dtype="float32")
    backend = harness.runner.attn_backend
    expanded = set()
    monkeypatch.setattr(
        backend, "expands", lambda latent, batch: batch.num_tokens in expanded
    )
    graphs = install(harness, token_counts=[4, 16])
    row = harness.new_row([1] * 64)
    batch = harness.prepare(ForwardMode.EXTEND, [(row, 9)])
    assert graphs.refusal(batch) is None
    expanded.add(9)
    assert graphs.refusal(batch) == "expanded_latents"


def test_every_refusal_is_known_in_advance():
    """A series of a reason that is not listed would begin with its first value."""
    source = textwrap.dedent(inspect.getsource(BreakableCudaGraphRunner.refusal))
    returned = {
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant)
    }
    assert returned - {None} == set(FALLBACK_REASONS)


def test_refusals_are_counted_by_reason(models):
    harness = ForwardHarness(models["LlamaForCausalLM"], dtype="float32")
    graphs = install(harness, token_counts=[4, 16])
    row = harness.new_row([1] * 64)
    batch = harness.prepare(ForwardMode.EXTEND, [(row, 9)])
    device = batch.input_ids.device
    span = InputLogprobSpan(row=0, start=0, stop=1, next_tokens=[1], top_k=0)
    embeds = InputEmbeds(
        rows=torch.tensor([0], device=device), values=torch.ones(1, 64, device=device)
    )
    long = harness.prepare(ForwardMode.EXTEND, [(row, 40)])
    refused = {
        "hidden_mode": dataclasses.replace(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL
        ),
        "input_embeds": dataclasses.replace(batch, input_embeds=embeds),
        "input_logprobs": dataclasses.replace(batch, input_logprobs=(span,)),
        "too_many_tokens": long,
    }
    for reason, refused_batch in refused.items():
        assert graphs.refusal(refused_batch) == reason
        with torch.inference_mode():
            assert graphs.try_replay(refused_batch) is None
        assert graphs.fallbacks[reason] == 1
    assert graphs.refusal(batch) is None
    for mode in set(ForwardMode) - {ForwardMode.EXTEND}:
        other = dataclasses.replace(batch, forward_mode=mode)
        assert graphs.try_replay(other) is None
    assert sum(graphs.fallbacks.values()) == len(refused)
    harness.runner.model.capture_layers([1])
    assert graphs.refusal(batch) == "aux_layers"
    assert graphs.num_replays == 0


def test_wasteful_padding_is_refused(models):
    harness = ForwardHarness(models["mock"], slots=4096, chunked_prefill_size=2048)
    counts = [HOST_BOUND_TOKENS, 1280]
    graphs = make_graphs(harness, token_counts=counts)
    free = make_graphs(harness, token_counts=counts, limit_padding=False)
    for tokens, is_taken in ((1000, True), (1025, False), (1267, False), (1270, True)):
        rows = [harness.new_row([1] * 500) for _ in range(3)]
        ends = [500, 500, tokens - 1000] if tokens > 1000 else [500, 400, 100]
        batch = harness.prepare(ForwardMode.EXTEND, list(zip(rows, ends, strict=True)))
        assert graphs.refusal(batch) == (None if is_taken else "padding")
        assert free.refusal(batch) is None
        release([(row, 0) for row in rows], harness)


class StaticStates:
    """A `SpecInput`."""

    def __init__(self, hidden_states):
        self.hidden_states = hidden_states


def test_draft_hidden_states_are_copied_in(models):
    """The stack reads the static buffer, never the tensor of one forward."""
    eager, graphed = (
        ForwardHarness(models["LlamaForCausalLM"], dtype="float32") for _ in range(2)
    )
    for harness in (eager, graphed):
        model = harness.runner.model

        def with_states(input_ids, positions, forward_batch, stack=model.forward_stack):
            output = stack(input_ids, positions, forward_batch)
            return output._replace(
                hidden=output.hidden + forward_batch.spec_info.hidden_states
            )

        model.__dict__["forward_stack"] = with_states
    graphs = install(graphed, token_counts=[8, 16], draft_hidden_dim=64)
    assert graphs.static_draft_hidden_states.shape == (16, 64)
    rng = random.Random(2)
    for length in (5, 16, 8, 1):
        prompt, states = random_tokens(rng, length), torch.randn(length, 64)
        logits = []
        for harness in (eager, graphed):
            row = harness.new_row(prompt)
            batch = harness.prepare(ForwardMode.EXTEND, [(row, length)])
            given = StaticStates(states.to(batch.input_ids.device))
            batch = dataclasses.replace(batch, spec_info=given)
            logits.append(harness.run(batch).next_token_logits)
        assert_same_logits(logits[1], logits[0])
    assert graphs.num_replays == 4
    narrow = dataclasses.replace(batch, spec_info=StaticStates(torch.zeros(1, 32)))
    assert graphs.refusal(narrow) == "draft_hidden_states"


@pytest.mark.parametrize(
    ("limit", "head", "tail"),
    [
        (8192, [4, 8, 12], [7168, 7680, 8192]),
        (2048, [4, 8, 12], [1536, 1792, 2048]),
        (1000, [4, 8, 12], [896, 960, 1000]),
        (4, [4], [4]),
        (3, [3], [3]),
    ],
)
def test_token_counts(limit, head, tail):
    counts = prefill_token_counts(limit)
    assert counts[:3] == (head if limit > 12 else counts)
    assert counts[-len(tail) :] == tail
    assert counts == sorted(set(counts)) and counts[-1] == limit


def test_a_draft_worker_is_captured_only_when_asked(models):
    harness = ForwardHarness(models["LlamaForCausalLM"], is_draft_worker=True)
    harness.runner.init_piecewise_cuda_graphs()
    assert harness.runner.prefill_graph_runner is None


@pytest.mark.parametrize("kind", [None, "EAGLE", "EAGLE3"])
def test_a_head_has_graphs_only_of_few_tokens(models, tmp_path, monkeypatch, kind):
    """A STANDALONE draft is a language model and has those of one."""
    path = models["mock"]
    if kind is not None:
        path = write_mock_draft(tmp_path, kind=kind, vocab_size=VOCAB)
    runner = ForwardHarness(path, is_draft_worker=True).runner
    args = dataclasses.replace(runner.server_args, chunked_prefill_size=2048)
    monkeypatch.setattr(runner, "server_args", args)
    monkeypatch.setattr(ServerArgs, "has_prefill_graphs", True)
    counts = runner.prefill_graph_token_counts()
    limit = 2048 if kind is None else MAX_HEAD_GRAPH_TOKENS
    assert counts == prefill_token_counts(limit)
    taken = prefill_graph_bytes(
        runner.model_config, counts, dtype=runner.dtype, captures_attention=True
    )
    assert runner.prefill_graph_bytes() == taken


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
