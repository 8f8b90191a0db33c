// fused_moe for petit_plugin/backends/cpu_moe.py, which owns the memory and has checked shapes, dtypes and contiguity.
#include "../cpu/moe.hpp"

#include <pybind11/stl.h>

#include <array>

#include "module.hpp"

namespace petit::bindings {
namespace {

// weight, scale, row_scale, row_exponent or 0, bias or 0; then the stride of row_scale
using Addresses = std::array<uintptr_t, 6>;
using Index = std::tuple<uintptr_t, bool>;  // address, int64 rather than int32

cpu::ExpertBank bank(int format, int64_t n, int64_t k, const Addresses& at, bool exact) {
    return {static_cast<cpu::Format>(format),
            n,
            k,
            pointer<const uint8_t>(at[0]),
            pointer<const uint8_t>(at[1]),
            pointer<const float>(at[2]),
            static_cast<int64_t>(at[5]),
            pointer<const int8_t>(at[3]),
            pointer<const float>(at[4]),
            exact};
}

cpu::IndexArray indices(const Index& index) { return {pointer<const void>(std::get<0>(index)), std::get<1>(index)}; }

}  // namespace

void bind_moe(py::module_& m) {
    m.def(
        "moe_workspace_bytes",
        [](int64_t tokens, int64_t topk, int64_t hidden, int64_t intermediate, bool gated, int x_dtype,
           int64_t budget) {
            const int64_t n13 = gated ? 2 * intermediate : intermediate;
            const auto type = static_cast<cpu::DType>(x_dtype);
            return cpu::plan_moe(tokens, topk, n13, intermediate, hidden, type, budget).workspace_bytes;
        },
        "Bytes of scratch memory fused_moe needs for the same sizes and budget.");
    m.def(
        "fused_moe",
        [](uintptr_t x, int64_t x_stride, int x_dtype, int64_t tokens, int64_t topk, int64_t num_experts,
           int64_t hidden, int64_t intermediate, int format, bool exact, const Addresses& w13, const Addresses& w2,
           const Index& topk_ids, uintptr_t topk_weights, const Index& expert_map, int64_t expert_map_size,
           int activation, bool gated, float alpha, float beta, float limit, bool router_on_input, float routed_scale,
           bool reduce, uintptr_t out, int out_dtype, uintptr_t stage_one, uintptr_t workspace, int64_t budget,
           int threads) {
            py::gil_scoped_release unlocked;
            const cpu::MoeProblem problem{
                .x = pointer<const void>(x),
                .x_stride = x_stride,
                .x_dtype = static_cast<cpu::DType>(x_dtype),
                .tokens = tokens,
                .topk = topk,
                .num_experts = num_experts,
                .w13 = bank(format, gated ? 2 * intermediate : intermediate, hidden, w13, exact),
                .w2 = bank(format, hidden, intermediate, w2, exact),
                .topk_ids = indices(topk_ids),
                .topk_weights = pointer<const float>(topk_weights),
                .expert_map = indices(expert_map),
                .expert_map_size = expert_map_size,
                .activation = {static_cast<cpu::ActivationKind>(activation), gated, alpha, beta, limit},
                .router_on_input = router_on_input,
                .routed_scale = routed_scale,
                .reduce = reduce,
                .out = pointer<void>(out),
                .out_dtype = static_cast<cpu::DType>(out_dtype),
                .workspace_budget = budget,
                .intermediate = pointer<void>(stage_one),
            };
            cpu::fused_moe(problem, pointer<void>(workspace), threads, cpu::best_isa());
        },
        "Route, w13, activation, w2, weighted sum (csrc/cpu/moe.hpp). ValueError if an expert id is out of range.");
}

}  // namespace petit::bindings
