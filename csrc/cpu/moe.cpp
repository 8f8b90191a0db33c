#include "moe.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "numbers.hpp"
#include "parallel.hpp"

namespace petit::cpu {
namespace {

constexpr int64_t kAlign = 64;
constexpr int64_t kSmallestChunk = 128;  // tokens; below this the weights would be read too often
constexpr int64_t kColumns = 512;        // columns of one task of the elementwise passes
constexpr int64_t kSerial = 4096;        // elements that are not worth waking a thread for

int64_t element_size(DType dtype) { return dtype == DType::f32 ? 4 : 2; }
int64_t align_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }
int64_t blocks_of(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Where the pieces of the workspace lie, in bytes.
struct Layout {
    int64_t sums, activated, results, local, position, rows, router, bytes;

    Layout(int64_t pairs, int64_t n13, int64_t intermediate, int64_t hidden, DType x_dtype) {
        int64_t at = 0;
        const auto take = [&](int64_t size) {
            const int64_t start = at;
            at = align_up(at + size, kAlign);
            return start;
        };
        sums = take(pairs * n13 * 4);
        activated = take(pairs * intermediate * element_size(x_dtype));
        results = take(pairs * hidden * 4);
        local = take(pairs * 4);
        position = take(pairs * 4);
        rows = take(pairs * 4);
        router = take(pairs * 4);
        bytes = at;
    }
};

// Checks one id and gives the local expert, or -1.
int32_t local_expert(const MoeProblem& problem, int64_t pair) {
    const int64_t id = problem.topk_ids[pair];
    const bool mapped = problem.expert_map.data != nullptr;
    const int64_t ids = mapped ? problem.expert_map_size : problem.num_experts;
    if (id < -1 || id >= ids) {
        throw std::invalid_argument("topk_ids[" + std::to_string(pair / problem.topk) + ", " +
                                    std::to_string(pair % problem.topk) + "] is " + std::to_string(id) +
                                    ": it must be -1 (no expert here) or below " + std::to_string(ids) +
                                    (mapped ? ", the length of expert_map" : ", the number of experts packed"));
    }
    if (id < 0 || !mapped) return static_cast<int32_t>(id);
    const int64_t local = problem.expert_map[id];
    if (local < -1 || local >= problem.num_experts) {
        throw std::invalid_argument("expert_map[" + std::to_string(id) + "] is " + std::to_string(local) +
                                    ": it must be -1 (not on this rank) or below " +
                                    std::to_string(problem.num_experts) + ", the number of experts packed");
    }
    return static_cast<int32_t>(local);
}

// One chunk of tokens.
class Chunk {
  public:
    Chunk(const MoeProblem& problem, int64_t first, int64_t tokens, const Layout& layout, char* workspace, int threads,
          Isa isa)
        : p_(problem),
          first_(first),
          tokens_(tokens),
          threads_(threads),
          isa_(isa),
          sums_(reinterpret_cast<float*>(workspace + layout.sums)),
          activated_(workspace + layout.activated),
          results_(reinterpret_cast<float*>(workspace + layout.results)),
          local_(reinterpret_cast<int32_t*>(workspace + layout.local)),
          position_(reinterpret_cast<int32_t*>(workspace + layout.position)),
          rows_(reinterpret_cast<int32_t*>(workspace + layout.rows)),
          router_(reinterpret_cast<float*>(workspace + layout.router)) {}

    void run() {
        sort_by_expert();
        first_gemm();
        activate_rows();
        second_gemm();
        combine();
    }

  private:
    int threads_for(int64_t elements) const {
        return static_cast<int>(std::clamp<int64_t>(elements / kSerial, 1, threads_));
    }

    int64_t pair(int64_t token, int64_t j) const { return (first_ + token) * p_.topk + j; }

    // Counting sort: start_[e] .. start_[e + 1] are expert e's rows, in token order. position_ maps a pair to its row
    // or -1, rows_ a row to its token.
    void sort_by_expert() {
        start_.assign(static_cast<size_t>(p_.num_experts) + 1, 0);
        const int64_t pairs = tokens_ * p_.topk;
        for (int64_t i = 0; i < pairs; ++i) {
            local_[i] = local_expert(p_, first_ * p_.topk + i);
            if (local_[i] >= 0) ++start_[static_cast<size_t>(local_[i]) + 1];
        }
        for (size_t e = 1; e < start_.size(); ++e) start_[e] += start_[e - 1];
        std::vector<int64_t> next(start_.begin(), start_.end() - 1);
        for (int64_t i = 0; i < pairs; ++i) {
            position_[i] = -1;
            if (local_[i] < 0) continue;
            const int64_t row = next[static_cast<size_t>(local_[i])]++;
            position_[i] = static_cast<int32_t>(row);
            rows_[row] = static_cast<int32_t>(i / p_.topk);
            router_[row] = p_.topk_weights[first_ * p_.topk + i];
        }
        // The elementwise pass needs the expert of a row for its bias; local_ is free from here on.
        for (int64_t e = 0; e < p_.num_experts; ++e) {
            std::fill(local_ + start_[static_cast<size_t>(e)], local_ + start_[static_cast<size_t>(e) + 1],
                      static_cast<int32_t>(e));
        }
    }

    int64_t rows() const { return start_.back(); }

    // One problem for every expert that has tokens.
    template <class Fill>
    void run_gemms(DType x_dtype, const Fill& fill) {
        problems_.clear();
        for (int64_t e = 0; e < p_.num_experts; ++e) {
            const int64_t begin = start_[static_cast<size_t>(e)], end = start_[static_cast<size_t>(e) + 1];
            if (begin == end) continue;
            GemmProblem gemm{};
            gemm.m = end - begin;
            gemm.bias_dtype = DType::f32;
            fill(gemm, e, begin);
            problems_.push_back(gemm);
        }
        if (problems_.empty()) return;
        grouped_gemm(problems_.data(), static_cast<int64_t>(problems_.size()), x_dtype, DType::f32, threads_, isa_);
    }

    void first_gemm() {
        const char* x = static_cast<const char*>(p_.x) + first_ * p_.x_stride * element_size(p_.x_dtype);
        run_gemms(p_.x_dtype, [&](GemmProblem& gemm, int64_t e, int64_t begin) {
            gemm.x = x;
            gemm.x_stride = p_.x_stride;
            gemm.x_rows = rows_ + begin;
            gemm.w = p_.w13.expert(e);
            gemm.y = sums_ + begin * p_.w13.n;
            gemm.y_stride = p_.w13.n;
        });
    }

    void activate_rows() {
        const int64_t size = p_.w2.k, blocks = blocks_of(size, kColumns), element = element_size(p_.x_dtype);
        parallel_for(threads_for(rows() * size), rows() * blocks, [&](int64_t task, int64_t last) {
            for (; task < last; ++task) {
                const int64_t row = task / blocks, begin = task % blocks * kColumns;
                activate(p_.activation, sums_ + row * p_.w13.n, p_.w13.expert_bias(local_[row]),
                         p_.router_on_input ? router_[row] : 1.0f, size, begin, std::min(begin + kColumns, size),
                         activated_ + row * size * element, p_.x_dtype);
            }
        });
        if (!p_.intermediate) return;
        for (int64_t i = 0; i < tokens_ * p_.topk; ++i) {
            if (position_[i] < 0) continue;
            std::memcpy(static_cast<char*>(p_.intermediate) + (first_ * p_.topk + i) * size * element,
                        activated_ + position_[i] * size * element, static_cast<size_t>(size * element));
        }
    }

    void second_gemm() {
        const int64_t element = element_size(p_.x_dtype);
        run_gemms(p_.x_dtype, [&](GemmProblem& gemm, int64_t e, int64_t begin) {
            gemm.x = activated_ + begin * p_.w2.k * element;
            gemm.x_stride = p_.w2.k;
            gemm.w = p_.w2.expert(e);
            gemm.bias = p_.w2.expert_bias(e);
            gemm.y = results_ + begin * p_.w2.n;
            gemm.y_stride = p_.w2.n;
        });
    }

    void combine() {
        const int64_t hidden = p_.w2.n, blocks = blocks_of(hidden, kColumns);
        parallel_for(threads_for(tokens_ * p_.topk * hidden), tokens_ * blocks, [&](int64_t task, int64_t last) {
            for (; task < last; ++task) {
                const int64_t token = task / blocks, begin = task % blocks * kColumns;
                combine_token(token, begin, std::min(begin + kColumns, hidden));
            }
        });
    }

    void combine_token(int64_t token, int64_t begin, int64_t end) {
        alignas(64) float total[kColumns];
        const int64_t hidden = p_.w2.n, count = end - begin, element = element_size(p_.out_dtype);
        char* out = static_cast<char*>(p_.out);
        std::fill_n(total, count, 0.0f);
        for (int64_t j = 0; j < p_.topk; ++j) {
            const int64_t row = position_[token * p_.topk + j];
            if (row >= 0) {
                const float router = p_.router_on_input ? 1.0f : router_[row];
                const float* result = results_ + row * hidden + begin;
                for (int64_t i = 0; i < count; ++i) total[i] += router * result[i];
            }
            if (!p_.reduce) {
                emit(total, count, out + (pair(token, j) * hidden + begin) * element);
                std::fill_n(total, count, 0.0f);
            }
        }
        if (p_.reduce) emit(total, count, out + ((first_ + token) * hidden + begin) * element);
    }

    void emit(float* values, int64_t count, char* to) const {
        if (p_.routed_scale != 1.0f) {
            for (int64_t i = 0; i < count; ++i) values[i] *= p_.routed_scale;
        }
        round_row(values, count, to, p_.out_dtype);
    }

    const MoeProblem& p_;
    int64_t first_, tokens_;
    int threads_;
    Isa isa_;
    float* sums_;
    char* activated_;
    float* results_;
    int32_t *local_, *position_, *rows_;
    float* router_;
    std::vector<int64_t> start_;
    std::vector<GemmProblem> problems_;
};

MoePlan plan_of(const MoeProblem& p) {
    return plan_moe(p.tokens, p.topk, p.w13.n, p.w2.k, p.w2.n, p.x_dtype, p.workspace_budget);
}

}  // namespace

WeightView ExpertBank::expert(int64_t index) const {
    const int64_t first_row = index * padded_rows(n);
    return {format,
            n,
            k,
            weight + first_row * (k / 2),
            scale + first_row * (k / group_size(format)),
            row_scale + (row_scale_stride == 0 ? index : first_row),
            row_scale_stride,
            row_exponent ? row_exponent + first_row : nullptr,
            exact};
}

MoePlan plan_moe(int64_t tokens, int64_t topk, int64_t n13, int64_t intermediate, int64_t hidden, DType x_dtype,
                 int64_t budget) {
    if (tokens == 0 || topk == 0) return {0, 0};
    const int64_t per_token = Layout(topk, n13, intermediate, hidden, x_dtype).bytes;
    const int64_t most = std::max(kSmallestChunk, budget / per_token);
    const int64_t chunk = blocks_of(tokens, blocks_of(tokens, most));  // equal chunks
    return {chunk, Layout(chunk * topk, n13, intermediate, hidden, x_dtype).bytes};
}

void fused_moe(const MoeProblem& problem, void* workspace, int threads, Isa isa) {
    const int64_t pairs = problem.tokens * problem.topk;
    for (int64_t i = 0; i < pairs; ++i) local_expert(problem, i);
    const MoePlan plan = plan_of(problem);
    if (plan.chunk_tokens == 0) {
        if (problem.tokens > 0 && problem.reduce) {
            std::memset(problem.out, 0,
                        static_cast<size_t>(problem.tokens * problem.w2.n * element_size(problem.out_dtype)));
        }
        return;
    }
    const Layout layout(plan.chunk_tokens * problem.topk, problem.w13.n, problem.w2.k, problem.w2.n, problem.x_dtype);
    for (int64_t first = 0; first < problem.tokens; first += plan.chunk_tokens) {
        const int64_t tokens = std::min(plan.chunk_tokens, problem.tokens - first);
        Chunk(problem, first, tokens, layout, static_cast<char*>(workspace), threads, isa).run();
    }
}

}  // namespace petit::cpu
