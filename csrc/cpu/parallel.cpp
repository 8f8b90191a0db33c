#include "parallel.hpp"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <atomic>
#include <cstring>
#include <string>

#include "float_mode.hpp"

namespace petit::cpu {
namespace {

struct Runtime {
    void (*parallel)(void (*fn)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
    int (*thread_num)() = nullptr;
    int (*num_threads)() = nullptr;
    int (*in_parallel)() = nullptr;
    bool fork_safe = true;
    std::string path;
};

// True once this process has started a team of threads. libgomp's pool does not survive fork(): a child that asks it
// for threads waits for ones that no longer exist.
std::atomic<bool> pool_started{false};
std::atomic<bool> pool_lost{false};

bool bind(Runtime& runtime, void* handle) {
    if (handle == nullptr) return false;
    auto find = [handle](const char* name) { return dlsym(handle, name); };
    void* parallel = find("GOMP_parallel");
    void* thread_num = find("omp_get_thread_num");
    void* num_threads = find("omp_get_num_threads");
    void* in_parallel = find("omp_in_parallel");
    if (!parallel || !thread_num || !num_threads || !in_parallel) return false;
    runtime.parallel = reinterpret_cast<decltype(runtime.parallel)>(parallel);
    runtime.thread_num = reinterpret_cast<decltype(runtime.thread_num)>(thread_num);
    runtime.num_threads = reinterpret_cast<decltype(runtime.num_threads)>(num_threads);
    runtime.in_parallel = reinterpret_cast<decltype(runtime.in_parallel)>(in_parallel);
    Dl_info info{};
    if (dladdr(parallel, &info) != 0 && info.dli_fname != nullptr) runtime.path = info.dli_fname;
    runtime.fork_safe = runtime.path.find("gomp") == std::string::npos;
    return true;
}

int bind_mapped(dl_phdr_info* info, size_t, void* data) {
    const char* path = info->dlpi_name;
    if (path == nullptr) return 0;
    const char* slash = std::strrchr(path, '/');
    const char* name = slash ? slash + 1 : path;
    for (const char* prefix : {"libgomp", "libiomp5", "libomp"}) {
        if (std::strncmp(name, prefix, std::strlen(prefix)) == 0) {
            // Never closed: the runtime outlives us, and its threads run our code.
            return bind(*static_cast<Runtime*>(data), dlopen(path, RTLD_LAZY | RTLD_NOLOAD)) ? 1 : 0;
        }
    }
    return 0;
}

Runtime find_runtime() {
    Runtime runtime;
    // Searching from torch's own library finds the runtime that torch was linked with, even if another package has
    // brought a second one into the process.
    if (bind(runtime, dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD))) return runtime;
    if (dl_iterate_phdr(bind_mapped, &runtime) == 1) return runtime;
    bind(runtime, dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL));
    return runtime;
}

const Runtime& runtime() {
    static const Runtime* const found = [] {
        pthread_atfork(nullptr, nullptr, [] { pool_lost = pool_lost || pool_started; });
        return new Runtime(find_runtime());
    }();
    return *found;
}

bool has_pool(const Runtime& omp) { return omp.fork_safe || !pool_lost; }

struct Team {
    ThreadFn fn;
    void* context;
};

void run_member(void* data) {
    const Team& team = *static_cast<const Team*>(data);
    const Runtime& omp = runtime();
    const FloatMode mode;
    team.fn(team.context, omp.thread_num(), omp.num_threads());
}

struct Ranges {
    RangeFn fn;
    void* context;
    int64_t tasks;
};

void run_range(void* data, int thread, int threads) {
    const Ranges& ranges = *static_cast<const Ranges*>(data);
    const int64_t begin = ranges.tasks * thread / threads;
    const int64_t end = ranges.tasks * (thread + 1) / threads;
    if (begin < end) ranges.fn(ranges.context, begin, end);
}

}  // namespace

void parallel_region(int threads, ThreadFn fn, void* context) {
    if (threads > 1) {
        const Runtime& omp = runtime();
        const bool usable = omp.parallel != nullptr && has_pool(omp) && !omp.in_parallel();
        if (usable) {
            pool_started = true;
            Team team{fn, context};
            omp.parallel(run_member, &team, static_cast<unsigned>(threads), 0);
            return;
        }
    }
    const FloatMode mode;
    fn(context, 0, 1);
}

void parallel_for(int threads, int64_t tasks, RangeFn fn, void* context) {
    if (tasks <= 0) return;
    if (threads <= 1 || tasks == 1) {
        const FloatMode mode;
        return fn(context, 0, tasks);
    }
    Ranges ranges{fn, context, tasks};
    parallel_region(tasks < threads ? static_cast<int>(tasks) : threads, run_range, &ranges);
}

const char* openmp_runtime() {
    const Runtime& omp = runtime();
    return omp.parallel != nullptr && has_pool(omp) ? omp.path.c_str() : "";
}

}  // namespace petit::cpu
