"""Commands and their options. Each command loads its code, and torch, when it runs, so that --help is quick."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="FP4 checkpoints and kernels: what this machine can run, what a checkpoint holds, quantize one, verify one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str, typer.Argument(help="Checkpoint directory, or a model name that is in the local Hugging Face cache.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


class Format(str, Enum):
    nvfp4 = "nvfp4"
    mxfp4 = "mxfp4"


class ScaleMode(str, Enum):
    round_up = "round_up"
    floor = "floor"
    even = "even"


def _version(show: bool) -> None:
    if show:
        from petit_cli import environment

        print(f"petit {environment.version()}")
        raise typer.Exit


@contextmanager
def _ready() -> Iterator[None]:
    """For commands that need the kernels: their errors reported, and torch and petit_plugin loaded."""
    from petit_cli import environment, output

    with output.reported():
        environment.load()
        yield


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what works on this machine, and why the rest does not."""
    from petit_cli import doctor, output

    with output.reported():
        doctor.run(as_json)


@app.command()
def inspect(
    model: Model,
    as_json: Json = False,
    quick: Annotated[bool, typer.Option("--quick", help="Read headers only, not the scales themselves.")] = False,
) -> None:
    """Explain a checkpoint without a GPU: the format of every layer, bytes saved, and what is broken or refused."""
    with _ready():
        from petit_plugin.cli import inspect

        inspect.run(model, as_json, quick)


@app.command()
def quantize(
    model: Model,
    out: Annotated[Path, typer.Argument(help="Directory to create.")],
    format: Annotated[Format, typer.Option("--format", "-f", help="FP4 format of the weights.")],
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude", "-x", help="Keep matching modules in 16 bits: name, wildcard or re:REGEX; may be repeated."
        ),
    ] = None,
    scale_mode: Annotated[
        ScaleMode | None,
        typer.Option(help="Rule for MXFP4 block exponents. [default: round_up, ModelOpt's]", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is a checkpoint directory.")] = False,
) -> None:
    """Quantize the linear layers of a BF16, FP16 or FP32 checkpoint to FP4, in ModelOpt's format.

    Embeddings, lm_head, routers, norms and vision towers keep their type. OUT appears only when it is complete.
    """
    with _ready():
        from petit_plugin.cli import quantize

        quantize.run(model, out, format.value, exclude or [], scale_mode and scale_mode.value, force)


@app.command()
def verify(model: Model, as_json: Json = False) -> None:
    """Check every FP4 layer: packed for the kernels and back, dequantized and multiplied, against the reference."""
    with _ready():
        from petit_plugin.cli import verify

        verify.run(model, as_json)


Arch = Annotated[str | None, typer.Option("--arch", help="gfx90a, gfx942 or gfx950; bench and tune emulate it.")]
OneFormat = Annotated[Format | None, typer.Option("--format", "-f", help="Only this format.")]
Rows = Annotated[list[int] | None, typer.Option("--rows", "-m", help="Rows of activations; may be repeated.")]


@app.command()
def isa(arch: Arch = None, as_json: Json = False) -> None:
    """What the compiled GPU kernels contain: registers, LDS, occupancy, instructions per 8 weights."""
    with _ready():
        from petit_plugin.cli import isa

        isa.run(arch, as_json)


@app.command()
def bench(arch: Arch = None, format: OneFormat = None, rows: Rows = None, as_json: Json = False) -> None:
    """Linear layers of Llama-3.3-70B: timed on this GPU, or counted on the emulator and modelled for each chip."""
    with _ready():
        from petit_plugin.cli import bench

        bench.run(arch, None if format is None else format.value, rows or [], as_json)


@app.command()
def tune(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Solution file to write.")] = None,
    arch: Arch = None,
    format: OneFormat = None,
    shape: Annotated[list[str] | None, typer.Option("--shape", help="N,K; may be repeated.")] = None,
    rows: Rows = None,
    show: Annotated[bool, typer.Option("--show", help="Print the table in use and stop.")] = False,
) -> None:
    """Choose the kernel and grid for each shape, by time on this GPU or by the emulator's model, into a file."""
    with _ready():
        from petit_plugin.cli import tune

        tune.run(out, arch, None if format is None else format.value, shape or [], rows or [], show)
