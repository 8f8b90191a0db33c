// IEEE arithmetic for a scope: subnormals kept, round to nearest, whatever the thread was set to
// (torch.set_flush_denormal sets the former on the calling thread only, and its workers keep theirs).
#pragma once

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif
#include <cstdint>

namespace petit::cpu {
namespace {

class FloatMode {
  public:
    FloatMode() : saved_(get()) { set(kDefault); }
    ~FloatMode() { set(saved_); }
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

  private:
#if defined(__x86_64__) || defined(__i386__)
    using Register = unsigned;
    static constexpr Register kDefault = 0x1f80;  // MXCSR: all exceptions masked, nothing else
    static Register get() { return _mm_getcsr(); }
    static void set(Register value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
    using Register = uint64_t;
    static constexpr Register kDefault = 0;  // FPCR
    static Register get() {
        Register value;
        __asm__ volatile("mrs %0, fpcr" : "=r"(value));
        return value;
    }
    static void set(Register value) { __asm__ volatile("msr fpcr, %0" : : "r"(value)); }
#else
    using Register = int;
    static constexpr Register kDefault = 0;
    static Register get() { return 0; }
    static void set(Register) {}
#endif

    Register saved_;
};

}  // namespace
}  // namespace petit::cpu
