// Names and availability of the instruction sets; the choice itself is best_isa() in gemm.hpp.
#pragma once

#include <string>

#include "gemm.hpp"

namespace petit::cpu {

const char* isa_name(Isa isa);
bool isa_built(Isa isa);            // this build contains kernels for it (they may still not run on this CPU)
Isa parse_isa(const char* wanted);  // throws std::invalid_argument if unknown, not built or not supported here

}  // namespace petit::cpu
