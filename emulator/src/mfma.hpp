// Matrix operands unpacked from registers, and the arithmetic of each generation.
#pragma once
#include <vector>

#include "bits.hpp"

namespace petit_emu {

constexpr int kMaxDim = 32, kMaxK = 128;

// One matrix operation unpacked: A as [k][row] and B as [k][column] (so that a step over k is a contiguous row), C as
// [row][column]. A number is also kept as sig * 2^(exp - fraction bits): `sig` signed, `exp` the exponent of its
// leading position.
struct Tile {
    int m, n, k;
    alignas(64) i32 a_sig[kMaxK][kMaxDim], b_sig[kMaxK][kMaxDim];
    alignas(64) i32 a_exp[kMaxK][kMaxDim], b_exp[kMaxK][kMaxDim];
    alignas(64) float a[kMaxK][kMaxDim], b[kMaxK][kMaxDim];
    alignas(64) float c[kMaxDim][kMaxDim];
    bool special = false;  // an Inf or NaN among A, B or C
};

// gfx90a, f16 and bf16_1k: denormals of A, B, C become +0; (p0+p1)+(p2+p3) per four k, then c + s; every step rounded,
// denormals flushed.
void mfma_cdna2(Tile& t);
// gfx942, f16 and bf16: per eight k, products truncated 24 bits below the largest, floor when joined with C (31 bits),
// RNE to f32. `man` is the number of fraction bits of the product of two significands.
void mfma_cdna3(Tile& t, int product_fraction, int group);
// gfx942 fp8/bf8: groups of 16, even and odd k summed apart.
void mfma_cdna3_fp8(Tile& t, int product_fraction);
// Plain f32: a chain of fused multiply-adds in k order.
void mfma_fma(Tile& t);

}  // namespace petit_emu
