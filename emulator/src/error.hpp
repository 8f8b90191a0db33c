// The one exception of the emulator: everything a kernel does wrong ends here, with the place where it happened.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace petit_emu {

struct EmuError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

__attribute__((format(printf, 1, 2))) inline std::string format(const char* fmt, ...) {
    char buffer[2048];
    va_list args;
    va_start(args, fmt);
    std::vsnprintf(buffer, sizeof buffer, fmt, args);
    va_end(args);
    return buffer;
}

template <class... Args>
[[noreturn]] void fail(const char* fmt, Args... args) {
    if constexpr (sizeof...(Args) == 0)
        throw EmuError(fmt);
    else
        throw EmuError(format(fmt, args...));
}

}  // namespace petit_emu
