// petit_plugin._native. Pointers cross as integers, so nothing of torch is linked and one build serves every torch.
// The callers (petit_plugin/backends) own the memory and have checked shapes, dtypes and contiguity.
#include "module.hpp"

#include "../cpu/isa.hpp"
#include "../cpu/pack.hpp"
#include "../cpu/parallel.hpp"

namespace petit::bindings {
namespace {

cpu::CheckpointView checkpoint(int format, int64_t n, int64_t k, uintptr_t weight, int64_t weight_stride,
                               uintptr_t scale, int64_t scale_stride) {
    return {static_cast<cpu::Format>(format), n,           k, pointer<const uint8_t>(weight), weight_stride,
            pointer<const uint8_t>(scale),    scale_stride};
}

void bind_packing(py::module_& m) {
    m.def(
        "plan_packing",
        [](int format, int64_t n, int64_t k, uintptr_t weight, int64_t weight_stride, uintptr_t scale,
           int64_t scale_stride, uintptr_t row_exponent, int threads) {
            cpu::PackPlan plan;
            {
                py::gil_scoped_release unlocked;
                plan = cpu::plan_packing(checkpoint(format, n, k, weight, weight_stride, scale, scale_stride),
                                         pointer<int8_t>(row_exponent), threads);
            }
            return py::make_tuple(plan.nan_row, plan.nan_group, plan.shifted, plan.exact);
        },
        "What packing will meet: (first row with a NaN scale or -1, its group, shifted, exact).");
    m.def(
        "pack",
        [](int format, int64_t n, int64_t k, uintptr_t weight, int64_t weight_stride, uintptr_t scale,
           int64_t scale_stride, uintptr_t out_weight, uintptr_t out_scale, uintptr_t row_exponent, int threads) {
            py::gil_scoped_release unlocked;
            cpu::pack(checkpoint(format, n, k, weight, weight_stride, scale, scale_stride),
                      {pointer<uint8_t>(out_weight), pointer<uint8_t>(out_scale), pointer<int8_t>(row_exponent)},
                      threads);
        },
        "Checkpoint codes and scales to the CPU layout.");
    m.def(
        "unpack",
        [](int format, int64_t n, int64_t k, uintptr_t weight, uintptr_t scale, uintptr_t row_exponent,
           uintptr_t out_weight, uintptr_t out_scale, int threads) {
            py::gil_scoped_release unlocked;
            cpu::unpack(weight_view(format, n, k, weight, scale, 0, 0, row_exponent, false),
                        pointer<uint8_t>(out_weight), pointer<uint8_t>(out_scale), threads);
        },
        "The CPU layout back to checkpoint codes and scales.");
    m.def(
        "dequantize",
        [](int format, int64_t n, int64_t k, uintptr_t weight, uintptr_t scale, uintptr_t row_scale,
           int64_t row_scale_stride, uintptr_t row_exponent, uintptr_t out, int out_type, int threads) {
            py::gil_scoped_release unlocked;
            cpu::dequantize(weight_view(format, n, k, weight, scale, row_scale, row_scale_stride, row_exponent, false),
                            pointer<void>(out), static_cast<cpu::OutType>(out_type), threads);
        },
        "The packed weight as [n, k] numbers, rounded once.");
}

void bind_gemm(py::module_& m) {
    m.def(
        "linear",
        [](uintptr_t x, int64_t x_stride, int64_t rows, int dtype, int format, int64_t n, int64_t k, uintptr_t weight,
           uintptr_t scale, uintptr_t row_scale, int64_t row_scale_stride, uintptr_t row_exponent, bool exact,
           uintptr_t bias, int bias_dtype, uintptr_t y, int threads, int isa) {
            py::gil_scoped_release unlocked;
            const cpu::GemmProblem problem{
                pointer<const void>(x),
                x_stride,
                nullptr,
                rows,
                weight_view(format, n, k, weight, scale, row_scale, row_scale_stride, row_exponent, exact),
                pointer<const void>(bias),
                static_cast<cpu::DType>(bias_dtype),
                pointer<void>(y),
                n};
            const auto type = static_cast<cpu::DType>(dtype);
            cpu::grouped_gemm(&problem, 1, type, type, threads, static_cast<cpu::Isa>(isa));
        },
        "y = x @ w.T + bias for row-major x with the given row stride; y is contiguous.");
    m.def(
        "best_isa", [] { return static_cast<int>(cpu::best_isa()); },
        "The instruction set that runs, after PETIT_CPU_ISA (ValueError if that one cannot run here).");
    m.def("isa_name", [](int isa) { return cpu::isa_name(static_cast<cpu::Isa>(isa)); });
    m.def("isa_built", [](int isa) { return cpu::isa_built(static_cast<cpu::Isa>(isa)); });
    m.def("isa_supported", [](int isa) { return cpu::isa_supported(static_cast<cpu::Isa>(isa)); });
    m.def("openmp_runtime", [] { return cpu::openmp_runtime(); }, "Path of the OpenMP runtime in use, or ''.");
}

}  // namespace
}  // namespace petit::bindings

PYBIND11_MODULE(_native, m) {
    m.doc() = "Native kernels of petit_plugin.";
    m.attr("__version__") = PETIT_VERSION;
    m.attr("compiler") = PETIT_COMPILER;
    petit::bindings::bind_packing(m);
    petit::bindings::bind_gemm(m);
    petit::bindings::bind_hip(m);
#ifdef PETIT_HAVE_MOE
    petit::bindings::bind_moe(m);
#endif
}
