// Argument checks and launches of the slot ops of draft branches.
#include "sglang_kernels/cpu/slots.h"

#include <algorithm>
#include <vector>

#include "torch_api.h"

namespace sglk {
namespace {

using Numbers = std::vector<int64_t>;

// Rows of a batch in req_to_token.
struct Batch {
  const char* op;
  const int32_t* table;
  int64_t stride, width, count;
  const int64_t *indices, *lens;

  slots::Row row(int64_t q) const { return {table + indices[q] * stride, width, lens[q]}; }
};

Batch read_batch(
    const char* op, const Tensor& table, const Tensor& indices, const Tensor& lens) {
  SGLK_CHECK(
      table.dim() == 2 && table.scalar_type() == ScalarType::Int &&
          (table.size(1) <= 1 || table.stride(1) == 1),
      op, "req_to_token", table, "int32 [rows, width] with contiguous rows");
  const int64_t n = indices.numel();
  check_vector(op, "req_pool_indices", indices, ScalarType::Long, n);
  check_vector(op, "seq_lens", lens, ScalarType::Long, n);
  const Batch batch{op,
                    static_cast<const int32_t*>(table.const_data_ptr()),
                    table.stride(0),
                    table.size(1),
                    n,
                    static_cast<const int64_t*>(indices.const_data_ptr()),
                    static_cast<const int64_t*>(lens.const_data_ptr())};
  for (int64_t q = 0; q < n; q++) {
    SGLK_REQUIRE(
        batch.indices[q] >= 0 && batch.indices[q] < table.size(0), op,
        ": req_pool_indices[", q, "] is ", batch.indices[q], ", expected 0 .. ",
        table.size(0) - 1);
    SGLK_REQUIRE(
        batch.lens[q] >= 0, op, ": seq_lens[", q, "] is ", batch.lens[q],
        ", expected at least 0");
  }
  return batch;
}

slots::Layout read_layout(const char* op, const Numbers& n) {
  SGLK_REQUIRE(n.size() == 4, op, ": layout has ", n.size(), " numbers, expected 4");
  SGLK_REQUIRE(
      n[0] > 0 && n[1] > 0 && n[2] > 0, op, ": page size ", n[0], ", topk ", n[1],
      " and steps ", n[2], " must be positive");
  return {n[0], n[1], n[2], n[3]};
}

int64_t* longs(const char* op, const char* name, const Tensor& t, int64_t size) {
  return output<int64_t>(op, name, t, ScalarType::Long, size);
}

void slots_tail(
    const Tensor& table, const Tensor& indices, const Tensor& lens, const Tensor& out) {
  const char* op = "slots_tail";
  const Batch batch = read_batch(op, table, indices, lens);
  SGLK_CHECK(out.dim() == 2, op, "out", out, "[requests, width]");
  const int64_t width = out.size(1);
  int64_t* to = longs(op, "out", out, batch.count * width);
  for (int64_t q = 0; q < batch.count; q++) {
    const slots::Row row = batch.row(q);
    for (int64_t j = 0; j < width; j++) to[q * width + j] = row.at(row.len + j);
  }
}

void slots_draft(
    const Tensor& table, const Tensor& indices, const Tensor& lens, const Numbers& numbers,
    const Tensor& out) {
  const char* op = "slots_draft";
  const Batch batch = read_batch(op, table, indices, lens);
  const slots::Layout layout = read_layout(op, numbers);
  const int64_t k = layout.topk, n = batch.count;
  int64_t* to = longs(op, "out", out, n * k * layout.steps);
  for (int64_t q = 0; q < n; q++) {
    const slots::Row row = batch.row(q);
    for (int64_t t = 0; t < k; t++) {
      const int64_t first = row.len + layout.shift(row.len, t);
      for (int64_t s = 0; s < layout.steps; s++) to[(s * n + q) * k + t] = row.at(first + s);
    }
  }
}

void slots_shifts(
    const Tensor& table, const Tensor& indices, const Tensor& lens, const Numbers& numbers,
    bool paged, const Tensor& shift_from, const Tensor& column_shift) {
  const char* op = "slots_shifts";
  const Batch batch = read_batch(op, table, indices, lens);
  const slots::Layout layout = read_layout(op, numbers);
  const int64_t k = layout.topk;
  int64_t* from = longs(op, "shift_from", shift_from, batch.count * k);
  int64_t* shift = longs(op, "column_shift", column_shift, batch.count * k);
  for (int64_t q = 0; q < batch.count; q++)
    for (int64_t t = 0; t < k; t++) {
      from[q * k + t] = layout.first_own(batch.lens[q], paged);
      shift[q * k + t] = layout.shift(batch.lens[q], t);
    }
}

void slots_tail_copies(
    const Tensor& table, const Tensor& indices, const Tensor& lens, const Numbers& numbers,
    const Tensor& src, const Tensor& dst) {
  const char* op = "slots_tail_copies";
  const Batch batch = read_batch(op, table, indices, lens);
  const slots::Layout layout = read_layout(op, numbers);
  const int64_t most = layout.max_tail(), copies = layout.copies();
  const int64_t size = batch.count * copies * most;
  int64_t* from = longs(op, "src", src, size);
  int64_t* to = longs(op, "dst", dst, size);
  std::fill(from, from + size, 0);
  std::fill(to, to + size, 0);
  for (int64_t q = 0; q < batch.count; q++) {
    const slots::Row row = batch.row(q);
    const int64_t tail = most ? layout.tail(row.len) : 0;
    for (int64_t i = 0; i < copies; i++) {
      const int64_t first = (q * copies + i) * most;
      const int64_t shift = layout.shift(row.len, layout.topk - copies + i);
      for (int64_t o = 0; o < tail; o++) {
        from[first + o] = row.at(row.len - tail + o);
        to[first + o] = row.at(row.len - tail + o + shift);
      }
    }
  }
}

void slots_accepted_moves(
    const Tensor& accept_index, const Tensor& locs, const Tensor& src, const Tensor& dst) {
  const char* op = "slots_accepted_moves";
  SGLK_CHECK(
      accept_index.dim() == 2, op, "accept_index", accept_index, "[requests, steps + 1]");
  const int64_t rows = accept_index.size(0), width = accept_index.size(1);
  const int64_t places = locs.numel(), nodes = rows ? places / rows : 0;
  const int64_t* index = longs(op, "accept_index", accept_index, rows * width);
  SGLK_CHECK(
      nodes * rows == places && (!rows || nodes >= width), op, "out_cache_loc", locs,
      "one slot per node");
  const int64_t* slots = longs(op, "out_cache_loc", locs, places);
  int64_t* from = longs(op, "src", src, rows * width);
  int64_t* to = longs(op, "dst", dst, rows * width);
  for (int64_t i = 0; i < rows * width; i++) {
    SGLK_REQUIRE(
        index[i] < places, op, ": accept_index holds ", index[i], ", expected below ",
        places);
    const bool is_accepted = index[i] >= 0;
    from[i] = is_accepted ? slots[index[i]] : 0;
    to[i] = is_accepted ? slots[i / width * nodes + i % width] : 0;
  }
}

void slots_branch_table(
    const Tensor& table, const Tensor& indices, const Tensor& lens, const Numbers& numbers,
    bool paged, bool skip_prefix, const Tensor& out) {
  const char* op = "slots_branch_table";
  const Batch batch = read_batch(op, table, indices, lens);
  const slots::Layout layout = read_layout(op, numbers);
  const int64_t k = layout.topk, unit = paged ? layout.page_size : 1;
  SGLK_CHECK(
      out.dim() == 2 && out.scalar_type() == ScalarType::Int &&
          out.size(0) == batch.count * k && (out.size(1) <= 1 || out.stride(1) == 1),
      op, "out", out,
      "int32 [" + std::to_string(batch.count * k) + ", columns] with contiguous rows");
  const int64_t columns = out.size(1), stride = out.stride(0);
  int32_t* to = static_cast<int32_t*>(out.mutable_data_ptr());
  const double work = 1e-3 * double(batch.count * k * columns);
  run_split(batch.count * k, split_for(work), [&](int64_t begin, int64_t end) {
    for (int64_t z = begin; z < end; z++) {
      const slots::Row row = batch.row(z / k);
      const int64_t own = layout.first_own(row.len, paged);
      const int64_t stop = layout.end(row.len, paged);
      const int64_t shift = layout.shift(row.len, z % k);
      int64_t element = skip_prefix ? own : 0, j = 0;
      int32_t* out_row = to + z * stride;
      for (; j < columns && element < own; j++, element += unit)
        out_row[j] = int32_t(row.at(element));
      for (; j < columns && element < stop; j++, element += unit)
        out_row[j] = int32_t(row.at(element + shift));
      std::fill(out_row + j, out_row + columns, 0);
    }
  });
}

void slots_branch_indices(
    const Tensor& table, const Tensor& indices, const Tensor& lens, const Numbers& numbers,
    const Tensor& indptr, const Tensor& out) {
  const char* op = "slots_branch_indices";
  const Batch batch = read_batch(op, table, indices, lens);
  const slots::Layout layout = read_layout(op, numbers);
  SGLK_CHECK(out.dim() == 2, op, "indices", out, "[steps, capacity]");
  const int64_t steps = out.size(0), capacity = out.size(1), rows = batch.count * layout.topk;
  int32_t* ends = output<int32_t>(op, "indptr", indptr, ScalarType::Int, steps * (rows + 1));
  int32_t* to = output<int32_t>(op, "indices", out, ScalarType::Int, steps * capacity);
  for (int64_t i = 0; i < steps; i++) {
    int64_t at = 0;
    ends[i * (rows + 1)] = 0;
    for (int64_t z = 0; z < rows; z++) {
      const slots::Row row = batch.row(z / layout.topk);
      const int64_t shift = layout.shift(row.len, z % layout.topk);
      for (int64_t e = 0; e < row.len + i + 1; e++, at++)
        if (at < capacity)
          to[i * capacity + at] = int32_t(row.at(e < row.len ? e : e + shift));
      ends[i * (rows + 1) + z + 1] = int32_t(at);
    }
  }
}

void slots_ancestors(
    const Tensor& parents, const Tensor& draft, const Tensor& lens, const Tensor& begins,
    int64_t step, const Tensor& out) {
  const char* op = "slots_ancestors";
  const int64_t steps = draft.dim() == 2 ? draft.size(0) : 0, n = lens.numel();
  SGLK_CHECK(
      steps > 0 && (n == 0 || draft.size(1) % n == 0), op, "draft_slots", draft,
      "[steps, requests x branches]");
  const int64_t rows = draft.size(1), k = n ? rows / n : 1;
  const int64_t groups = 1 + k * (steps - 1);
  SGLK_REQUIRE(
      step >= 0 && (step == 0 || step < steps - 1), op, ": step ", step, " of ", steps);
  const int64_t* candidates = longs(op, "parents", parents, n * groups);
  const int64_t* slots = longs(op, "draft_slots", draft, steps * rows);
  const int64_t* len = longs(op, "seq_lens", lens, n);
  const int64_t* begin = longs(op, "begins", begins, rows);
  const int64_t size = out.numel();
  int32_t* to = output<int32_t>(op, "out", out, ScalarType::Int, size);
  const slots::Layout layout{1, k, steps, 0};
  for (int64_t z = 0; z < rows; z++) {
    const int64_t q = z / k, first = begin[z] + len[q];
    for (int64_t s = step, branch = z % k; s > 0; s--) {
      const int64_t candidate = candidates[q * groups + 1 + k * s + branch];
      branch = layout.parent(candidate, s);
      SGLK_REQUIRE(
          branch >= 0 && branch < k, op, ": parents[", q, "] holds ", candidate,
          " for a branch of step ", s);
      const int64_t at = first + s - 1;
      if (at >= 0 && at < size) to[at] = int32_t(slots[(s - 1) * rows + q * k + branch]);
    }
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sglang_kernels, m) {
  m.def("slots_tail(Tensor table, Tensor indices, Tensor lens, Tensor(a!) out) -> ()");
  m.def(
      "slots_draft(Tensor table, Tensor indices, Tensor lens, int[] layout, "
      "Tensor(a!) out) -> ()");
  m.def(
      "slots_shifts(Tensor table, Tensor indices, Tensor lens, int[] layout, bool paged, "
      "Tensor(a!) shift_from, Tensor(b!) column_shift) -> ()");
  m.def(
      "slots_tail_copies(Tensor table, Tensor indices, Tensor lens, int[] layout, "
      "Tensor(a!) src, Tensor(b!) dst) -> ()");
  m.def(
      "slots_accepted_moves(Tensor accept_index, Tensor locs, Tensor(a!) src, "
      "Tensor(b!) dst) -> ()");
  m.def(
      "slots_branch_table(Tensor table, Tensor indices, Tensor lens, int[] layout, "
      "bool paged, bool skip_prefix, Tensor(a!) out) -> ()");
  m.def(
      "slots_branch_indices(Tensor table, Tensor indices, Tensor lens, int[] layout, "
      "Tensor(a!) indptr, Tensor(b!) out) -> ()");
  m.def(
      "slots_ancestors(Tensor parents, Tensor draft_slots, Tensor lens, Tensor begins, "
      "int step, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sglang_kernels, CPU, m) {
  m.impl("slots_tail", TORCH_BOX(&slots_tail));
  m.impl("slots_draft", TORCH_BOX(&slots_draft));
  m.impl("slots_shifts", TORCH_BOX(&slots_shifts));
  m.impl("slots_tail_copies", TORCH_BOX(&slots_tail_copies));
  m.impl("slots_accepted_moves", TORCH_BOX(&slots_accepted_moves));
  m.impl("slots_branch_table", TORCH_BOX(&slots_branch_table));
  m.impl("slots_branch_indices", TORCH_BOX(&slots_branch_indices));
  m.impl("slots_ancestors", TORCH_BOX(&slots_ancestors));
}

}  // namespace sglk
