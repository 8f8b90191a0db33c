"""Options of `petit quantize` that would have no effect are errors, and its patterns mean what a shell's mean."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from cli.runner import listing, petit, write_model, write_tensors

from petit_plugin.checkpoints.safetensors_files import read_tensors
from petit_plugin.cli import quantize


@pytest.mark.parametrize("mode", ["round_up", "floor"])
def test_scale_mode_is_for_mxfp4(mode: str, tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    result = petit("quantize", tmp_path / "in", tmp_path / "out", "-f", "nvfp4", "--scale-mode", mode)
    assert result.code == 2 and f"--scale-mode {mode}" in result.err and listing(tmp_path) == ["in"]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("*.o_porj", "--exclude '*.o_porj' matches no module"),
        ("model.layers.7", "--exclude 'model.layers.7' matches no module"),
        ("o_pro", "--exclude 'o_pro' matches no module"),
        ("re:layers", "--exclude 're:layers' matches no module"),
        ("re:(", "--exclude: pattern 're:(' is not a valid regular expression"),
        ("re:a{99999999999}", "is not a valid regular expression"),
    ],
)
def test_useless_patterns(pattern: str, text: str, tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    result = petit("quantize", tmp_path / "in", tmp_path / "out", "-f", "nvfp4", "-x", "*.q_proj", "-x", pattern)
    assert result.code == 2 and text in result.err and result.err.count("\n") == 1, result.err
    assert listing(tmp_path) == ["in"]


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("*.o_*", {"layers.0.self_attn.o_proj", "layers.1.self_attn.o_proj"}),
        ("model.layers.0.mlp.do*", {"layers.0.mlp.down_proj"}),
        ("model.layers.0.mlp.up*", {"layers.0.mlp.up_proj", "layers.0.mlp.gate_proj"}),  # fused with up_proj
        ("model.layers.[1].mlp.down_proj", {"layers.1.mlp.down_proj"}),
        ("layers.0.mlp.down_proj", {"layers.0.mlp.down_proj"}),
        ("re:.*0.*down", {"layers.0.mlp.down_proj"}),
        ("lm_head", set()),
    ],
)
def test_patterns(pattern: str, kept: set[str], tmp_path: Path) -> None:
    write_model(tmp_path / "in", tied=True)
    result = petit("quantize", tmp_path / "in", tmp_path / "out", "-f", "mxfp4", "-x", pattern)
    assert result.code == 0, result.err
    tensors = read_tensors(tmp_path / "out")
    found = {n.removesuffix(".weight") for n, t in tensors.items() if n.endswith("_proj.weight") and t.dtype == "BF16"}
    assert found == {f"model.{name}" for name in kept}
    ignore = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {f"model.{name}" for name in kept} <= set(ignore)
    assert petit("verify", tmp_path / "out").code == 0


@pytest.mark.parametrize("options", [(), ("-x", "*.down_proj")])
def test_float64_weights_are_refused_by_name(options: tuple[str, ...], tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "in")
    name = "model.layers.1.mlp.down_proj.weight"
    write_tensors(tmp_path / "in", tensors | {name: tensors[name].double()})
    result = petit("quantize", tmp_path / "in", tmp_path / "out", "-f", "nvfp4", *options)
    assert result.code == 1 and f"{name} is F64: start from BF16, FP16 or FP32 weights" in result.err
    assert listing(tmp_path) == ["in"]


def test_largest_magnitudes_are_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = write_model(tmp_path / "in")
    name = "model.layers.1.mlp.down_proj.weight"
    source = quantize._Source(read_tensors(tmp_path / "in"))
    rows, reads, together = source.rows, [], threading.Barrier(6)

    def counted(asked: str) -> object:
        reads.append(asked)
        return rows(asked)

    monkeypatch.setattr(source, "rows", counted)
    found: list[float] = []

    def ask() -> None:
        together.wait()
        found.append(source.amax(name))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reads == [name] and found == [float(tensors[name].abs().max())] * 6
