// Threads of the CPU kernels. They help the thread that calls a kernel: it shares out parts and
// runs those that no helper has begun. A helper that does not run therefore costs nothing,
// unlike a team that meets at a barrier and waits for all its members.
#pragma once

#include <cstdint>

namespace sglk {

using PartBody = void (*)(void* context, int64_t part);

// Calls body(context, part) once for every part in [0, parts) and returns when all are done;
// runs on the calling thread and up to `threads - 1` helpers. Rethrows the first exception.
// Calls from several threads at once do not share helpers; the later ones run alone.
void run_parts(int64_t parts, int64_t threads, PartBody body, void* context);

}  // namespace sglk
