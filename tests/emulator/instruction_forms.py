# ruff: noqa: E501  (kernel and assembly text)
"""Assembly forms of the vector and scalar instructions of the oracle's table, with the width of every operand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Registers of the test kernels: three sources and the destination, two dwords each.
SOURCES = ("v[10:11]", "v[12:13]", "v[14:15]")
DEST = "v[16:17]"
SCALAR_SOURCES = ("s[24:25]", "s[26:27]")
SCALAR_DEST = "s[28:29]"


@dataclass(frozen=True)
class Form:
    name: str  # mnemonic with its encoding suffix
    text: str
    widths: tuple[int, ...]  # of the sources, bits
    dest_width: int
    scalar: bool
    writes_mask: bool  # the vector comparison, or a carry in s[20:21] / vcc
    pseudocode: str
    float_bits: int  # 0: integers; otherwise the float width that inputs should mostly be


def _reg(pair: str, width: int) -> str:
    first = pair.split("[")[1].split(":")[0]
    return f"{pair[0]}{first}" if width <= 32 else pair


def forms(operands: dict[Any, dict[str, Any]], pcode: dict[Any, str]) -> list[Form]:
    out = []
    for op, text in pcode.items():
        kind = type(op).__name__
        fields = operands.get(op)
        if fields is None:
            continue
        name = op.name.lower()
        sources = [fields[k] for k in ("src0", "src1", "src2", "vsrc1", "vsrc2", "ssrc0", "ssrc1") if k in fields]
        widths = tuple(s[1] for s in sources)
        dest = fields.get("vdst") or fields.get("sdst")
        if dest is None and kind not in ("SOPCOp", "VOPCOp"):
            continue
        width = dest[1] if dest else 64
        if max(widths, default=0) > 64 or width > 64 or any(s[1] not in (16, 32, 64) for s in sources):
            continue
        fmt = sources[0][0].name if sources else ""
        float_bits = 64 if "F64" in fmt else 16 if "F16" in fmt else 32 if "F32" in fmt else 0
        if kind in ("VOP1Op", "VOP2Op", "VOP3Op", "VOP3POp"):
            parts = [_reg(DEST, width), *(_reg(r, w) for r, w in zip(SOURCES, widths, strict=False))]
            mask = False
            if kind == "VOP2Op" and "_co_" in name:
                parts.insert(1, "vcc")
                mask = True
                if name.startswith(("v_addc", "v_subb")):
                    parts.append("vcc")
            elif kind == "VOP2Op" and name.startswith("v_cndmask"):
                parts.append("vcc")
            elif name.startswith(("v_cndmask", "v_cmp")):
                continue
            out.append(Form(name, f"{name} {', '.join(parts)}", widths, width, False, mask, text, float_bits))
        elif kind == "VOP3SDOp":
            parts = [_reg(DEST, width), "vcc", *(_reg(r, w) for r, w in zip(SOURCES, widths, strict=False))]
            if name.startswith(("v_addc", "v_subb")):
                parts = [*parts[:4], "vcc"]
                widths = widths[:2]
            suffix = "_e64" if "_co_" in name and not name.endswith("_e64") else ""
            out.append(
                Form(name + suffix, f"{name}{suffix} {', '.join(parts)}", widths, width, False, True, text, float_bits)
            )
        elif kind == "VOPCOp" and "cmpx" not in name:
            parts = ["vcc", *(_reg(r, w) for r, w in zip(SOURCES, widths, strict=False))]
            out.append(Form(name, f"{name} {', '.join(parts)}", widths, 64, False, True, text, float_bits))
        elif kind in ("SOP1Op", "SOP2Op"):
            parts = [_reg(SCALAR_DEST, width), *(_reg(r, w) for r, w in zip(SCALAR_SOURCES, widths, strict=False))]
            out.append(Form(name, f"{name} {', '.join(parts)}", widths, width, True, False, text, 0))
        elif kind == "SOPCOp":
            parts = [_reg(r, w) for r, w in zip(SCALAR_SOURCES, widths, strict=False)]
            out.append(Form(name, f"{name} {', '.join(parts)}", widths, 0, True, False, text, 0))
    return out


def kernel(form: Form) -> str:
    """Loads 8 dwords a lane (three sources, old destination) and 8 a workgroup (scalar sources, old destination, VCC, SCC);
    stores 8 dwords a lane: destination, VCC, scalar destination, SCC, EXEC (low)."""
    return f"""
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  s_load_dwordx2 s[8:9], s[0:1], 0x10
  s_waitcnt lgkmcnt(0)
  s_lshl_b32 s10, s2, 5
  s_add_u32 s8, s8, s10
  s_addc_u32 s9, s9, 0
  s_load_dwordx8 s[24:31], s[8:9], 0x0
  s_lshl_b32 s11, s2, 11
  v_lshlrev_b32_e32 v1, 5, v0
  v_add_u32_e32 v1, s11, v1
  global_load_dwordx4 v[10:13], v1, s[4:5]
  global_load_dwordx4 v[14:17], v1, s[4:5] offset:16
  s_waitcnt vmcnt(0) lgkmcnt(0)
  s_mov_b64 vcc, s[30:31]
  s_mov_b64 s[34:35], s[30:31]
  s_bitcmp1_b32 s30, 7
  {form.text}
  s_cselect_b32 s36, 1, 0
  s_mov_b64 s[38:39], exec
  s_mov_b64 exec, -1
  v_mov_b32_e32 v18, vcc_lo
  v_mov_b32_e32 v19, vcc_hi
  v_mov_b32_e32 v20, s28
  v_mov_b32_e32 v21, s29
  v_mov_b32_e32 v22, s36
  v_mov_b32_e32 v23, s38
  global_store_dwordx4 v1, v[16:19], s[6:7]
  global_store_dwordx4 v1, v[20:23], s[6:7] offset:16"""
