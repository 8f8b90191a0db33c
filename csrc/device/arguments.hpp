// Argument blocks of the kernels, shared with csrc/host: plain C++ types, the same size on both sides.
#pragma once

namespace petit {

struct RowInfo {   // one activation row
    int exponent;  // x = plane0 * 2^exponent
    int planes;    // plane p holds what is 28 p octaves further down; usually 1
};

struct GemmArgs {
    const unsigned char* weight;
    const unsigned char* scale;
    const float* row_scale;
    const int* row_exponent;
    const unsigned char* x;   // fragment-order activations, plane after plane
    const RowInfo* rows;      // [m]
    const void* bias;         // [n] or null
    void* y;                  // [m, y_stride]
    unsigned char* partials;  // two slots a workgroup
    unsigned* counters;       // one a tile, zero between launches
    long long plane_bytes;
    long long y_stride;  // elements
    unsigned n, m;
    unsigned k_tiles, row_groups;
    unsigned m_blocks;          // m tiles of the kernel's height
    unsigned units_q, units_r;  // units per workgroup: q + 1 for the first r workgroups, q for the rest
    unsigned bias_f32;          // bias is float32 instead of the activation dtype
    unsigned workgroups;        // grid size
    unsigned xcds;              // dies the workgroup ids go round; neighbours in work then share a die
};

struct ConvertArgs {
    const unsigned char* x;
    unsigned char* out;
    RowInfo* rows;
    long long x_stride_bytes;  // multiple of 16, as the base address
    long long plane_bytes;
    unsigned slices;  // grid y
    unsigned k;       // multiple of 8
    unsigned k_tiles;
};

struct DequantizeArgs {
    const unsigned char* weight;
    const unsigned char* scale;
    unsigned char* out;  // [rows, k] 16-bit
    unsigned n_begin;    // multiple of 64
    unsigned rows;
    unsigned k;
    unsigned k_tiles;
};

struct FinishArgs {
    const float* sum;  // [m, n]
    const float* row_scale;
    const int* row_exponent;
    const void* bias;
    void* y;
    long long y_stride;
    unsigned n, m;  // columns handled by this launch
    unsigned bias_f32;
    int exponent;  // added to row_exponent
};

}  // namespace petit
