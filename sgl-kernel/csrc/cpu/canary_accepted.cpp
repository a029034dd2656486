// The KV canary's check of the paths accepted by a verification.
#include "sglang_kernels/cpu/canary.h"

namespace sglk::canary {

void check_path(const State& s, const Site& site, const Path& path, int64_t q) {
  if (path.req_rows[q] == 0) return;
  const int64_t root = q * path.nodes, end = root + path.nodes;
  const int64_t length = path.accept_lens[q];
  const int64_t *accepted = path.accept_index + q * path.width,
                *gained = path.gained + q * path.width;
  int64_t before = root, due = 0;
  const auto doubt = [&](int64_t i, int64_t wanted, int64_t found) {
    Found f;
    f.reasons = Reason::kAcceptPath;
    f.position = path.prefix_lens[q] + i;
    f.expected_word0 = pack_word0(wanted, f.position + 1);
    f.found_word0 = pack_word0(found, f.position + 1);
    report(s, site, f, path.req_rows[q], path.serials[q], q);
  };
  if (length < 1 || length > path.width) return doubt(0, -1, length);
  for (int64_t i = 0; i < length; i++) {
    const int64_t node = accepted[i];
    const bool inside = node >= root && node < end;
    const int64_t at = inside ? node : root;
    const int64_t follows = path.predict[at];
    const int64_t choice = path.choices ? path.choices[at] : follows;
    bool wrong = i == 0 ? node != root
                        : !inside || path.parent_index[at] != before || path.tokens[at] != due;
    wrong |= gained[i] != follows || choice != follows;
    if (wrong) return doubt(i, choice, gained[i]);
    before = at;
    due = follows;
  }
  if (!path.choices || length == path.width) return;
  const int64_t choice = path.choices[before];
  for (int64_t node = root; node < end; node++)
    if (path.parent_index[node] == before && path.tokens[node] == choice)
      return doubt(length - 1, choice, -1);
}

}  // namespace sglk::canary
