#include "hip_runtime.hpp"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <type_traits>
#include <vector>

namespace petit::host {
namespace {

constexpr int kMultiprocessorCount = 63;  // hipDeviceAttributeMultiprocessorCount of ROCm 6 and 7

int find_mapped(dl_phdr_info* info, size_t, void* result) {
    const char* path = info->dlpi_name;
    const char* slash = path ? std::strrchr(path, '/') : nullptr;
    const char* name = slash ? slash + 1 : path;
    if (name == nullptr || std::strncmp(name, "libamdhip64", 11) != 0) return 0;
    *static_cast<std::string*>(result) = path;
    return 1;
}

void* open_any(const std::string& path, std::string& opened) {
    if (!path.empty()) {
        opened = path;
        return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    }
    if (dl_iterate_phdr(find_mapped, &opened) != 0) return dlopen(opened.c_str(), RTLD_NOW | RTLD_NOLOAD);
    for (const char* name : {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"}) {
        opened = name;
        if (void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return handle;
    }
    return nullptr;
}

}  // namespace

HipRuntime::HipRuntime(const std::string& path) {
    void* handle = open_any(path, path_);
    if (handle == nullptr) {
        const char* why = dlerror();
        throw HipError("cannot open the HIP runtime (" + path_ + "): " + (why ? why : "unknown error") +
                       "; install ROCm >= 6.2 or a ROCm build of torch");
    }
    auto bind = [&](auto& target, const char* name, bool needed = true) {
        void* found = dlsym(handle, name);
        if (found == nullptr && needed)
            throw HipError("HIP runtime " + path_ + " has no " + name + "; ROCm >= 6.2 is needed");
        target = reinterpret_cast<std::remove_reference_t<decltype(target)>>(found);
    };
    bind(get_device_count_, "hipGetDeviceCount");
    bind(get_device_, "hipGetDevice");
    bind(set_device_, "hipSetDevice");
    bind(device_get_attribute_, "hipDeviceGetAttribute");
    bind(get_device_properties_, "hipGetDevicePropertiesR0600");
    bind(module_load_data_, "hipModuleLoadData");
    bind(module_unload_, "hipModuleUnload");
    bind(module_get_function_, "hipModuleGetFunction");
    bind(module_launch_kernel_, "hipModuleLaunchKernel");
    bind(get_error_string_, "hipGetErrorString");
    bind(get_last_error_, "hipGetLastError");
    bind(emulator_error_, "petit_emu_last_error", false);
}

void HipRuntime::fail(const char* call, int code, const std::string& what) const {
    const char* text = get_error_string_(code);
    get_last_error_();  // the runtime would report this error again from an unrelated call
    std::string message = std::string(call) + " failed with " + std::to_string(code) + " (" +
                          (text ? text : "no text") + ") while " + what;
    const char* detail = emulator_error_ ? emulator_error_() : nullptr;
    if (detail && *detail && (!text || std::strcmp(detail, text) != 0)) message += ": " + std::string(detail);
    throw HipError(message);
}

/// Makes `device` current for a scope. The destructor cannot report, and going back to a device that was current works.
class HipRuntime::DeviceGuard {
  public:
    DeviceGuard(const HipRuntime& runtime, int device, const char* what) : runtime_(runtime) {
        if (int code = runtime.get_device_(&previous_)) runtime.fail("hipGetDevice", code, what);
        if (previous_ == device) return;
        if (int code = runtime.set_device_(device))
            runtime.fail("hipSetDevice", code, std::string(what) + " on device " + std::to_string(device));
        changed_ = true;
    }
    ~DeviceGuard() {
        if (changed_) runtime_.set_device_(previous_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    const HipRuntime& runtime_;
    int previous_ = 0;
    bool changed_ = false;
};

int HipRuntime::device_count() const {
    int count = 0;
    if (int code = get_device_count_(&count)) fail("hipGetDeviceCount", code, "counting GPUs");
    return count;
}

std::string HipRuntime::arch(int device) const {
    // hipDeviceProp_t grows from release to release, but its architecture name ("gfx942:sramecc+:xnack-") is text, and
    // beyond the marketing name that fills the first 256 bytes nothing else looks like it.
    const std::string what = "asking for the architecture of device " + std::to_string(device);
    std::vector<char> properties(16384, 0);
    if (int code = get_device_properties_(properties.data(), device)) fail("hipGetDeviceProperties", code, what);
    for (size_t i = 256; i + 8 < properties.size(); ++i) {
        if (std::memcmp(&properties[i], "gfx", 3) != 0) continue;
        const std::string name(&properties[i], strnlen(&properties[i], 64));
        return name.substr(0, name.find(':'));
    }
    throw HipError("HIP runtime " + path_ + " gave no name while " + what);
}

int HipRuntime::compute_units(int device) const {
    int count = 0;
    if (int code = device_get_attribute_(&count, kMultiprocessorCount, device))
        fail("hipDeviceGetAttribute", code, "counting the compute units of device " + std::to_string(device));
    return count;
}

void* HipRuntime::load_module(int device, const void* image, const std::string& what) const {
    DeviceGuard guard(*this, device, "loading a code object");
    void* module = nullptr;
    if (int code = module_load_data_(&module, image)) fail("hipModuleLoadData", code, "loading " + what);
    return module;
}

void HipRuntime::unload_module(void* module) const { module_unload_(module); }

Function HipRuntime::function(void* module, const std::string& name) const {
    Function found = nullptr;
    if (int code = module_get_function_(&found, module, name.c_str()))
        fail("hipModuleGetFunction", code, "looking up " + name);
    return found;
}

void HipRuntime::launch(int device, Stream stream, Function function, unsigned grid_x, unsigned grid_y,
                        unsigned threads, void* arguments, std::string (*describe)(const void*),
                        const void* context) const {
    DeviceGuard guard(*this, device, "launching a kernel");
    void* parameters[] = {arguments};
    const int code = module_launch_kernel_(function, grid_x, grid_y, 1, threads, 1, 1, 0, stream, parameters, nullptr);
    if (code) fail("hipModuleLaunchKernel", code, "launching " + describe(context));
}

}  // namespace petit::host
