// The KV canary's check of whose logits gave whose token.
#include "sglang_kernels/cpu/canary.h"

#include <cfloat>
#include <cmath>
#include <cstring>

namespace sglk::canary {
namespace {

constexpr double kSlack = 1.0 / double(int64_t{1} << kSlackBits);
const float kTiny = std::ldexp(1.0f, -int(kTinyBits));

float float_of(int64_t word) {
  const auto low = static_cast<int32_t>(word);
  float value;
  std::memcpy(&value, &low, sizeof(value));
  return value;
}

// The random number in [0, 1) that belongs to a key and a position.
double uniform(int64_t key, int64_t position) {
  const uint64_t mixed = mix64(bits(key) + bits(position + 1) * bits(kNoiseStep));
  return std::ldexp(double(mixed >> (64 - kNoiseBits)), -int(kNoiseBits));
}

// A token whose checks are under way.
struct Token {
  int64_t index, row, id, position, at;
  const int64_t* announced;
  bool is_known;

  bool has(int64_t flag) const {
    return is_known && (announced[Sampling::kFlags] & flag) != 0;
  }
  float number(int64_t word) const { return float_of(announced[word]); }
};

Token read_token(const Drawn& d, int64_t i) {
  const int64_t r = i / d.width, req = d.req_rows[r];
  Token t{};
  t.index = i;
  t.row = r;
  t.id = d.tokens[i];
  t.position = d.prefix_lens[r] + d.extend_lens[r] + i % d.width;
  t.at = d.logits_rows ? d.logits_rows[i] : i;
  t.announced = d.sampling + req * Sampling::kCount;
  t.is_known = t.announced[Sampling::kSerial] == d.serials[r];
  return t;
}

int64_t sum_row(const void* row, int64_t width) {
  uint64_t sum = 0;
  const auto* words = static_cast<const int32_t*>(row);
  for (int64_t j = 0; row && j < width; j++) sum += carried_term(words[j], j);
  return word(sum);
}

// Compares what the head read with the row that is due.
void check_hidden(const Drawn& d, const Token& t, Found& f) {
  if (!d.inputs.data || !d.hidden.data) return;
  const int64_t end = d.hidden_ends ? d.hidden_ends[t.index] : t.index + 1;
  const void* due = d.hidden.row(end - 1);
  const void* found = d.inputs.row(t.at);
  const int64_t width = d.hidden_words;
  if (due && std::memcmp(due, found, width * sizeof(int32_t)) == 0) return;
  const int64_t due_sum = sum_row(due, width), found_sum = sum_row(found, width);
  if (due_sum == found_sum) return;
  f.reasons |= Reason::kLogitsRow;
  f.expected_lineage = due_sum;
  f.found_lineage = found_sum;
}

void flag_mask(Found& f, int64_t due, int64_t found) {
  f.reasons |= Reason::kGrammarMask;
  f.expected_word0 = due;
  f.found_word0 = found;
}

// Compares the words of a mask row. Returns false if its grammar failed, so that the token
// will be discarded.
bool check_mask(const Drawn& d, const Token& t, const int32_t* mask, Found& f) {
  if (!t.is_known) return true;
  const bool has_grammar = t.has(SamplingFlag::kGrammar);
  const int64_t own = d.serials[t.row] & kSerialWordMask;
  const int32_t* words = mask ? mask + d.masks.columns - MaskWord::kCount : nullptr;
  const int64_t serial = words ? words[MaskWord::kSerial] : 0;
  const int64_t accepted = words ? words[MaskWord::kAccepted] : 0;
  if (has_grammar && serial == own && accepted == kUnknown) return false;
  const int64_t gained = t.position - t.announced[Sampling::kPromptLen];
  const int64_t due = has_grammar ? pack_word0(own, gained) : pack_word0(0, accepted);
  const int64_t found = pack_word0(serial, accepted);
  const bool is_allowed = !has_grammar || !mask || t.id >= d.logits.columns ||
                          (mask[t.id / 32] >> (t.id % 32) & 1);
  if (due != found || !is_allowed) flag_mask(f, due, found);
  return true;
}

bool is_hit(const Token& t, double lower, double own, double total) {
  const double target = uniform(t.announced[Sampling::kKey], t.position) * total;
  const double slack = kSlack * total;
  // A token without a measurable share of the total overflows it.
  return std::isfinite(total) && lower - slack <= target && target <= lower + own + slack;
}

// Whether `kept` is just what top-k, top-p and min-p leave; see the torch reference.
bool is_filter_right(const Token& t, const WeightSums& all, const KeptSums& kept) {
  const int64_t top_k = t.announced[Sampling::kTopK];
  const double top_p = double(t.number(Sampling::kTopP));
  const double floor = double(t.number(Sampling::kMinP) * all.largest);
  const bool may_go = kept.count >= top_k || kept.mass >= (top_p - kSlack) * all.total ||
                      kept.dropped * (1 - kSlack) <= floor;
  const bool may_stay = kept.count <= top_k &&
                        kept.mass - kept.smallest < (top_p + kSlack) * all.total &&
                        floor * (1 - kSlack) <= kept.smallest;
  const bool is_prefix = kept.dropped <= kept.smallest * (1 + kSlack);
  return may_go && may_stay && is_prefix && !kept.is_other;
}

bool is_drawn(const Drawn& d, const Token& t, const WeightArgs& args) {
  const WeightSums sums = d.scans->sum_weights(args);
  const bool is_filtered = t.announced[Sampling::kTopK] < d.logits.columns ||
                           t.number(Sampling::kTopP) < 1 || t.number(Sampling::kMinP) > 0;
  if (!is_filtered) return is_hit(t, sums.lower, 1, sums.total);
  const auto* kept = static_cast<const float*>(d.kept.row(t.at));
  if (!kept || !(kept[t.id] > 0)) return false;
  const KeptSums left = d.scans->sum_kept(args, kept, float(kSlack), kTiny);
  return is_filter_right(t, sums, left) && is_hit(t, left.lower, kept[t.id], left.total);
}

// Whether the announced parameters choose the token from its row.
bool is_chosen(const Drawn& d, const Token& t, const void* logits, const int32_t* mask) {
  WeightArgs args{};
  args.dtype = d.dtype;
  args.logits = logits;
  args.mask = t.has(SamplingFlag::kGrammar) ? mask : nullptr;
  if (t.has(SamplingFlag::kEdited)) {
    args.dtype = DType::f32;
    args.logits = d.edited_rows ? d.edited.row(d.edited_rows[t.index]) : nullptr;
    if (!args.logits) return false;
  }
  args.count = d.logits.columns;
  args.token = t.id;
  args.temperature = t.number(Sampling::kTemperature);
  if (!t.has(SamplingFlag::kGreedy)) return is_drawn(d, t, args);
  const float own = d.scans->value_at(args.dtype, args.logits, t.id);
  return own == own && !d.scans->any_above(args.dtype, args.logits, args.count, own, args.mask);
}

void check_values(const Drawn& d, const Token& t, const int32_t* mask, Found& f) {
  const void* logits = d.logits.row(t.at);
  const float own = d.scans->value_at(d.dtype, logits, t.id);
  const auto any_above = [&](float limit) {
    return d.scans->any_above(d.dtype, logits, d.logits.columns, limit, nullptr);
  };
  constexpr int64_t kElsewhere = SamplingFlag::kEdited | SamplingFlag::kGrammar;
  const bool is_plain = t.has(SamplingFlag::kGreedy) && !t.has(kElsewhere);
  // One scan tells that nothing is above the token, and so that nothing is NaN or +inf.
  if (is_plain && std::isfinite(own) && !any_above(own)) return;
  if (own == -INFINITY || any_above(FLT_MAX))
    f.reasons |= Reason::kLogitsNotFinite;
  else if (d.draws && t.is_known && !is_chosen(d, t, logits, mask))
    f.reasons |= Reason::kSampledToken;
}

}  // namespace

void check_drawn(const State& s, const Site& site, const Drawn& d, int64_t i) {
  const Token t = read_token(d, i);
  if (t.id < 0 || t.at < 0) return;
  Found f;
  const auto show_token = [&] {
    f.expected_word0 = pack_word0(kUnknown, t.position);
    f.found_word0 = pack_word0(t.id, t.position);
  };
  show_token();
  f.position = t.position;
  // Nothing can be read of a row that is not there, or of an id that is none.
  if (t.at >= d.logits.rows) {
    f.reasons = Reason::kLogitsRow;
    const bool compares = d.inputs.data && d.hidden.data;
    const int64_t end = d.hidden_ends ? d.hidden_ends[t.index] : t.index + 1;
    f.expected_lineage = compares ? sum_row(d.hidden.row(end - 1), d.hidden_words) : 0;
  } else {
    check_hidden(d, t, f);
    const auto* mask = static_cast<const int32_t*>(d.masks.row(t.at));
    if (check_mask(d, t, mask, f)) {
      const bool is_id = t.id < d.logits.columns;
      if (!t.is_known || !is_id) f.reasons |= Reason::kSampledToken;
      if (is_id) check_values(d, t, mask, f);
      const bool is_right_mask = f.expected_word0 == f.found_word0;
      if (f.reasons & Reason::kLogitsNotFinite && is_right_mask) {
        // NaN wins over every id, also over those that the mask allows.
        f.reasons &= ~Reason::kGrammarMask;
        show_token();
      }
    }
  }
  if (f.reasons) report(s, site, f, d.req_rows[t.row], d.serials[t.row], t.row);
}

}  // namespace sglk::canary
