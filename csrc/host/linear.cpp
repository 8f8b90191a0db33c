#include "linear.hpp"

#include <algorithm>
#include <utility>

namespace petit::host {
namespace {

constexpr unsigned kGridLimit = 65535;  // of a grid in y
constexpr unsigned kConvertThreads = 256;

/// What a launch was for, put into words only if it fails.
struct Purpose {
    const std::string& kernel;
    std::string shape;

    static std::string describe(const void* context) {
        const auto& p = *static_cast<const Purpose*>(context);
        return p.kernel + " for " + p.shape;
    }
};

std::string bracketed(unsigned a, unsigned b) { return "[" + std::to_string(a) + ", " + std::to_string(b) + "]"; }

}  // namespace

DeviceCode::DeviceCode(const HipRuntime& runtime, int device, const std::string& image, const std::string& name)
    : runtime_(runtime), device_(device), name_(name) {
    module_ = runtime.load_module(device, image.data(), name + " on device " + std::to_string(device));
}

Function DeviceCode::function(const std::string& kernel) {
    const auto found = functions_.find(kernel);
    if (found != functions_.end()) return found->second;
    const Function function = runtime_.function(loaded("kernel " + kernel), kernel);
    functions_.emplace(kernel, function);
    return function;
}

void* DeviceCode::loaded(const std::string& what) const {
    if (module_ == nullptr) throw HipError(name_ + " has been unloaded; " + what + " is gone");
    return module_;
}

void DeviceCode::unload() {
    functions_.clear();
    if (void* module = std::exchange(module_, nullptr)) runtime_.unload_module(module);
}

void DeviceCode::dequantize(const std::string& kernel, DequantizeArgs args, Stream stream) {
    const Purpose purpose{kernel, "rows " + std::to_string(args.n_begin) + " and on, " + bracketed(args.rows, args.k)};
    runtime_.launch(device_, stream, function(kernel), (args.k_tiles + 3) / 4, (args.rows + 63) / 64, 256, &args,
                    Purpose::describe, &purpose);
}

void DeviceCode::finish(const std::string& kernel, FinishArgs args, Stream stream) {
    const Purpose purpose{kernel, "y " + bracketed(args.m, args.n)};
    const Function run = function(kernel);
    const unsigned rows = args.m;
    auto* y = static_cast<unsigned short*>(args.y);
    const float* sum = args.sum;
    for (unsigned begin = 0; begin < rows; begin += kGridLimit) {
        args.m = std::min(rows - begin, kGridLimit);
        args.sum = sum + static_cast<std::int64_t>(begin) * args.n;
        args.y = y + begin * args.y_stride;
        runtime_.launch(device_, stream, run, (args.n + 255) / 256, args.m, 256, &args, Purpose::describe, &purpose);
    }
}

ConvertArgs LinearPlan::launch_convert(const Call& call) const {
    code->function(convert);  // an unloaded code object is an error, not a crash
    auto* workspace = static_cast<unsigned char*>(call.workspace);
    ConvertArgs c = convert_args;
    c.x = static_cast<const unsigned char*>(call.x);
    c.x_stride_bytes = call.x_stride_bytes;
    c.out = workspace + x_at;
    c.rows = reinterpret_cast<RowInfo*>(workspace + rows_at);
    const Purpose purpose{convert, shape};
    code->runtime().launch(code->device(), call.stream, convert_function, gemm_args.m, c.slices, kConvertThreads, &c,
                           Purpose::describe, &purpose);
    return c;
}

void LinearPlan::convert_only(const Call& call) const { launch_convert(call); }

void LinearPlan::run(const Call& call) const {
    const ConvertArgs c = launch_convert(call);
    auto* workspace = static_cast<unsigned char*>(call.workspace);
    GemmArgs g = gemm_args;
    g.weight = static_cast<const unsigned char*>(call.weight);
    g.scale = static_cast<const unsigned char*>(call.scale);
    g.row_scale = call.row_scale;
    g.row_exponent = call.row_exponent;
    g.x = c.out;
    g.rows = c.rows;
    g.bias = call.bias;
    g.bias_f32 = call.bias_f32;
    g.y = call.y;
    g.y_stride = call.y_stride;
    g.partials = workspace + partials_at;
    g.counters = reinterpret_cast<unsigned*>(workspace + counters_at);
    const Purpose purpose{gemm, shape};
    code->runtime().launch(code->device(), call.stream, gemm_function, g.workgroups, 1, threads, &g, Purpose::describe,
                           &purpose);
}

}  // namespace petit::host
