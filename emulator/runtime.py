"""ctypes face of the emulator: load a code object, launch kernels on NumPy arrays or torch tensors, read counters."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emulator import build


class EmulatorError(RuntimeError):
    """What the kernel did wrong, with workgroup, wave, pc and instruction."""


@dataclass(frozen=True)
class Counters:
    """Counts of wave instructions by unit, bytes summed over lanes, cycles of the modelled units."""

    values: dict[str, int]

    def __getattr__(self, name: str) -> int:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    def __sub__(self, other: Counters) -> Counters:
        return Counters({k: v - other.values[k] for k, v in self.values.items()})

    @property
    def instructions(self) -> int:
        units = ("salu", "valu", "mfma", "vmem", "lds", "smem", "branch", "wait", "barrier", "other")
        return sum(self.values[u] for u in units)


_FIXED = {"i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q", "f32": "<f", "f64": "<d"}


@dataclass(frozen=True)
class Arg:
    """An argument of explicit type: Arg("i32", 5). Plain int and float take the size that the kernel declares."""

    kind: str
    value: float

    def pack(self) -> bytes:
        return struct.pack(_FIXED[self.kind], self.value)


def library_path() -> Path:
    """The shared library: also what PETIT_HIP_RUNTIME should name."""
    return build.library()


class Emulator:
    """The one emulated device of this process."""

    def __init__(self, path: str | Path | None = None) -> None:
        lib = ctypes.CDLL(str(path or library_path()))
        for name in ("last_error", "arch", "kernels", "describe", "counter_name", "unit"):
            getattr(lib, f"petit_emu_{name}").restype = ctypes.c_char_p
        p, u64 = ctypes.c_void_p, ctypes.c_uint64
        lib.petit_emu_register.argtypes = [p, u64, ctypes.c_char_p, ctypes.c_int]
        lib.petit_emu_unregister.argtypes = [p]
        lib.petit_emu_load.argtypes = [ctypes.c_char_p, u64, ctypes.POINTER(p)]
        lib.petit_emu_unload.argtypes = [p]
        lib.petit_emu_function.argtypes = [p, ctypes.c_char_p, ctypes.POINTER(p)]
        lib.petit_emu_kernels.argtypes = [p]
        lib.petit_emu_describe.argtypes = [p]
        lib.petit_emu_launch.argtypes = [p, p, p, ctypes.c_uint32, ctypes.c_char_p, u64]
        lib.petit_emu_set_option.argtypes = [ctypes.c_char_p, u64]
        lib.petit_emu_counters.argtypes = [ctypes.c_int, p]
        lib.petit_emu_pc_counts.argtypes = [p, p, u64]
        lib.petit_emu_pc_counts.restype = u64
        self.lib = lib
        n = lib.petit_emu_counter_count()
        self._names = [lib.petit_emu_counter_name(i).decode() for i in range(n)]

    def check(self, status: int) -> None:
        if status:
            raise EmulatorError(self.lib.petit_emu_last_error().decode())

    @property
    def arch(self) -> str:
        return self.lib.petit_emu_arch().decode()

    def set_arch(self, name: str) -> None:
        self.check(self.lib.petit_emu_set_arch(name.encode()))

    def set_option(self, name: str, value: int) -> None:
        """resident, quantum, seed (order of workgroups and waves), xcds, cus: see c_api.cpp."""
        self.check(self.lib.petit_emu_set_option(name.encode(), value))

    def register(self, pointer: int, nbytes: int, name: str, writable: bool = True) -> None:
        self.check(self.lib.petit_emu_register(pointer, nbytes, name.encode(), int(writable)))

    def unregister(self, pointer: int) -> None:
        self.check(self.lib.petit_emu_unregister(pointer))

    @contextlib.contextmanager
    def registered(self, *arrays: Any, writable: bool = True) -> Iterator[None]:
        """Makes the memory of arrays (or torch tensors) visible to kernels inside the block."""
        done: list[int] = []
        try:
            for i, array in enumerate(arrays):
                pointer, nbytes = memory_of(array)
                if nbytes:
                    self.register(pointer, nbytes, f"array {i}", writable)
                    done.append(pointer)
            yield
        finally:
            for pointer in done:
                self.unregister(pointer)

    def load(self, elf: bytes, arch: str | None = None) -> Module:
        """`arch` switches the device first; modules of another architecture stay usable."""
        if arch is not None and arch != self.arch:
            self.set_arch(arch)
        return Module(self, elf)

    def counters(self, last: bool = False) -> Counters:
        """Since the last reset, or of the last launch."""
        buffer = (ctypes.c_uint64 * len(self._names))()
        self.lib.petit_emu_counters(int(last), buffer)
        return Counters(dict(zip(self._names, buffer, strict=True)))

    def reset_counters(self) -> None:
        self.lib.petit_emu_reset_counters()

    def pc_counts(self) -> dict[int, int]:
        """pc -> times executed (by a wave) in the last launch."""
        n = self.lib.petit_emu_pc_counts(None, None, 0)
        pcs, counts = (ctypes.c_uint64 * n)(), (ctypes.c_uint64 * n)()
        self.lib.petit_emu_pc_counts(pcs, counts, n)
        return dict(zip(pcs, counts, strict=True))

    def knows(self, arch: str, mnemonic: str) -> str:
        """Unit that executes a mnemonic (without its _e32/_e64 suffix), or "" if the emulator does not know it."""
        return self.lib.petit_emu_unit(arch.encode(), mnemonic.encode()).decode()


class Module:
    """A loaded code object. `module.kernel(name)`; `unload()` or use as a context manager."""

    def __init__(self, emulator: Emulator, elf: bytes) -> None:
        self.emulator = emulator
        self.elf = bytes(elf)
        handle = ctypes.c_void_p()
        emulator.check(emulator.lib.petit_emu_load(self.elf, len(self.elf), ctypes.byref(handle)))
        self._handle: ctypes.c_void_p | None = handle

    def names(self) -> list[str]:
        return self.emulator.lib.petit_emu_kernels(self._handle).decode().split()

    def kernel(self, name: str | None = None) -> Kernel:
        if name is None:
            (name,) = self.names()
        return Kernel(self, name)

    def unload(self) -> None:
        if self._handle is not None:
            self.emulator.check(self.emulator.lib.petit_emu_unload(self._handle))
            self._handle = None

    def __enter__(self) -> Module:
        return self

    def __exit__(self, *_: object) -> None:
        self.unload()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.unload()


class Kernel:
    """One kernel: its resources and `launch`."""

    def __init__(self, module: Module, name: str) -> None:
        self.module, self.name = module, name
        emulator = module.emulator
        handle = ctypes.c_void_p()
        emulator.check(emulator.lib.petit_emu_function(module._handle, name.encode(), ctypes.byref(handle)))
        self._handle = handle
        first, *rest = emulator.lib.petit_emu_describe(handle).decode().splitlines()
        self.lds_bytes, self.scratch_bytes, self.kernarg_bytes, self.vgpr, self.agpr, self.sgpr, self.spills = map(
            int, first.split()
        )
        self.args = [
            (int(o), int(s), kind) for o, s, kind in (line.split() for line in rest) if not kind.startswith("hidden_")
        ]

    def pack(self, args: Sequence[Any]) -> bytes:
        if len(args) != len(self.args):
            raise TypeError(f"{self.name} takes {len(self.args)} arguments, got {len(args)}")
        out = bytearray(self.kernarg_bytes)
        for i, (value, (offset, size, kind)) in enumerate(zip(args, self.args, strict=True)):
            if value is None:
                raw = bytes(8)
            elif isinstance(value, Arg):
                raw = value.pack()
            elif isinstance(value, bytes):
                raw = value
            elif isinstance(value, bool | int):
                raw = int(value).to_bytes(size, "little", signed=value < 0)
            elif isinstance(value, float):
                raw = struct.pack("<f" if size == 4 else "<d", value)
            else:
                raw = memory_of(value)[0].to_bytes(8, "little")
            if len(raw) != size:
                raise TypeError(f"{self.name}: argument {i} ({kind}) has {size} bytes, the value given has {len(raw)}")
            out[offset : offset + size] = raw
        return bytes(out)

    def launch(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        lds: int = 0,
        *,
        register: bool = True,
        extra: Sequence[Any] = (),
    ) -> Counters:
        """Runs the kernel. `grid` counts workgroups, `block` work items, `lds` is the dynamic LDS in bytes.

        Array and tensor arguments are passed as pointers and (register=True) are the only memory the kernel may touch,
        together with `extra` arrays. Returns the counters of this launch; raises EmulatorError.
        """
        emulator = self.module.emulator
        packed = self.pack(args)
        arrays = {memory_of(a)[0]: a for a in [*args, *extra] if is_array(a)} if register else {}
        g, b = (ctypes.c_uint32 * 3)(*three(grid)), (ctypes.c_uint32 * 3)(*three(block))
        with emulator.registered(*arrays.values()):
            emulator.check(emulator.lib.petit_emu_launch(self._handle, g, b, lds, packed, len(packed)))
        return emulator.counters(last=True)


def three(x: int | Sequence[int]) -> list[int]:
    t = [x] if isinstance(x, int) else list(x)
    return t + [1] * (3 - len(t))


def is_array(x: Any) -> bool:
    return hasattr(x, "__array_interface__") or hasattr(x, "data_ptr")


def memory_of(x: Any) -> tuple[int, int]:
    """Address and bytes of a contiguous NumPy array or CPU torch tensor."""
    if hasattr(x, "data_ptr"):
        if x.device.type != "cpu" or not x.is_contiguous():
            raise TypeError("a kernel argument must be a contiguous CPU tensor")
        return x.data_ptr(), x.numel() * x.element_size()
    if hasattr(x, "__array_interface__"):
        if not x.flags.c_contiguous:
            raise TypeError("a kernel argument must be a contiguous array")
        return x.ctypes.data, x.nbytes
    raise TypeError(f"not an array or tensor: {type(x).__name__}")


_instance: Emulator | None = None


def get() -> Emulator:
    """The process-wide emulator, built and loaded at first use."""
    global _instance
    if _instance is None:
        _instance = Emulator()
    return _instance


def load(elf: bytes, arch: str | None = None) -> Module:
    return get().load(elf, arch)
