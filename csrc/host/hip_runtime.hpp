// The HIP runtime, opened when it is first needed: the module links no ROCm, so one build runs with and without it.
#pragma once

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>

namespace petit::host {

/// A HIP call that failed. The text names the call, HIP's own message and what was being done.
class HipError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

using Function = void*;  // hipFunction_t
using Stream = void*;    // hipStream_t

/// One opened runtime library. Opened libraries stay open: other code in the process may hold their objects.
class HipRuntime {
  public:
    /// `path` names a library; empty means the process's own: libamdhip64 if one is mapped already (torch's; two
    /// runtimes cannot share streams), else libamdhip64.so.7, .so.6, .so. Throws HipError if none can be opened.
    explicit HipRuntime(const std::string& path);

    const std::string& path() const { return path_; }
    int device_count() const;
    std::string arch(int device) const;  // "gfx942", without feature flags
    int compute_units(int device) const;

    /// Loads an ELF code object on `device`; `what` goes into the error text.
    void* load_module(int device, const void* image, const std::string& what) const;
    void unload_module(void* module) const;
    Function function(void* module, const std::string& name) const;

    /// Enqueues a kernel with one argument block on `stream` of `device`. No allocation, no synchronisation.
    void launch(int device, Stream stream, Function function, unsigned grid_x, unsigned grid_y, unsigned threads,
                void* arguments, std::string (*describe)(const void*), const void* context) const;

  private:
    class DeviceGuard;
    [[noreturn]] void fail(const char* call, int code, const std::string& what) const;

    std::string path_;
    int (*get_device_count_)(int*) = nullptr;
    int (*get_device_)(int*) = nullptr;
    int (*set_device_)(int) = nullptr;
    int (*device_get_attribute_)(int*, int, int) = nullptr;
    int (*get_device_properties_)(void*, int) = nullptr;
    int (*module_load_data_)(void**, const void*) = nullptr;
    int (*module_unload_)(void*) = nullptr;
    int (*module_get_function_)(void**, void*, const char*) = nullptr;
    int (*module_launch_kernel_)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                                 void**, void**) = nullptr;
    const char* (*get_error_string_)(int) = nullptr;
    int (*get_last_error_)() = nullptr;
    const char* (*emulator_error_)() = nullptr;  // the development emulator says more than an error code
};

}  // namespace petit::host
