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
    row_scale_stride: int,
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
    row_scale_stride: int,
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
def moe_workspace_bytes(
    tokens: int, topk: int, hidden: int, intermediate: int, gated: bool, x_dtype: int, budget: int, /
) -> int: ...
def fused_moe(
    x: int,
    x_stride: int,
    x_dtype: int,
    tokens: int,
    topk: int,
    num_experts: int,
    hidden: int,
    intermediate: int,
    format: int,
    exact: bool,
    w13: tuple[int, ...],
    w2: tuple[int, ...],
    topk_ids: tuple[int, bool],
    topk_weights: int,
    expert_map: tuple[int, bool],
    expert_map_size: int,
    activation: int,
    gated: bool,
    alpha: float,
    beta: float,
    limit: float,
    router_on_input: bool,
    routed_scale: float,
    reduce: bool,
    out: int,
    out_dtype: int,
    stage_one: int,
    workspace: int,
    budget: int,
    threads: int,
    /,
) -> None: ...
def hip_find_nan(
    format: int, n: int, k: int, weight: int, weight_stride: int, scale: int, scale_stride: int, threads: int, /
) -> tuple[int, int]: ...
def hip_pack(
    format: int,
    target: int,
    n: int,
    k: int,
    exact: bool,
    weight: int,
    weight_stride: int,
    scale: int,
    scale_stride: int,
    out_weight: int,
    out_scale: int,
    row_exponent: int,
    threads: int,
    /,
) -> bool: ...
def hip_unpack(
    format: int,
    target: int,
    n: int,
    k: int,
    exact: bool,
    weight: int,
    scale: int,
    row_exponent: int,
    out_weight: int,
    out_scale: int,
    threads: int,
    /,
) -> None: ...
def hip_dequantize(
    format: int,
    target: int,
    n: int,
    k: int,
    exact: bool,
    weight: int,
    scale: int,
    row_scale: int,
    row_exponent: int,
    out: int,
    out_type: int,
    threads: int,
    /,
) -> None: ...

class HipError(RuntimeError): ...

class HipRuntime:
    def __init__(self, path: str, /) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def device_count(self) -> int: ...
    def arch(self, device: int, /) -> str: ...
    def compute_units(self, device: int, /) -> int: ...

class DeviceCode:
    def __init__(self, runtime: HipRuntime, device: int, image: bytes, name: str, /) -> None: ...
    def unload(self) -> None: ...
    def function(self, kernel: str, /) -> None: ...
    def dequantize(
        self, kernel: str, weight: int, scale: int, out: int, n_begin: int, rows: int, k: int, stream: int, /
    ) -> None: ...
    def finish(
        self,
        kernel: str,
        sum: int,
        row_scale: int,
        row_exponent: int,
        bias: int,
        bias_f32: bool,
        y: int,
        y_stride: int,
        n: int,
        m: int,
        stream: int,
        /,
    ) -> None: ...

class LinearPlan:
    def __init__(
        self,
        code: DeviceCode,
        convert: str,
        gemm: str,
        shape: str,
        n_k_m: tuple[int, int, int],
        grid: tuple[int, int, int, int, int, int],
        slices: int,
        offsets: tuple[int, int, int, int, int],
        /,
    ) -> None: ...
    def run(
        self,
        x: int,
        x_stride_bytes: int,
        weight: int,
        scale: int,
        row_scale: int,
        row_exponent: int,
        bias: int,
        bias_f32: bool,
        y: int,
        y_stride: int,
        workspace: int,
        stream: int,
        /,
    ) -> None: ...
    def convert(self, x: int, x_stride_bytes: int, workspace: int, stream: int, /) -> None: ...
