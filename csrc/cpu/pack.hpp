// Checkpoint tensors to the packed layout of gemm.hpp, and back.
#pragma once

#include "gemm.hpp"

namespace petit::cpu {

struct CheckpointView {
    Format format;
    int64_t n, k;
    const uint8_t* weight;  // [n, k/2], low nibble = even k
    int64_t weight_stride;  // bytes from row to row
    const uint8_t* scale;   // [n, k/group], E4M3FN (NVFP4) or E8M0 (MXFP4)
    int64_t scale_stride;   // bytes from row to row
};

struct PackedView {
    uint8_t* weight;
    uint8_t* scale;
    int8_t* row_exponent;  // [n_pad] or null
};

// What packing will do, found by reading the scales (and codes where a scale is suspicious) before anything is written.
struct PackPlan {
    int64_t nan_row = -1;  // first block with a NaN scale and a non-zero code, if any: such a weight cannot be packed
    int64_t nan_group = -1;
    bool shifted = false;  // some row needs a power of two; row_exponent must then be given
    bool exact = false;    // some row spans more octaves than the fast kernels' window: stored raw
};

// row_exponent [n_pad] is filled for MXFP4 (with zeros unless `shifted`), untouched for NVFP4.
PackPlan plan_packing(const CheckpointView& source, int8_t* row_exponent, int threads);

// row_exponent in `target` is read, not written: it comes from plan_packing, null when nothing is shifted.
void pack(const CheckpointView& source, const PackedView& target, int threads);

// weight [n, k/2] and scale [n, k/group], both contiguous, as they were in the checkpoint (canonical form, see
// pack.cpp).
void unpack(const WeightView& packed, uint8_t* weight, uint8_t* scale, int threads);

// What the kernels multiply by, row scale and exponent included, [n, k] contiguous, rounded once to the type.
enum class OutType : int { bf16 = 0, f16 = 1, f32 = 2, f64 = 3 };
void dequantize(const WeightView& packed, void* out, OutType type, int threads);

}  // namespace petit::cpu
