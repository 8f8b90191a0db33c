// A decoded instruction and the table that maps a mnemonic to the function executing it.
#pragma once
#include <string>
#include <unordered_map>
#include <vector>

#include "bits.hpp"

namespace petit_emu {

constexpr int kLanes = 64;
constexpr int kAgprBase = 256;  // register file: v0..v255 then a0..a255

struct alignas(64) Row {
    u32 l[kLanes];
};

enum class Unit : u8 { salu, valu, mfma, vmem, lds, smem, branch, wait, barrier, other, count };
const char* unit_name(Unit u);

enum class Arch : u8 { gfx90a, gfx942, gfx950 };

// SGPR numbers with a fixed meaning (the hardware's own encoding).
enum : u16 { kVcc = 106, kM0 = 124, kExec = 126 };
enum : u16 { kSccSrc = 200, kVccz, kExecz, kSharedBase, kSharedLimit, kPrivateBase, kPrivateLimit };

struct Operand {
    enum Kind : u8 { none, vgpr, sgpr, imm, special, off } kind = none;
    u8 dwords = 1;
    u16 reg = 0;
    bool neg = false, abs = false, sext = false, inline_float = false;
    double value = 0;           // of an inline float
    u64 bits = 0;               // immediate, already in the type the instruction reads
    const Row* rows = nullptr;  // the immediate in every lane, one row per dword
};

// How an instruction's sources and destination are read: decides inline constants, the sign bit of neg/abs, op_sel.
enum class Ty : u8 { b32, f32, f16, i16, b64, f64, pk16, pkf16, pkf32 };
enum class Dst : u8 { full, zero_high, keep_high };

struct Wave;
struct Inst;
using Handler = void (*)(Wave&, const Inst&);

struct OpDef {
    Handler fn = nullptr;
    Unit unit = Unit::other;
    Ty ty = Ty::b32;
    Dst dst = Dst::full;
    Ty dty = Ty::b32;        // type of the result (clamp and omod)
    int cycles = 0;          // MFMA: matrix-unit cycles
    bool int_clamp = false;  // an integer handler that saturates by itself
};

struct Dpp {
    enum Ctrl : u8 {
        off,
        quad_perm,
        row_shl,
        row_shr,
        row_ror,
        wave_shl,
        wave_shr,
        wave_rol,
        wave_ror,
        row_mirror,
        row_half_mirror,
        row_bcast15,
        row_bcast31,
        row_newbcast
    } ctrl = off;
    u8 arg = 0;  // shift, lane, or four 2-bit selectors
    u8 row_mask = 15, bank_mask = 15;
    bool bound_ctrl = false;
};

struct Sdwa {
    enum Sel : u8 { byte0, byte1, byte2, byte3, word0, word1, dword };
    bool on = false;
    Sel dst = dword, src[2] = {dword, dword};
    u8 unused = 0;  // 0 pad, 1 sext, 2 preserve
};

struct Inst {
    Handler fn = nullptr;
    const OpDef* def = nullptr;
    u64 pc = 0;
    u32 index = 0, size = 0;
    u8 nops = 0;
    Operand ops[7];
    // modifiers
    bool clamp = false, post = false;  // post: the result needs clamp, omod, SDWA or op_sel placement
    u8 omod = 0;                       // 1: *2, 2: *4, 3: /2
    u8 src_mods = 0;                   // bit k: operand k needs more than a plain read
    bool dst_hi = false;               // op_sel: a 16-bit result goes to the high half
    u8 op_sel = 0, op_sel_hi = 0xff, neg_lo = 0, neg_hi = 0;
    bool glc = false, slc = false, sc0 = false, sc1 = false, nt = false, lds = false, offen = false, idxen = false,
         gds = false, tfe = false;
    i32 offset = 0, offset0 = 0, offset1 = 0;
    u8 cbsz = 0, abid = 0, blgp = 0;
    u32 bitop3 = 0;
    int vmcnt = -1, lgkmcnt = -1, expcnt = -1;
    i64 target = -1;  // branch target (instruction index)
    Dpp dpp;
    Sdwa sdwa;
    std::string mnemonic, text;
};

struct OpTable {
    std::unordered_map<std::string, OpDef> ops;
    OpDef& add(const std::string& name, Handler fn, Unit unit, Ty ty = Ty::b32, Dst dst = Dst::full) {
        return ops[name] = {fn, unit, ty, dst, ty};
    }
    // Source and result of different types.
    OpDef& convert(const std::string& name, Handler fn, Ty from, Ty to, Dst dst = Dst::full) {
        return ops[name] = {fn, Unit::valu, from, dst, to};
    }
};
const OpTable& op_table(Arch arch);

// Each of these files adds its own instructions.
void add_salu(OpTable&);
void add_control(OpTable&);
void add_vop_int(OpTable&);
void add_vop_int_wide(OpTable&);
void add_vop_float(OpTable&);
void add_vop_f16(OpTable&);
void add_vop_f64(OpTable&);
void add_vop_convert(OpTable&, Arch);
void add_vop_scale_convert(OpTable&);
void add_vop_packed(OpTable&);
void add_vop_compare(OpTable&);
void add_vop_lane(OpTable&);
void add_mfma(OpTable&, Arch);
void add_lds(OpTable&, Arch);
void add_vmem(OpTable&, Arch);
void add_atomics(OpTable&, Arch);
void add_smem(OpTable&);

// The text of a code object. Instructions are decoded when a kernel that contains them is first launched.
struct CodeObject;
struct Kernel;
struct Line {
    u64 pc;
    u32 size;
    std::string mnemonic, operands;
};
struct Program {
    Arch arch{};
    std::vector<Line> lines;
    std::vector<Inst> code;                 // one per line; fn is null until decoded
    std::unordered_map<u64, u32> index_of;  // pc -> index
    std::unordered_map<u64, Row*> constants;

    Program(Arch a, std::vector<Line> text);
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;
    ~Program();
    // Decodes [begin, end) and checks that it names no register beyond the kernel's allocation.
    void prepare(const Kernel& k, u64 end);

  private:
    Inst decode(const Line& line, u32 index);
    void immediate(Operand& o, Ty ty, bool literal);
    void check_allocation(const Kernel& k, const Inst& in) const;
};

}  // namespace petit_emu
