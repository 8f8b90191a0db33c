// Packing for CDNA and launches through the HIP runtime. Pointers and streams cross as integers; the callers
// (petit_plugin/backends/hip) own the memory and have checked shapes.
#include <pybind11/stl.h>

#include <array>
#include <memory>

#include "../host/linear.hpp"
#include "../host/pack.hpp"
#include "module.hpp"

namespace petit::bindings {
namespace {

host::PackedView packed(int format, int target, int64_t n, int64_t k, bool exact, uintptr_t weight, uintptr_t scale,
                        uintptr_t row_exponent, uintptr_t row_scale) {
    return {static_cast<cpu::Format>(format),
            static_cast<host::Target>(target),
            n,
            k,
            exact,
            pointer<uint8_t>(weight),
            pointer<uint8_t>(scale),
            pointer<int32_t>(row_exponent),
            pointer<const float>(row_scale)};
}

cpu::CheckpointView checkpoint(int format, int64_t n, int64_t k, uintptr_t weight, int64_t weight_stride,
                               uintptr_t scale, int64_t scale_stride) {
    return {static_cast<cpu::Format>(format), n,           k, pointer<const uint8_t>(weight), weight_stride,
            pointer<const uint8_t>(scale),    scale_stride};
}

void bind_hip_packing(py::module_& m) {
    m.def(
        "hip_find_nan",
        [](int format, int64_t n, int64_t k, uintptr_t weight, int64_t weight_stride, uintptr_t scale,
           int64_t scale_stride, int threads) {
            py::gil_scoped_release unlocked;
            const host::Block b =
                host::find_nan(checkpoint(format, n, k, weight, weight_stride, scale, scale_stride), threads);
            return std::pair(b.row, b.group);
        },
        "First (row, group) with a NaN scale over a non-zero code, or (-1, -1).");
    m.def(
        "hip_pack",
        [](int format, int target, int64_t n, int64_t k, bool exact, uintptr_t weight, int64_t weight_stride,
           uintptr_t scale, int64_t scale_stride, uintptr_t out_weight, uintptr_t out_scale, uintptr_t row_exponent,
           int threads) {
            py::gil_scoped_release unlocked;
            return host::pack(checkpoint(format, n, k, weight, weight_stride, scale, scale_stride),
                              packed(format, target, n, k, exact, out_weight, out_scale, row_exponent, 0), threads);
        },
        "Checkpoint codes and scales to the CDNA layout; False if a row needs exact=True.");
    m.def(
        "hip_unpack",
        [](int format, int target, int64_t n, int64_t k, bool exact, uintptr_t weight, uintptr_t scale,
           uintptr_t row_exponent, uintptr_t out_weight, uintptr_t out_scale, int threads) {
            py::gil_scoped_release unlocked;
            host::unpack(packed(format, target, n, k, exact, weight, scale, row_exponent, 0),
                         pointer<uint8_t>(out_weight), pointer<uint8_t>(out_scale), threads);
        },
        "The CDNA layout back to checkpoint codes and scales.");
    m.def(
        "hip_dequantize",
        [](int format, int target, int64_t n, int64_t k, bool exact, uintptr_t weight, uintptr_t scale,
           uintptr_t row_scale, uintptr_t row_exponent, uintptr_t out, int out_type, int threads) {
            py::gil_scoped_release unlocked;
            host::dequantize(packed(format, target, n, k, exact, weight, scale, row_exponent, row_scale),
                             pointer<void>(out), static_cast<cpu::OutType>(out_type), threads);
        },
        "The packed weight as [n, k] numbers, rounded once, on the host.");
}

void bind_runtime(py::module_& m) {
    py::register_exception<host::HipError>(m, "HipError", PyExc_RuntimeError);
    py::class_<host::HipRuntime>(m, "HipRuntime")
        .def(py::init<const std::string&>())
        .def_property_readonly("path", &host::HipRuntime::path)
        .def_property_readonly("device_count", &host::HipRuntime::device_count)
        .def("arch", &host::HipRuntime::arch)
        .def("compute_units", &host::HipRuntime::compute_units);
    py::class_<host::DeviceCode>(m, "DeviceCode")
        .def(py::init([](const host::HipRuntime& runtime, int device, const py::bytes& image, const std::string& name) {
                 return std::make_unique<host::DeviceCode>(runtime, device, image, name);
             }),
             py::keep_alive<1, 2>())
        .def("unload", &host::DeviceCode::unload)
        .def(
            "function", [](host::DeviceCode& self, const std::string& kernel) { self.function(kernel); },
            "Look the kernel up now, so that no launch has to.")
        .def(
            "dequantize",
            [](host::DeviceCode& self, const std::string& kernel, uintptr_t weight, uintptr_t scale, uintptr_t out,
               unsigned n_begin, unsigned rows, unsigned k, uintptr_t stream) {
                py::gil_scoped_release unlocked;
                self.dequantize(kernel,
                                {pointer<const uint8_t>(weight), pointer<const uint8_t>(scale), pointer<uint8_t>(out),
                                 n_begin, rows, k, static_cast<unsigned>(host::k_tiles(k))},
                                pointer<void>(stream));
            },
            "Rows of W as 16-bit operands [rows, k].")
        .def(
            "finish",
            [](host::DeviceCode& self, const std::string& kernel, uintptr_t sum, uintptr_t row_scale,
               uintptr_t row_exponent, uintptr_t bias, bool bias_f32, uintptr_t y, int64_t y_stride, unsigned n,
               unsigned m, uintptr_t stream) {
                py::gil_scoped_release unlocked;
                self.finish(
                    kernel,
                    {pointer<const float>(sum), pointer<const float>(row_scale), pointer<const int32_t>(row_exponent),
                     pointer<const void>(bias), pointer<void>(y), y_stride, n, m, bias_f32, 0},
                    pointer<void>(stream));
            },
            "y [m, n] from the float32 product sum [m, n].");
}

host::LinearPlan make_plan(host::DeviceCode& code, const std::string& convert, const std::string& gemm,
                           const std::string& shape, std::array<unsigned, 3> n_k_m, std::array<unsigned, 6> grid,
                           unsigned slices, std::array<int64_t, 5> offsets) {
    const auto [n, k, m] = n_k_m;
    const auto [threads, workgroups, units_q, units_r, m_blocks, xcds] = grid;
    host::LinearPlan plan{};
    plan.code = &code;
    plan.convert = convert, plan.gemm = gemm, plan.shape = shape;
    plan.convert_function = code.function(convert), plan.gemm_function = code.function(gemm);
    plan.threads = threads;
    plan.x_at = offsets[0], plan.rows_at = offsets[1], plan.partials_at = offsets[2], plan.counters_at = offsets[3];
    plan.convert_args.plane_bytes = plan.gemm_args.plane_bytes = offsets[4];
    plan.convert_args.slices = slices;
    plan.convert_args.k = k;
    plan.convert_args.k_tiles = plan.gemm_args.k_tiles = static_cast<unsigned>(host::k_tiles(k));
    plan.gemm_args.n = n;
    plan.gemm_args.m = m;
    plan.gemm_args.row_groups = static_cast<unsigned>(host::row_groups(n));
    plan.gemm_args.m_blocks = m_blocks;
    plan.gemm_args.units_q = units_q;
    plan.gemm_args.units_r = units_r;
    plan.gemm_args.workgroups = workgroups;
    plan.gemm_args.xcds = xcds;
    return plan;
}

void bind_linear(py::module_& m) {
    py::class_<host::LinearPlan>(m, "LinearPlan")
        .def(py::init(&make_plan), py::keep_alive<1, 2>(),
             "n_k_m; grid: threads, workgroups, units_q, units_r, m_blocks, xcds; offsets in the workspace: converted "
             "activations, rows, partial sums, counters, and the stride of planes.")
        .def(
            "run",
            [](const host::LinearPlan& self, uintptr_t x, int64_t x_stride_bytes, uintptr_t weight, uintptr_t scale,
               uintptr_t row_scale, uintptr_t row_exponent, uintptr_t bias, bool bias_f32, uintptr_t y,
               int64_t y_stride, uintptr_t workspace, uintptr_t stream) {
                py::gil_scoped_release unlocked;
                self.run({pointer<const void>(x), x_stride_bytes, pointer<const void>(weight),
                          pointer<const void>(scale), pointer<const float>(row_scale),
                          pointer<const int32_t>(row_exponent), pointer<const void>(bias), bias_f32, pointer<void>(y),
                          y_stride, pointer<void>(workspace), pointer<void>(stream)});
            },
            "y = x W^T + bias on the stream.")
        .def(
            "convert",
            [](const host::LinearPlan& self, uintptr_t x, int64_t x_stride_bytes, uintptr_t workspace,
               uintptr_t stream) {
                py::gil_scoped_release unlocked;
                host::LinearPlan::Call call{};
                call.x = pointer<const void>(x);
                call.x_stride_bytes = x_stride_bytes;
                call.workspace = pointer<void>(workspace);
                call.stream = pointer<void>(stream);
                self.convert_only(call);
            },
            "The activation pre-pass alone.");
}

}  // namespace

void bind_hip(py::module_& m) {
    bind_hip_packing(m);
    bind_runtime(m);
    bind_linear(m);
}

}  // namespace petit::bindings
