// Columns of draft branches in a row of req_to_token. Torch-free; mirrors
// sglang/srt/speculative/ops/{layout,slots}.py, where the rule is drawn.
#pragma once

#include <cstdint>

namespace sglk::slots {

struct Layout {
  int64_t page_size, topk, steps;

  int64_t tail(int64_t len) const { return len % page_size; }
  // Columns of a branch: whole pages.
  int64_t width(int64_t len) const {
    return (tail(len) + steps + page_size - 1) / page_size * page_size;
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
