// The launches of a linear layer. What to launch is decided once per shape (petit_plugin/backends/hip/solutions.py);
// here it is carried out: argument blocks filled, kernels enqueued, nothing else.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "../device/arguments.hpp"
#include "hip_runtime.hpp"

namespace petit::host {

/// One code object loaded on one device, and its kernels.
class DeviceCode {
  public:
    DeviceCode(const HipRuntime& runtime, int device, const std::string& image, const std::string& name);

    /// Looked up once. Throws HipError if the code object has no such kernel.
    Function function(const std::string& kernel);
    void unload();

    const HipRuntime& runtime() const { return runtime_; }
    int device() const { return device_; }

    /// Rows [n_begin, n_begin + rows) of W as 16-bit operands [rows, k], for a vendor GEMM.
    void dequantize(const std::string& kernel, DequantizeArgs args, Stream stream);
    /// y from the float32 product `sum` [m, n]: the one rounding.
    void finish(const std::string& kernel, FinishArgs args, Stream stream);

  private:
    void* loaded(const std::string& what) const;

    const HipRuntime& runtime_;
    int device_;
    std::string name_;
    void* module_ = nullptr;
    std::map<std::string, Function> functions_;
};

/// y[m, n] = x[m, k] W^T: the activation pre-pass and one GEMM kernel, for one shape. Immutable.
struct LinearPlan {
    DeviceCode* code;
    std::string convert, gemm, shape;
    Function convert_function, gemm_function;
    unsigned threads;  // of a GEMM workgroup
    ConvertArgs convert_args;
    GemmArgs gemm_args;
    std::int64_t x_at, rows_at, partials_at, counters_at;  // in the workspace

    /// The pointers of one call. x: rows of 16-bit values, 16-byte aligned like their stride. The counters at the
    /// start of the workspace are zero before and after.
    struct Call {
        const void* x;
        std::int64_t x_stride_bytes;
        const void* weight;
        const void* scale;
        const float* row_scale;
        const int* row_exponent;
        const void* bias;
        bool bias_f32;
        void* y;
        std::int64_t y_stride;
        void* workspace;
        Stream stream;
    };
    void run(const Call& call) const;
    void convert_only(const Call& call) const;  // the pre-pass alone, for counting what it costs

  private:
    ConvertArgs launch_convert(const Call& call) const;
};

}  // namespace petit::host
