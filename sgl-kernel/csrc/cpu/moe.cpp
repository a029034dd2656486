// Mixture of experts: choice of experts, and products with their weights.
#include <cmath>
#include <limits>
#include <vector>

#include "torch_api.h"

namespace sglk {
namespace {

constexpr int64_t kPanel = 32;
// Time of one thread: per weight byte from the third-level cache, per multiply-add, per
// element copied or summed, and per logit of the routing.
constexpr double kMicrosecondsPerByte = 3e-5;
constexpr double kMicrosecondsPerMultiplyAdd = 1.2e-5;
constexpr double kMicrosecondsPerElement = 1e-4;
constexpr double kMicrosecondsPerLogit = 1e-2;

// ---- routing ---------------------------------------------------------------------------

// The fields of `RoutingRule` in layers/ops/moe_routing/op.py.
struct Rule {
  int64_t top_k, groups, top_groups, group_best;
  bool is_sigmoid, renormalise;
  double scale;
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Index of the largest of values [0, n); the lowest of several equal ones. No value may be
// NaN.
int64_t first_largest(const float* values, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 1; i < n; i++)
    if (values[i] > values[best]) best = i;
  return best;
}

// The sum of the `count` largest; destroys `values`.
float sum_of_largest(float* values, int64_t n, int64_t count) {
  float sum = 0.0f;
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = first_largest(values, n);
    sum += values[at];
    values[at] = -kInfinity;
  }
  return sum;
}

// Scratch of one thread's tokens.
struct RouteScratch {
  std::vector<float> score, choice, group, copy;
};

// Excludes the experts of all but the best groups from the choice.
void limit_to_groups(const Rule& rule, int64_t experts, RouteScratch& s) {
  const int64_t size = experts / rule.groups;
  for (int64_t g = 0; g < rule.groups; g++) {
    std::copy_n(s.choice.begin() + g * size, size, s.copy.begin());
    s.group[g] = sum_of_largest(s.copy.data(), size, rule.group_best);
  }
  std::vector<bool> kept(rule.groups, false);
  for (int64_t i = 0; i < rule.top_groups; i++) {
    int64_t best = -1;
    for (int64_t g = 0; g < rule.groups; g++)
      if (!kept[g] && (best < 0 || s.group[g] > s.group[best])) best = g;
    kept[best] = true;
  }
  for (int64_t e = 0; e < experts; e++)
    if (!kept[e / size]) s.choice[e] = -kInfinity;
}

void route_token(
    const Rule& rule, const float* logits, const float* correction, int64_t experts,
    RouteScratch& s, float* weights, int32_t* ids) {
  float largest = logits[0];
  for (int64_t e = 1; e < experts; e++)
    if (!(logits[e] <= largest)) largest = logits[e];  // NaN is the largest
  for (int64_t e = 0; e < experts; e++)
    s.score[e] = rule.is_sigmoid ? -logits[e] : logits[e] - largest;
  kernels().exp(s.score.data(), s.score.data(), experts);
  for (int64_t e = 0; e < experts; e++) {
    if (rule.is_sigmoid) s.score[e] = 1.0f / (1.0f + s.score[e]);
    // Softmax keeps the order of the logits; rounding does not.
    const float value = rule.is_sigmoid ? s.score[e] : logits[e];
    const float choice = correction ? value + correction[e] : value;
    s.choice[e] = std::isnan(choice) ? kInfinity : choice;
  }
  if (rule.groups > 1) limit_to_groups(rule, experts, s);
  float chosen = 0.0f;
  for (int64_t k = 0; k < rule.top_k; k++) {
    // An expert that was taken ranks below all others, even below excluded groups.
    int64_t best = -1;
    for (int64_t e = 0; e < experts; e++) {
      const bool is_taken = std::isnan(s.choice[e]);
      if (!is_taken && (best < 0 || s.choice[e] > s.choice[best])) best = e;
    }
    s.choice[best] = std::numeric_limits<float>::quiet_NaN();
    ids[k] = int32_t(best);
    weights[k] = s.score[best];
    chosen += s.score[best];
  }
  float divisor = 1.0f;
  if (rule.renormalise) {
    divisor = chosen + 1e-20f;
  } else if (!rule.is_sigmoid) {
    divisor = 0.0f;
    for (int64_t e = 0; e < experts; e++) divisor += s.score[e];
  }
  for (int64_t k = 0; k < rule.top_k; k++)
    weights[k] = weights[k] / divisor * float(rule.scale);
}

void moe_route(
    const Tensor& logits, const OptionalTensor& correction, int64_t top_k, bool is_sigmoid,
    bool renormalise, double scale, int64_t groups, int64_t top_groups, int64_t group_best,
    const Tensor& weights, const Tensor& ids) {
  const char* op = "moe_route";
  SGLK_CHECK(
      logits.dim() == 2 && logits.scalar_type() == ScalarType::Float && logits.is_contiguous(),
      op, "logits", logits, "contiguous float32 [T, E]");
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  SGLK_REQUIRE(
      groups >= 1 && experts % groups == 0 && top_groups >= 1 && top_groups <= groups &&
          group_best >= 1 && group_best <= experts / groups && top_k >= 1 &&
          top_k <= top_groups * (experts / groups),
      op, ": the rule (top_k ", top_k, ", groups ", groups, ", top_groups ", top_groups,
      ", group_best ", group_best, ") does not fit ", experts, " experts");
  if (correction) check_vector(op, "correction", *correction, ScalarType::Float, experts);
  SGLK_CHECK(
      weights.scalar_type() == ScalarType::Float && weights.is_contiguous() &&
          weights.numel() == tokens * top_k,
      op, "weights", weights, "contiguous float32 [T, top_k]");
  SGLK_CHECK(
      ids.scalar_type() == ScalarType::Int && ids.is_contiguous() &&
          ids.numel() == tokens * top_k,
      op, "ids", ids, "contiguous int32 [T, top_k]");
  const Rule rule{top_k, groups, top_groups, group_best, is_sigmoid, renormalise, scale};
  const auto* from = static_cast<const float*>(logits.const_data_ptr());
  const float* added =
      correction ? static_cast<const float*>(correction->const_data_ptr()) : nullptr;
  auto* to_weights = static_cast<float*>(weights.mutable_data_ptr());
  auto* to_ids = static_cast<int32_t*>(ids.mutable_data_ptr());
  const double work = double(tokens * experts) * kMicrosecondsPerLogit;
  run_split(tokens, split_for(work), [&](int64_t begin, int64_t end) {
    const auto floats = [](int64_t n) { return std::vector<float>(size_t(n)); };
    RouteScratch scratch{floats(experts), floats(experts), floats(groups), floats(experts)};
    for (int64_t t = begin; t < end; t++)
      route_token(
          rule, from + t * experts, added, experts, scratch, to_weights + t * top_k,
          to_ids + t * top_k);
  });
}

// ---- experts ---------------------------------------------------------------------------

// The rows [first, first + rows) of the sorted list, which one expert multiplies.
struct Group {
  int64_t expert, first, rows;
};

// A product of every group's rows with its expert's weight, cut into parts of equal time.
class GroupedProduct {
 public:
  GroupedProduct(const std::vector<Group>& groups, const LinearArgs& args, int64_t panels)
      : groups_(groups), args_(args), expert_bytes_(panels * kPanel * args.k *
                                                    (args.weight_bf16 ? 2 : 4)),
        columns_(panels * kPanel), units_(kernels().linear_units(columns_)) {
    for (const Group& group : groups) {
      const double cells = double(columns_) * double(args.k);
      const double cost = cells * (args.weight_bf16 ? 2 : 4) * kMicrosecondsPerByte +
                          cells * double(group.rows) * kMicrosecondsPerMultiplyAdd;
      ends_.push_back((ends_.empty() ? 0.0 : ends_.back()) + cost);
    }
  }

  void run() const {
    const Split split = split_for(ends_.back());
    const int64_t most = units_ * int64_t(groups_.size());
    const int64_t parts = std::min(split.parts, most);
    run_split(parts, {split.threads, parts}, [&](int64_t begin, int64_t end) {
      const double scale = ends_.back() / double(parts);
      run_interval(double(begin) * scale, double(end) * scale, end == parts);
    });
  }

 private:
  // The units whose share of the time begins in [low, high).
  void run_interval(double low, double high, bool is_last) const {
    for (size_t g = 0; g < groups_.size(); g++) {
      const double begin = g ? ends_[g - 1] : 0.0, end = ends_[g];
      if (end <= low) continue;
      if (begin >= high && !is_last) break;
      const int64_t from = unit_at(low, begin, end);
      const int64_t to = is_last ? units_ : unit_at(high, begin, end);
      if (from < to) run_group(groups_[g], from, to);
    }
  }

  int64_t unit_at(double time, double begin, double end) const {
    const double share = std::ceil((time - begin) / (end - begin) * double(units_));
    return int64_t(std::min(std::max(share, 0.0), double(units_)));
  }

  void run_group(const Group& group, int64_t unit_begin, int64_t unit_end) const {
    LinearArgs args = args_;
    args.x += group.first * args.x_stride;
    args.out += group.first * args.out_stride;
    args.weight = static_cast<const char*>(args.weight) + group.expert * expert_bytes_;
    if (args.bias) args.bias += group.expert * (args.gate == Gate::none ? args.n : columns_);
    args.rows = group.rows;
    kernels().linear(args, 0, group.rows, unit_begin, unit_end);
  }

  const std::vector<Group>& groups_;
  const LinearArgs& args_;
  const int64_t expert_bytes_, columns_, units_;
  std::vector<double> ends_;
};

// place[a] is the row of assignment a (token * top_k + j) in the order of experts.
std::vector<Group> sort_by_expert(
    const int32_t* ids, int64_t assignments, int64_t experts, std::vector<int32_t>& place) {
  std::vector<int64_t> next(size_t(experts) + 1, 0);
  for (int64_t a = 0; a < assignments; a++) {
    SGLK_REQUIRE(
        ids[a] >= 0 && ids[a] < experts, "moe_experts: ids has ", ids[a], ", but there are ",
        experts, " experts");
    next[size_t(ids[a]) + 1]++;
  }
  std::vector<Group> groups;
  for (int64_t e = 0; e < experts; e++) {
    const int64_t rows = next[size_t(e) + 1];
    next[size_t(e) + 1] += next[size_t(e)];
    if (rows) groups.push_back({e, next[size_t(e)], rows});
  }
  for (int64_t a = 0; a < assignments; a++) place[size_t(a)] = int32_t(next[size_t(ids[a])]++);
  return groups;
}

void check_weight(
    const char* name, const Tensor& weight, int64_t columns, int64_t k, ScalarType type) {
  SGLK_CHECK(
      weight.dim() == 4 && weight.size(1) == (columns + kPanel - 1) / kPanel &&
          weight.size(2) == k && weight.size(3) == kPanel && weight.is_contiguous() &&
          weight.scalar_type() == type &&
          (type == ScalarType::BFloat16 || type == ScalarType::Float),
      "moe_experts", name, weight,
      "packed float32 or bfloat16 [E, panels, inputs, 32], both weights of one dtype");
}

void moe_experts(
    const Tensor& x, const Tensor& ids, const Tensor& weights, const Tensor& gate_up,
    const OptionalTensor& gate_up_bias, const Tensor& down, const OptionalTensor& down_bias,
    int64_t inner, bool is_clamped, double alpha, double limit, const Tensor& scratch,
    const Tensor& out) {
  const char* op = "moe_experts";
  SGLK_CHECK(
      x.dim() == 2 && x.size(1) > 0 && x.scalar_type() == ScalarType::Float &&
          x.is_contiguous(),
      op, "x", x, "contiguous float32 [T, H]");
  const int64_t tokens = x.size(0), hidden = x.size(1);
  SGLK_CHECK(
      ids.dim() == 2 && ids.size(0) == tokens && ids.scalar_type() == ScalarType::Int &&
          ids.is_contiguous(),
      op, "ids", ids, "contiguous int32 [T, top_k]");
  const int64_t top_k = ids.size(1), assignments = tokens * top_k;
  SGLK_CHECK(
      weights.scalar_type() == ScalarType::Float && weights.is_contiguous() &&
          weights.numel() == assignments,
      op, "weights", weights, "contiguous float32 [T, top_k]");
  SGLK_REQUIRE(inner > 0, op, ": inner is ", inner, ", expected at least 1");
  const int64_t gate_panels = (inner + kPanel / 2 - 1) / (kPanel / 2);
  check_weight("gate_up", gate_up, gate_panels * kPanel, hidden, gate_up.scalar_type());
  check_weight("down", down, hidden, inner, gate_up.scalar_type());
  const int64_t experts = gate_up.size(0);
  SGLK_CHECK(down.size(0) == experts, op, "down", down, "as many experts as gate_up");
  const auto check_matrix = [&](const char* name, const Tensor& t, int64_t size) {
    SGLK_CHECK(
        t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.numel() == size, op,
        name, t, "contiguous float32 of the size of the experts' outputs");
  };
  if (gate_up_bias) check_matrix("gate_up_bias", *gate_up_bias, experts * gate_panels * kPanel);
  if (down_bias) check_matrix("down_bias", *down_bias, experts * hidden);
  check_matrix("scratch", scratch, assignments * (2 * hidden + inner));
  check_matrix("out", out, tokens * hidden);
  if (assignments == 0) return;

  std::vector<int32_t> place(static_cast<size_t>(assignments));
  const auto* id = static_cast<const int32_t*>(ids.const_data_ptr());
  const std::vector<Group> groups = sort_by_expert(id, assignments, experts, place);
  const auto* from = static_cast<const float*>(x.const_data_ptr());
  auto* sorted = static_cast<float*>(scratch.mutable_data_ptr());
  float* activated = sorted + assignments * hidden;
  float* product = activated + assignments * inner;
  const double elements = double(assignments * hidden);
  if (tokens > 1) {
    run_split(
        assignments, split_for(elements * kMicrosecondsPerElement),
        [&](int64_t begin, int64_t end) {
          for (int64_t a = begin; a < end; a++)
            std::copy_n(
                from + a / top_k * hidden, hidden, sorted + place[size_t(a)] * hidden);
        });
  }
  const auto data = [](const OptionalTensor& t) {
    return t ? static_cast<const float*>(t->const_data_ptr()) : nullptr;
  };
  LinearArgs first{};
  first.x = tokens > 1 ? sorted : from;
  first.x_stride = tokens > 1 ? hidden : 0;  // one token is every expert's row
  first.weight = gate_up.const_data_ptr();
  first.weight_bf16 = gate_up.scalar_type() == ScalarType::BFloat16;
  first.bias = data(gate_up_bias);
  first.out = activated;
  first.out_stride = first.n = inner;
  first.k = hidden;
  first.gate = is_clamped ? Gate::clamped : Gate::silu;
  first.alpha = float(alpha);
  first.limit = float(limit);
  GroupedProduct(groups, first, gate_up.size(1)).run();
  LinearArgs second{};
  second.x = activated;
  second.x_stride = second.k = inner;
  second.weight = down.const_data_ptr();
  second.weight_bf16 = first.weight_bf16;
  second.bias = data(down_bias);
  second.out = product;
  second.out_stride = second.n = hidden;
  GroupedProduct(groups, second, down.size(1)).run();
  const WeightedSumArgs sum{
      product, place.data(), static_cast<const float*>(weights.const_data_ptr()),
      static_cast<float*>(out.mutable_data_ptr()), top_k, hidden};
  run_split(
      tokens, split_for(elements * kMicrosecondsPerElement),
      [&](int64_t begin, int64_t end) { kernels().weighted_sum(sum, begin, end); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sglang_kernels, m) {
  m.def(
      "moe_route(Tensor logits, Tensor? correction, int top_k, bool is_sigmoid, "
      "bool renormalise, float scale, int groups, int top_groups, int group_best, "
      "Tensor(a!) weights, Tensor(b!) ids) -> ()");
  m.def(
      "moe_experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, "
      "Tensor? gate_up_bias, Tensor down, Tensor? down_bias, int inner, bool is_clamped, "
      "float alpha, float limit, Tensor(a!) scratch, Tensor(b!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sglang_kernels, CPU, m) {
  m.impl("moe_route", TORCH_BOX(&moe_route));
  m.impl("moe_experts", TORCH_BOX(&moe_experts));
}

}  // namespace sglk
