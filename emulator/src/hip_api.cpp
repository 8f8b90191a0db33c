// The HIP calls that the host layer makes, so that this library can stand in for libamdhip64. Every call completes
// before it returns; streams and events are accepted and mean nothing. Device pointers are host pointers.
#include <cstdio>
#include <cstdlib>

#include "device.hpp"

using namespace petit_emu;

#define HIP_EMU_API extern "C" __attribute__((visibility("default")))

namespace {

enum : int {
    hipSuccess = 0,
    hipErrorInvalidValue = 1,
    hipErrorOutOfMemory = 2,
    hipErrorInvalidDevice = 101,
    hipErrorInvalidImage = 200,
    hipErrorNotFound = 500,
    hipErrorLaunchFailure = 719,
    hipErrorNotSupported = 801
};
thread_local int g_last = hipSuccess;

int fault(int code, const std::string& text) {
    set_last_error(text);
    if (!std::getenv("PETIT_EMULATOR_QUIET")) std::fprintf(stderr, "petit emulator: %s\n", text.c_str());
    return g_last = code;
}
template <class F>
int guarded(int code, F f) {
    Device& d = Device::get();
    std::lock_guard guard(d.lock);
    try {
        const int r = f(d);
        return r ? g_last = r : r;
    } catch (const std::exception& e) {
        return fault(code, e.what());
    }
}
// Layout of hipDeviceProp_tR0600 (HIP 6 and 7), only the fields a host layer reads.
struct Properties {
    u8 raw[1472];
    template <class T>
    void put(std::size_t at, T x) {
        std::memcpy(raw + at, &x, sizeof x);
    }
};

}  // namespace

HIP_EMU_API int hipInit(unsigned) { return hipSuccess; }
HIP_EMU_API int hipDriverGetVersion(int* v) { return *v = 60400000, hipSuccess; }
HIP_EMU_API int hipRuntimeGetVersion(int* v) { return *v = 60400000, hipSuccess; }
HIP_EMU_API int hipGetDeviceCount(int* n) { return *n = 1, hipSuccess; }
HIP_EMU_API int hipSetDevice(int i) {
    return i == 0 ? hipSuccess : fault(hipErrorInvalidDevice, "the emulator has one device, number 0");
}
HIP_EMU_API int hipGetDevice(int* i) { return *i = 0, hipSuccess; }
HIP_EMU_API int hipDeviceGet(int* d, int i) { return *d = i, i == 0 ? hipSuccess : hipErrorInvalidDevice; }
HIP_EMU_API int hipDeviceGetName(char* name, int n, int) {
    return std::snprintf(name, std::size_t(n), "petit emulator (%s)", arch_name(Device::get().arch)), hipSuccess;
}
HIP_EMU_API int hipGetDevicePropertiesR0600(Properties* p, int i) {
    if (i != 0) return hipErrorInvalidDevice;
    return guarded(hipErrorInvalidValue, [&](Device& d) {
        std::memset(p->raw, 0, sizeof p->raw);
        std::snprintf(reinterpret_cast<char*>(p->raw), 256, "petit emulator (%s)", arch_name(d.arch));
        p->put<u64>(288, 64ull << 30), p->put<u64>(296, d.arch == Arch::gfx950 ? 163840 : 65536);
        p->put<i32>(304, 65536), p->put<i32>(308, kLanes), p->put<i32>(320, 1024);
        for (int k = 0; k < 3; ++k) p->put<i32>(324 + 4 * k, 1024), p->put<i32>(336 + 4 * k, 0x7fffffff);
        p->put<i32>(360, 9),
            p->put<i32>(364, d.arch == Arch::gfx90a   ? 0
                             : d.arch == Arch::gfx942 ? 4
                                                      : 5),
            p->put<i32>(388, static_cast<i32>(d.cu_count()));
        std::snprintf(reinterpret_cast<char*>(p->raw + 1160), 256, "%s:sramecc+:xnack-", arch_name(d.arch));
        return hipSuccess;
    });
}
HIP_EMU_API int hipGetDeviceProperties(Properties* p, int i) { return hipGetDevicePropertiesR0600(p, i); }
// Only the attributes whose numbers are the same in every HIP 6 and 7 release.
HIP_EMU_API int hipDeviceGetAttribute(int* value, int attribute, int) {
    Device& d = Device::get();
    switch (attribute) {
        case 23:
            *value = 9;
            return hipSuccess;  // compute capability major
        case 63:
            *value = static_cast<int>(d.cu_count());
            return hipSuccess;  // multiprocessors
        case 87:
            *value = kLanes;
            return hipSuccess;  // warp size
        default:
            return fault(hipErrorNotSupported,
                         "hipDeviceGetAttribute: attribute " + std::to_string(attribute) + " is not provided");
    }
}

HIP_EMU_API int hipModuleLoadData(void** module, const void* image) {
    return guarded(hipErrorInvalidImage, [&](Device& d) {
        const u8* p = static_cast<const u8*>(image);
        *module = d.load(p, elf_size(p));
        return hipSuccess;
    });
}
HIP_EMU_API int hipModuleLoadDataEx(void** module, const void* image, unsigned, int*, void**) {
    return hipModuleLoadData(module, image);
}
HIP_EMU_API int hipModuleUnload(void* m) {
    return guarded(hipErrorInvalidValue,
                   [&](Device& d) { return d.unload(static_cast<LoadedModule*>(m)), hipSuccess; });
}
HIP_EMU_API int hipModuleGetFunction(void** f, void* m, const char* name) {
    return guarded(hipErrorInvalidValue, [&](Device& d) {
        *f = d.function(static_cast<LoadedModule*>(m), name);
        return *f ? hipSuccess : fault(hipErrorNotFound, std::string("no kernel named ") + name);
    });
}
HIP_EMU_API int hipModuleLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                      unsigned bz, unsigned lds, void*, void** params, void** extra) {
    return guarded(hipErrorLaunchFailure, [&](Device& d) {
        auto* function = static_cast<Function*>(f);
        std::vector<u8> args;
        if (params && extra) fail("hipModuleLaunchKernel: kernelParams and extra are both set");
        if (extra) {
            const u8* buffer = nullptr;
            std::size_t bytes = 0;
            for (int i = 0; extra[i] != reinterpret_cast<void*>(3); i += 2) {  // HIP_LAUNCH_PARAM_END
                if (extra[i] == reinterpret_cast<void*>(1))
                    buffer = static_cast<const u8*>(extra[i + 1]);
                else if (extra[i] == reinterpret_cast<void*>(2))
                    bytes = *static_cast<std::size_t*>(extra[i + 1]);
                else
                    fail("hipModuleLaunchKernel: unknown entry in extra");
            }
            if (!buffer) fail("hipModuleLaunchKernel: extra has no argument buffer");
            args.assign(buffer, buffer + bytes);
        } else if (params) {
            args = pack_arguments(*function->kernel, params);
        }
        const u32 grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
        d.launch(function, grid, block, lds, args);
        return hipSuccess;
    });
}
HIP_EMU_API int hipFuncGetAttribute(int* value, int attribute, const void* f) {
    const Kernel& k = *static_cast<const Function*>(f)->kernel;
    switch (attribute) {
        case 0:
            *value = static_cast<int>(k.max_workgroup);
            return hipSuccess;  // max threads a block
        case 1:
            *value = static_cast<int>(k.group_bytes);
            return hipSuccess;  // shared bytes
        case 2:
            *value = 0;
            return hipSuccess;  // constant bytes
        case 3:
            *value = static_cast<int>(k.private_bytes);
            return hipSuccess;  // local bytes
        case 4:
            *value = static_cast<int>(k.vgpr_count);
            return hipSuccess;  // registers
        default:
            return fault(hipErrorNotSupported,
                         "hipFuncGetAttribute: attribute " + std::to_string(attribute) + " is not provided");
    }
}
HIP_EMU_API int hipFuncSetAttribute(const void*, int, int) { return hipSuccess; }

HIP_EMU_API int hipMalloc(void** p, std::size_t n) {
    return guarded(hipErrorOutOfMemory, [&](Device& d) {
        *p = n ? d.allocate(n, "hipMalloc(" + std::to_string(n) + ")") : nullptr;
        return hipSuccess;
    });
}
HIP_EMU_API int hipFree(void* p) {
    if (!p) return hipSuccess;
    return guarded(hipErrorInvalidValue, [&](Device& d) {
        return d.release(p) ? hipSuccess : fault(hipErrorInvalidValue, "hipFree: not an allocation of hipMalloc");
    });
}
HIP_EMU_API int hipMemcpy(void* to, const void* from, std::size_t n, int) {
    return std::memmove(to, from, n), hipSuccess;
}
HIP_EMU_API int hipMemcpyAsync(void* to, const void* from, std::size_t n, int kind, void*) {
    return hipMemcpy(to, from, n, kind);
}
HIP_EMU_API int hipMemcpyHtoD(void* to, const void* from, std::size_t n) { return hipMemcpy(to, from, n, 1); }
HIP_EMU_API int hipMemcpyDtoH(void* to, const void* from, std::size_t n) { return hipMemcpy(to, from, n, 2); }
HIP_EMU_API int hipMemset(void* p, int value, std::size_t n) { return std::memset(p, value, n), hipSuccess; }
HIP_EMU_API int hipMemsetAsync(void* p, int value, std::size_t n, void*) { return hipMemset(p, value, n); }
HIP_EMU_API int hipMemGetInfo(std::size_t* free, std::size_t* total) {
    return *free = *total = 64ull << 30, hipSuccess;
}

// hipPointerAttribute_t of HIP 6: type, device, device pointer, host pointer, managed, flags. Type 2 is device memory.
struct PointerAttributes {
    int type, device;
    void *device_pointer, *host_pointer;
    int managed;
    unsigned flags;
};
HIP_EMU_API int hipPointerGetAttributes(PointerAttributes* out, const void* p) {
    return guarded(hipErrorInvalidValue, [&](Device& d) {
        if (!d.memory.covering(reinterpret_cast<u64>(p))) return int(hipErrorInvalidValue);
        *out = {2, 0, const_cast<void*>(p), nullptr, 0, 0};
        return int(hipSuccess);
    });
}

HIP_EMU_API int hipStreamCreate(void** s) { return *s = nullptr, hipSuccess; }
HIP_EMU_API int hipStreamCreateWithFlags(void** s, unsigned) { return *s = nullptr, hipSuccess; }
HIP_EMU_API int hipStreamDestroy(void*) { return hipSuccess; }
HIP_EMU_API int hipStreamSynchronize(void*) { return hipSuccess; }
HIP_EMU_API int hipStreamQuery(void*) { return hipSuccess; }
HIP_EMU_API int hipStreamIsCapturing(void*, int* status) { return *status = 0, hipSuccess; }
HIP_EMU_API int hipDeviceSynchronize() { return hipSuccess; }
HIP_EMU_API int hipEventCreate(void** e) { return *e = nullptr, hipSuccess; }
HIP_EMU_API int hipEventCreateWithFlags(void** e, unsigned) { return *e = nullptr, hipSuccess; }
HIP_EMU_API int hipEventDestroy(void*) { return hipSuccess; }
HIP_EMU_API int hipEventRecord(void*, void*) { return hipSuccess; }
HIP_EMU_API int hipEventSynchronize(void*) { return hipSuccess; }
HIP_EMU_API int hipEventElapsedTime(float* ms, void*, void*) {
    return *ms = static_cast<float>(double(Device::get().last.nanoseconds) * 1e-6), hipSuccess;
}

HIP_EMU_API int hipGetLastError() {
    const int r = g_last;
    g_last = hipSuccess;
    return r;
}
HIP_EMU_API int hipPeekAtLastError() { return g_last; }
HIP_EMU_API const char* hipGetErrorName(int code) {
    switch (code) {
        case hipSuccess:
            return "hipSuccess";
        case hipErrorInvalidValue:
            return "hipErrorInvalidValue";
        case hipErrorOutOfMemory:
            return "hipErrorOutOfMemory";
        case hipErrorInvalidDevice:
            return "hipErrorInvalidDevice";
        case hipErrorInvalidImage:
            return "hipErrorInvalidImage";
        case hipErrorNotFound:
            return "hipErrorNotFound";
        case hipErrorLaunchFailure:
            return "hipErrorLaunchFailure";
        case hipErrorNotSupported:
            return "hipErrorNotSupported";
        default:
            return "hipErrorUnknown";
    }
}
// The emulator's own message for the last failure in this thread: it says what the kernel did and where.
HIP_EMU_API const char* hipGetErrorString(int code) {
    return code == hipSuccess ? "no error" : last_error().empty() ? hipGetErrorName(code) : last_error().c_str();
}
