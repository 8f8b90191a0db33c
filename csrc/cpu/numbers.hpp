// Scalar conversions between the number formats. Everything is `static`: a file built for a wider instruction set
// keeps its own copy, so the linker can never hand that copy to code that runs on an older CPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "gemm.hpp"

namespace petit::cpu {

template <class To, class From>
static inline To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To out;
    std::memcpy(&out, &value, sizeof(out));
    return out;
}

static constexpr float kE2M1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

static constexpr int64_t group_size(Format format) { return format == Format::nvfp4 ? 16 : 32; }

static constexpr int64_t padded_rows(int64_t n) { return (n + kRowBlock - 1) / kRowBlock * kRowBlock; }

// 2^e, exact for every e that float64 can hold as a normal number; larger magnitudes are not needed here.
static inline double power_of_two(int e) { return bits_as<double>(static_cast<uint64_t>(e + 1023) << 52); }

// The stored scale byte's value (gemm.hpp). float64 holds every one of them as a normal number.
static inline double scale_value(Format format, uint8_t c) {
    if (format == Format::mxfp4) return power_of_two(static_cast<int>(c) - 127);
    return c == 0 ? 0.0 : power_of_two((c >> 3) - 16) * (1.0 + 0.125 * (c & 7));
}

static inline float bf16_to_float(uint16_t h) { return bits_as<float>(static_cast<uint32_t>(h) << 16); }

static inline float f16_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 31u;
    const uint32_t mantissa = h & 0x3ffu;
    if (exponent == 31) return bits_as<float>(sign | 0x7f800000u | (mantissa << 13));
    if (exponent == 0) {
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    return bits_as<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// float64 to a 16-bit float in one rounding, to nearest, ties to even. `mantissa` is the number of stored fraction
// bits, `bias` the exponent bias; the rest of the 15 bits below the sign is the exponent.
static inline uint16_t round_to_16_bits(double value, int mantissa, int bias) {
    const uint64_t bits = bits_as<uint64_t>(value);
    const uint16_t sign = static_cast<uint16_t>((bits >> 48) & 0x8000u);
    const uint64_t magnitude = bits & 0x7fffffffffffffffull;
    const uint16_t infinity = static_cast<uint16_t>(0x7fffu & ~((1u << mantissa) - 1u));
    if (magnitude > 0x7ff0000000000000ull) return static_cast<uint16_t>(infinity | (1u << (mantissa - 1)));
    const int exponent = static_cast<int>(magnitude >> 52) - 1023;
    if (exponent > bias) return static_cast<uint16_t>(sign | infinity);
    uint64_t significand = magnitude & 0xfffffffffffffull;
    int drop = 52 - mantissa;
    uint64_t base = 0;
    if (exponent >= 1 - bias) {
        base = static_cast<uint64_t>(exponent + bias) << mantissa;
    } else {  // subnormal in the result: the leading bit becomes explicit
        significand |= magnitude >> 52 ? 1ull << 52 : 0;
        drop += 1 - bias - exponent;
        if (drop > 54) return sign;
    }
    const uint64_t kept = significand >> drop;
    const uint64_t rest = significand & ((1ull << drop) - 1);
    const uint64_t half = 1ull << (drop - 1);
    const uint64_t up = rest > half || (rest == half && (kept & 1)) ? 1 : 0;
    return static_cast<uint16_t>(sign | (base + kept + up));  // a carry runs into the exponent, and into infinity
}

static inline uint16_t double_to_bf16(double value) { return round_to_16_bits(value, 7, 127); }
static inline uint16_t double_to_f16(double value) { return round_to_16_bits(value, 10, 15); }

static inline double load_number(const void* base, int64_t index, DType dtype) {
    switch (dtype) {
        case DType::bf16:
            return bf16_to_float(static_cast<const uint16_t*>(base)[index]);
        case DType::f16:
            return f16_to_float(static_cast<const uint16_t*>(base)[index]);
        case DType::f32:
            break;
    }
    return static_cast<const float*>(base)[index];
}

static inline void store_number(void* base, int64_t index, DType dtype, double value) {
    switch (dtype) {
        case DType::bf16:
            static_cast<uint16_t*>(base)[index] = double_to_bf16(value);
            return;
        case DType::f16:
            static_cast<uint16_t*>(base)[index] = double_to_f16(value);
            return;
        case DType::f32:
            break;
    }
    static_cast<float*>(base)[index] = static_cast<float>(value);
}

}  // namespace petit::cpu
