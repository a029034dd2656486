"""Typed functions over the native CPU ops. Every function checks its arguments and
raises a `RuntimeError` that names the argument; none allocates a result.

Tensors are float32, bfloat16 or float16 on the CPU unless said; sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sglang_kernels.library import builtin

_rmsnorm = builtin("rmsnorm")
_fused_add_rmsnorm = builtin("fused_add_rmsnorm")
_silu_and_mul = builtin("silu_and_mul")
_gelu_and_mul = builtin("gelu_and_mul")
_rope_store_kv = builtin("rope_store_kv")
_decode_attention = builtin("decode_attention")
_decode_attention_full = builtin("decode_attention_full")
_extend_attention = builtin("extend_attention")
_extend_attention_full = builtin("extend_attention_full")
_latent_store = builtin("latent_store")
_packed_linear = builtin("packed_linear")
_packed_head_linear = builtin("packed_head_linear")
_plain_linear = builtin("plain_linear")
_moe_route = builtin("moe_route")
_moe_experts = builtin("moe_experts")
_exp = builtin("exp")
_tree_top_k = builtin("tree_top_k")
_tree_select = builtin("tree_select")
_tree_build = builtin("tree_build")
_tree_verify_greedy = builtin("tree_verify_greedy")
_tree_verify_sampled = builtin("tree_verify_sampled")
_tree_gather_accepted = builtin("tree_gather_accepted")
_slots_tail = builtin("slots_tail")
_slots_draft = builtin("slots_draft")
_slots_shifts = builtin("slots_shifts")
_slots_tail_copies = builtin("slots_tail_copies")
_slots_accepted_moves = builtin("slots_accepted_moves")
_slots_branch_table = builtin("slots_branch_table")
_slots_branch_indices = builtin("slots_branch_indices")
_slots_ancestors = builtin("slots_ancestors")
_slot_sums = builtin("slot_sums")


def rmsnorm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out = x / sqrt(mean(x ** 2) + eps) * weight.

    Args:
        x: [..., H], contiguous, or two dimensions with contiguous rows.
        weight: [H]; out: like x, contiguous, may be x.
    """
    _rmsnorm(x, weight, eps, out)


def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """residual += x; x = rmsnorm(residual) * weight; both [..., H] contiguous."""
    _fused_add_rmsnorm(x, residual, weight, eps)


def silu_and_mul(x: Tensor, out: Tensor) -> None:
    """out [T, I] = silu(x[:, :I]) * x[:, I:]; rows of x contiguous, out contiguous."""
    _silu_and_mul(x, out)


def gelu_and_mul(x: Tensor, out: Tensor) -> None:
    """Like `silu_and_mul`, with the tanh form of gelu."""
    _gelu_and_mul(x, out)


def rope_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    out_cache_loc: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    eps: float,
) -> None:
    """q = rope(norm(q)); k_cache[loc] = rope(norm(k)); v_cache[loc] = v.

    Args:
        q: [T, Hq, D]; k, v: [T, Hkv, D]; any token stride.
        positions, out_cache_loc: [T] int64.
        cos_sin_cache: [max_position, rot] float32 or None.
        k_cache, v_cache: [slots, Hkv, D].
        q_norm_weight, k_norm_weight: [D] or None.
    """
    _rope_store_kv(
        q,
        k,
        v,
        positions,
        cos_sin_cache,
        k_cache,
        v_cache,
        out_cache_loc,
        q_norm_weight,
        k_norm_weight,
        eps,
    )


def latent_store(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    out_cache_loc: Tensor,
    k_norm_weight: Tensor,
    eps: float,
) -> None:
    """k_cache[loc] = [norm(latent) | rope(key)] of k; q's last channels = rope.

    Args:
        q: [T, Hq, rank + rope]; k: [T, 1, rank + rope]; any token stride.
        positions, out_cache_loc: [T] int64.
        cos_sin_cache: [max_position, rope] float32.
        k_cache: [slots, 1, rank + rope]; k_norm_weight: [rank].
    """
    _latent_store(
        q, k, positions, cos_sin_cache, k_cache, out_cache_loc, k_norm_weight, eps
    )


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_index: Tensor | None,
    read_lens: Tensor,
    page_size: int,
    sm_scale: float,
    window: int,
    out: Tensor,
) -> None:
    """Attend one query per row to KV elements 0 .. read_lens[r] - 1, or the newest
    `window`.

    Args:
        q: [R, Hq, D]; k_cache: [slots, Hkv, D]; v_cache: [slots, Hkv, Dv];
        out: [R, Hq, Dv].
        page_table: [rows, columns] int32, first slots of pages, any strides.
        row_index: [R] int64 or None; read_lens: [R] int64.
    """
    _decode_attention(
        q,
        k_cache,
        v_cache,
        page_table,
        row_index,
        read_lens,
        page_size,
        sm_scale,
        window,
        out,
    )


def decode_attention_full(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_index: Tensor | None,
    read_lens: Tensor,
    page_size: int,
    sm_scale: float,
    window: int,
    logit_cap: float,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """`decode_attention` for models with a softmax cap or sinks.

    Args:
        logit_cap: scores become cap * tanh(score / cap); 0 disables it.
        sinks: [Hq] float32 or the dtype of q, logits without a value; or None.
    """
    _decode_attention_full(
        q,
        k_cache,
        v_cache,
        page_table,
        row_index,
        read_lens,
        page_size,
        sm_scale,
        window,
        logit_cap,
        sinks,
        out,
    )


def extend_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_index: Tensor | None,
    qo_indptr: Tensor,
    prefix_lens: Tensor,
    page_size: int,
    sm_scale: float,
    window: int,
    tree_mask: Tensor | None,
    out: Tensor,
) -> None:
    """Causal (or tree-masked) attention of several new tokens per row.

    Args:
        q: [T, Hq, D]; k_cache: [slots, Hkv, D]; v_cache: [slots, Hkv, Dv];
        out: [T, Hq, Dv].
        page_table: [rows, columns] int32, first slots of pages, any strides.
        row_index: [R] int64 or None; qo_indptr: [R + 1] int64; prefix_lens: [R] int64.
        tree_mask: [R, N, N] bool, contiguous, or None.
    """
    _extend_attention(
        q,
        k_cache,
        v_cache,
        page_table,
        row_index,
        qo_indptr,
        prefix_lens,
        page_size,
        sm_scale,
        window,
        tree_mask,
        out,
    )


def extend_attention_full(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_index: Tensor | None,
    qo_indptr: Tensor,
    prefix_lens: Tensor,
    page_size: int,
    sm_scale: float,
    window: int,
    logit_cap: float,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    positions: Tensor | None,
    out: Tensor,
) -> None:
    """`extend_attention` for models with a softmax cap or sinks, and windows over
    trees.

    Args:
        logit_cap, sinks: as in `decode_attention_full`.
        positions: [T] int64, given with a window and a tree mask, else None.
    """
    _extend_attention_full(
        q,
        k_cache,
        v_cache,
        page_table,
        row_index,
        qo_indptr,
        prefix_lens,
        page_size,
        sm_scale,
        window,
        logit_cap,
        sinks,
        tree_mask,
        positions,
        out,
    )


def packed_linear(
    x: Tensor, weight: Tensor, n: int, bias: Tensor | None, out: Tensor
) -> None:
    """out [..., N] = x [..., K] @ W.T + bias; float32.

    Args:
        weight: [ceil(N / 32), K, 32] float32 or bfloat16, as `pack_weight` makes it.
        bias: [N] float32 or None.
    """
    _packed_linear(x, weight, n, bias, out)


def packed_head_linear(x: Tensor, weight: Tensor, n: int, out: Tensor) -> None:
    """out[:, h] = x[:, h] @ W[h].T; float32, channels contiguous.

    Args:
        x: [T, H, K]; out: [T, H, N].
        weight: [H, ceil(N / 32), K, 32]; for each head as in `packed_linear`.
    """
    _packed_head_linear(x, weight, n, out)


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [rows, N] = x [rows, K] @ weight [N, K].T + bias, for few rows.

    Args:
        x: bfloat16 or float16 like the others; contiguous rows, any row stride.
        weight, out: contiguous; bias: [N] or None.
    """
    _plain_linear(x, weight, bias, out)


def moe_route(
    logits: Tensor,
    correction: Tensor | None,
    top_k: int,
    is_sigmoid: bool,
    renormalise: bool,
    scale: float,
    groups: int,
    top_groups: int,
    group_best: int,
    weights: Tensor,
    ids: Tensor,
) -> None:
    """Choose `top_k` experts per token, the best first; among equals the lowest ids.

    Args:
        logits: [T, E] float32; correction: [E] float32 or None, only for the choice.
        is_sigmoid: scores are sigmoids, otherwise a softmax.
        groups, top_groups, group_best: experts come from the best `top_groups` groups,
            ranked by the sum of each group's `group_best` best scores.
        weights: [T, top_k] float32; ids: [T, top_k] int32; both are results.
    """
    _moe_route(
        logits,
        correction,
        top_k,
        is_sigmoid,
        renormalise,
        scale,
        groups,
        top_groups,
        group_best,
        weights,
        ids,
    )


def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    inner: int,
    is_clamped: bool,
    alpha: float,
    limit: float,
    scratch: Tensor,
    out: Tensor,
) -> None:
    """out[t] = sum over k of weights[t, k] * expert ids[t, k] of x[t]; float32.

    Args:
        x, out: [T, H]; ids: [T, K] int32; weights: [T, K].
        gate_up: [E, ceil(I / 16), H, 32], 16 columns of gate and of up per panel; down:
            [E, ceil(H / 32), I, 32]; both float32 or both bfloat16, as `pack_experts`
            makes them.
        gate_up_bias: [E, ceil(I / 16) * 32]; down_bias: [E, H]; or None.
        inner: I. is_clamped: clamped SwiGLU with `alpha` and `limit`.
        scratch: T * K * (2 * H + I) floats.
    """
    _moe_experts(
        x,
        ids,
        weights,
        gate_up,
        gate_up_bias,
        down,
        down_bias,
        inner,
        is_clamped,
        alpha,
        limit,
        scratch,
        out,
    )


decoder_plan_words: Callable[[int], int] = builtin("decoder_plan_words")
"""Return the int64 words of a plan with this many layers."""
decoder_plan: Callable[..., None] = builtin("decoder_plan")
"""Fill the plan of a dense decoder's stack with addresses of weights, which it checks.

Args:
    weights: for each layer input_norm [H], qkv, its bias, cos_sin_cache [positions,
        rot], q_norm [D], k_norm [D], o, its bias, post_norm [H], gate_up, its bias,
        down, its bias; then the final norm [H], or None to return the stream as it is.
        float32, products packed as in `packed_linear`; absent ones are None. The caller
        keeps them alive.
    sizes: layers, H, query heads, KV heads, D, channels of the MLP, its activation (0:
        silu, 1: gelu), and the width of the input that each run passes to the first
        layer (which then lacks an input_norm), or 0.
    eps: eps of every norm; scale: factor on the scores.
    plan: [decoder_plan_words(layers)] int64, written.
"""
decoder_stack: Callable[..., None] = builtin("decoder_stack")
"""Run a stack: the ops of its layers and the final norm, with the same bits.

Args:
    plan: filled by `decoder_plan`.
    x: [T, H] float32, then the stream after the last layer; out: [T, H]; scratch:
        [T * (2 * (Hq + Hkv) * D + 3 * channels of the MLP)] float32.
    k_caches, v_caches: [slots, Hkv, D] float32 for each layer.
    positions, out_cache_loc: [T] int64.
    page_table, row_index, tree_mask, page_size: as in `extend_attention`.
    lens, qo_indptr: `read_lens` and None in a decode, else `prefix_lens` and the
        offsets of the rows.
    first: [T, width of the first layer's input in the plan] float32, read by the first
        layer's attention. Defaults to the normalised stream.
    captured_layers, captured: ascending numbers of layers, and [T, their count, H]
        float32, which receives their inputs. The number of layers stands for the output
        of the last layer. No layers and None capture nothing.
"""

# Launches of the KV canary, called by `kv_canary.kernels.native`. Their signatures are
# the schemas. Every forward runs two of them, and a Python function's frame would cost
# about 2 us each.
canary_verify: Callable[..., None] = builtin("canary_verify")
"""Check the records of all slots that a forward is about to read.

Args:
    state: the canary's arena, [words] int64.
    rows, table: lists of the tensors of `ForwardView` and `KVReadView`, in order, with
        None for absent ones.
    k_words, v_words: [layers, slots, words] int64 or None.
    req_to_token, tokens: [rows, columns] int32 or None.
    numbers: the numbers of `ForwardView`, `PoolChecks` and `KVReadView`, in order.
    steps_phase: whether to step the phase of the forward's manager.
"""
canary_write_head: Callable[..., None] = builtin("canary_write_head")
"""Check the slots and inputs of the new tokens and write their head records.

Args:
    state, rows, k_words, v_words, req_to_token: as in `canary_verify`.
    tree_mask: [tokens, width] bool or None.
    published: [rows, columns] int32 or None, tokens by position.
    oracle_tokens, oracle_positions: [T] int64 or None.
    numbers: the numbers of `ForwardView` and `PoolChecks`, in order.
"""
canary_before_model: Callable[..., None] = builtin("canary_before_model")
"""`canary_verify`, then `canary_write_head`.

Args: tensors of both, then the numbers of `canary_verify`.
"""
canary_expect_rows: Callable[..., None] = builtin("canary_expect_rows")
"""Record what the host knows about rows.

Args:
    state: as in `canary_verify`.
    rows: [rows] int64; values: [values, rows] int64, the rows of `Expected`.
    seeds: [req_rows] int64 or None.
"""
canary_note_tokens: Callable[..., None] = builtin("canary_note_tokens")
"""Record what was sampled.

Args:
    state: as in `canary_verify`.
    req_rows, serials, tokens, prefix_lens, extend_lens: [rows] int64.
    marks: [2, rows] int64, written.
"""
canary_sum_slots: Callable[..., None] = builtin("canary_sum_slots")
"""Sum up the values of slots, each multiplied by the key of its place.

Args:
    values: [m] int8, int16 or int32; bases: [layers] int64.
    offsets: [page_size, n] int64; keys: [n] int64; slots: [slots] int64.
    page_stride: values from one page to the next.
    sums: [slots, layers] int64, written.
"""
canary_note_accepted: Callable[..., None] = builtin("canary_note_accepted")
"""Check an accepted path and record its last token.

Args:
    state: as in `canary_verify`.
    path: the tensors of `AcceptedPath`, in order.
    marks: [2, rows] int64, written.
"""
canary_carry: Callable[..., None] = builtin("canary_carry")
"""Record or compare checksums of the state that a forward leaves for a later one.

Args:
    state: as in `canary_verify`.
    rows: the tensors of `CarriedRows`: places, req_rows, serials, positions, int64;
        words int32, ids int64 and bits int32, each or None.
    sums: int64, written or compared.
    numbers: the numbers of `CarriedRows`.
    checks: compare the sums instead of recording them.
"""
canary_check_drawn: Callable[..., None] = builtin("canary_check_drawn")
"""Check whose logits gave whose token.

Args:
    state: as in `canary_verify`.
    drawn: the tensors of `DrawnTokens` in order, each or None where it may be absent.
    findings: int64, gathered before; takes the ring's count and the verdicts. Or None.
    draws: whether tokens are drawn with the noise of their positions.
"""
canary_write_tail: Callable[..., None] = builtin("canary_write_tail")
"""Compare the head records with this forward, write the tail records, step the clock.

Args:
    state, rows, k_words, v_words: as in `canary_verify`.
    findings: int64 or None, filled as by `canary_gather_findings`.
    numbers: as in `canary_write_head`.
    advance: advance lineages first, as `canary_finish_step` does.
"""
canary_poison: Callable[..., None] = builtin("canary_poison")
"""Poison the records of slots [n] int64, or of the first n_live[0] of them.

Args: state, slots, n_live: [1] int64 or None.
"""
canary_gather_findings: Callable[..., None] = builtin("canary_gather_findings")
"""Fill findings with ring entries, counters and verdicts of rows, and clear these.

Args: state; req_rows: [R] int64, request rows; findings: int64.
"""
canary_finish_step: Callable[..., None] = builtin("canary_finish_step")
"""Add the terms of the rows' new tokens to their expected lineages, then run
`canary_gather_findings` on the rows.

Args: state, rows, findings, max_depth.
"""


def exp(x: Tensor, out: Tensor) -> None:
    """out = e ** x, with the kernels' own exponential; float32 [N]."""
    _exp(x, out)


def simd_level() -> str:
    """Return the SIMD level in use: avx512, avx2 or baseline."""
    return str(builtin("simd_level")())


def set_simd_level(name: str) -> None:
    """Use a level by name, or `auto` for the best one. Process-wide, for tests.

    Raises:
        RuntimeError: unknown name, or the processor does not have it.
    """
    builtin("set_simd_level")(name)


def tree_top_k(logits: Tensor, probs: Tensor, ids: Tensor) -> None:
    """Find the K best ids of each row and their softmax probabilities (1 if K is 1).

    Args:
        logits: [R, V], rows contiguous; probs: [R, K] float32; ids: [R, K] int64.
    """
    _tree_top_k(logits, probs, ids)


def tree_select(
    level: int,
    steps: int,
    topk_p: Tensor,
    topk_index: Tensor,
    hot: Tensor | None,
    levels: list[Tensor],
    input_ids: Tensor,
    hidden_rows: Tensor,
) -> None:
    """Record the candidates of a draft level and choose the K branches that go on.

    Args:
        topk_p: [b, K] at level 0, else [b * K, K], float32; topk_index: alike, int64.
        hot: [V'] int64 or None.
        levels: scores, tokens, parents and beam scores of `DraftLevels`.
        input_ids, hidden_rows: [b * K] int64.
    """
    _tree_select(level, steps, topk_p, topk_index, hot, levels, input_ids, hidden_rows)


def tree_build(
    levels: list[Tensor],
    topk: int,
    root_tokens: Tensor,
    seq_lens: Tensor,
    tree: list[Tensor],
) -> None:
    """Keep the best candidates and link them into trees.

    Args:
        levels: scores, tokens and parents of `DraftLevels`.
        root_tokens, seq_lens: [b] int64.
        tree: fields of `DraftTree` in their order.
    """
    _tree_build(levels, topk, root_tokens, seq_lens, tree)


def tree_verify_greedy(
    tokens: Tensor, parents: Tensor, target_ids: Tensor, result: list[Tensor]
) -> None:
    """Follow the target's choices through the trees.

    Args:
        tokens, parents, target_ids: [b, D] int64.
        result: predict, accept_index and accept_lens of `VerifyResult`.
    """
    _tree_verify_greedy(tokens, parents, target_ids, result)


def tree_verify_sampled(
    tokens: Tensor,
    parents: Tensor,
    positions: Tensor,
    probs: Tensor,
    totals: Tensor,
    keys: Tensor,
    thresholds: list[float],
    result: list[Tensor],
) -> None:
    """Accept drafts so that every token is distributed as the target's own.

    Args:
        tokens, parents, positions: [b, D] int64; keys: [b] int64.
        probs: [b * D, V] float32; totals: [b * D] float32, its row sums.
        thresholds: single, accumulated.
        result: fields of `VerifyResult` in their order.
    """
    _tree_verify_sampled(
        tokens, parents, positions, probs, totals, keys, thresholds, result
    )


def tree_gather_accepted(
    result: list[Tensor], tokens: Tensor, node_rows: Tensor, bonus_tokens: Tensor
) -> None:
    """Gather tokens and node places of the accepted paths, padded with the last one.

    Args:
        result: predict, accept_index and accept_lens of `VerifyResult`.
        tokens: [b, W] int64; node_rows: [b, S + 1] int64; bonus_tokens: [b] int64.
    """
    _tree_gather_accepted(result, tokens, node_rows, bonus_tokens)


def slots_tail(table: Tensor, indices: Tensor, lens: Tensor, out: Tensor) -> None:
    """out [b, W] int64 = slots of columns from each length on.

    Here and below: table [rows, width] int32, rows contiguous; indices, lens: [b]
    int64;
    layout: page size, topk, steps, first column of the draft region (-1 without one).
    Columns past a row give slot 0.
    """
    _slots_tail(table, indices, lens, out)


def slots_draft(
    table: Tensor, indices: Tensor, lens: Tensor, layout: list[int], out: Tensor
) -> None:
    """out [S, b * K] int64 = slots that each branch writes in each draft step."""
    _slots_draft(table, indices, lens, layout, out)


def slots_shifts(
    table: Tensor,
    indices: Tensor,
    lens: Tensor,
    layout: list[int],
    paged: bool,
    shift_from: Tensor,
    column_shift: Tensor,
) -> None:
    """Compute each branch's first own element and column shift, [b * K] int64."""
    _slots_shifts(table, indices, lens, layout, paged, shift_from, column_shift)


def slots_tail_copies(
    table: Tensor,
    indices: Tensor,
    lens: Tensor,
    layout: list[int],
    src: Tensor,
    dst: Tensor,
) -> None:
    """Compute moves that copy each prefix's tail to branches, int64
    [b * (K - 1) * (P - 1)], or [0] with a region."""
    _slots_tail_copies(table, indices, lens, layout, src, dst)


def slots_accepted_moves(
    accept_index: Tensor, locs: Tensor, src: Tensor, dst: Tensor
) -> None:
    """Compute moves [b * (S + 1)] int64 that bring accepted nodes to the front.

    Args:
        accept_index: [b, S + 1] int64; locs: [b * D] int64.
    """
    _slots_accepted_moves(accept_index, locs, src, dst)


def slots_branch_table(
    table: Tensor,
    indices: Tensor,
    lens: Tensor,
    layout: list[int],
    paged: bool,
    skip_prefix: bool,
    out: Tensor,
) -> None:
    """out [b * K, columns] int32 = first slots of each branch's pages, or its slots."""
    _slots_branch_table(table, indices, lens, layout, paged, skip_prefix, out)


def slots_branch_indices(
    table: Tensor,
    indices: Tensor,
    lens: Tensor,
    layout: list[int],
    indptr: Tensor,
    out: Tensor,
) -> None:
    """List the slots that each branch reads in each step, one flat list per step.

    Args:
        indptr: [steps, b * K + 1] int32; out: [steps, capacity] int32.
    """
    _slots_branch_indices(table, indices, lens, layout, indptr, out)


def slots_ancestors(
    parents: Tensor,
    draft_slots: Tensor,
    lens: Tensor,
    begins: Tensor,
    step: int,
    out: Tensor,
) -> None:
    """Write the slots of each branch's ancestors after the prefix in its list.

    Args:
        parents: [b, 1 + K * (S - 1)] int64, see `DraftLevels`.
        draft_slots: [S, b * K] int64, written by each branch in each step.
        lens: [b] int64; begins: [b * K] int64, places of the lists in `out`.
        step: the lists are for this step; 0 has no ancestors.
        out: [n] int32; places outside are left out.
    """
    _slots_ancestors(parents, draft_slots, lens, begins, step, out)


def slot_sums(sums: Tensor, words: Tensor, slots: Tensor, first_layer: int) -> None:
    """sums [n] int64 += hashes of all words of slots [n] int64.

    Args:
        words: [layers, slots, width] int64, rows contiguous.
        first_layer: number of the first layer in the keys of the hashes.
    """
    _slot_sums(sums, words, slots, first_layer)
