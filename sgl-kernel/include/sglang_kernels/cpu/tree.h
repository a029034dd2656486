// Draft trees: selection of candidates, tree building, verification. Torch-free; mirrors
// the references in sglang/srt/draft_trees/ops/{tree,verify}.py. Knows nothing of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace sglk::tree {

constexpr uint64_t kBonusStream = 0x5851F42D4C957F2Dull;

// The uniform number of (key, position), as sampling/ops/noise.py makes it.
inline double uniform(uint64_t key, int64_t position) {
  uint64_t word = key + (uint64_t(position) + 1) * 0x9E3779B97F4A7C15ull;
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
  word ^= word >> 31;
  return double(word >> 11) * 0x1p-53;
}

inline float nan_last(float x) {
  return x != x ? -std::numeric_limits<float>::infinity() : x;
}

// The k largest values seen, in falling order; among equals the first one seen.
struct Best {
  int64_t k;
  float* values;
  int64_t* indices;
  int64_t held = 0;

  void offer(float x, int64_t index) {
    if (held == k && !(x > values[k - 1])) return;
    int64_t at = held < k ? held++ : k - 1;
    for (; at > 0 && x > values[at - 1]; at--) {
      values[at] = values[at - 1];
      indices[at] = indices[at - 1];
    }
    values[at] = x;
    indices[at] = index;
  }

  // n values whose first index is `first`.
  void offer_all(const float* x, int64_t n, int64_t first) {
    constexpr int64_t kGroup = 32;
    int64_t i = 0;
    for (; i + kGroup <= n; i += kGroup) {
      if (held == k) {
        // Most groups hold nothing better, and this finds out without branches.
        const float worst = values[k - 1];
        int32_t better = 0;
        for (int64_t j = 0; j < kGroup; j++) better |= x[i + j] > worst;
        if (!better) continue;
      }
      for (int64_t j = i; j < i + kGroup; j++) offer(nan_last(x[j]), first + j);
    }
    for (; i < n; i++) offer(nan_last(x[i]), first + i);
  }
};

struct Shape {
  int64_t topk, nodes, candidates, groups;
};

inline int64_t place_to_level(int64_t place, int64_t topk) {
  return place < topk ? 0 : 1 + (place - topk) / (topk * topk);
}

// One request's rows of DraftTree and DraftLevels.
struct BuildRow {
  const float* scores;
  const int64_t *candidate_tokens, *group_parents;
  int64_t root_token, seq_len, first_place;
  int64_t *tokens, *positions, *parent_index, *next_token, *next_sibling;
  bool* mask;
  int64_t* selected;
};

inline void select_nodes(const Shape& s, const BuildRow& row) {
  const int64_t wanted = s.nodes - 1;
  std::vector<int64_t> order(size_t(s.candidates));
  for (int64_t i = 0; i < s.candidates; i++) order[size_t(i)] = i;
  const auto better = [&](int64_t a, int64_t b) {
    const float x = nan_last(row.scores[a]), y = nan_last(row.scores[b]);
    return x > y || (x == y && a < b);
  };
  if (wanted < s.candidates)
    std::nth_element(order.begin(), order.begin() + wanted, order.end(), better);
  std::sort(order.begin(), order.begin() + wanted);
  std::copy(order.begin(), order.begin() + wanted, row.selected);
}

// The parent's node, or -1 if it was not selected.
inline int64_t find_parent(const Shape& s, const BuildRow& row, int64_t place) {
  const int64_t group = place / s.topk;
  if (group == 0) return 0;
  const int64_t expanded = row.group_parents[group];
  if (place_to_level(expanded, s.topk) != place_to_level(place, s.topk) - 1) return -1;
  const int64_t *begin = row.selected, *end = begin + s.nodes - 1;
  const int64_t* found = std::lower_bound(begin, end, expanded);
  return found != end && *found == expanded ? found - begin + 1 : -1;
}

inline void build_row(const Shape& s, const BuildRow& row) {
  const int64_t n = s.nodes;
  select_nodes(s, row);
  std::fill(row.next_token, row.next_token + n, -1);
  std::fill(row.next_sibling, row.next_sibling + n, -1);
  std::fill(row.mask, row.mask + n * n, false);
  for (int64_t i = 0; i < n; i++) {
    const int64_t place = i ? row.selected[i - 1] : 0;
    const int64_t parent = i ? find_parent(s, row, place) : -1;
    row.tokens[i] = i ? row.candidate_tokens[place] : row.root_token;
    row.parent_index[i] = parent < 0 ? -1 : row.first_place + parent;
    row.positions[i] = parent < 0 ? row.seq_len : row.positions[parent] + 1;
    if (parent >= 0) std::copy_n(row.mask + parent * n, n, row.mask + i * n);
    row.mask[i * n + i] = true;
  }
  // Backwards, so that each node becomes the head of its parent's list.
  for (int64_t i = n - 1; i > 0; i--) {
    if (row.parent_index[i] < 0) continue;
    const int64_t parent = row.parent_index[i] - row.first_place;
    row.next_sibling[i] = row.next_token[parent];
    row.next_token[parent] = i;
  }
}

// One request's tree and result; `steps` drafts can be accepted.
struct VerifyRow {
  int64_t nodes, steps, first_place;
  const int64_t *tokens, *parent_index;
  int64_t *predict, *accept_index, *accept_len;

  bool is_child(int64_t node, int64_t parent) const {
    return parent_index[node] == first_place + parent;
  }
  void begin() const {
    std::fill(predict, predict + nodes, 0);
    std::fill(accept_index, accept_index + steps + 1, -1);
    accept_index[0] = first_place;
    *accept_len = 1;
  }
  int64_t accept(int64_t parent, int64_t child) const {
    predict[parent] = tokens[child];
    accept_index[(*accept_len)++] = first_place + child;
    return child;
  }
};

inline void verify_greedy(const VerifyRow& row, const int64_t* target_ids) {
  row.begin();
  int64_t current = 0;
  for (int64_t step = 0; step < row.steps; step++) {
    int64_t child = current + 1;
    while (child < row.nodes &&
           !(row.is_child(child, current) && row.tokens[child] == target_ids[current]))
      child++;
    if (child == row.nodes) break;
    current = row.accept(current, child);
  }
  row.predict[current] = target_ids[current];
}

struct SampledArgs {
  const float* probs;  // the request's first row
  int64_t probs_stride, vocab;
  const float* totals;
  const int64_t* positions;
  uint64_t key;
  double threshold_single, threshold_acc;
  int64_t* rejected;  // [topk]
  int64_t topk;
};

// The first id whose cumulative weight, without the rejected ones, exceeds the noise.
inline int64_t draw_bonus(const SampledArgs& a, const float* weights, double noise) {
  bool skip = true;
  const auto is_rejected = [&](int64_t id) {
    return skip && std::find(a.rejected, a.rejected + a.topk, id) != a.rejected + a.topk;
  };
  double total = 0;
  for (int64_t v = 0; v < a.vocab; v++) total += weights[v];
  double rest = total;
  for (int64_t i = 0; i < a.topk; i++)
    if (a.rejected[i] >= 0 && a.rejected[i] < a.vocab) rest -= weights[a.rejected[i]];
  // If the subtraction left nothing but rounding, look for a weight that is left.
  if (!(rest > total * 1e-6)) {
    rest = 0;
    for (int64_t v = 0; v < a.vocab; v++)
      if (weights[v] > 0 && !is_rejected(v)) rest += weights[v];
    skip = rest > 0;
    if (!skip) rest = total;
  }
  const double target = noise * rest;
  double sum = 0;
  int64_t last = a.vocab - 1;
  for (int64_t v = 0; v < a.vocab; v++) {
    if (!(weights[v] > 0) || is_rejected(v)) continue;
    sum += weights[v];
    last = v;
    if (sum > target) return v;
  }
  return last;
}

inline void verify_sampled(const VerifyRow& row, const SampledArgs& a) {
  row.begin();
  std::fill(a.rejected, a.rejected + a.topk, -1);
  int64_t current = 0;
  for (int64_t step = 0; step < row.steps; step++) {
    const float* weights = a.probs + current * a.probs_stride;
    const double total = a.totals[current];
    const double bound = uniform(a.key, a.positions[current] + 1) * total * a.threshold_acc;
    double mass = 0;
    int64_t accepted = -1, rejected = 0;
    for (int64_t child = current + 1; child < row.nodes; child++) {
      if (!row.is_child(child, current)) continue;
      const int64_t token = row.tokens[child];
      const double p = token >= 0 && token < a.vocab ? weights[token] : 0;
      mass += p;
      if (p > 0 && (bound < mass || p >= a.threshold_single * total)) {
        accepted = child;
        break;
      }
      if (rejected < a.topk) a.rejected[rejected++] = token;
    }
    if (accepted < 0) break;
    std::fill(a.rejected, a.rejected + a.topk, -1);
    current = row.accept(current, accepted);
  }
  row.predict[current] = draw_bonus(
      a, a.probs + current * a.probs_stride,
      uniform(a.key ^ kBonusStream, a.positions[current] + 1));
}

}  // namespace sglk::tree
