// Columns of draft branches in a row of req_to_token. Torch-free; mirrors
// sglang/srt/configs/draft_layout.py, where the rule is drawn.
#pragma once

#include <cstdint>

namespace sglk::slots {

struct Layout {
  int64_t page_size, topk, steps;
  // The first column of the draft region. Negative: branches follow the prefix.
  int64_t region;

  int64_t tail(int64_t len) const { return len % page_size; }
  // Columns of a branch: whole pages.
  int64_t width(int64_t len) const {
    return (tail(len) + steps + page_size - 1) / page_size * page_size;
  }
  // Distance of a branch's own elements from their columns.
  int64_t shift(int64_t len, int64_t branch) const {
    return region < 0 ? branch * width(len) : region + branch * steps - len;
  }
  // Branches that need a copy of the prefix's tail: the last ones of a request.
  int64_t copies() const { return topk - 1; }
  int64_t max_tail() const { return region < 0 ? page_size - 1 : 0; }
  // The branch of the step before that a branch of `step` > 0 continues, given its candidate
  // (DraftLevels).
  int64_t parent(int64_t candidate, int64_t step) const {
    return (candidate - topk - topk * topk * (step - 1)) / topk;
  }
  // The first KV element that a branch does not share with the others.
  int64_t first_own(int64_t len, bool paged) const { return paged ? len - tail(len) : len; }
  int64_t end(int64_t len, bool paged) const {
    return paged ? len - tail(len) + width(len) : len + steps;
  }
};

// Slots of one request; columns past the row are the scratch slot.
struct Row {
  const int32_t* slots;
  int64_t width, len;

  int64_t at(int64_t column) const { return column < width ? slots[column] : 0; }
};

}  // namespace sglk::slots
