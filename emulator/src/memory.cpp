#include "memory.hpp"

#include <algorithm>

#include "error.hpp"

namespace petit_emu {

void Memory::add(const void* p, u64 bytes, const std::string& name, bool writable) {
    const u64 begin = reinterpret_cast<u64>(p);
    if (bytes == 0) return;
    auto next = ranges_.lower_bound(begin);
    if (next != ranges_.end() && next->first < begin + bytes)
        fail("registering %s [0x%llx, +%llu): overlaps %s", name.c_str(), static_cast<unsigned long long>(begin),
             static_cast<unsigned long long>(bytes), next->second.name.c_str());
    if (next != ranges_.begin()) {
        const Range& before = std::prev(next)->second;
        if (before.begin + before.bytes > begin)
            fail("registering %s [0x%llx, +%llu): overlaps %s", name.c_str(), static_cast<unsigned long long>(begin),
                 static_cast<unsigned long long>(bytes), before.name.c_str());
    }
    ranges_[begin] = Range{begin, bytes, name, writable, {}};
}

bool Memory::remove(const void* p) { return ranges_.erase(reinterpret_cast<u64>(p)) != 0; }

const Range* Memory::covering(u64 address) const {
    auto it = ranges_.upper_bound(address);
    if (it == ranges_.begin()) return nullptr;
    const Range& r = std::prev(it)->second;
    return address - r.begin < r.bytes ? &r : nullptr;
}

Range* Memory::find_slow(u64 address, u64 bytes, Range*& hint) {
    Range* r = const_cast<Range*>(covering(address));
    if (!r || bytes > r->bytes - (address - r->begin)) return nullptr;
    return hint = r;
}

std::string Memory::describe(u64 address) const {
    auto it = ranges_.upper_bound(address);
    std::string near = "no registered range near it";
    if (it != ranges_.begin()) {
        const Range& r = std::prev(it)->second;
        near = format("%lld bytes after the start of %s (%llu bytes)", static_cast<long long>(address - r.begin),
                      r.name.c_str(), static_cast<unsigned long long>(r.bytes));
    }
    if (it != ranges_.end() && it->first - address < (1u << 20))
        near += format(", %lld bytes before %s", static_cast<long long>(it->first - address), it->second.name.c_str());
    return near;
}

// --- Coherence
// --------------------------------------------------------------------------------------------------------------------

Coherence::~Coherence() {
    for (auto& [line, log] : logs_) log.range->touched.clear();
}

bool Coherence::visible(const Event& e, const Reader& r, const Cu& cu) const {
    if (e.wave == r.wave) return true;
    if (e.cu == r.cu) return e.arrived != 0;
    if (e.xcd == r.xcd) return e.arrived && (r.bypass_l1 || cu.l1_inv > e.arrived);
    if (!e.written_back) return false;
    if (r.device) return true;
    return (r.bypass_l1 ? l2_inv_[r.xcd] : cu.l2_seen) > e.written_back;
}

bool Coherence::touched(const Range& r, u64 address, u64 bytes) const {
    if (r.touched.empty()) return false;
    const u64 first = address / kLine - r.begin / kLine, last = (address + bytes - 1) / kLine - r.begin / kLine;
    for (u64 i = first; i <= last; ++i)
        if (r.touched[i]) return true;
    return false;
}

void Coherence::read(Range& r, u64 address, u64 bytes, u8* out, const Reader& reader, const Cu& cu) const {
    if (!touched(r, address, bytes)) {
        std::memcpy(out, reinterpret_cast<const void*>(address), bytes);
        return;
    }
    while (bytes) {
        const u64 line = address / kLine, at = address % kLine, n = std::min(bytes, kLine - at);
        auto it = logs_.find(line);
        if (it == logs_.end()) {
            std::memcpy(out, reinterpret_cast<const void*>(address), n);
        } else {
            std::memcpy(out, it->second.base + at, n);
            for (u32 id : it->second.events) {
                const Event& e = events_[id];
                if (!visible(e, reader, cu)) continue;
                for (u64 i = 0; i < n; ++i)
                    if (e.mask[(at + i) / 8] >> ((at + i) % 8) & 1) out[i] = e.data[at + i];
            }
        }
        address += n, out += n, bytes -= n;
    }
}

Coherence::Log& Coherence::log_for(Range& r, u64 line) {
    if (line == last_line_) return *last_log_;
    auto [it, fresh] = logs_.try_emplace(line);
    Log& log = it->second;
    if (fresh) {
        if (r.touched.empty()) r.touched.assign((r.begin + r.bytes - 1) / kLine - r.begin / kLine + 1, 0);
        r.touched[line - r.begin / kLine] = 1;
        log.range = &r;
        const u64 from = std::max(line * kLine, r.begin), to = std::min((line + 1) * kLine, r.begin + r.bytes);
        std::memset(log.base, 0, sizeof log.base);
        std::memcpy(log.base + (from - line * kLine), reinterpret_cast<const void*>(from), to - from);
    } else if (r.touched.empty() || !r.touched[line - r.begin / kLine]) {  // a line shared by two ranges
        if (r.touched.empty()) r.touched.assign((r.begin + r.bytes - 1) / kLine - r.begin / kLine + 1, 0);
        r.touched[line - r.begin / kLine] = 1;
        const u64 from = std::max(line * kLine, r.begin), to = std::min((line + 1) * kLine, r.begin + r.bytes);
        std::memcpy(log.base + (from - line * kLine), reinterpret_cast<const void*>(from), to - from);
    }
    last_line_ = line, last_log_ = &log;
    return log;
}

void Coherence::write(Range& r, u64 address, u64 bytes, const u8* in, const Reader& w, u64 serial, bool write_through,
                      std::vector<u32>& ids) {
    while (bytes) {
        const u64 line = address / kLine, at = address % kLine, n = std::min(bytes, kLine - at);
        Log& log = log_for(r, line);
        if (log.events.empty() || events_[log.events.back()].serial != serial) {
            Event e;
            e.line = line, e.wave = w.wave, e.cu = w.cu, e.xcd = w.xcd, e.serial = serial,
            e.write_through = write_through;
            const u32 id = static_cast<u32>(events_.size());
            events_.push_back(e);
            log.events.push_back(id);
            ids.push_back(id);
        }
        Event& e = events_[log.events.back()];
        std::memcpy(e.data + at, in, n);
        for (u64 i = 0; i < n; ++i) e.mask[(at + i) / 8] |= static_cast<u8>(1u << ((at + i) % 8));
        std::memcpy(reinterpret_cast<void*>(address), in, n);
        address += n, in += n, bytes -= n;
    }
}

void Coherence::arrive(const std::vector<u32>& ids) {
    if (ids.empty()) return;
    const u64 t = tick();
    for (u32 id : ids) {
        Event& e = events_[id];
        if (e.arrived) continue;
        e.arrived = t;
        if (e.write_through)
            e.written_back = t;
        else
            dirty_[e.xcd].push_back(id);
    }
}

void Coherence::arrive_all() {
    std::vector<u32> ids;
    for (; all_arrived_ < events_.size(); ++all_arrived_) ids.push_back(all_arrived_);
    arrive(ids);
}

void Coherence::write_back(u32 xcd) {
    const u64 t = tick();
    for (u32 id : dirty_[xcd]) events_[id].written_back = t;
    dirty_[xcd].clear();
}

void Coherence::invalidate(Cu& cu, u32 xcd, bool l2) {
    const u64 t = tick();
    if (l2) l2_inv_[xcd] = t;
    cu.l1_inv = t;
    cu.l2_seen = l2_inv_[xcd];
}

}  // namespace petit_emu
