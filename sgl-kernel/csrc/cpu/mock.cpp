// Checks of arguments and launches of the mock model's ops.
#include "sglang_kernels/cpu/mock.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <vector>

#include "torch_api.h"

namespace sglk {
namespace {

// Time of one thread for a row, for the decision to split; measured within a factor 2.
constexpr double kMicrosecondsPerRow = 0.5;

// Runs body(row) for every row, shared among the threads where there are many.
template <class Body>
void each_row(int64_t rows, const Body& body) {
  run_split(rows, split_for(double(rows) * kMicrosecondsPerRow), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) body(t);
  });
}

// Calls body with a null pointer of the element type.
template <class Body>
void by_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::f32: return body(static_cast<float*>(nullptr));
    case DType::bf16: return body(static_cast<c10::BFloat16*>(nullptr));
    case DType::f16: return body(static_cast<c10::Half*>(nullptr));
  }
}

// A tensor [rows, width] of floats with contiguous rows.
struct Matrix {
  DType dtype;
  void* data;
  int64_t rows, stride;

  template <class T>
  T* row(int64_t t, const T*) const {
    return static_cast<T*>(data) + t * stride;
  }
};

Matrix matrix(const char* op, const char* name, const Tensor& t, int64_t width) {
  SGLK_CHECK(
      t.dim() == 2 && t.size(1) == width && t.stride(1) == 1, op, name, t,
      "[*, " + std::to_string(width) + "] with contiguous rows");
  return {float_type(op, name, t), t.mutable_data_ptr(), t.size(0), t.stride(0)};
}

// A result [rows, width] of floats.
Matrix written(const char* op, const Tensor& t, int64_t rows, int64_t width) {
  const Matrix out = matrix(op, "out", t, width);
  SGLK_CHECK(out.rows == rows, op, "out", t, std::to_string(rows) + " rows");
  return out;
}

const int64_t* longs(const char* op, const char* name, const Tensor& t, int64_t size) {
  check_vector(op, name, t, ScalarType::Long, size);
  return static_cast<const int64_t*>(t.const_data_ptr());
}

int64_t* long_output(const char* op, const char* name, const Tensor& t, int64_t size) {
  return output<int64_t>(op, name, t, ScalarType::Long, size);
}

int check_layer(const char* op, int64_t layer) {
  SGLK_REQUIRE(
      layer >= 0 && layer < mock::kLayers, op, ": layer is ", layer, ", expected 0 .. ",
      mock::kLayers - 1);
  return int(layer);
}

void check_vocab(const char* op, int64_t vocab) {
  SGLK_REQUIRE(
      vocab > 0 && vocab <= mock::kMaxVocab, op, ": vocab is ", vocab, ", expected 1 .. ",
      mock::kMaxVocab);
}

void mock_embedded_keys(const Tensor& embedded, const Tensor& positions, const Tensor& out) {
  const char* op = "mock_embedded_keys";
  const Matrix rows = matrix(op, "embedded", embedded, mock::kHidden);
  const int64_t* position = longs(op, "positions", positions, rows.rows);
  int64_t* to = long_output(op, "out", out, rows.rows);
  by_type(rows.dtype, [&](auto* type) {
    each_row(rows.rows, [&](int64_t t) {
      const uint64_t token = mock::read_signs(rows.row(t, type), mock::kTokenBits);
      to[t] = mock::key_layer0(token, position[t]);
    });
  });
}

void mock_next_keys(const Tensor& fold0, const Tensor& positions, const Tensor& out) {
  const char* op = "mock_next_keys";
  const int64_t rows = fold0.numel();
  const int64_t *fold = longs(op, "fold0", fold0, rows),
                *position = longs(op, "positions", positions, rows);
  int64_t* to = long_output(op, "out", out, rows);
  for (int64_t t = 0; t < rows; t++) to[t] = mock::key_layer1(fold[t], position[t]);
}

void mock_qkv(const Tensor& x, int64_t layer, const Tensor& out) {
  const char* op = "mock_qkv";
  const int64_t rows = x.numel();
  const int64_t* key = longs(op, "x", x, rows);
  const Matrix to = written(op, out, rows, mock::kQkv);
  const int which = check_layer(op, layer);
  by_type(to.dtype, [&](auto* type) {
    each_row(rows, [&](int64_t t) { mock::write_qkv(to.row(t, type), key[t], which); });
  });
}

void mock_fold(const Tensor& mean, const Tensor& count, int64_t layer, const Tensor& out) {
  const char* op = "mock_fold";
  const Matrix means = matrix(op, "mean", mean, mock::kHidden);
  const int64_t* elements = longs(op, "count", count, means.rows);
  int64_t* to = long_output(op, "out", out, means.rows);
  const int which = check_layer(op, layer);
  by_type(means.dtype, [&](auto* type) {
    each_row(means.rows, [&](int64_t t) {
      to[t] = mock::fold(means.row(t, type), elements[t], which);
    });
  });
}

void mock_fold_onto(
    const Tensor& before, const Tensor& x, const Tensor& mean, const Tensor& count,
    int64_t layer, const Tensor& out) {
  const char* op = "mock_fold_onto";
  const Matrix means = matrix(op, "mean", mean, mock::kHidden);
  const int64_t *elements = longs(op, "count", count, means.rows),
                *from = longs(op, "before", before, means.rows),
                *key = longs(op, "x", x, means.rows);
  int64_t* to = long_output(op, "out", out, means.rows);
  const int which = check_layer(op, layer);
  by_type(means.dtype, [&](auto* type) {
    each_row(means.rows, [&](int64_t t) {
      const int64_t fold = word(bits(from[t]) + bits(mock::term(key[t], which)));
      const bool is_sound = mock::is_plausible(means.row(t, type), elements[t]);
      to[t] = is_sound ? fold : mock::spoilt(fold);
    });
  });
}

void mock_keep_whole(const Tensor& fold, const Tensor& is_whole, const Tensor& out) {
  const char* op = "mock_keep_whole";
  const int64_t rows = fold.numel();
  const int64_t* from = longs(op, "fold", fold, rows);
  check_vector(op, "is_whole", is_whole, ScalarType::Bool, rows);
  const bool* whole = static_cast<const bool*>(is_whole.const_data_ptr());
  int64_t* to = long_output(op, "out", out, rows);
  for (int64_t t = 0; t < rows; t++) to[t] = whole[t] ? from[t] : mock::spoilt(from[t]);
}

void mock_hidden(
    const Tensor& fold0, const Tensor& fold1, const Tensor& positions, int64_t vocab,
    const Tensor& out) {
  const char* op = "mock_hidden";
  const int64_t rows = fold0.numel();
  const int64_t *first = longs(op, "fold0", fold0, rows),
                *second = longs(op, "fold1", fold1, rows),
                *position = longs(op, "positions", positions, rows);
  check_vocab(op, vocab);
  const Matrix to = written(op, out, rows, mock::kHidden);
  by_type(to.dtype, [&](auto* type) {
    each_row(rows, [&](int64_t t) {
      const int64_t token = mock::next_token(first[t], second[t], position[t], vocab);
      mock::write_hidden(to.row(t, type), token, {first[t], second[t]}, [](int i) {
        return 1.0f + float(i) / 16.0f;
      });
    });
  });
}

void mock_proposal(
    const Tensor& fold0, const Tensor& fold1, const Tensor& positions,
    std::vector<int64_t> acceptance, const Tensor& out) {
  const char* op = "mock_proposal";
  const int64_t rows = fold0.numel();
  const int64_t *first = longs(op, "fold0", fold0, rows),
                *second = longs(op, "fold1", fold1, rows),
                *position = longs(op, "positions", positions, rows);
  SGLK_REQUIRE(
      acceptance.size() == 3, op, ": acceptance has ", acceptance.size(),
      " numbers, expected 3");
  const mock::Acceptance table{acceptance[0], acceptance[1], acceptance[2]};
  check_vocab(op, table.vocab);
  const Matrix to = written(op, out, rows, mock::kHidden);
  by_type(to.dtype, [&](auto* type) {
    each_row(rows, [&](int64_t t) {
      mock::write_proposal(to.row(t, type), {first[t], second[t]}, position[t], table);
    });
  });
}

void mock_aux_states(const Tensor& hidden, const Tensor& out) {
  const char* op = "mock_aux_states";
  const Matrix from = matrix(op, "hidden", hidden, mock::kHidden);
  const DType dtype = float_type(op, "out", out);
  SGLK_CHECK(
      out.is_contiguous() && dtype == from.dtype &&
          out.numel() == mock::kStates * from.rows * mock::kHidden,
      op, "out", out, "[3, rows, 512] of the dtype of hidden");
  by_type(dtype, [&](auto* type) {
    auto* to = static_cast<decltype(type)>(out.mutable_data_ptr());
    each_row(from.rows, [&](int64_t t) {
      for (int i = 0; i < mock::kStates; i++)
        mock::write_aux(to + (i * from.rows + t) * mock::kHidden, from.row(t, type), i);
    });
  });
}

void mock_read_folds(
    const Tensor& states, const Tensor& folds, const Tensor& is_whole) {
  const char* op = "mock_read_folds";
  SGLK_CHECK(
      states.dim() == 2 &&
          (states.size(1) == mock::kHidden || states.size(1) == mock::kStates * mock::kHidden),
      op, "states", states, "[*, 512] or [*, 1536]");
  const Matrix from = matrix(op, "states", states, states.size(1));
  const int count = int(states.size(1) / mock::kHidden);
  int64_t* to = long_output(op, "folds", folds, mock::kLayers * from.rows);
  bool* whole = output<bool>(op, "is_whole", is_whole, ScalarType::Bool, from.rows);
  by_type(from.dtype, [&](auto* type) {
    each_row(from.rows, [&](int64_t t) {
      const auto* state = from.row(t, type);
      const mock::Folds first = mock::read_folds(state, 0);
      bool agree = first.whole;
      for (int i = 1; i < count; i++) {
        const mock::Folds other = mock::read_folds(state + i * mock::kHidden, i);
        agree &= other.whole && other.of[0] == first.of[0] && other.of[1] == first.of[1];
      }
      for (int layer = 0; layer < mock::kLayers; layer++)
        to[layer * from.rows + t] = word(first.of[layer]);
      whole[t] = agree;
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sglang_kernels, m) {
  m.def("mock_embedded_keys(Tensor embedded, Tensor positions, Tensor(a!) out) -> ()");
  m.def("mock_next_keys(Tensor fold0, Tensor positions, Tensor(a!) out) -> ()");
  m.def("mock_qkv(Tensor x, int layer, Tensor(a!) out) -> ()");
  m.def("mock_fold(Tensor mean, Tensor count, int layer, Tensor(a!) out) -> ()");
  m.def(
      "mock_fold_onto(Tensor before, Tensor x, Tensor mean, Tensor count, int layer, "
      "Tensor(a!) out) -> ()");
  m.def("mock_keep_whole(Tensor fold, Tensor is_whole, Tensor(a!) out) -> ()");
  m.def(
      "mock_hidden(Tensor fold0, Tensor fold1, Tensor positions, int vocab, "
      "Tensor(a!) out) -> ()");
  m.def(
      "mock_proposal(Tensor fold0, Tensor fold1, Tensor positions, int[] acceptance, "
      "Tensor(a!) out) -> ()");
  m.def("mock_aux_states(Tensor hidden, Tensor(a!) out) -> ()");
  m.def("mock_read_folds(Tensor states, Tensor(a!) folds, Tensor(b!) is_whole) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sglang_kernels, CPU, m) {
  m.impl("mock_embedded_keys", TORCH_BOX(&mock_embedded_keys));
  m.impl("mock_next_keys", TORCH_BOX(&mock_next_keys));
  m.impl("mock_qkv", TORCH_BOX(&mock_qkv));
  m.impl("mock_fold", TORCH_BOX(&mock_fold));
  m.impl("mock_fold_onto", TORCH_BOX(&mock_fold_onto));
  m.impl("mock_keep_whole", TORCH_BOX(&mock_keep_whole));
  m.impl("mock_hidden", TORCH_BOX(&mock_hidden));
  m.impl("mock_proposal", TORCH_BOX(&mock_proposal));
  m.impl("mock_aux_states", TORCH_BOX(&mock_aux_states));
  m.impl("mock_read_folds", TORCH_BOX(&mock_read_folds));
}

}  // namespace sglk
