__version__: str
compiler: str

def plan_packing(
    format: int,
    n: int,
    k: int,
    weight: int,
    weight_stride: int,
    scale: int,
    scale_stride: int,
    row_exponent: int,
    threads: int,
    /,
) -> tuple[int, int, bool, bool]: ...
def pack(
    format: int,
    n: int,
    k: int,
    weight: int,
    weight_stride: int,
    scale: int,
    scale_stride: int,
    out_weight: int,
    out_scale: int,
    row_exponent: int,
    threads: int,
    /,
) -> None: ...
def unpack(
    format: int,
    n: int,
    k: int,
    weight: int,
    scale: int,
    row_exponent: int,
    out_weight: int,
    out_scale: int,
    threads: int,
    /,
) -> None: ...
def dequantize(
    format: int,
    n: int,
    k: int,
    weight: int,
    scale: int,
    row_scale: int,
    row_exponent: int,
    out: int,
    out_type: int,
    threads: int,
    /,
) -> None: ...
def linear(
    x: int,
    x_stride: int,
    rows: int,
    dtype: int,
    format: int,
    n: int,
    k: int,
    weight: int,
    scale: int,
    row_scale: int,
    row_exponent: int,
    exact: bool,
    bias: int,
    bias_dtype: int,
    y: int,
    threads: int,
    isa: int,
    /,
) -> None: ...
def best_isa() -> int: ...
def isa_name(isa: int, /) -> str: ...
def isa_built(isa: int, /) -> bool: ...
def isa_supported(isa: int, /) -> bool: ...
def openmp_runtime() -> str: ...
