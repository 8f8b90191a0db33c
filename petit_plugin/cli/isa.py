"""`petit isa`: what the compiled GPU kernels contain."""

from __future__ import annotations

from petit_cli import output
from petit_plugin.backends.hip import isa, solutions

_COLUMNS = (
    ("kernel", "kernel"),
    ("vgpr", "VGPR"),
    ("agpr", "AGPR"),
    ("lds_bytes", "LDS"),
    ("scratch_bytes", "scratch"),
    ("occupancy", "waves"),
    ("valu_per_8_weights", "VALU/8w"),
    ("mfma_per_8_weights", "MFMA/8w"),
    ("weight_load_bytes", "load B"),
    ("bytes_in_flight_per_cu", "in flight"),
)


def run(arch: str | None, as_json: bool) -> None:
    if arch is not None and arch not in solutions.ARCHS:
        raise output.UsageError(f"--arch {arch}: there are kernels for {', '.join(solutions.ARCHS)}")
    try:
        reports = list(isa.report(arch))
    except (FileNotFoundError, RuntimeError) as error:
        raise output.CheckFailed(str(error)) from None
    if as_json:
        output.print_json(isa.as_json(iter(reports)))
        return
    width = max(len(r.kernel) for r in reports)
    for name in solutions.ARCHS:
        rows = [r for r in reports if r.arch == name]
        if not rows:
            continue
        print(f"{name}: {len(rows)} kernels; counts are of the innermost MFMA loop, per 8 weights of a lane")
        print("  ".join(title.ljust(width) if key == "kernel" else title.rjust(9) for key, title in _COLUMNS))
        for r in rows:
            cells = [getattr(r, key) for key, _ in _COLUMNS]
            shown = ["-" if c is None else f"{c:.1f}" if isinstance(c, float) else str(c) for c in cells]
            print("  ".join([shown[0].ljust(width), *(c.rjust(9) for c in shown[1:])]))
