// From sums to y: round(sum * row_scale[n] * 2^(row_exponent[n] + shift[m]) + bias[n]), one rounding.
//
// The arithmetic is float64, as the sums are: no power of two of the contract leaves its range, and what is left is a
// single rounding to y's type. About 2 ns for 16 results: nothing beside the sums.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "gemm.hpp"
#include "numbers.hpp"
#include "simd_activations.hpp"

namespace petit::cpu {
namespace {

class Epilogue {
  public:
    // For rows n0 .. n0 + 15.
    Epilogue(const GemmProblem& p, int64_t n0, DType y_dtype)
        : n0_(n0), count_(p.w.n - n0 < kRowBlock ? p.w.n - n0 : kRowBlock), y_dtype_(y_dtype), y_(p.y), p_(p) {
        for (int r = 0; r < kRowBlock; ++r) {
            const int exponent = p.w.row_exponent ? p.w.row_exponent[n0 + r] : 0;
            factor_[r] = static_cast<double>(p.w.scale_of_row(n0 + r)) * power_of_two(exponent);
            bias_[r] = p.bias && r < count_ ? load_number(p.bias, n0 + r, p.bias_dtype) : 0.0;
        }
    }

    void store(int64_t m, int shift, const double* sums) const {
        if (shift == kTooWide) return;
        alignas(64) double value[kRowBlock];
        if (shift == 0) {
            for (int r = 0; r < kRowBlock; ++r) value[r] = sums[r] * factor_[r];
        } else {
            const double power = power_of_two(shift);
            for (int r = 0; r < kRowBlock; ++r) value[r] = sums[r] * factor_[r] * power;
        }
        if (p_.bias) {  // adding 0.0 would turn -0 into +0
            for (int r = 0; r < kRowBlock; ++r) value[r] += bias_[r];
        }
        const int64_t at = m * p_.y_stride + n0_;
        switch (y_dtype_) {
            case DType::f32:
                return store_f32(static_cast<float*>(y_) + at, value);
            case DType::bf16:
                return store_bf16(static_cast<uint16_t*>(y_) + at, value);
            case DType::f16:
                return store_f16(static_cast<uint16_t*>(y_) + at, value);
        }
    }

  private:
    template <class T>
    void copy_out(T* y, const T* line) const {
        if (count_ == kRowBlock) {
            std::memcpy(y, line, sizeof(T) * kRowBlock);
        } else {
            std::memcpy(y, line, sizeof(T) * static_cast<size_t>(count_));
        }
    }

    void store_f32(float* y, const double* value) const {
        float line[kRowBlock];
        for (int r = 0; r < kRowBlock; ++r) line[r] = static_cast<float>(value[r]);
        copy_out(y, line);
    }

    // float64 to float32, to odd: the bits that float32 cannot hold become one sticky bit, so that rounding the result
    // to 16 bits gives what one rounding from float64 gives. Infinity and NaN stay what they are.
    static void round_to_odd(const double* value, float* out) {
        constexpr uint64_t low = 0x1fffffffu;
        for (int r = 0; r < kRowBlock; ++r) {
            const uint64_t bits = bits_as<uint64_t>(value[r]);
            out[r] = static_cast<float>(bits_as<double>((((bits & low) + low) | bits) & ~low));
        }
    }

    void store_bf16(uint16_t* y, const double* value) const {
        float odd[kRowBlock];
        round_to_odd(value, odd);
        uint16_t line[kRowBlock];
        for (int r = 0; r < kRowBlock; ++r) {
            const uint32_t bits = bits_as<uint32_t>(odd[r]);
            const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
            const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
            line[r] = static_cast<uint16_t>((nan ? bits | 0x400000u : rounded) >> 16);
        }
        copy_out(y, line);
    }

    void store_f16(uint16_t* y, const double* value) const {
        float odd[kRowBlock];
        round_to_odd(value, odd);
        uint16_t line[kRowBlock];
        for (int r = 0; r < kRowBlock; r += 8) {
            const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(odd + r), _MM_FROUND_TO_NEAREST_INT);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(line + r), half);
        }
        copy_out(y, line);
    }

    int64_t n0_, count_;
    DType y_dtype_;
    void* y_;
    const GemmProblem& p_;
    alignas(64) double factor_[kRowBlock];
    alignas(64) double bias_[kRowBlock];
};

}  // namespace
}  // namespace petit::cpu
