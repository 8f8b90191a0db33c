// What every SIMD kernel shares: cutting a call into tasks, preparing activations, handing tasks to threads.
//
// A kernel K supplies (all static):
//   X, kStep                     type of a stored activation, activations a k-step broadcasts at once
//   kDecodeRows, kDecodeMost     rows of one decode pass; up to kDecodeMost rows are done by passes of it
//   kTileRows, kTileBlocks       rows of x and row blocks (of 16 weights) in the largest register tile
//   tile_rows()                  optional: rows of x in the register tile that suits this processor
//   kPanel, kPanelFloats         k dequantised at a time, and floats that one row block of it takes
//   decode<R>(w, block, x, sums)             sums[R][16] of one row block over all k, in float64
//   dequantize(w, block, k0, k1, out)        exact values of one row block, in the order tile() reads them
//   prepare_fixed, decode_fixed              optional: one row of x in integers, written behind its float32 form
//   tile<R, B>(panels, x, steps, next, sums) adds to sums[B][R][16] what B panels give with R rows of x; `next` is the x
//                                            that will be read next, for a prefetch
// decode streams the weights once from memory through registers; the tile path turns kPanel of k of some row blocks at
// a time into numbers that stay in the caches while all rows of x pass over them.
//
// Everything is in an unnamed namespace: each instruction set's file compiles its own copy with its own flags.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include "kernels.hpp"
#include "parallel.hpp"
#include "simd_activations.hpp"
#include "simd_epilogue.hpp"

namespace petit::cpu {
namespace {

// Memory that a thread keeps between calls; contents do not survive reserve().
template <class T>
class Scratch {
  public:
    ~Scratch() { std::free(data_); }
    T* reserve(int64_t count) {
        if (count > capacity_) {
            std::free(data_);
            const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 4095) / 4096 * 4096;
            data_ = static_cast<T*>(std::aligned_alloc(4096, bytes));
            capacity_ = data_ ? static_cast<int64_t>(bytes / sizeof(T)) : 0;
            if (data_ == nullptr) throw std::bad_alloc();
        }
        return data_;
    }

  private:
    T* data_ = nullptr;
    int64_t capacity_ = 0;
};

constexpr int64_t kScratchBytes = int64_t{64} << 20;  // prepared activations held at once
constexpr int64_t kMostRows = 256;                    // of them per item: further rows dequantise the weights again
constexpr int64_t kDecodeTaskBytes = 96 << 10;        // weights of one decode task
constexpr int64_t kTileTaskBlocks = 8;                // row blocks of one tile task: how often cached x is used again
constexpr int64_t kThreadWork = 96 << 10;             // weight bytes (times passes) that pay for one more thread

template <class K>
class Driver {
    using X = typename K::X;
    static constexpr bool kFixed = requires { &K::decode_fixed; };

    struct Item {  // rows m0 .. m0 + m of one problem
        const GemmProblem* p;
        int64_t m0, m;
        RowBlocks rows;
        bool decode;
        int64_t first_task, tasks, blocks, task_blocks;
        X* x;
        int32_t* shift;
        int64_t inexact;  // groups that the integer form leaves out, or -1: there is no integer form

        bool may_be_fixed() const { return kFixed && m == 1; }
        int64_t elements() const { return m * p->w.k * (may_be_fixed() ? 2 : 1); }
    };

  public:
    Driver(DType x_dtype, DType y_dtype, int threads) : x_dtype_(x_dtype), y_dtype_(y_dtype), threads_(threads) {}

    void run(const GemmProblem* problems, int64_t count) {
        static thread_local Scratch<char> item_memory;
        static thread_local Scratch<X> x_memory;
        static thread_local Scratch<int32_t> shift_memory;
        int64_t items = 0;
        for (int64_t i = 0; i < count; ++i) items += (problems[i].m + kMostRows - 1) / kMostRows;
        if (items == 0) return;
        items_ = reinterpret_cast<Item*>(item_memory.reserve(items * static_cast<int64_t>(sizeof(Item))));
        int64_t elements = 0, rows = 0;
        for (int64_t i = 0; i < count; ++i) {
            const GemmProblem& p = problems[i];
            if (p.m == 0 || p.w.n == 0) continue;
            const RowBlocks pieces(p.m, kMostRows);
            for (int64_t piece = 0; piece < pieces.count; ++piece) {
                const int64_t m = pieces.size(piece);
                if (count_ > 0 && (elements + 2 * m * p.w.k) * static_cast<int64_t>(sizeof(X)) > kScratchBytes) {
                    flush(x_memory.reserve(elements), shift_memory.reserve(rows), rows);
                    elements = rows = 0;
                }
                append(p, pieces.first(piece), m);
                elements += items_[count_ - 1].elements();
                rows += m;
            }
        }
        if (count_ > 0) flush(x_memory.reserve(elements), shift_memory.reserve(rows), rows);
    }

  private:
    static int tile_rows() {
        if constexpr (requires { K::tile_rows(); }) return K::tile_rows();
        return K::kTileRows;
    }

    void append(const GemmProblem& p, int64_t m0, int64_t m) {
        const bool decode = m <= K::kDecodeMost;
        const int64_t blocks = padded_rows(p.w.n) / kRowBlock;
        int64_t task_blocks = kTileTaskBlocks;
        if (decode) task_blocks = kDecodeTaskBytes / (p.w.k * 8) + 1;
        // At least four tasks a thread where there are enough row blocks, in whole register tiles.
        const int64_t most = blocks / (4 * threads_) / K::kTileBlocks * K::kTileBlocks;
        if (task_blocks > most) task_blocks = most > K::kTileBlocks ? most : K::kTileBlocks;
        const int64_t tasks = (blocks + task_blocks - 1) / task_blocks;
        new (&items_[count_++]) Item{&p,          m0,      m,       RowBlocks(m, decode ? K::kDecodeRows : tile_rows()),
                                     decode,      tasks_,  tasks,   blocks,
                                     task_blocks, nullptr, nullptr, -1};
        tasks_ += tasks;
        work_ += blocks * kRowBlock * p.w.k / 2 * (1 + m / 4);
    }

    void flush(X* x, int32_t* shift, int64_t rows) {
        int64_t elements = 0;
        for (int64_t i = 0; i < count_; ++i) {
            items_[i].x = x + elements;
            items_[i].shift = shift;
            elements += items_[i].elements();
            shift += items_[i].m;
        }
        const int64_t useful = 1 + work_ / kThreadWork;
        const int threads = static_cast<int64_t>(threads_) < useful ? threads_ : static_cast<int>(useful);
        const bool small = elements < (32 << 10);  // not worth waking threads for
        parallel_for(small ? 1 : threads, rows, [this](int64_t begin, int64_t end) { prepare(begin, end); });
        next_task_ = 0;
        auto body = [](void* self, int, int) { static_cast<Driver*>(self)->work(); };
        parallel_region(static_cast<int64_t>(threads) < tasks_ ? threads : static_cast<int>(tasks_), body, this);
        finish_wide_rows();
        count_ = tasks_ = work_ = 0;
    }

    // Rows that float32 sums cannot hold (simd_activations.hpp): the epilogue has left their results out.
    void finish_wide_rows() {
        const int64_t x_size = x_dtype_ == DType::f32 ? 4 : 2, y_size = y_dtype_ == DType::f32 ? 4 : 2;
        for (int64_t i = 0; i < count_; ++i) {
            for (int64_t r = 0; r < items_[i].m; ++r) {
                if (items_[i].shift[r] != kTooWide) continue;
                GemmProblem one = *items_[i].p;
                const int64_t row = items_[i].m0 + r, source = one.x_rows ? one.x_rows[row] : row;
                one.x = static_cast<const char*>(one.x) + source * one.x_stride * x_size;
                one.y = static_cast<char*>(one.y) + row * one.y_stride * y_size;
                one.x_rows = nullptr;
                one.m = 1;
                grouped_gemm_portable(&one, 1, x_dtype_, y_dtype_, threads_);
            }
        }
    }

    // Rows begin .. end of all items, counted through.
    void prepare(int64_t begin, int64_t end) {
        static thread_local Scratch<float> line_memory;
        const int64_t element = x_dtype_ == DType::f32 ? 4 : 2;
        for (int64_t i = 0, first = 0; i < count_ && first < end; first += items_[i++].m) {
            Item& item = items_[i];
            const int64_t k = item.p->w.k;
            for (int64_t r = begin > first ? begin - first : 0; r < item.m && first + r < end; ++r) {
                const int64_t source = item.p->x_rows ? item.p->x_rows[item.m0 + r] : item.m0 + r;
                const char* row = static_cast<const char*>(item.p->x) + source * item.p->x_stride * element;
                const int64_t block = item.rows.holding(r), block_row = item.rows.first(block);
                X* out = item.x + block_row * k + (r - block_row) * K::kStep;
                item.shift[r] = store_row<K::kStep>(row, k, x_dtype_, item.p->w.format, item.rows.size(block), out,
                                                    line_memory.reserve(k));
                if constexpr (kFixed) {
                    if (item.may_be_fixed()) item.inexact = K::prepare_fixed(item.p->w, item.x, item.x + k);
                }
            }
        }
    }

    // Tasks are handed out one by one: cores of a shared machine do not run equally fast.
    void work() {
        int64_t i = 0;
        for (;;) {
            const int64_t task = __atomic_fetch_add(&next_task_, int64_t{1}, __ATOMIC_RELAXED);
            if (task >= tasks_) return;
            while (task >= items_[i].first_task + items_[i].tasks) ++i;
            const Item& item = items_[i];
            const int64_t begin = (task - item.first_task) * item.task_blocks;
            const int64_t end = begin + item.task_blocks < item.blocks ? begin + item.task_blocks : item.blocks;
            if (item.decode) {
                run_decode(item, begin, end);
            } else {
                run_tiles(item, begin, end);
            }
        }
    }

    void run_decode(const Item& item, int64_t begin, int64_t end) {
        const WeightView& w = item.p->w;
        alignas(64) double sums[K::kDecodeRows][kRowBlock];
        for (int64_t block = begin; block < end; ++block) {
            const Epilogue epilogue(*item.p, block * kRowBlock, y_dtype_);
            for (int64_t pass = 0; pass < item.rows.count; ++pass) {
                const int64_t first = item.rows.first(pass), rows = item.rows.size(pass);
                if constexpr (kFixed) {
                    if (item.inexact >= 0) K::decode_fixed(w, block, item.x, item.x + w.k, item.inexact, sums[0]);
                }
                if (item.inexact < 0) kDecode[rows - 1](w, block, item.x + first * w.k, sums);
                for (int64_t r = 0; r < rows; ++r) {
                    epilogue.store(item.m0 + first + r, item.shift[first + r], sums[r]);
                }
            }
        }
    }

    void run_tiles(const Item& item, int64_t begin, int64_t end) {
        static thread_local Scratch<float> panel_memory;
        static thread_local Scratch<double> sum_memory;
        const WeightView& w = item.p->w;
        float* const panel = panel_memory.reserve(K::kPanelFloats * K::kTileBlocks);
        double* const sums =
            sum_memory.reserve((end - begin) * item.m * kRowBlock);  // [tile][row block of x][B][R][16]
        std::memset(sums, 0, static_cast<size_t>((end - begin) * item.m * kRowBlock) * sizeof(double));
        for (int64_t k0 = 0; k0 < w.k; k0 += K::kPanel) {
            const int64_t k1 = k0 + K::kPanel < w.k ? k0 + K::kPanel : w.k;
            for (int64_t block = begin; block < end; block += K::kTileBlocks) {
                const int64_t wide = end - block < K::kTileBlocks ? end - block : K::kTileBlocks;
                for (int64_t b = 0; b < wide; ++b) K::dequantize(w, block + b, k0, k1, panel + b * K::kPanelFloats);
                double* const tile_sums = sums + (block - begin) * item.m * kRowBlock;
                for (int64_t group = 0; group < item.rows.count; ++group) {
                    const int64_t first = item.rows.first(group), rows = item.rows.size(group);
                    // What the next tile reads: the same k of the next rows of x, or the next k of the first ones.
                    const bool last = group + 1 == item.rows.count;
                    const int64_t next_rows = item.rows.size(last ? 0 : group + 1),
                                  next_first = last ? 0 : first + rows;
                    const int64_t next_k = last && block + K::kTileBlocks >= end ? k1 : k0;
                    const X* const next = item.x + next_first * w.k + next_k * next_rows;
                    kTile[wide - 1][rows - 1](panel, item.x + first * w.k + k0 * rows, (k1 - k0) / K::kStep, next,
                                              tile_sums + first * wide * kRowBlock);
                }
            }
        }
        for (int64_t block = begin; block < end; ++block) {
            const Epilogue epilogue(*item.p, block * kRowBlock, y_dtype_);
            const int64_t b = (block - begin) % K::kTileBlocks, tile = block - b;
            const int64_t wide = end - tile < K::kTileBlocks ? end - tile : K::kTileBlocks;
            for (int64_t group = 0; group < item.rows.count; ++group) {
                const int64_t first = item.rows.first(group), rows = item.rows.size(group);
                const double* from = sums + ((tile - begin) * item.m + first * wide + b * rows) * kRowBlock;
                for (int64_t r = 0; r < rows; ++r) {
                    epilogue.store(item.m0 + first + r, item.shift[first + r], from + r * kRowBlock);
                }
            }
        }
    }

    using DecodeFn = void (*)(const WeightView&, int64_t block, const X* x, double (*sums)[kRowBlock]);
    using TileFn = void (*)(const float* panel, const X* x, int64_t steps, const X* next, double* sums);

    template <class Sequence>
    struct Tables;
    template <int... I>
    struct Tables<std::integer_sequence<int, I...>> {
        static constexpr DecodeFn decode[] = {K::template decode<I + 1>...};
        template <int B>
        static constexpr TileFn tile[] = {K::template tile<I + 1, B>...};
    };
    static constexpr const DecodeFn* kDecode = Tables<std::make_integer_sequence<int, K::kDecodeRows>>::decode;
    using TileTables = Tables<std::make_integer_sequence<int, K::kTileRows>>;
    static constexpr const TileFn* kTile[] = {TileTables::template tile<1>, TileTables::template tile<K::kTileBlocks>};

    DType x_dtype_, y_dtype_;
    int threads_;
    Item* items_ = nullptr;
    int64_t count_ = 0, tasks_ = 0, work_ = 0;
    int64_t next_task_ = 0;
};

}  // namespace
}  // namespace petit::cpu
