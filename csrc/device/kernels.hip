// Instantiates every kernel of kernels.def for one target.
#include "convert.hpp"
#include "decode.hpp"
#include "dequantize.hpp"
#include "tile.hpp"

using namespace petit;

namespace petit {
constexpr Core kExactCore = arch::kHasFp4Convert ? Core::kConvert : Core::kMask;
}

#define DECODE(format, F, type, T, core, exact, rows, row_tiles)                       \
    PETIT_KERNEL(256, 2) void petit_decode_##format##_##type##_##rows(GemmArgs a) {    \
        decode_gemm<DecodeConfig<F, T, row_tiles, core, exact>>(a);                    \
    }
#define TILE(format, F, type, T, core, exact, rows, row_tiles, n_tiles, waves)                \
    PETIT_KERNEL((waves) * 64, 2) void petit_tile_##format##_##type##_##rows(GemmArgs a) {    \
        tile_gemm<TileConfig<F, T, row_tiles, n_tiles, waves, core, exact>>(a);               \
    }
#define DEQUANTIZE(format, F, type, T, core, suffix)                                            \
    PETIT_KERNEL(256, 2) void petit_dequantize_##format##_##type##suffix(DequantizeArgs a) {    \
        dequantize<F, T, core, false>(a);                                                       \
    }

#include "kernels.def"

PETIT_KERNEL(256, 2) void petit_convert_bf16(ConvertArgs a) { convert_row<Type::kBf16, Type::kF16>(a); }
PETIT_KERNEL(256, 2) void petit_convert_f16(ConvertArgs a) { convert_row<Type::kF16, Type::kF16>(a); }
PETIT_KERNEL(256, 2) void petit_arrange_bf16(ConvertArgs a) { convert_row<Type::kBf16, Type::kBf16>(a); }
PETIT_KERNEL(256, 2) void petit_finish_bf16(FinishArgs a) { finish<Type::kBf16>(a); }
PETIT_KERNEL(256, 2) void petit_finish_f16(FinishArgs a) { finish<Type::kF16>(a); }
