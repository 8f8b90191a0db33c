// Workgroups, waves and barriers: who runs when.
#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>

#include "group.hpp"
#include "module.hpp"

namespace petit_emu {

Group::Group(Launch& l, u32 linear_id)
    : launch(&l), linear(linear_id), xcd(linear_id % l.xcds), lds(l.kernel->group_bytes + l.config.dynamic_lds) {
    id[0] = linear_id % l.config.grid[0];
    id[1] = linear_id / l.config.grid[0] % l.config.grid[1];
    id[2] = linear_id / l.config.grid[0] / l.config.grid[1];
    const u32 items = l.config.block[0] * l.config.block[1] * l.config.block[2], count = (items + kLanes - 1) / kLanes;
    registers = std::make_unique_for_overwrite<Row[]>(std::size_t(count) * 512);
    for (u32 i = 0; i < count; ++i) {
        auto w = std::make_unique<Wave>();
        w->v = &registers[std::size_t(i) * 512];
        w->id = static_cast<u8>(i), w->uid = u64(linear_id) * 16 + i;
        w->group = this, w->program = l.program;
        start_wave(*w, i * kLanes, std::min<u32>(kLanes, items - i * kLanes));
        waves.push_back(std::move(w));
    }
}

// The initial registers that the kernel descriptor asks for.
void Group::start_wave(Wave& w, u32 first, u32 items) {
    const Kernel& k = *launch->kernel;
    const auto& b = launch->config.block;
    w.set_exec(items == kLanes ? ~0ull : (1ull << items) - 1ull);
    w.sready[1] |= 3ull << (kExec - 64);
    const u32 id_mode = k.rsrc2 >> 11 & 3u;
    for (u32 l = 0; l < items; ++l) {
        const u32 i = first + l, x = i % b[0], y = i / b[0] % b[1], z = i / b[0] / b[1];
        w.v[0].l[l] = x | (id_mode >= 1 ? y << 10 : 0) | (id_mode >= 2 ? z << 20 : 0);
    }
    w.mark(0, w.exec());

    u32 s = 0;
    auto user = [&](int bit, u32 count, u64 value, bool known) {
        if (!(k.properties >> bit & 1)) return;
        if (known) {
            w.write_s(s, static_cast<u32>(value));
            if (count > 1) w.write_s(s + 1, static_cast<u32>(value >> 32));
        }
        s += count;
    };
    if (k.properties & 1) {  // private segment buffer: base is the private aperture, which buffer accesses recognise
        w.write_s64(0, kPrivateAperture | (u64(1) << 63)), w.write_s(2, ~0u), w.write_s(3, 0);
        s = 4;
    }
    user(1, 2, launch->kernarg - 64, true);  // dispatch packet
    user(2, 2, 0, false);                    // queue
    user(3, 2, launch->kernarg, true);       // kernel arguments
    user(4, 2, launch->serial, true);        // dispatch id
    user(5, 2, 0, true);                     // flat scratch
    user(6, 1, k.private_bytes, true);
    const u32 preload = k.kernarg_preload & 127u, preload_at = k.kernarg_preload >> 7;
    for (u32 i = 0; i < preload; ++i) {
        u32 x;
        std::memcpy(&x, reinterpret_cast<const u8*>(launch->kernarg) + 4 * (preload_at + i), 4);
        w.write_s(s++, x);
    }
    s = std::max(s, k.rsrc2 >> 1 & 31u);
    for (int axis = 0; axis < 3; ++axis)
        if (k.rsrc2 >> (7 + axis) & 1) w.write_s(s++, id[axis]);
    if (k.rsrc2 >> 10 & 1) w.write_s(s++, 0);
    if ((k.rsrc2 & 1) && launch->arch == Arch::gfx90a) w.write_s(s++, 0);  // scratch wave offset
    if (launch->arch != Arch::gfx90a) w.write_s64(102, 0);                 // architected flat scratch

    w.scratch_bytes = k.private_bytes;
    w.scratch.assign(std::size_t(k.private_bytes) * kLanes, 0xcc);
    w.mode = k.rsrc1 >> 12 & 0xffu;
    const u64 entry = k.entry + (preload ? 256 : 0);
    auto it = launch->program->index_of.find(entry);
    if (it == launch->program->index_of.end())
        fail("%s: entry 0x%llx is not an instruction", kernel_name(), static_cast<unsigned long long>(entry));
    w.pc = it->second;
}

static void run_wave(Wave& w, u64* counts, u64 quantum) {
    apply_float_mode(w);
    const Inst* code = w.program->code.data();
    const std::size_t size = w.program->code.size();
    while (w.stop == WaveStop::running) {
        if (w.pc >= size) fail("%s: ran past the end of the code", w.group->kernel_name());
        const Inst& in = code[w.pc];
        w.now = &in;
        if (!in.fn) w.die("unknown instruction");
        ++counts[w.pc];
        ++w.pc;
        in.fn(w, in);
        if (--quantum == 0) return;
    }
}

// With a seed the schedule is made unfair: one wave of each workgroup runs only when the others cannot, and then in
// some workgroups only every 4, 16 or 64 rounds. What a missing barrier or release would leave to luck then goes wrong.
static u64 mix(u64 seed, u64 x) {
    x = (x + seed) * 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 31) * 0xbf58476d1ce4e5b9ull;
    return x ^ x >> 29;
}

Group::Step Group::step(u64 quantum) {
    std::vector<u32> order(waves.size());
    std::iota(order.begin(), order.end(), 0u);
    if (launch->config.seed)
        std::shuffle(order.begin(), order.end(), std::mt19937_64(launch->config.seed + launch->coherence->tick()));
    bool progress = false;
    const u32 lazy = static_cast<u32>(mix(launch->config.seed, linear) % waves.size());
    for (u32 i : order) {
        Wave& w = *waves[i];
        if (w.stop != WaveStop::running) continue;
        if (launch->config.seed && i == lazy && std::any_of(waves.begin(), waves.end(), [&](auto& o) {
                return o.get() != &w && o->stop == WaveStop::running;
            }))
            continue;
        progress = true;
        run_wave(w, launch->pc_counts.data(), quantum);
    }
    u32 waiting = 0, done = 0;
    for (auto& w : waves) waiting += w->stop == WaveStop::barrier, done += w->stop == WaveStop::done;
    if (done == waves.size()) return Step::done;
    if (waiting + done != waves.size()) {
        if (!progress) fail("%s: workgroup makes no progress", kernel_name());
        return Step::spent;
    }
    barrier();
    return Step::again;
}

void Group::barrier() {
    lds.next_epoch();
    for (auto& w : waves) {
        if (w->stop != WaveStop::barrier) continue;
        for (const auto* q : {&w->lgkm, &w->vm})
            for (const InFlight& f : *q)
                if (!f.lds_bytes.empty()) lds.restamp(*w, f);
        w->stop = WaveStop::running;
    }
}

void Group::retired(Wave& w, InFlight& f) {
    (void)w;
    if (!f.store_events.empty()) launch->coherence->arrive(f.store_events);
    if (f.lds_dma)
        for (std::size_t i = 0; i + 1 < f.lds_bytes.size(); i += 2) lds.dma_done(f.lds_bytes[i], f.lds_bytes[i + 1]);
    if (f.cache_op == 1) launch->coherence->write_back(xcd);
}

void Launch::run() {
    const auto start = std::chrono::steady_clock::now();
    const unsigned saved = _mm_getcsr();
    coherence = std::make_unique<Coherence>(xcds);
    pc_counts.assign(program->code.size(), 0);
    const u64 total = u64(config.grid[0]) * config.grid[1] * config.grid[2];
    std::vector<u32> order(total);
    std::iota(order.begin(), order.end(), 0u);
    if (config.seed) std::shuffle(order.begin(), order.end(), std::mt19937_64(config.seed));
    const u32 items = config.block[0] * config.block[1] * config.block[2];
    try {
        std::vector<std::unique_ptr<Group>> active;
        std::size_t next = 0;
        u64 round = 0;
        while (next < total || !active.empty()) {
            // A workgroup runs to its end before the next starts, unless it spends its quantum (it may be waiting for
            // another one).
            if (active.empty() && next < total) active.push_back(std::make_unique<Group>(*this, order[next++]));
            bool finished = false;
            ++round;
            for (std::size_t i = 0; i < active.size() && !finished; ++i) {
                const auto& waves = active[i]->waves;
                const auto running =
                    std::count_if(waves.begin(), waves.end(), [](auto& w) { return w->stop == WaveStop::running; });
                if (config.seed && running == 1 && round % (1ull << 2 * (mix(config.seed + 1, active[i]->linear) & 3)))
                    continue;
                Group::Step step = Group::Step::again;
                while (step == Group::Step::again) step = active[i]->step(config.quantum);
                if (step == Group::Step::spent) {
                    coherence->arrive_all();
                    u64 executed = 0;
                    for (u64 n : pc_counts) executed += n;
                    if (executed > config.limit)
                        fail("%s: %llu instructions executed, an endless loop?", kernel->name.c_str(),
                             static_cast<unsigned long long>(executed));
                }
                finished = step == Group::Step::done;
                if (finished) active.erase(active.begin() + static_cast<std::ptrdiff_t>(i));
            }
            if (!finished && next < total && active.size() < config.resident)
                active.push_back(std::make_unique<Group>(*this, order[next++]));
        }
    } catch (...) {
        _mm_setcsr(saved);
        throw;
    }
    _mm_setcsr(saved);
    coherence.reset();
    counters.workgroups = total;
    counters.waves = total * ((items + kLanes - 1) / kLanes);
    counters.launches = 1;
    for (std::size_t i = 0; i < pc_counts.size(); ++i) {
        if (!pc_counts[i]) continue;
        const OpDef& def = *program->code[i].def;
        counters.by_unit[static_cast<int>(def.unit)] += pc_counts[i];
        counters.mfma_cycles += pc_counts[i] * static_cast<u64>(def.cycles);
    }
    counters.nanoseconds = static_cast<u64>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count());
}

}  // namespace petit_emu
