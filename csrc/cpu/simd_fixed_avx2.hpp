// One row of x in integer arithmetic, for AVX2, where decoding E2M1 to float32 costs more than reading it from memory.
//
// Within a group, bfloat16 or float16 activations nearly always fit 23-bit integers x = X * 2^(e - 21) exactly, e being
// the exponent of the largest; and 2 w + 12 is an unsigned byte. X in three signed bytes then needs, for 8 rows x 16 k,
//   10 instructions for the bytes of w, 12 byte multiply-adds and 9 adds, 7 to join the three parts and take 12 sum(X)
//   off again, 6 for the scale: 44, or 2.8 per 8 weights (float32: 3.9).
// The sum of a group is exact, which float32 would round. Groups that do not fit exactly (a tiny value beside a large
// one, and any float32 data) are left out here, listed, and added by the float32 kernel; nothing is ever approximated.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace petit::cpu {
namespace {

// 16 k of x. limb[l] holds byte l of X for the codes of a row's dword in the order the nibble masks give them:
// k0 k4 k1 k5, then k2 k6 k3 k7, then the same of the next 8 k.
struct alignas(64) FixedGroup {
    int32_t limb[3][4];
    int32_t offset;   // 12 sum(X)
    float unit;       // value of 1 in 2 w X: 2^(e - 22); of the whole group in its first 16 k
    int32_t inexact;  // entry i: the number of the i-th group that was left out
    int32_t unused;
};
static_assert(sizeof(FixedGroup) == 16 * sizeof(float));

constexpr int kFixedBits = 21;          // of X below the exponent of the largest: |X| < 2^22
constexpr int kSmallestExponent = -60;  // groups below are left to float32 arithmetic: `unit` stays a normal number

// Exponent of the largest of `count` 8-wide magnitudes (float32 bits), -127 if it is zero or subnormal.
inline int largest_exponent(const float* x, int count) {
    __m256i largest = _mm256_setzero_si256();
    for (int i = 0; i < count; ++i) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 8 * i));
        largest = _mm256_max_epu32(largest, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    }
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1));
    return static_cast<int>(static_cast<uint32_t>(_mm_cvtsi128_si32(four)) >> 23) - 127;
}

// Eight X into the bytes of `group` that belong to its first (unit 0) or last 8 k.
inline void store_limbs(__m256i value, int unit, FixedGroup& group) {
    const __m256i byte = _mm256_set1_epi32(0xff);
    for (int l = 0; l < 3; ++l) {
        const __m256i low = _mm256_and_si256(value, byte);
        const __m128i pairs =
            _mm_or_si128(_mm256_castsi256_si128(low), _mm_slli_epi32(_mm256_extracti128_si256(low, 1), 8));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(&group.limb[l][2 * unit]), _mm_packus_epi32(pairs, pairs));
        const __m256i digit =
            _mm256_srai_epi32(_mm256_slli_epi32(value, 24), 24);  // the byte as it will be read: signed
        value = _mm256_srai_epi32(_mm256_sub_epi32(value, digit), 8);
    }
}

// k activations in groups of Group. Returns how many groups were left out, or -1 if so many that the float32 kernel had
// better do all.
template <int Group>
int64_t store_fixed(const float* x, int64_t k, FixedGroup* out) {
    constexpr int pieces = Group / 8;
    int64_t inexact = 0;
    for (int64_t g = 0; g < k / Group; ++g, x += Group) {
        FixedGroup* const to = out + g * (Group / 16);
        const int exponent = largest_exponent(x, pieces);
        const bool usable = exponent > kSmallestExponent && exponent < 128;  // infinity and NaN have exponent 128
        const __m256 factor = _mm256_set1_ps(static_cast<float>(power_of_two(usable ? kFixedBits - exponent : 0)));
        __m256i value[pieces];
        __m256 different = _mm256_setzero_ps();
        for (int i = 0; i < pieces; ++i) {
            const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), factor);
            value[i] = _mm256_cvtps_epi32(scaled);
            different = _mm256_or_ps(different, _mm256_cmp_ps(_mm256_cvtepi32_ps(value[i]), scaled, _CMP_NEQ_UQ));
        }
        const bool zero = exponent == -127 && _mm256_movemask_ps(different) == 0;
        const bool exact = zero || (usable && _mm256_movemask_ps(different) == 0);
        if (!exact) {
            out[inexact++].inexact = static_cast<int32_t>(g);
            if (inexact > k / Group / 32) return -1;
            for (__m256i& v : value) v = _mm256_setzero_si256();
        }
        for (int i = 0; i < pieces; ++i) store_limbs(value[i], i % 2, to[i / 2]);
        for (int i = 0; i < pieces; i += 2) {
            const __m256i sum = _mm256_add_epi32(value[i], value[i + 1]);
            __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
            four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
            four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
            to[i / 2].offset = 12 * _mm_cvtsi128_si32(four);
        }
        const int unit = exponent - kFixedBits - 1;
        to[0].unit = exact && !zero ? static_cast<float>(power_of_two(unit)) : 0.0f;
    }
    return inexact;
}

// 2 w + 12 of every code.
alignas(32) constexpr uint8_t kShiftedE2M1[32] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
                                                  12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Adds up 2 w X over 16 k of 8 rows: modulo 2^32, which the result (below 2^31 for 32 k) never needs.
inline __m256i fixed_sum(const uint8_t* codes, const FixedGroup& x, __m256i table, __m256i nibbles) {
    __m256i w[4];
    for (int u = 0; u < 2; ++u) {
        const __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 64 * u));
        w[2 * u] = _mm256_shuffle_epi8(table, _mm256_and_si256(q, nibbles));
        w[2 * u + 1] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(q, 4), nibbles));
    }
    __m256i part[3];
    for (int l = 0; l < 3; ++l) {  // below 4 * 2 * 24 * 128 = 24576: no saturation
        part[l] = _mm256_maddubs_epi16(w[0], _mm256_set1_epi32(x.limb[l][0]));
        for (int j = 1; j < 4; ++j) {
            part[l] = _mm256_add_epi16(part[l], _mm256_maddubs_epi16(w[j], _mm256_set1_epi32(x.limb[l][j])));
        }
    }
    const __m256i one = _mm256_set1_epi16(1);
    const __m256i low =
        _mm256_add_epi32(_mm256_madd_epi16(part[0], one), _mm256_madd_epi16(part[1], _mm256_set1_epi16(256)));
    const __m256i high = _mm256_slli_epi32(_mm256_madd_epi16(part[2], one), 16);
    return _mm256_sub_epi32(_mm256_add_epi32(low, high), _mm256_set1_epi32(x.offset));
}

}  // namespace
}  // namespace petit::cpu
