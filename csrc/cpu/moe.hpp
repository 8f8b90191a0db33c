// Fused mixture of experts on the CPU: route, first GEMM, activation, second GEMM, weighted sum over the top-k.
//
//   h[p]      = r_in * (x[token(p)] . w13[e(p)]^T) + b13[e(p)]                       float32
//   a[p]      = round(act(h[p]))                                                     x's type, the one rounding between
//   z[p]      = a[p] . w2[e(p)]^T + b2[e(p)]                                         float32
//   out[t]    = round(routed_scale * sum_j r_out[t, j] * z[pair(t, j)])              j ascending, float32
//
// p runs over the (token, j) pairs that this rank's experts own, sorted by expert, so that an expert's weights are
// read once for all of its tokens. r_in is 1 and r_out the router weight, or the other way round (router_on_input).
#pragma once

#include <cstdint>

#include "gemm.hpp"
#include "moe_activation.hpp"

namespace petit::cpu {

// The weights of one of the two GEMMs for all experts: each tensor has the expert dimension first and every expert's
// slice is a WeightView.
struct ExpertBank {
    Format format;
    int64_t n;
    int64_t k;
    const uint8_t* weight;
    const uint8_t* scale;
    const float* row_scale;
    int64_t row_scale_stride;    // of the rows; 0: each expert has one for all its rows
    const int8_t* row_exponent;  // or null
    const float* bias;           // [experts, n], or null
    bool exact;

    WeightView expert(int64_t index) const;
    const float* expert_bias(int64_t index) const { return bias ? bias + index * n : nullptr; }
};

// An int32 or int64 array.
struct IndexArray {
    const void* data;
    bool is_64;

    int64_t operator[](int64_t i) const {
        return is_64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
    }
};

struct MoeProblem {
    const void* x;  // [tokens, w13.k]
    int64_t x_stride;
    DType x_dtype;
    int64_t tokens;
    int64_t topk;
    int64_t num_experts;  // held here
    ExpertBank w13;       // n = 2 * intermediate (gate rows, then up rows), or intermediate when not gated
    ExpertBank w2;        // k = intermediate
    IndexArray topk_ids;  // [tokens, topk]; -1 contributes zero
    const float* topk_weights;
    IndexArray expert_map;  // global -> local or -1; data is null when ids are local
    int64_t expert_map_size;
    Activation activation;
    bool router_on_input;
    float routed_scale;
    bool reduce;  // false: out is [tokens, topk, w2.n], the terms of the sum, zero where there is no expert
    void* out;    // contiguous
    DType out_dtype;
    int64_t workspace_budget;  // bytes; more tokens than fit are done in chunks (a chunk has at least 128)
    void* intermediate;  // or null; else [tokens, topk, w2.k] of x's type receives a; rows of absent experts are kept
};

// How a problem is cut so that its workspace stays bounded however many tokens come.
struct MoePlan {
    int64_t chunk_tokens;
    int64_t workspace_bytes;
};
MoePlan plan_moe(int64_t tokens, int64_t topk, int64_t n13, int64_t intermediate, int64_t hidden, DType x_dtype,
                 int64_t budget);

// `workspace` must hold plan_moe(...).workspace_bytes and be 64-byte aligned; its contents do not matter. Throws
// std::invalid_argument, before anything is written, when an expert id or an expert_map entry is out of range.
void fused_moe(const MoeProblem& problem, void* workspace, int threads, Isa isa);

}  // namespace petit::cpu
