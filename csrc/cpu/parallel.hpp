// Threads for the CPU kernels, taken from the OpenMP runtime that the process already has (torch's).
//
// Nothing here links OpenMP, so the same code built by gcc or clang shares torch's thread pool instead of bringing a
// second one. The runtime is looked up at the first call, never when the library is loaded.
// All work, on every thread and when it is serial, runs in the same floating-point mode (float_mode.hpp).
#pragma once

#include <cstdint>

namespace petit::cpu {

using RangeFn = void (*)(void* context, int64_t begin, int64_t end);
using ThreadFn = void (*)(void* context, int thread, int threads);

// Calls fn on at most `threads` threads with disjoint contiguous ranges that cover [0, tasks), of nearly equal size.
void parallel_for(int threads, int64_t tasks, RangeFn fn, void* context);

// Calls fn(context, thread, count) once on each of `count` <= `threads` threads; for kernels that hand out work
// themselves. `count` may be smaller than asked for (nested region, thread limit), so it must be honoured.
void parallel_region(int threads, ThreadFn fn, void* context);

// The same for a callable. `static`, so that a file built for a wider instruction set keeps its own copy.
template <class Body>
static void parallel_for(int threads, int64_t tasks, const Body& body) {
    auto call = [](void* context, int64_t begin, int64_t end) { (*static_cast<const Body*>(context))(begin, end); };
    parallel_for(threads, tasks, static_cast<RangeFn>(call), const_cast<void*>(static_cast<const void*>(&body)));
}

// Where the threads come from: the path of the runtime in use, or "" when work runs serially: there is none, or this
// process was forked from one that had already started its threads, which libgomp cannot use or replace.
const char* openmp_runtime();

}  // namespace petit::cpu
