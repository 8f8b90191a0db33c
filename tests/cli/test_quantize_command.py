"""`petit quantize`: what it writes, what it leaves alone, and that nothing half-written stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli.runner import listing, petit, write_model, write_tensors
from safetensors.torch import load_file

from petit_plugin.checkpoints import QuantSpec
from petit_plugin.checkpoints.checkpoint import Checkpoint
from petit_plugin.cli import quantize
from petit_plugin.cli.quantize_plan import ignore_list
from petit_plugin.formats import quantize_mxfp4, quantize_nvfp4

FAMILIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def loaded(path: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        out |= load_file(file)
    return out


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def fused_amax(tensors: dict[str, torch.Tensor], name: str) -> float:
    parent, leaf = name.removesuffix(".weight").rsplit(".", 1)
    group = next((f for f in FAMILIES if leaf in f), (leaf,))
    return max(float(tensors[f"{parent}.{g}.weight"].abs().max()) for g in group)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("arch", "shards"), [("llama", 1), ("llama", 3), ("qwen3_moe", 2)])
def test_tensors_bit_for_bit(fmt: str, arch: str, shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "SLICE_ELEMENTS", 5000)  # rows come in many uneven slices
    monkeypatch.setattr(quantize, "COPY_BYTES", 1000)
    source = write_model(tmp_path / "in", arch, shards)
    result = petit("quantize", tmp_path / "in", tmp_path / "out", "--format", fmt)
    assert result.code == 0, result.err
    found = loaded(tmp_path / "out")
    for name, tensor in source.items():
        module = name.removesuffix(".weight")
        if not is_linear(name):
            assert same(found.pop(name), tensor)
        elif fmt == "nvfp4":
            expected = quantize_nvfp4(tensor, amax=fused_amax(source, name))
            for suffix, value in zip(("weight", "weight_scale", "weight_scale_2"), expected, strict=True):
                assert same(found.pop(f"{module}.{suffix}"), value)
        else:
            expected_mx = quantize_mxfp4(tensor)
            for suffix, value in zip(("weight", "weight_scale"), expected_mx, strict=True):
                assert same(found.pop(f"{module}.{suffix}"), value)
    assert not found, "tensors that nobody asked for"
    assert listing(tmp_path) == ["in", "out"]
    assert petit("verify", tmp_path / "out").code == 0


def test_config_files(tmp_path: Path) -> None:
    write_model(tmp_path / "in", "qwen3_moe", 2)
    (tmp_path / "in" / "chat_template.jinja").write_text("{{ x }}")
    (tmp_path / "in" / "pytorch_model.bin").write_bytes(b"old")
    (tmp_path / "in" / "original").mkdir()
    result = petit("quantize", tmp_path / "in", tmp_path / "out", "--format", "nvfp4")
    assert result.code == 0 and "not copied: original/, pytorch_model.bin" in result.err
    out = tmp_path / "out"
    assert (out / "chat_template.jinja").read_text() == "{{ x }}"
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "in" / "tokenizer.json").read_bytes()
    assert not (out / "pytorch_model.bin").exists()
    config, before = (json.loads((d / "config.json").read_text()) for d in (out, tmp_path / "in"))
    quant = config.pop("quantization_config")
    assert config == before
    assert (quant["quant_method"], quant["quant_algo"]) == ("modelopt", "W4A16_NVFP4")
    assert quant["config_groups"]["group_0"]["weights"]["group_size"] == 16
    ignored = {"lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"}
    assert set(quant["ignore"]) == ignored
    nested = json.loads((out / "hf_quant_config.json").read_text())
    assert QuantSpec.from_config(nested) == QuantSpec.from_config(quant)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(Checkpoint(out).tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in Checkpoint(out).tensors.values())


def test_mxfp4_config_is_modelopts(tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    assert petit("quantize", tmp_path / "in", tmp_path / "out", "-f", "mxfp4").code == 0
    quant = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert quant["quant_algo"] == "mxfp4" and "config_groups" not in quant and "group_size" not in quant


@pytest.mark.parametrize("mode", ["floor", "even"])
def test_scale_mode(mode: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "in")
    assert petit("quantize", tmp_path / "in", tmp_path / "out", "-f", "mxfp4", "--scale-mode", mode).code == 0
    name = "model.layers.0.mlp.down_proj"
    expected = quantize_mxfp4(source[f"{name}.weight"], scale_mode=mode)  # type: ignore[arg-type]
    assert same(loaded(tmp_path / "out")[f"{name}.weight_scale"], expected.weight_scale)


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    write_model(tmp_path / "in", tied=True)
    assert petit("quantize", tmp_path / "in", tmp_path / "out", "-f", "nvfp4").code == 0
    assert "lm_head.weight" not in loaded(tmp_path / "out")
    spec = QuantSpec.from_checkpoint(tmp_path / "out")
    assert spec.layer_format("lm_head") is None
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def test_exclude_takes_fused_partners_along_and_says_so(tmp_path: Path) -> None:
    source = write_model(tmp_path / "in")
    result = petit(
        "quantize", tmp_path / "in", tmp_path / "out", "-f", "nvfp4", "-x", "*.layers.0.*.k_proj", "-x", "*.o_proj"
    )
    assert result.code == 0
    assert "model.layers.0.self_attn.q_proj: kept in 16 bits, model.layers.0.self_attn.k_proj is excluded" in result.err
    found = loaded(tmp_path / "out")
    for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert same(found[f"model.layers.0.self_attn.{leaf}.weight"], source[f"model.layers.0.self_attn.{leaf}.weight"])
    assert found["model.layers.1.self_attn.q_proj.weight"].dtype == torch.uint8
    assert found["model.layers.1.self_attn.o_proj.weight"].dtype == torch.bfloat16


def test_k_that_is_no_multiple_of_the_group_stays(tmp_path: Path) -> None:
    write_model(tmp_path / "in", intermediate=376)  # 8 mod 16
    result = petit("quantize", tmp_path / "in", tmp_path / "out", "-f", "nvfp4")
    assert result.code == 0
    assert "down_proj has K = 376, no multiple of the nvfp4 group 16" in result.err
    found = loaded(tmp_path / "out")
    assert found["model.layers.0.mlp.down_proj.weight"].dtype == torch.bfloat16
    assert found["model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8
    assert petit("verify", tmp_path / "out").code == 0


def test_a_bank_of_experts_has_one_format(tmp_path: Path) -> None:
    write_model(tmp_path / "in", "qwen3_moe", intermediate=48)  # fine for K = 128, not for down_proj in groups of 32
    assert petit("quantize", tmp_path / "in", tmp_path / "out", "-f", "mxfp4").code == 0
    dtypes = {t.dtype for n, t in loaded(tmp_path / "out").items() if ".experts." in n}
    assert dtypes == {torch.bfloat16}
    assert QuantSpec.from_checkpoint(tmp_path / "out").layer_format("model.layers.0.mlp.experts") is None


def test_vision_towers_are_ignored_as_a_tree() -> None:
    quantized = ["model.language_model.layers.0.mlp.up_proj.weight"]
    kept = ["model.visual.blocks.0.attn.qkv", "model.visual.merger.mlp.0", "model.language_model.layers.0.mlp.gate"]
    assert ignore_list(quantized, kept) == ["lm_head", "model.language_model.layers.0.mlp.gate", "model.visual*"]


# ---- refusals


def test_unquantizable_sources(tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())

    def refuse(text: str, *options: str) -> None:
        result = petit("quantize", tmp_path / "in", tmp_path / "out", "-f", "nvfp4", *options)
        assert result.code == 1 and text in result.err and result.err.count("\n") == 1, result.err
        assert listing(tmp_path) == ["in"]

    refuse("no linear layer is left to quantize", "-x", "*")
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    refuse("quantized already")
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    refuse("[in, out]")
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    bank = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 64, 32, dtype=torch.bfloat16)}
    write_tensors(tmp_path / "in", tensors | bank)
    refuse("holds all experts of a layer in one tensor")
    write_tensors(
        tmp_path / "in", tensors | {"model.layers.0.x.weight": torch.zeros(16, 16, dtype=torch.float8_e4m3fn)}
    )
    refuse("model.layers.0.x.weight is F8_E4M3")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_non_finite_weights(value: float, fmt: str, tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "in")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    write_tensors(tmp_path / "in", tensors)
    result = petit("quantize", tmp_path / "in", tmp_path / "out", "-f", fmt)
    assert result.code == 1 and "model.layers.1.mlp.down_proj.weight" in result.err
    assert listing(tmp_path) == ["in"]


def test_zero_weights_are_exact(tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "in")
    tensors["model.layers.1.mlp.down_proj.weight"].zero_()
    write_tensors(tmp_path / "in", tensors)
    assert petit("quantize", tmp_path / "in", tmp_path / "out", "-f", "nvfp4").code == 0
    assert petit("verify", tmp_path / "out").code == 0
    assert not (loaded(tmp_path / "out")["model.layers.1.mlp.down_proj.weight"] & 0x77).any()


def test_truncated_source(tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    result = petit("quantize", tmp_path / "in", tmp_path / "out", "-f", "nvfp4")
    assert result.code == 1 and "model.safetensors: truncated" in result.err
    assert listing(tmp_path) == ["in"]


# ---- OUT


def test_existing_out(tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    args = ("quantize", tmp_path / "in", tmp_path / "out", "-f", "nvfp4")
    assert petit(*args).code == 0
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    again = petit(*args[:3], "-f", "mxfp4")
    assert again.code == 2 and "exists already" in again.err and "--force" in again.err
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert petit(*args[:3], "-f", "mxfp4", "--force").code == 0
    assert QuantSpec.from_checkpoint(tmp_path / "out").formats == {"mxfp4"}
    assert listing(tmp_path) == ["in", "out"]


def test_a_failed_replacement_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "in")
    assert petit("quantize", tmp_path / "in", tmp_path / "out", "-f", "nvfp4").code == 0
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    write_tensors(tmp_path / "in", tensors)
    assert petit("quantize", tmp_path / "in", tmp_path / "out", "-f", "mxfp4", "--force").code == 1
    assert QuantSpec.from_checkpoint(tmp_path / "out").formats == {"nvfp4"}
    assert listing(tmp_path) == ["in", "out"]


def test_force_replaces_checkpoints_only(tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    result = petit("quantize", tmp_path / "in", tmp_path / "photos", "-f", "nvfp4", "--force")
    assert result.code == 2 and "not a checkpoint directory" in result.err
    assert (tmp_path / "photos" / "cat.jpg").read_bytes() == b"cat"
    for inside in (tmp_path / "in", tmp_path / "in" / "out", tmp_path):
        assert petit("quantize", tmp_path / "in", inside, "-f", "nvfp4", "--force").code == 2
    assert petit("quantize", tmp_path / "in", tmp_path / "no" / "such" / "out", "-f", "nvfp4").code == 2
    unwritable = petit("quantize", tmp_path / "in", "/proc/out", "-f", "nvfp4")
    assert unwritable.code == 1 and "error:" in unwritable.err
    assert listing(tmp_path) == ["in", "photos"]


def test_too_little_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "in")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(quantize.shutil, "disk_usage", lambda path: usage)
    result = petit("quantize", tmp_path / "in", tmp_path / "out", "-f", "nvfp4")
    assert result.code == 1 and "1.0 kB are free" in result.err and listing(tmp_path) == ["in"]


_SIGNALLED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits "ignore"
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from petit_plugin.checkpoints.safetensors_writer import SafetensorsWriter
write, calls = SafetensorsWriter.write, 0
def counted(self, *args):
    global calls
    calls += 1
    if calls == 12:
        print(os.listdir(DIRECTORY), flush=True)
        os.kill(os.getpid(), SIGNAL)
    return write(self, *args)
SafetensorsWriter.write = counted
from petit_cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    work = tmp_path / "work"
    write_model(work / "in")
    code = _SIGNALLED.replace("DIRECTORY", repr(str(work))).replace("SIGNAL", str(int(number)))
    args = ["quantize", str(work / "in"), str(work / "out"), "--format", "nvfp4"]
    run = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=600)
    assert ".out.partial-" in run.stdout, "the signal has to come while files are being written"
    assert run.returncode == 1 and run.stderr.strip().endswith("interrupted"), run.stderr
    assert listing(work) == ["in"]


_MEMORY = """
import sys, threading, time
from pathlib import Path
from petit_cli import main
from petit_plugin.cli import quantize
import petit_plugin.formats

quantize.SLICE_ELEMENTS = 1 << 20
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
start = peak = anonymous()
done = False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)
watcher = threading.Thread(target=watch); watcher.start()
try:
    main()
except SystemExit as end:
    code = end.code
finally:
    done = True
    watcher.join()
print("PEAK", peak - start, code)
"""


def test_memory_is_bounded_by_slices(tmp_path: Path) -> None:
    """A 64 MB linear (128 MB in float32): slices of 1 M elements take a few times 4 MB, not the tensor's size."""
    write_model(tmp_path / "in")
    big = {
        "model.embed_tokens.weight": torch.zeros(16 << 10, 1024, dtype=torch.bfloat16),
        "model.layers.0.mlp.up_proj.weight": torch.full((32 << 10, 1024), 0.5, dtype=torch.bfloat16),
    }
    write_tensors(tmp_path / "in", big)
    args = ["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--format", "nvfp4"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", _MEMORY, *args], capture_output=True, text=True, timeout=900, env=environment
    )
    peak, code = run.stdout.split("PEAK ")[1].split()
    assert code == "0", run.stderr
    assert int(peak) < 72_000, f"{peak} kB for slices of 4 MB"
