// Minimum and maximum as the hardware defines them.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

namespace petit_emu {

// v_min/v_max: a NaN gives the other operand, -0 < +0.
template <class T>
inline T min_ieee(T a, T b) {
    if (a != a) return b;
    if (b != b) return a;
    if (a == b) return std::signbit(a) ? a : b;
    return a < b ? a : b;
}
template <class T>
inline T max_ieee(T a, T b) {
    if (a != a) return b;
    if (b != b) return a;
    if (a == b) return std::signbit(a) ? b : a;
    return a > b ? a : b;
}
// v_minimum3/v_maximum3: a NaN wins.
template <class T>
inline T minimum(T a, T b) {
    if (a != a || b != b) return a + b;
    return min_ieee(a, b);
}
template <class T>
inline T maximum(T a, T b) {
    if (a != a || b != b) return a + b;
    return max_ieee(a, b);
}

}  // namespace petit_emu
