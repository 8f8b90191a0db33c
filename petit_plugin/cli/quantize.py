"""`petit quantize`: a 16-bit checkpoint in, an FP4 checkpoint in ModelOpt's format out.

Files are written shard by shard and tensors in slices of rows, so memory stays at a few slices a core.
Everything goes to a directory beside OUT that is renamed at the end: OUT is either complete or not there.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from petit_cli import output
from petit_cli.output import CheckFailed, UsageError, size
from petit_plugin.checkpoints.checkpoint import Checkpoint
from petit_plugin.checkpoints.errors import BrokenCheckpointError, UnsupportedCheckpointError
from petit_plugin.checkpoints.patterns import PatternSet
from petit_plugin.checkpoints.safetensors_files import INDEX_NAME, TensorInfo, load_json, read_tensors
from petit_plugin.checkpoints.safetensors_writer import SafetensorsWriter, TensorSpec
from petit_plugin.checkpoints.spec import GROUP_SIZES
from petit_plugin.cli import model_path
from petit_plugin.cli.quantize_plan import Plan, check_source, ignore_list, make_plan, unmatched, user_pattern
from petit_plugin.cli.workers import Workers, workers

if TYPE_CHECKING:
    import torch

SLICE_ELEMENTS = 8 << 20  # 32 MB in float32
COPY_BYTES = 16 << 20
LINE_SECONDS = 10
# Weights are 4-bit and activations stay 16-bit; no calibration has been done. ModelOpt's names for that.
ALGOS = {"nvfp4": "W4A16_NVFP4", "mxfp4": "mxfp4"}
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
Advance = Callable[[int], None]


def quantization_configs(fmt: str, ignore: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(quantization_config of config.json, hf_quant_config.json): servers read the first, older tools the second."""
    from petit_plugin._version import __version__

    producer = {"name": "petit_plugin", "version": __version__}
    flat: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": ALGOS[fmt],
        "ignore": ignore,
        "producer": producer,
    }
    nested: dict[str, Any] = {"quant_algo": ALGOS[fmt], "kv_cache_quant_algo": None, "exclude_modules": ignore}
    if fmt == "nvfp4":
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        flat["config_groups"] = {"group_0": {"weights": weights, "targets": ["Linear"]}}
        nested["group_size"] = 16
    return flat, {"producer": producer, "quantization": nested}


def output_tensors(info: TensorInfo, fmt: str) -> list[TensorSpec]:
    """The tensors that a quantized weight becomes."""
    module, (n, k) = info.name.removesuffix(".weight"), info.shape
    specs = [TensorSpec(info.name, "U8", (n, k // 2))]
    if fmt == "nvfp4":
        specs.append(TensorSpec(f"{module}.weight_scale", "F8_E4M3", (n, k // 16)))
        specs.append(TensorSpec(f"{module}.weight_scale_2", "F32", ()))
    else:
        specs.append(TensorSpec(f"{module}.weight_scale", "U8", (n, k // 32)))
    return specs


class _Source:
    """Slices of rows of the source's tensors, and their largest magnitudes. For several threads."""

    def __init__(self, tensors: dict[str, TensorInfo]):
        self.tensors = tensors
        self._amax: dict[str, Future[float]] = {}
        self._lock = threading.Lock()

    def rows(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        from safetensors import safe_open

        info = self.tensors[name]
        step = max(1, SLICE_ELEMENTS // max(info.shape[1], 1))
        with safe_open(str(info.file), framework="pt") as file:
            data = file.get_slice(name)
            for start in range(0, info.shape[0], step):
                yield start, data[start : min(start + step, info.shape[0])]

    def amax(self, name: str) -> float:
        """Largest magnitude of a tensor, found once. Raises BrokenCheckpointError for NaN or infinity."""
        with self._lock:
            first = name not in self._amax
            future = self._amax.setdefault(name, Future())
        if first:
            try:
                future.set_result(self._find_amax(name))
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def _find_amax(self, name: str) -> float:
        largest = 0.0
        for _, part in self.rows(name):
            value = float(part.abs().max()) if part.numel() else 0.0
            if not value < float("inf"):
                raise BrokenCheckpointError(f"{name} holds {value}: the model is damaged")
            largest = max(largest, value)
        return largest


def _copy(info: TensorInfo, writer: SafetensorsWriter, advance: Advance) -> None:
    with info.file.open("rb") as file:
        file.seek(info.start)
        done = 0
        while done < info.nbytes:
            data = file.read(min(COPY_BYTES, info.nbytes - done))
            if not data:
                raise BrokenCheckpointError(f"{info.file.name}: ends inside tensor {info.name}")
            writer.write(info.name, data, done)
            done += len(data)
            advance(len(data))


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy; valid as long as the caller holds the tensor."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def _quantize_tensor(
    source: _Source,
    info: TensorInfo,
    siblings: tuple[str, ...],
    fmt: str,
    mode: str,
    writer: SafetensorsWriter,
    advance: Advance,
) -> None:
    from petit_plugin.formats import quantize_mxfp4, quantize_nvfp4

    module, k = info.name.removesuffix(".weight"), info.shape[1]
    amax = max(source.amax(s) for s in siblings) if fmt == "nvfp4" else 0.0
    global_scale: torch.Tensor | None = None
    for start, part in source.rows(info.name):
        try:
            if fmt == "nvfp4":
                # One scale for layers that are fused when served: loaders that keep a single one stay exact.
                codes, scale, global_scale = quantize_nvfp4(part, amax=amax or None)
            else:
                codes, scale = quantize_mxfp4(part, scale_mode=mode)  # type: ignore[arg-type]
        except ValueError as error:
            raise BrokenCheckpointError(f"{info.name}: {error}") from error
        writer.write(info.name, _bytes(codes), start * (k // 2))
        writer.write(f"{module}.weight_scale", _bytes(scale), start * (k // GROUP_SIZES[fmt]))
        advance(part.numel() * part.element_size())
    if global_scale is not None:
        writer.write(f"{module}.weight_scale_2", _bytes(global_scale))


def write_weights(
    out: Path, tensors: dict[str, TensorInfo], plan: Plan, fmt: str, mode: str, pool: Workers, advance: Advance
) -> int:
    """One output file for every input file, and the index if there are several. Returns the bytes written."""
    source = _Source(tensors)
    files = sorted({t.file for t in tensors.values()})
    weight_map: dict[str, str] = {}
    total = 0
    for number, file in enumerate(files, 1):
        inside = sorted((t for t in tensors.values() if t.file == file), key=lambda t: t.start)
        specs = [
            s
            for t in inside
            for s in (output_tensors(t, fmt) if t.name in plan.quantize else [TensorSpec(t.name, t.dtype, t.shape)])
        ]
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with SafetensorsWriter(out / name, specs) as writer:

            def convert(info: TensorInfo, writer: SafetensorsWriter = writer) -> None:
                if info.name in plan.quantize:
                    _quantize_tensor(source, info, plan.quantize[info.name], fmt, mode, writer, advance)
                else:
                    _copy(info, writer, advance)

            for _ in pool.map(convert, inside):
                pass
        weight_map |= {s.name: name for s in specs}
        total += sum(s.nbytes for s in specs)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (out / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    return total


def copy_side_files(model: Path, out: Path) -> list[str]:
    """Tokenizer, generation config, templates ... : plain files that hold no weights. Returns what was left out."""
    skipped = []
    for entry in sorted(model.iterdir()):
        if entry.is_dir():
            skipped.append(entry.name + "/")
        elif entry.name.endswith(_WEIGHT_FILES) or entry.name.endswith(".index.json"):
            if not entry.name.endswith((".safetensors", INDEX_NAME)):
                skipped.append(entry.name)
        elif entry.name not in ("config.json", "hf_quant_config.json"):
            shutil.copyfile(entry, out / entry.name)
    return skipped


@contextmanager
def atomic_directory(out: Path, force: bool) -> Iterator[Path]:
    """A directory beside `out` to fill; it becomes `out` if the block ends well and vanishes if it does not.

    With `force` it replaces `out`: whatever happens, `out` is afterwards the complete old or the complete new one.
    """
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        _sync(*temporary.iterdir(), temporary)
        with output.signals_held():
            if force and out.exists():
                _replace(temporary, out)
            else:
                os.rename(temporary, out)
            _sync(out.parent)
    finally:
        with output.signals_held():
            shutil.rmtree(temporary, ignore_errors=True)


def _replace(temporary: Path, out: Path) -> None:
    """Rename `temporary` to `out`, which exists and is deleted once that is done."""
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.old-", dir=out.parent))
    old = aside / out.name
    try:
        os.rename(out, old)
        os.rename(temporary, out)
    finally:
        if not os.path.lexists(out):
            try:
                os.rename(old, out)
            except OSError as error:
                raise CheckFailed(f"{out} could not be put back ({error.strerror}): it is now {old}") from error
        shutil.rmtree(aside, ignore_errors=True)


def _sync(*paths: Path) -> None:
    """Wait until files and directory entries are on the disk, so that the rename is not there before them."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def check_out(model: Path, out: Path, force: bool) -> Path:
    """OUT as an absolute path. Raises UsageError when it may not be created there."""
    out = Path(os.path.abspath(out.expanduser()))
    real, source = out.resolve(), model.resolve()
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such directory to create {out.name} in")
    if real == source or real in source.parents or source in real.parents:
        raise UsageError(f"{out} is, contains or lies in the model itself: choose another directory")
    if os.path.lexists(out):
        if not force:
            raise UsageError(f"{out} exists already: choose another name, or replace it with --force")
        if out.is_symlink() or not out.is_dir() or (any(out.iterdir()) and not (out / "config.json").exists()):
            raise UsageError(f"{out} is not a checkpoint directory: --force does not replace it")
    return out


def run(model: str, out: Path, fmt: str, exclude: list[str], scale_mode: str | None, force: bool) -> None:
    if scale_mode is not None and fmt != "mxfp4":
        raise UsageError(f"--scale-mode {scale_mode} is a rule for MXFP4 scales: leave it out with --format {fmt}")
    try:
        patterns = [user_pattern(text) for text in exclude]
    except UnsupportedCheckpointError as error:
        raise UsageError(f"--exclude: {error}") from error
    path = model_path.resolve(model)
    out = check_out(path, out, force)
    config = load_json(path / "config.json")
    tensors = read_tensors(path)
    for text in unmatched(tensors, exclude):
        raise UsageError(f"--exclude {text!r} matches no module of {path}: correct it (petit inspect lists names)")
    check_source(config, tensors, PatternSet(patterns))
    plan = make_plan(tensors, fmt, exclude)
    for note in plan.notes:
        output.say(note)
    before = sum(t.nbytes for t in tensors.values())
    needed = sum(
        sum(s.nbytes for s in output_tensors(t, fmt)) if t.name in plan.quantize else t.nbytes for t in tensors.values()
    )
    if shutil.disk_usage(out.parent).free < needed * 1.01:
        raise CheckFailed(
            f"{out.parent}: {size(needed)} are needed and {size(shutil.disk_usage(out.parent).free)} are free"
        )

    flat, nested = quantization_configs(fmt, ignore_list(plan.quantize, plan.kept))
    with atomic_directory(out, force) as temporary:
        skipped = copy_side_files(path, temporary)
        with workers() as pool, _progress(f"{fmt} {path.name}", before) as show:

            def advance(n: int) -> None:
                pool.check()
                show(n)

            total = write_weights(temporary, tensors, plan, fmt, scale_mode or "round_up", pool, advance)
        (temporary / "hf_quant_config.json").write_text(json.dumps(nested, indent=2) + "\n")
        written = json.dumps({**config, "quantization_config": flat}, indent=2) + "\n"
        (temporary / "config.json").write_text(written)
        Checkpoint(temporary).check()  # what has been written is what a loader will understand
    if skipped:
        output.say(f"not copied: {', '.join(skipped)}")
    output.console().print(
        f"{out}: {len(plan.quantize)} layers in {fmt}, {len(plan.kept)} matrices kept; "
        f"{size(before)} became {size(total)}",
        markup=False,
        soft_wrap=True,
    )


@contextmanager
def _progress(label: str, total: int) -> Iterator[Advance]:
    """A bar on a terminal; elsewhere a line from time to time."""
    console = output.error_console()
    if console.is_terminal:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(label, total=total)
            yield lambda n: progress.update(task, advance=n)
        return
    done, said = 0, time.monotonic()

    def advance(n: int) -> None:
        nonlocal done, said
        done += n
        if time.monotonic() - said > LINE_SECONDS:
            said = time.monotonic()
            output.say(f"{label}: {size(done)} of {size(total)}")

    yield advance
