#include "disasm.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <string_view>

#include "error.hpp"

namespace petit_emu {
namespace fs = std::filesystem;
namespace {

std::string run(const std::string& command) {
    FILE* pipe = popen(command.c_str(), "r");
    if (!pipe) fail("cannot run: %s", command.c_str());
    std::string out;
    std::array<char, 1 << 16> buffer;
    while (std::size_t n = fread(buffer.data(), 1, buffer.size(), pipe)) out.append(buffer.data(), n);
    const int status = pclose(pipe);
    if (status != 0) fail("failed (status %d): %s", status, command.c_str());
    return out;
}

std::string on_path(const std::string& name) {
    std::istringstream path(std::getenv("PATH") ? std::getenv("PATH") : "");
    for (std::string dir; std::getline(path, dir, ':');) {
        std::error_code ec;
        fs::path p = fs::path(dir) / name;
        if (!dir.empty() && fs::is_regular_file(p, ec) && access(p.c_str(), X_OK) == 0) return p;
    }
    return {};
}

int major_version(const std::string& tool) {
    const std::string text = run("'" + tool + "' --version 2>/dev/null");
    const auto at = text.find("version ");
    return at == std::string::npos ? 0 : std::atoi(text.c_str() + at + 8);
}

std::string trim(const std::string& s) {
    const auto a = s.find_first_not_of(" \t\r"), b = s.find_last_not_of(" \t\r");
    return a == std::string::npos ? std::string() : s.substr(a, b - a + 1);
}

}  // namespace

std::string find_objdump() {
    if (const char* forced = std::getenv("PETIT_LLVM_OBJDUMP"); forced && *forced) {
        if (access(forced, X_OK) != 0) fail("PETIT_LLVM_OBJDUMP=%s is not an executable file", forced);
        return forced;
    }
    if (std::string p = on_path("llvm-objdump-22"); !p.empty()) return p;
    std::string seen;
    const char* rocm = std::getenv("ROCM_PATH");
    for (const std::string& p : {std::string(rocm ? rocm : "/opt/rocm") + "/llvm/bin/llvm-objdump",
                                 on_path("llvm-objdump"), on_path("llvm-objdump-21"), on_path("llvm-objdump-20")}) {
        if (p.empty() || access(p.c_str(), X_OK) != 0) continue;
        const int v = major_version(p);
        if (v >= 20) return p;
        seen += " " + p + " (version " + std::to_string(v) + ")";
    }
    fail(
        "no AMDGPU disassembler: the emulator needs llvm-objdump >= 20 (llvm-objdump-22, ROCm's, or set "
        "PETIT_LLVM_OBJDUMP).%s%s",
        seen.empty() ? "" : " Too old:", seen.c_str());
}

std::vector<Line> disassemble(const u8* elf, std::size_t bytes) {
    static const std::string tool = find_objdump();
    char name[] = "/tmp/petit_emu_XXXXXX";
    const int fd = mkstemp(name);
    if (fd < 0) fail("cannot create a temporary file for the disassembler");
    const bool written = write(fd, elf, bytes) == static_cast<ssize_t>(bytes);
    close(fd);
    std::string text;
    try {
        if (!written) fail("cannot write the temporary file for the disassembler");
        text = run("'" + tool + "' -d " + name);
    } catch (...) {
        unlink(name);
        throw;
    }
    unlink(name);

    // "\tv_add_u32_e32 v4, s2, v0      // 000000001E68: 68080002"
    std::vector<Line> lines;
    lines.reserve(text.size() / 100);
    for (std::size_t at = 0, end; at < text.size(); at = end + 1) {
        end = std::min(text.find('\n', at), text.size());
        if (text[at] != '\t') continue;
        const std::string_view line(text.data() + at + 1, end - at - 1);
        const auto comment = line.rfind("// ");
        if (comment == line.npos) continue;
        Line out;
        char* p = nullptr;
        out.pc = std::strtoull(line.data() + comment + 3, &p, 16);
        if (*p != ':') fail("disassembly line not understood: %s", std::string(line).c_str());
        out.size = 0;  // eight hexadecimal digits a dword, then possibly <symbol+offset>
        for (++p; *p == ' ' && p[1] != '<'; p += 9) out.size += 4;
        const auto space = line.find(' ');
        out.mnemonic = line.substr(0, space);
        if (space < comment) out.operands = trim(std::string(line.substr(space, comment - space)));
        lines.push_back(std::move(out));
    }
    if (lines.empty()) fail("%s printed no instructions for this code object", tool.c_str());
    return lines;
}

}  // namespace petit_emu
