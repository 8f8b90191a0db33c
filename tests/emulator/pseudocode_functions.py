"""The functions that the ISA pseudocode calls without defining them."""

from __future__ import annotations

import math
from fractions import Fraction

from pseudocode import FORMATS, Machine, Unsupported, V, encode, number


def _f(v: V, value: float | Fraction, sign: bool | None = None) -> V:
    return V(v.kind, v.width, encode(value, v.type, sign))


def _clamped_int(kind: str, width: int, x: float) -> V:
    if x != x:
        return V(kind, width, 0)
    lo, hi = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if kind == "i" else (0, (1 << width) - 1)
    return number(kind, width, lo if x <= lo else hi if x >= hi else math.trunc(x))


def call(m: Machine, name: str, a: list[V]) -> V:
    if name == "fma":
        x, y, z = (v.num() for v in a)
        if not all(map(math.isfinite, (x, y, z))):
            try:
                return _f(a[0], x * y + z)
            except OverflowError:
                return _f(a[0], math.nan)
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        negative_product = math.copysign(1, x) * math.copysign(1, y) < 0
        return _f(a[0], exact, negative_product and math.copysign(1, z) < 0)
    if name in ("isNAN", "isQuietNAN", "isSignalNAN"):
        e, f = FORMATS[a[0].type]
        nan = a[0].num() != a[0].num()
        quiet = a[0].bits >> (f - 1) & 1
        return V("u", 1, int(nan and (name == "isNAN" or quiet == (name == "isQuietNAN"))))
    if name == "cvtToQuietNAN":
        return V(a[0].kind, a[0].width, a[0].bits | 1 << (FORMATS[a[0].type][1] - 1))
    if name == "abs":
        return (
            V(a[0].kind, a[0].width, a[0].bits & ~(1 << (a[0].width - 1)))
            if a[0].kind in ("f", "bf")
            else number("u", a[0].width, abs(a[0].num()))
        )
    if name == "sign":
        return V("u", 1, a[0].bits >> (a[0].width - 1) & 1)
    if name == "exponent":
        e, f = FORMATS[a[0].type]
        return V("i", 32, a[0].bits >> f & ((1 << e) - 1))
    if name in ("trunc", "floor", "ceil"):
        x = a[0].num()
        if not math.isfinite(x):
            return a[0]
        return _f(a[0], Fraction(getattr(math, name)(x)), math.copysign(1, x) < 0)
    if name == "mantissa":
        x = a[0].num()
        return a[0] if x == 0 or not math.isfinite(x) else _f(a[0], math.frexp(x)[0])
    if name in ("f32_to_snorm", "f32_to_unorm"):
        x = a[0].num()
        low, top = (-1.0, 32767) if name == "f32_to_snorm" else (0.0, 65535)
        return number("i", 16, 0 if x != x else round(Fraction(min(max(x, low), 1.0)) * top))
    if name == "isEven":
        return V("u", 1, int(a[0].num() % 2 == 0))
    if name == "fract":
        x = a[0].num()
        return _f(a[0], Fraction(x) - math.floor(x) if math.isfinite(x) else math.nan)
    if name == "sqrt":
        x = a[0].num()
        return _f(a[0], math.nan if x < 0 else x if x in (0, math.inf) or x != x else math.sqrt(x))
    if name == "pow":
        x, y = a[0].num(), a[1].num()
        try:
            return _f(a[0], x**y)
        except OverflowError:
            return _f(a[0], math.inf)
    if name == "log2":
        x = a[0].num()
        return _f(
            a[0], -math.inf if x == 0 else math.nan if x < 0 or x != x else math.inf if x == math.inf else math.log2(x)
        )
    if name in ("sin", "cos"):
        x = a[0].num()
        return _f(a[0], getattr(math, name)(x) if math.isfinite(x) else math.nan)
    if name == "ldexp":
        x, e = a[0].num(), a[1].num()
        return (
            a[0] if not math.isfinite(x) or x == 0 else _f(a[0], Fraction(x) * Fraction(2) ** max(-3000, min(3000, e)))
        )
    if name == "bitCount":
        return V("u", 32, bin(a[0].bits).count("1"))
    if name in ("signext", "signext_from_bit"):
        x, n = a[0], a[1].num() if len(a) > 1 else a[0].width
        if n == 0:
            return V("i", x.width, 0)
        low = x.bits & ((1 << n) - 1)
        return number("i", x.width, low - (1 << n) if low >> (n - 1) & 1 else low)
    if name in ("f32_to_f16", "f64_to_f32", "f16_to_f32", "f32_to_f64", "bf16_to_f32", "f32_to_bf16"):
        to = name.split("_to_")[1]
        toward_zero = m.mem.get("ROUND_MODE") == 3
        kind, width = ("bf", 16) if to == "bf16" else ("f", int(to[1:]))
        return V(kind, width, encode(a[0].num(), to, rtz=toward_zero))
    if "_to_" in name and len(a) == 1:
        source, to = name.split("_to_")
        if source[0] in "iu" and to[0] == "f":
            return number("f", int(to[1:]), Fraction(a[0].num()))
        if source[0] == "f" and to[0] in "iu" and to[1:].isdigit():
            return _clamped_int(to[0], int(to[1:]), a[0].num())
        if source[0] in "iu" and to[0] in "iu" and source[1:].isdigit() and to[1:].isdigit():
            x, n = a[0].num(), int(to[1:])
            if int(source[1:]) > n:  # narrowing saturates
                lo, hi = (-(1 << (n - 1)), (1 << (n - 1)) - 1) if to[0] == "i" else (0, (1 << n) - 1)
                x = min(max(x, lo), hi)
            return number(to[0], n, x)
    if name.startswith("v_"):
        text = m.lookup(name)
        if text is None:
            raise Unsupported(name)
        inner = Machine(
            m.lookup,
            S0=a[0].bits,
            S1=a[1].bits if len(a) > 1 else 0,
            S2=a[2].bits if len(a) > 2 else 0,
            D0=0,
            laneId=m.lane,
        )
        inner.mem["WAVE_MODE_IEEE"] = 1
        inner.run(text.replace("WAVE_MODE.IEEE", "WAVE_MODE_IEEE"))
        return V(a[0].kind, a[0].width, inner.mem["D0"] & ((1 << a[0].width) - 1))
    raise Unsupported(f"function {name}")
