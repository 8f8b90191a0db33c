// Shared by the binding files: pointers from integers, and one bind function per part.
#pragma once

#include <pybind11/pybind11.h>

#include "../cpu/gemm.hpp"

namespace petit::bindings {

namespace py = pybind11;

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

inline cpu::WeightView weight_view(int format, int64_t n, int64_t k, uintptr_t weight, uintptr_t scale,
                                   uintptr_t row_scale, int64_t row_scale_stride, uintptr_t row_exponent, bool exact) {
    return {static_cast<cpu::Format>(format),
            n,
            k,
            pointer<const uint8_t>(weight),
            pointer<const uint8_t>(scale),
            pointer<const float>(row_scale),
            row_scale_stride,
            pointer<const int8_t>(row_exponent),
            exact};
}

void bind_hip(py::module_& m);
void bind_moe(py::module_& m);  // moe.cpp; present when the build finds that file

}  // namespace petit::bindings
