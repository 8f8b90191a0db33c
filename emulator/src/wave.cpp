#include "wave.hpp"

#include "group.hpp"
#include "valu.hpp"

namespace petit_emu {

void Wave::die(const std::string& what) const {
    const Inst* in = now;
    fail("%s: %s [workgroup (%u,%u,%u), wave %u, pc 0x%llx: %s]", group->kernel_name(), what.c_str(), group->id[0],
         group->id[1], group->id[2], unsigned(id), in ? static_cast<unsigned long long>(in->pc) : 0ull,
         in ? in->text.c_str() : "?");
}

static std::string reg_name(unsigned reg) {
    return reg < kAgprBase ? format("v%u", reg) : format("a%u", reg - kAgprBase);
}

static std::string loading_pc(const Wave& w, unsigned reg) {
    for (const auto* q : {&w.vm, &w.lgkm})
        for (const InFlight& f : *q)
            if (reg >= f.first && reg < unsigned(f.first) + f.count)
                return format("loaded by pc 0x%llx", static_cast<unsigned long long>(f.pc));
    return "loading";
}

void Wave::die_unready(unsigned reg, u64 lanes) const {
    const int lane = std::countr_zero(lanes & ~ready[reg]);
    if (pending[reg])
        die(format("reads %s before the s_waitcnt that its load needs (%s, lane %d)", reg_name(reg).c_str(),
                   loading_pc(*this, reg).c_str(), lane));
    die(format("reads %s, which is not initialised in lane %d", reg_name(reg).c_str(), lane));
}
void Wave::die_overwrite(unsigned reg) const {
    die(format("overwrites %s while a load to it is in flight (%s)", reg_name(reg).c_str(),
               loading_pc(*this, reg).c_str()));
}
void Wave::die_sgpr(unsigned reg) const {
    const bool loading = spending[reg >> 6] >> (reg & 63) & 1;
    die(format(loading ? "reads s%u before the s_waitcnt lgkmcnt(0) that its load needs"
                       : "reads s%u, which is not initialised",
               reg));
}
void Wave::die_sgpr_overwrite(unsigned reg) const {
    die(format("overwrites s%u while a scalar load to it is in flight", reg));
}

u32 Wave::special(unsigned reg) const {
    switch (reg) {
        case kSccSrc:
            return get_scc();
        case kVccz:
            return read_s64(kVcc) == 0;
        case kExecz:
            return exec() == 0;
        default:
            return static_cast<u32>(special64(reg));
    }
}
u64 Wave::special64(unsigned reg) const {
    switch (reg) {
        case kSharedBase:
            return kSharedAperture;
        case kPrivateBase:
            return kPrivateAperture;
        case kSharedLimit:
        case kPrivateLimit:
            return 0xffffffffull;
        default:
            return special(reg);
    }
}

// --- sources with modifiers
// -------------------------------------------------------------------------------------------------------

static int dpp_source(const Dpp& d, int l) {  // source lane or -1
    const int row = l & ~15, i = l & 15;
    switch (d.ctrl) {
        case Dpp::quad_perm:
            return (l & ~3) | (d.arg >> (2 * (l & 3)) & 3);
        case Dpp::row_shl:
            return i + d.arg < 16 ? l + d.arg : -1;
        case Dpp::row_shr:
            return i >= d.arg ? l - d.arg : -1;
        case Dpp::row_ror:
            return row | ((i - d.arg) & 15);
        case Dpp::wave_shl:
            return l + 1 < 64 ? l + 1 : -1;
        case Dpp::wave_rol:
            return (l + 1) & 63;
        case Dpp::wave_shr:
            return l - 1;
        case Dpp::wave_ror:
            return (l - 1) & 63;
        case Dpp::row_mirror:
            return row | (15 - i);
        case Dpp::row_half_mirror:
            return (l & ~7) | (7 - (l & 7));
        case Dpp::row_bcast15:
            return row ? row - 1 : -1;
        case Dpp::row_bcast31:
            return l >= 32 ? 31 : -1;
        case Dpp::row_newbcast:
            return row | d.arg;
        default:
            return l;
    }
}

u64 Wave::dpp_lanes(const Inst& in) const {
    const u64 active = exec();
    u64 lanes = 0;
    for (int l = 0; l < kLanes; ++l) {
        if (!(active >> l & 1) || !(in.dpp.row_mask >> (l >> 4) & 1) || !(in.dpp.bank_mask >> (l >> 2 & 3) & 1))
            continue;
        const int s = dpp_source(in.dpp, l);
        if (in.dpp.bound_ctrl || (s >= 0 && (active >> s & 1))) lanes |= 1ull << l;
    }
    return lanes;
}

const u32* Wave::src_modified(const Inst& in, int k, Row& tmp, u64 lanes) const {
    const Operand& o = in.ops[k];
    if (k == 1 && in.dpp.ctrl) {
        const u64 active = exec();
        u64 used = 0;
        int from[kLanes];
        for (int l = 0; l < kLanes; ++l) {
            from[l] = dpp_source(in.dpp, l);
            if (from[l] >= 0 && !(active >> from[l] & 1)) from[l] = -1;
            if ((lanes >> l & 1) && from[l] >= 0) used |= 1ull << from[l];
        }
        Row plain;
        const u32* p = dword(o, 0, plain, used);
        for (int l = 0; l < kLanes; ++l) tmp.l[l] = from[l] >= 0 ? p[from[l]] : 0;
    } else {
        Row plain;
        const u32* p = dword(o, 0, plain, lanes);
        std::memcpy(tmp.l, p, sizeof tmp.l);
    }
    const bool half = in.def->ty == Ty::f16 || in.def->ty == Ty::i16;
    if (in.sdwa.on && k <= 2) {
        const Sdwa::Sel sel = in.sdwa.src[k - 1];
        if (sel != Sdwa::dword) {
            const bool word = sel >= Sdwa::word0;
            const int shift = word ? (sel - Sdwa::word0) * 16 : sel * 8;
            for (u32& x : tmp.l) {
                const u32 y = x >> shift;
                x = word ? (o.sext ? u32(i32(i16(y))) : y & 0xffffu) : (o.sext ? u32(i32(i8(y))) : y & 0xffu);
            }
        } else if (o.sext && half)
            for (u32& x : tmp.l) x = u32(i32(i16(x)));
    }
    if (half && !in.sdwa.on && (in.op_sel >> (k - 1) & 1))
        for (u32& x : tmp.l) x >>= 16;
    const u32 sign = half ? 0x8000u : 0x80000000u;
    if (o.abs)
        for (u32& x : tmp.l) x &= ~sign;
    if (o.neg)
        for (u32& x : tmp.l) x ^= sign;
    return tmp.l;
}

void read_wide(const Wave& w, const Inst& in, int k, Wide& out, u64 lanes) {
    const Operand& o = in.ops[k];
    if (in.dpp.ctrl && k == 1) w.die("DPP on a 64-bit operand is not supported");
    Row t0, t1;
    const u32 *lo, *hi;
    if (o.kind == Operand::sgpr) {
        const u64 x = w.read_s64(o.reg);
        for (u64& y : out.l) y = x;
    } else {
        lo = w.dword(o, 0, t0, lanes), hi = w.dword(o, 1, t1, lanes);
        for (int l = 0; l < kLanes; ++l) out.l[l] = lo[l] | u64(hi[l]) << 32;
    }
    if (o.abs)
        for (u64& x : out.l) x &= ~(1ull << 63);
    if (o.neg)
        for (u64& x : out.l) x ^= 1ull << 63;
}

void write_wide(Wave& w, const Inst& in, const Wide& x, u64 lanes) {
    Row lo, hi;
    for (int l = 0; l < kLanes; ++l) {
        u64 y = x.l[l];
        if (in.post && in.def->dty == Ty::f64) {
            double d = f64(y);
            if (in.omod) d *= in.omod == 1 ? 2.0 : in.omod == 2 ? 4.0 : 0.5;
            if (in.clamp) d = d > 0 ? (d < 1 ? d : 1.0) : 0.0;
            y = b64(d);
        }
        lo.l[l] = static_cast<u32>(y), hi.l[l] = static_cast<u32>(y >> 32);
    }
    const unsigned d = in.ops[0].reg;
    w.may_write(d), w.may_write(d + 1);
    blend(w.v[d].l, lo.l, lanes), blend(w.v[d + 1].l, hi.l, lanes);
    w.mark(d, lanes), w.mark(d + 1, lanes);
}

void finish_valu(Wave& w, const Inst& in, Row& r, u64 lanes) {
    const OpDef& def = *in.def;
    const unsigned d = in.ops[0].reg;
    w.may_write(d);
    if (in.omod || in.clamp) {
        const float factor = in.omod == 0 ? 1.0f : in.omod == 1 ? 2.0f : in.omod == 2 ? 4.0f : 0.5f;
        if (def.dty == Ty::f32) {
            for (u32& x : r.l) {
                float y = f32(x);
                if (in.omod) y *= factor;
                if (in.clamp) y = y > 0 ? (y < 1 ? y : 1.0f) : 0.0f;  // NaN -> 0 (DX10_CLAMP)
                x = b32(y);
            }
        } else if (def.dty == Ty::f16) {
            for (u32& x : r.l) {
                float y = h2f(x);
                if (in.omod) y *= factor;
                if (in.clamp) y = y > 0 ? (y < 1 ? y : 1.0f) : 0.0f;
                x = f2h(y);
            }
        } else if (in.omod || !def.int_clamp) {
            w.die("clamp or output multiplier on this result is not supported");
        }
    }
    const Row& old = w.v[d];
    if (in.sdwa.on && in.sdwa.dst != Sdwa::dword) {
        const Sdwa::Sel sel = in.sdwa.dst;
        const bool word = sel >= Sdwa::word0;
        const int shift = word ? (sel - Sdwa::word0) * 16 : sel * 8;
        const u32 mask = (word ? 0xffffu : 0xffu) << shift;
        if (in.sdwa.unused == 2) w.need(d, lanes);
        for (int l = 0; l < kLanes; ++l) {
            const u32 x = r.l[l] << shift & mask;
            u32 rest = 0;
            if (in.sdwa.unused == 2)
                rest = old.l[l] & ~mask;
            else if (in.sdwa.unused == 1 && (r.l[l] >> (word ? 15 : 7) & 1))
                rest = shift + (word ? 16 : 8) < 32 ? ~0u << (shift + (word ? 16 : 8)) : 0u;
            r.l[l] = x | rest;
        }
    } else if (in.dst_hi) {
        for (int l = 0; l < kLanes; ++l) r.l[l] = (old.l[l] & 0xffffu) | r.l[l] << 16;
    } else if (def.dst == Dst::keep_high && !in.sdwa.on) {
        for (int l = 0; l < kLanes; ++l) r.l[l] = (old.l[l] & 0xffff0000u) | (r.l[l] & 0xffffu);
    }
    blend(w.v[d].l, r.l, lanes);
    w.mark(d, lanes);
}

// --- outstanding memory instructions
// ----------------------------------------------------------------------------------------------

void Wave::issue(InFlight f) {
    f.pc = now->pc;
    for (unsigned r = f.first; r < unsigned(f.first) + f.count; ++r) {
        pending[r] += static_cast<u8>(f.vm + f.lgkm);
        loaded[r] |= f.lanes;
        ready[r] &= ~f.lanes;
    }
    for (unsigned r = f.sfirst; r < unsigned(f.sfirst) + f.scount; ++r) {
        spending[r >> 6] |= 1ull << (r & 63);
        sready[r >> 6] &= ~(1ull << (r & 63));
    }
    if (f.vm) vm.push_back(f);
    if (f.lgkm) lgkm.push_back(std::move(f));  // FLAT sits in both queues and is done when both are
}

void Wave::retire(InFlight& f, bool) {
    for (unsigned r = f.first; r < unsigned(f.first) + f.count; ++r) {
        if (--pending[r] == 0) ready[r] |= loaded[r], loaded[r] = 0;
    }
    for (unsigned r = f.sfirst; r < unsigned(f.sfirst) + f.scount; ++r) {
        spending[r >> 6] &= ~(1ull << (r & 63));
        sready[r >> 6] |= 1ull << (r & 63);
    }
    group->retired(*this, f);
}

// At most n instructions may remain outstanding. An in-order one is surely done when n or more younger in-order ones
// follow it; an out-of-order one (scalar loads, FLAT) only when nothing at all may remain.
void Wave::wait(std::deque<InFlight>& queue, int n) {
    if (queue.empty()) return;
    int younger = 0;
    std::vector<std::size_t> done;
    for (std::size_t i = queue.size(); i-- > 0;) {
        const InFlight& f = queue[i];
        if (f.order == InFlight::in_order ? younger >= n : n == 0) done.push_back(i);
        if (f.order == InFlight::in_order) ++younger;
    }
    for (std::size_t k = done.size(); k-- > 0;) retire(queue[done[k]], &queue == &vm);  // oldest first
    for (std::size_t i : done) queue.erase(queue.begin() + static_cast<std::ptrdiff_t>(i));
}

}  // namespace petit_emu
