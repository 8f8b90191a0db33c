// Device types and the few raw operations every kernel uses. No HIP header is needed: the kernels are compiled
// with `-nogpuinc -nogpulib`, so a machine without ROCm can build them.
#pragma once

#define PETIT_DEVICE __attribute__((device)) __attribute__((always_inline)) inline
#define PETIT_SHARED __attribute__((shared))
#define PETIT_KERNEL(threads, waves_per_simd)                                                         \
    extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(threads, threads))) \
    __attribute__((amdgpu_waves_per_eu(waves_per_simd)))

namespace petit {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

using u32x2 = u32 __attribute__((ext_vector_type(2)));
using u32x4 = u32 __attribute__((ext_vector_type(4)));
using u16x4 = u16 __attribute__((ext_vector_type(4)));
using f16x2 = _Float16 __attribute__((ext_vector_type(2)));
using f16x4 = _Float16 __attribute__((ext_vector_type(4)));
using f16x8 = _Float16 __attribute__((ext_vector_type(8)));
using bf16x4 = __bf16 __attribute__((ext_vector_type(4)));
using bf16x8 = __bf16 __attribute__((ext_vector_type(8)));
using s16x4 = short __attribute__((ext_vector_type(4)));
using f32x4 = float __attribute__((ext_vector_type(4)));

template <class To, class From>
PETIT_DEVICE To as(From v) {
    static_assert(sizeof(To) == sizeof(From));
    return __builtin_bit_cast(To, v);
}

template <class T>
PETIT_DEVICE T min(T a, T b) {
    return a < b ? a : b;
}
template <class T>
PETIT_DEVICE T max(T a, T b) {
    return a > b ? a : b;
}

constexpr u32 kWave = 64;

PETIT_DEVICE u32 lane_id() { return __builtin_amdgcn_workitem_id_x() % kWave; }
/// The wave's number inside its workgroup, in a scalar register.
PETIT_DEVICE u32 wave_id() { return __builtin_amdgcn_readfirstlane(__builtin_amdgcn_workitem_id_x() / kWave); }

/// Buffer descriptor over [base, base + bytes): loads outside it return 0 and touch no memory. 32-bit size, so callers
/// rebase per tile instead of addressing a whole (possibly > 4 GiB) tensor through one descriptor.
using Buffer = __amdgpu_buffer_rsrc_t;
PETIT_DEVICE Buffer make_buffer(const void* base, u32 bytes) {
    return __builtin_amdgcn_make_buffer_rsrc(const_cast<void*>(base), 0, bytes, 0x00027000);
}
constexpr u32 kOutOfRange = 0x80000000u;  // a lane offset no descriptor reaches

// `kStream` marks data that is read once (weights): it must not evict the activations from L2.
constexpr int kCached = 0, kStream = 2;
template <int kPolicy = kCached>
PETIT_DEVICE u32x4 load16(Buffer b, u32 lane_offset, u32 offset) {
    return __builtin_amdgcn_raw_buffer_load_b128(b, lane_offset, offset, kPolicy);
}
template <int kPolicy = kCached>
PETIT_DEVICE u32x2 load8(Buffer b, u32 lane_offset, u32 offset) {
    return __builtin_amdgcn_raw_buffer_load_b64(b, lane_offset, offset, kPolicy);
}
template <int kPolicy = kCached>
PETIT_DEVICE u32 load4(Buffer b, u32 lane_offset, u32 offset) {
    return __builtin_amdgcn_raw_buffer_load_b32(b, lane_offset, offset, kPolicy);
}

PETIT_DEVICE void store16(Buffer b, u32 lane_offset, u32 offset, u32x4 v) {
    __builtin_amdgcn_raw_buffer_store_b128(v, b, lane_offset, offset, 0);
}

// Hide how a value was made. A loop counter so treated stays scalar (loop strength reduction likes to keep copies of it in
// vector registers); a lane offset so treated keeps constant parts in the instruction's offset field.
PETIT_DEVICE u32 in_sgpr(u32 v) {
    asm("" : "+s"(v));
    return v;
}
PETIT_DEVICE u32 in_vgpr(u32 v) {
    asm("" : "+v"(v));
    return v;
}

/// Keeps a rare branch a branch: the compiler would rather compute both sides and select.
PETIT_DEVICE void never_speculate() { asm volatile("; rare"); }

/// Nothing is moved across this point by the scheduler: prefetches stay where they are written.
PETIT_DEVICE void pin_schedule() { __builtin_amdgcn_sched_barrier(0); }

/// Workgroup barrier with the memory order LDS exchange needs.
PETIT_DEVICE void barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

/// The same for LDS alone: global loads in flight stay in flight.
PETIT_DEVICE void lds_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

/// Whether the flag is set in any lane of any of `kWaves` waves; `words` is LDS nobody else uses around the call.
template <int kWaves>
PETIT_DEVICE bool any_wave(bool flag, u32* words) {
    const u32 mine = __builtin_amdgcn_ballot_w64(flag) != 0;
    lds_barrier();
    words[wave_id()] = mine;
    lds_barrier();
    u32 any = 0;
#pragma unroll
    for (int w = 0; w < kWaves; ++w) any |= words[w];
    lds_barrier();
    return __builtin_amdgcn_readfirstlane(any) != 0;
}

}  // namespace petit
