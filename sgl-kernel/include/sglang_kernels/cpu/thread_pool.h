// Threads of the CPU kernels. They help the thread that calls a kernel: it shares out
// parts and takes those that no helper has begun itself. A helper that does not run costs
// nothing, therefore, where a team that meets at a barrier would wait for all its members.
#pragma once

#include <cstdint>

namespace sglk {

using PartBody = void (*)(void* context, int64_t part);

// Calls body(context, part) once for every part in [0, parts) and returns when all are
// done; on the calling thread and on up to `threads - 1` helpers. Rethrows the first
// exception. Calls from several threads at once share no helpers: the later ones do their
// parts alone.
void run_parts(int64_t parts, int64_t threads, PartBody body, void* context);

}  // namespace sglk
