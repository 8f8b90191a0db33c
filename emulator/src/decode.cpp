// Text of an instruction -> Inst: operands, modifiers, the function that executes it.
#include <algorithm>
#include <set>

#include "disasm.hpp"
#include "elf.hpp"
#include "error.hpp"
#include "inst.hpp"

namespace petit_emu {
namespace {

using std::string;

bool starts(const string& s, const char* p) { return s.rfind(p, 0) == 0; }
bool ends(const string& s, const char* p) {
    const string t = p;
    return s.size() >= t.size() && s.compare(s.size() - t.size(), t.size(), t) == 0;
}

const std::set<string> kPlainModifiers = {"glc",   "slc",   "dlc",   "sc0", "sc1", "nt",         "lds",
                                          "offen", "idxen", "clamp", "gds", "tfe", "row_mirror", "row_half_mirror"};

bool is_modifier(const string& t) {
    if (kPlainModifiers.count(t)) return true;
    const auto colon = t.find(':');
    return colon != string::npos && t.find('[') > colon && t[0] != '-' && t[0] != '|';
}

// Commas separate operands; spaces separate modifiers. Brackets, parentheses and |x| protect both.
void split(const string& text, std::vector<string>& operands, std::vector<string>& modifiers) {
    int depth = 0;
    string token;
    auto flush = [&] {
        if (token.empty()) return;
        (is_modifier(token) ? modifiers : operands).push_back(token);
        token.clear();
    };
    for (char c : text) {
        if (c == '[' || c == '(') ++depth;
        if (c == ']' || c == ')') --depth;
        if (depth == 0 && (c == ',' || c == ' '))
            flush();
        else if (c != ' ')
            token += c;
    }
    flush();
}

const std::unordered_map<string, std::pair<int, int>> kNamed = {// name -> register, dwords
                                                                {"vcc", {kVcc, 2}},
                                                                {"vcc_lo", {kVcc, 1}},
                                                                {"vcc_hi", {kVcc + 1, 1}},
                                                                {"exec", {kExec, 2}},
                                                                {"exec_lo", {kExec, 1}},
                                                                {"exec_hi", {kExec + 1, 1}},
                                                                {"m0", {kM0, 1}},
                                                                {"flat_scratch", {102, 2}},
                                                                {"flat_scratch_lo", {102, 1}},
                                                                {"flat_scratch_hi", {103, 1}},
                                                                {"xnack_mask", {104, 2}},
                                                                {"xnack_mask_lo", {104, 1}},
                                                                {"xnack_mask_hi", {105, 1}}};
const std::unordered_map<string, int> kSpecial = {{"scc", kSccSrc},
                                                  {"src_scc", kSccSrc},
                                                  {"vccz", kVccz},
                                                  {"src_vccz", kVccz},
                                                  {"execz", kExecz},
                                                  {"src_execz", kExecz},
                                                  {"src_shared_base", kSharedBase},
                                                  {"src_shared_limit", kSharedLimit},
                                                  {"src_private_base", kPrivateBase},
                                                  {"src_private_limit", kPrivateLimit}};

Operand parse_operand(string t) {
    Operand o;
    if (starts(t, "sext(")) o.sext = true, t = t.substr(5, t.size() - 6);
    if (starts(t, "neg(")) o.neg = true, t = t.substr(4, t.size() - 5);
    if (t.size() > 1 && t[0] == '-' && !std::isdigit(static_cast<unsigned char>(t[1])) && t[1] != '.')
        o.neg = true, t = t.substr(1);
    if (starts(t, "abs(")) o.abs = true, t = t.substr(4, t.size() - 5);
    if (t[0] == '|') o.abs = true, t = t.substr(1, t.size() - 2);
    auto reg = [&](const char* prefix, Operand::Kind kind, int base) {
        const std::size_t n = std::strlen(prefix);
        if (!starts(t, prefix) || t.size() <= n) return false;
        int first, last;
        if (t[n] == '[') {
            char* end;
            first = last = static_cast<int>(std::strtol(t.c_str() + n + 1, &end, 10));
            if (*end == ':') last = static_cast<int>(std::strtol(end + 1, &end, 10));
        } else if (std::isdigit(static_cast<unsigned char>(t[n]))) {
            first = last = std::atoi(t.c_str() + n);
        } else
            return false;
        o.kind = kind, o.reg = static_cast<u16>(base + first), o.dwords = static_cast<u8>(last - first + 1);
        return true;
    };
    if (reg("v", Operand::vgpr, 0) || reg("a", Operand::vgpr, kAgprBase) || reg("s", Operand::sgpr, 0) ||
        reg("ttmp", Operand::sgpr, 108))
        return o;
    if (auto it = kNamed.find(t); it != kNamed.end()) {
        o.kind = Operand::sgpr, o.reg = static_cast<u16>(it->second.first),
        o.dwords = static_cast<u8>(it->second.second);
        return o;
    }
    if (auto it = kSpecial.find(t); it != kSpecial.end()) {
        o.kind = Operand::sgpr, o.reg = static_cast<u16>(it->second);
        return o;
    }
    if (t == "off" || t == "null") {
        o.kind = Operand::off;
        return o;
    }
    o.kind = Operand::imm;
    if (t.find('.') != string::npos && !starts(t, "0x")) {
        o.inline_float = true, o.value = std::strtod(t.c_str(), nullptr);
        if (starts(t, "0.15915") || starts(t, "0.1592")) o.value = 0.15915494309189532;
    } else {
        char* end;
        o.bits = t[0] == '-' ? static_cast<u64>(std::strtoll(t.c_str(), &end, 0)) : std::strtoull(t.c_str(), &end, 0);
        if (*end) o.kind = Operand::none;  // a name the handler does not need (sendmsg(...), hwreg(...))
    }
    return o;
}

}  // namespace

void Program::immediate(Operand& o, Ty ty, bool literal) {
    if (o.inline_float) {
        switch (ty) {
            case Ty::f16:
            case Ty::i16:
            case Ty::pk16:
            case Ty::pkf16:
                o.bits = f2h_rne(static_cast<float>(o.value));
                break;
            case Ty::f64:
            case Ty::b64:
                o.bits = b64(o.value);
                break;
            case Ty::pkf32:
                o.bits = b32(static_cast<float>(o.value)) * 0x100000001ull;
                break;
            default:
                o.bits = b32(static_cast<float>(o.value));
        }
    } else if (ty == Ty::f64 && literal && o.bits <= 0xffffffffull) {
        o.bits <<= 32;  // a literal is the high half of a double
    } else if (ty == Ty::pkf32) {
        o.bits = (o.bits & 0xffffffffull) * 0x100000001ull;
    }
    Row*& rows = constants[o.bits];
    if (!rows) {
        rows = new (std::align_val_t(64)) Row[2];
        for (int l = 0; l < kLanes; ++l)
            rows[0].l[l] = static_cast<u32>(o.bits), rows[1].l[l] = static_cast<u32>(o.bits >> 32);
    }
    o.rows = rows;
}

namespace {

u8 bit_list(const string& v, int* count = nullptr) {  // "[1,0,1]" -> bit 0 first
    u8 bits = 0;
    int n = 0;
    for (char c : v)
        if (c == '0' || c == '1') bits |= static_cast<u8>((c - '0') << n++);
    if (count) *count = n;
    return bits;
}

Sdwa::Sel sdwa_sel(const string& v) {
    static const std::unordered_map<string, Sdwa::Sel> names = {
        {"BYTE_0", Sdwa::byte0}, {"BYTE_1", Sdwa::byte1}, {"BYTE_2", Sdwa::byte2}, {"BYTE_3", Sdwa::byte3},
        {"WORD_0", Sdwa::word0}, {"WORD_1", Sdwa::word1}, {"DWORD", Sdwa::dword}};
    return names.at(v);
}

bool dpp_modifier(Dpp& d, const string& key, const string& value) {
    static const std::unordered_map<string, Dpp::Ctrl> names = {
        {"row_shl", Dpp::row_shl},   {"row_shr", Dpp::row_shr},          {"row_ror", Dpp::row_ror},
        {"wave_shl", Dpp::wave_shl}, {"wave_shr", Dpp::wave_shr},        {"wave_rol", Dpp::wave_rol},
        {"wave_ror", Dpp::wave_ror}, {"row_newbcast", Dpp::row_newbcast}};
    if (key == "quad_perm") {
        d.ctrl = Dpp::quad_perm;
        int n = 0;
        for (char c : value)
            if (c >= '0' && c <= '3') d.arg |= static_cast<u8>((c - '0') << (2 * n++));
    } else if (auto it = names.find(key); it != names.end()) {
        d.ctrl = it->second, d.arg = static_cast<u8>(std::atoi(value.c_str()));
    } else if (key == "row_mirror")
        d.ctrl = Dpp::row_mirror;
    else if (key == "row_half_mirror")
        d.ctrl = Dpp::row_half_mirror;
    else if (key == "row_bcast")
        d.ctrl = value == "15" ? Dpp::row_bcast15 : Dpp::row_bcast31;
    else if (key == "row_mask")
        d.row_mask = static_cast<u8>(std::strtol(value.c_str(), nullptr, 0));
    else if (key == "bank_mask")
        d.bank_mask = static_cast<u8>(std::strtol(value.c_str(), nullptr, 0));
    else if (key == "bound_ctrl")
        d.bound_ctrl = true;
    else
        return false;
    return true;
}

void parse_modifier(Inst& in, const string& m, int sources) {
    const auto colon = m.find(':');
    const string key = m.substr(0, colon), value = colon == string::npos ? "" : m.substr(colon + 1);
    const int number = static_cast<int>(std::strtol(value.c_str(), nullptr, 0));
    if (key == "glc")
        in.glc = true;
    else if (key == "slc")
        in.slc = true;
    else if (key == "sc0")
        in.sc0 = true;
    else if (key == "sc1")
        in.sc1 = true;
    else if (key == "nt")
        in.nt = true;
    else if (key == "lds")
        in.lds = true;
    else if (key == "offen")
        in.offen = true;
    else if (key == "idxen")
        in.idxen = true;
    else if (key == "gds")
        in.gds = true;
    else if (key == "tfe")
        in.tfe = true;
    else if (key == "clamp")
        in.clamp = true;
    else if (key == "offset")
        in.offset = number;
    else if (key == "offset0")
        in.offset0 = number;
    else if (key == "offset1")
        in.offset1 = number;
    else if (key == "cbsz")
        in.cbsz = static_cast<u8>(number);
    else if (key == "abid")
        in.abid = static_cast<u8>(number);
    else if (key == "blgp")
        in.blgp = static_cast<u8>(number);
    else if (key == "bitop3")
        in.bitop3 = static_cast<u32>(number);
    else if (key == "mul")
        in.omod = number == 2 ? 1 : 2;
    else if (key == "div")
        in.omod = 3;
    else if (key == "op_sel") {
        int n;
        in.op_sel = bit_list(value, &n);
        in.dst_hi = n == sources + 1 && (in.op_sel >> sources & 1);
    } else if (key == "op_sel_hi")
        in.op_sel_hi = bit_list(value);
    else if (key == "neg_lo")
        in.neg_lo = bit_list(value);
    else if (key == "neg_hi")
        in.neg_hi = bit_list(value);
    else if (key == "neg")
        in.blgp = bit_list(value);  // f64 MFMA
    else if (key == "dst_sel")
        in.sdwa.dst = sdwa_sel(value), in.sdwa.on = true;
    else if (key == "dst_unused")
        in.sdwa.unused = value == "UNUSED_SEXT" ? 1 : value == "UNUSED_PRESERVE" ? 2 : 0;
    else if (key == "src0_sel")
        in.sdwa.src[0] = sdwa_sel(value), in.sdwa.on = true;
    else if (key == "src1_sel")
        in.sdwa.src[1] = sdwa_sel(value), in.sdwa.on = true;
    else if (key == "format" || key == "dlc")
        fail("modifier %s is not supported", m.c_str());
    else if (!dpp_modifier(in.dpp, key, value))
        fail("modifier %s is not known", m.c_str());
}

void parse_waitcnt(Inst& in, const string& text) {
    auto field = [&](const char* name, int& out) {
        const auto at = text.find(name);
        if (at != string::npos) out = std::atoi(text.c_str() + at + std::strlen(name) + 1);
    };
    field("vmcnt", in.vmcnt), field("lgkmcnt", in.lgkmcnt), field("expcnt", in.expcnt);
    if (in.vmcnt < 0 && in.lgkmcnt < 0 && in.expcnt < 0 &&
        !text.empty()) {  // plain number: every field at its maximum, or all zero
        const u32 x = static_cast<u32>(std::strtoul(text.c_str(), nullptr, 0));
        in.vmcnt = static_cast<int>((x & 15u) | (x >> 10 & 48u)), in.lgkmcnt = static_cast<int>(x >> 8 & 15u);
    }
}

}  // namespace

Program::Program(Arch a, std::vector<Line> text) : arch(a), lines(std::move(text)), code(lines.size()) {
    index_of.reserve(lines.size());
    for (u32 i = 0; i < lines.size(); ++i)
        index_of[lines[i].pc] = i, code[i].pc = lines[i].pc, code[i].size = lines[i].size;
}
Program::~Program() {
    for (auto& [bits, r] : constants) ::operator delete[](r, std::align_val_t(64));
}

Inst Program::decode(const Line& line, u32 index) {
    Inst in;
    in.pc = line.pc, in.size = line.size, in.index = index;
    in.text = line.mnemonic + (line.operands.empty() ? "" : " " + line.operands);
    string name = line.mnemonic;
    for (const char* suffix : {"_e32", "_e64", "_sdwa", "_dpp"})
        if (ends(name, suffix)) {
            name.resize(name.size() - std::strlen(suffix));
            break;
        }
    in.mnemonic = name;
    const OpTable& table = op_table(arch);
    auto it = table.ops.find(name);
    if (it == table.ops.end()) return in;  // an error when it is executed
    in.def = &it->second, in.fn = it->second.fn;
    if (name == "s_waitcnt") {
        parse_waitcnt(in, line.operands);
        return in;
    }
    std::vector<string> operands, modifiers;
    split(line.operands, operands, modifiers);
    if (operands.size() > 7) fail("more operands than expected");
    for (const string& t : operands) in.ops[in.nops++] = parse_operand(t);
    if (name.find("_mix") != string::npos) in.op_sel_hi = 0;
    for (const string& m : modifiers) parse_modifier(in, m, in.nops - 1);
    for (int k = 0; k < in.nops; ++k)
        if (in.ops[k].kind == Operand::imm)
            immediate(in.ops[k], in.def->ty, line.size > 4 && starts(operands[k], "0x"));
    const bool half = in.def->ty == Ty::f16 || in.def->ty == Ty::i16;
    for (int k = 1; k < in.nops; ++k) {
        const Operand& o = in.ops[k];
        bool mod = o.neg || o.abs || o.sext || (k == 1 && in.dpp.ctrl);
        if (in.sdwa.on && k <= 2) mod |= in.sdwa.src[k - 1] != Sdwa::dword;
        if (half && (in.op_sel >> (k - 1) & 1)) mod = true;
        if (mod) in.src_mods |= static_cast<u8>(1u << k);
    }
    in.post =
        in.clamp || in.omod || (in.sdwa.on && in.sdwa.dst != Sdwa::dword) || in.dst_hi || in.def->dst == Dst::keep_high;
    if (in.def->unit == Unit::branch && in.nops == 1 && in.ops[0].kind == Operand::imm) {
        auto to = index_of.find(line.pc + 4 + 4 * static_cast<u64>(static_cast<i64>(static_cast<i16>(in.ops[0].bits))));
        in.target = to == index_of.end() ? -1 : static_cast<i64>(to->second);
    }
    return in;
}

void Program::check_allocation(const Kernel& k, const Inst& in) const {
    const u32 vgprs = k.accum_offset(), agprs = k.total_vgprs() > vgprs ? k.total_vgprs() - vgprs : 0;
    for (int o = 0; o < in.nops; ++o) {
        const Operand& op = in.ops[o];
        if (op.kind != Operand::vgpr) continue;
        const bool acc = op.reg >= kAgprBase;
        const u32 last = op.reg % kAgprBase + op.dwords - 1u, limit = acc ? agprs : vgprs;
        if (last >= limit) fail("names %c%u, but the kernel descriptor allocates %u", acc ? 'a' : 'v', last, limit);
    }
}

void Program::prepare(const Kernel& k, u64 end) {
    auto it = index_of.find(k.entry);
    if (it == index_of.end())
        fail("%s: entry 0x%llx is not an instruction", k.name.c_str(), static_cast<unsigned long long>(k.entry));
    for (u32 i = it->second; i < lines.size() && lines[i].pc < end; ++i) {
        if (code[i].fn || !code[i].text.empty()) continue;
        try {
            code[i] = decode(lines[i], i);
            check_allocation(k, code[i]);
        } catch (const EmuError& e) {
            const string text = lines[i].mnemonic + " " + lines[i].operands;
            code[i] = Inst{};
            fail("%s: pc 0x%llx '%s': %s", k.name.c_str(), static_cast<unsigned long long>(lines[i].pc), text.c_str(),
                 e.what());
        }
    }
}

}  // namespace petit_emu
