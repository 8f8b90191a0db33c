// Branches, barriers, waits, mode.
#include "group.hpp"
#include "module.hpp"
#include "wave.hpp"

namespace petit_emu {
namespace {

void jump(Wave& w, const Inst& in) {
    if (in.target < 0) w.die("branch target is not an instruction");
    w.pc = static_cast<u32>(in.target);
}
template <auto Condition>
void branch(Wave& w, const Inst& in) {
    if (Condition(w)) jump(w, in);
}

u64 pc_value(const Wave& w, const Inst& in) {
    return reinterpret_cast<u64>(w.group->launch->module->base) + in.pc + in.size;
}
void jump_to(Wave& w, u64 address) {
    const auto& index = w.program->index_of;
    auto it = index.find(address - reinterpret_cast<u64>(w.group->launch->module->base));
    if (it == index.end())
        w.die(format("jumps to 0x%llx, which is not an instruction", static_cast<unsigned long long>(address)));
    w.pc = it->second;
}
void s_getpc(Wave& w, const Inst& in) { w.write_s64(in.ops[0].reg, pc_value(w, in)); }
void s_setpc(Wave& w, const Inst& in) { jump_to(w, w.sop64(in.ops[0])); }
void s_swappc(Wave& w, const Inst& in) {
    const u64 to = w.sop64(in.ops[1]);
    w.write_s64(in.ops[0].reg, pc_value(w, in));
    jump_to(w, to);
}
void s_call(Wave& w, const Inst& in) {
    w.write_s64(in.ops[0].reg, pc_value(w, in));
    jump_to(w, pc_value(w, in) + static_cast<u64>(4 * static_cast<i64>(static_cast<i16>(in.ops[1].bits))));
}

void s_waitcnt(Wave& w, const Inst& in) {
    if (in.vmcnt >= 0) w.wait(w.vm, in.vmcnt);
    if (in.lgkmcnt >= 0) w.wait(w.lgkm, in.lgkmcnt);
}
void s_barrier(Wave& w, const Inst&) { w.stop = WaveStop::barrier; }
void s_endpgm(Wave& w, const Inst&) {
    // Stores still in flight stay invisible to the other CUs (nothing ordered them) until some wave has to wait:
    // Launch::run.
    w.stop = WaveStop::done;
}
void nothing(Wave&, const Inst&) {}

// hwreg(HW_REG_MODE, offset, width)
struct HwReg {
    bool mode;
    u32 offset = 0, width = 32;
};
HwReg parse_hwreg(const Wave& w, const Inst& in) {
    const auto at = in.text.find("hwreg(");
    if (at == std::string::npos) w.die("hwreg operand not understood");
    HwReg r{in.text.compare(at, 17, "hwreg(HW_REG_MODE") == 0};
    unsigned o, n;
    const auto comma = in.text.find(',', at);
    if (comma < in.text.find(')', at) && std::sscanf(in.text.c_str() + comma, ", %u, %u", &o, &n) == 2)
        r.offset = o, r.width = n;
    return r;
}
void set_mode(Wave& w, const Inst& in, u32 value) {
    const HwReg r = parse_hwreg(w, in);
    if (!r.mode) w.die("only the MODE hardware register may be written");
    const u32 mask = (r.width == 32 ? ~0u : (1u << r.width) - 1u) << r.offset;
    w.mode = (w.mode & ~mask) | (value << r.offset & mask);
    apply_float_mode(w);
}
void s_setreg(Wave& w, const Inst& in) { set_mode(w, in, w.sop(in.ops[1])); }
void s_getreg(Wave& w, const Inst& in) {
    const HwReg r = parse_hwreg(w, in);
    u32 x = w.mode;
    if (!r.mode) {
        // HW_ID and XCC_ID tell a kernel where it runs; the model's own numbers.
        if (in.text.find("XCC_ID") != std::string::npos)
            x = w.group->xcd;
        else if (in.text.find("HW_ID") != std::string::npos)
            x = w.group->linear;
        else
            w.die("this hardware register is not modelled");
    }
    w.write_s(in.ops[0].reg, r.width == 32 ? x >> r.offset : x >> r.offset & ((1u << r.width) - 1u));
}
void s_memtime(Wave& w, const Inst& in) { w.write_s64(in.ops[0].reg, w.group->launch->coherence->tick()); }

}  // namespace

// f32 rounding and denormal handling are the host's own, through MXCSR. f16 and f64 keep denormals (the launch checks
// that).
void apply_float_mode(const Wave& w) {
    static constexpr unsigned rounding[4] = {_MM_ROUND_NEAREST, _MM_ROUND_UP, _MM_ROUND_DOWN, _MM_ROUND_TOWARD_ZERO};
    unsigned csr = _MM_MASK_MASK | rounding[w.mode & 3];
    if (!(w.mode >> 4 & 2)) csr |= 0x8000u;  // f32 denormal results become zero
    if (!(w.mode >> 4 & 1)) csr |= 0x0040u;  // f32 denormal sources are read as zero
    if ((w.mode >> 6 & 3) != 3)
        fail("%s: MODE flushes f16/f64 denormals, which is not modelled", w.group->kernel_name());
    _mm_setcsr(csr);
}

void add_control(OpTable& t) {
    const auto br = [&](const char* name, Handler fn) { t.add(name, fn, Unit::branch); };
    br("s_branch", branch<[](const Wave&) { return true; }>);
    br("s_cbranch_scc0", branch<[](const Wave& w) { return !w.get_scc(); }>);
    br("s_cbranch_scc1", branch<[](const Wave& w) { return w.get_scc(); }>);
    br("s_cbranch_vccz", branch<[](const Wave& w) { return w.read_s64(kVcc) == 0; }>);
    br("s_cbranch_vccnz", branch<[](const Wave& w) { return w.read_s64(kVcc) != 0; }>);
    br("s_cbranch_execz", branch<[](const Wave& w) { return w.exec() == 0; }>);
    br("s_cbranch_execnz", branch<[](const Wave& w) { return w.exec() != 0; }>);
    t.add("s_getpc_b64", s_getpc, Unit::salu), t.add("s_setpc_b64", s_setpc, Unit::salu);
    t.add("s_swappc_b64", s_swappc, Unit::salu), t.add("s_call_b64", s_call, Unit::salu);
    t.add("s_waitcnt", s_waitcnt, Unit::wait), t.add("s_barrier", s_barrier, Unit::barrier),
        t.add("s_endpgm", s_endpgm, Unit::other);
    for (const char* name :
         {"s_nop", "s_sleep", "s_setprio", "s_code_end", "s_inst_prefetch", "s_sethalt", "s_icache_inv",
          "s_incperflevel", "s_decperflevel", "s_ttracedata", "s_set_gpr_idx_off", "s_sendmsg"})
        t.add(name, nothing, Unit::other);
    t.add("s_setreg_b32", s_setreg, Unit::salu), t.add("s_setreg_imm32_b32", s_setreg, Unit::salu),
        t.add("s_getreg_b32", s_getreg, Unit::salu);
    t.add("s_memtime", s_memtime, Unit::smem), t.add("s_memrealtime", s_memtime, Unit::smem);
}

}  // namespace petit_emu
