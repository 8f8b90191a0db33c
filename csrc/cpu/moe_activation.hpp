// The activations between the two expert GEMMs, from float32 sums to one row of the second GEMM's input.
#pragma once

#include <cstdint>

#include "gemm.hpp"

namespace petit::cpu {

enum class ActivationKind : int { silu = 0, gelu = 1, gelu_tanh = 2, relu2 = 3 };

// f(g) * (u + beta), with g clamped to (-inf, limit] and u to [-limit, limit]; f(g) alone when not gated.
//   silu       g * sigmoid(alpha * g)        alpha 1.702, beta 1, limit 7 are gpt-oss's "swigluoai"
//   gelu       g * Phi(g)                    the exact one
//   gelu_tanh  g * (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3))) / 2
//   relu2      max(g, 0)^2
// A NaN stays a NaN.
struct Activation {
    ActivationKind kind;
    bool gated;
    float alpha;
    float beta;
    float limit;  // infinity for none
};

// One row: out[i] for i in [begin, end) from h[i] (and h[size + i] when gated), where h = router * sums + bias.
// `bias` may be null and is laid out as `sums`. `out` is x_dtype, indexed from the row's start.
void activate(const Activation& activation, const float* sums, const float* bias, float router, int64_t size,
              int64_t begin, int64_t end, void* out, DType out_dtype);

// Rounds `count` float32 values to nearest even in `dtype`.
void round_row(const float* values, int64_t count, void* out, DType dtype);

}  // namespace petit::cpu
