"""Evaluates the instruction pseudocode of AMD's ISA document (as the tinygrad wheel ships it), one lane at a time.

An oracle independent of the emulator: it shares no code with it, works on Python integers and rounds exact rationals.
Anything it does not understand raises Unsupported, so that a test can say which instructions it did not check.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

FORMATS = {"f16": (5, 10), "f32": (8, 23), "f64": (11, 52), "bf16": (8, 7)}


class Unsupported(Exception):
    pass


@dataclass
class V:
    """kind: u, i, b (bits), f, bf; width in bits; raw bits."""

    kind: str
    width: int
    bits: int
    signed_zero: bool = False  # the literals +0.0 and -0.0 compare with their sign

    @property
    def type(self) -> str:
        return f"{self.kind}{self.width}"

    def num(self) -> Any:
        if self.kind == "p":
            return self.bits
        if self.kind in ("f", "bf"):
            return decode(self.bits, self.type)
        if self.kind == "i" and self.bits >> (self.width - 1) & 1:
            return self.bits - (1 << self.width)
        return self.bits

    def true(self) -> bool:
        return self.num() != 0


def decode(bits: int, fmt: str) -> float:
    e_bits, m_bits = FORMATS[fmt]
    sign = -1.0 if bits >> (e_bits + m_bits) & 1 else 1.0
    e, m = bits >> m_bits & ((1 << e_bits) - 1), bits & ((1 << m_bits) - 1)
    if e == (1 << e_bits) - 1:
        return math.nan if m else sign * math.inf
    bias = (1 << (e_bits - 1)) - 1
    return sign * (math.ldexp(m, 1 - bias - m_bits) if e == 0 else math.ldexp((1 << m_bits) + m, e - bias - m_bits))


def encode(x: float | Fraction, fmt: str, sign: bool | None = None, rtz: bool = False) -> int:
    """Round to nearest even (or toward zero) from an exact value."""
    e_bits, m_bits = FORMATS[fmt]
    top = (1 << e_bits) - 1
    if isinstance(x, float):
        if math.isnan(x):
            return top << m_bits | 1 << (m_bits - 1)
        negative = math.copysign(1.0, x) < 0
        if math.isinf(x):
            return negative << (e_bits + m_bits) | top << m_bits
        x = Fraction(x)
    else:
        negative = x < 0
    if sign is not None and x == 0:
        negative = sign
    word = int(negative) << (e_bits + m_bits)
    mag = abs(x)
    if mag == 0:
        return word
    bias = (1 << (e_bits - 1)) - 1
    e = mag.numerator.bit_length() - mag.denominator.bit_length()
    if mag < Fraction(2) ** e:
        e -= 1
    e = max(e, 1 - bias)
    scaled = mag / Fraction(2) ** (e - m_bits)
    n = math.floor(scaled) if rtz else round(scaled)  # Fraction rounds half to even
    if n >> (m_bits + 1):
        n, e = n >> 1, e + 1
    if n >> m_bits == 0:
        return word | n
    if e + bias >= top:
        return word | ((top << m_bits) - 1 if rtz else top << m_bits)
    return word | (e + bias) << m_bits | (n & ((1 << m_bits) - 1))


def number(kind: str, width: int, value: Any) -> V:
    if kind in ("f", "bf"):
        return V(kind, width, encode(value if isinstance(value, Fraction) else float(value), f"{kind}{width}"))
    return V(kind, width, int(value) & ((1 << width) - 1))


TOKEN = re.compile(
    r"\s*(?://[^\n]*|(?P<sized>\d+'(?:0x[0-9a-fA-F]+|\d+\.\d+|\d+)(?:U|I|B|F)?(?![\w(]))|(?P<cast>\d+'(?:BF|U|I|B|F)(?=\())|(?P<decl>\d+'(?:BF|U|I|B|F))"
    r"|(?P<num>0x[0-9a-fA-F]+|\d+\.\d+|\d+)(?P<suffix>ULL|LL|U|F|L)?|(?P<name>[A-Za-z_]\w*)|(?P<op>\*\*|<<|>>|<=|>=|==|!=|<>|&&|\|\||\+=|-=|[-+*/%&|^~!<>?:=(){}\[\].,;])|(?P<nl>\n))"
)


@functools.cache
def tokenize(text: str) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    at = 0
    text = re.sub(r"//[^\n]*", "", text)
    while at < len(text):
        m = TOKEN.match(text, at)
        if not m or m.end() == at:
            if text[at:].strip() == "":
                break
            raise Unsupported(f"token at {text[at : at + 20]!r}")
        at = m.end()
        for kind in ("sized", "cast", "decl", "name", "op"):
            if m.group(kind) is not None:
                out.append((kind, m.group(kind)))
        if m.group("num") is not None:
            out.append(("num", m.group("num") + (m.group("suffix") or "")))
    return out


TYPE = re.compile(r"^(bf|[uifb])(\d+)$")
BINARY = [
    ["||"],
    ["&&"],
    ["|"],
    ["^"],
    ["&"],
    ["==", "!=", "<>"],
    ["<", ">", "<=", ">="],
    ["<<", ">>"],
    ["+", "-"],
    ["*", "/", "%"],
    ["**"],
]


class Machine:
    """State of one lane: `mem` maps names to bits; D0 etc. are read back by the caller."""

    def __init__(self, lookup: Any, **regs: int) -> None:
        self.lookup = lookup  # name -> pseudocode, for helpers such as v_max_f32
        self.mem: dict[str, Any] = dict(regs)
        self.types: dict[str, tuple[str, int]] = {}
        self.lane = regs.get("laneId", 0)
        self.result: V | None = None

    # --- statements
    def run(self, text: str) -> None:
        self.tokens, self.at = tokenize(text), 0
        try:
            self.block(True)
        except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
            raise Unsupported(f"{type(e).__name__}: {e}") from e

    def peek(self, ahead: int = 0) -> tuple[str, str]:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ("end", "")

    def take(self, value: str | None = None) -> str:
        _kind, text = self.peek()
        if value is not None and text != value:
            raise Unsupported(f"expected {value}, found {text}")
        self.at += 1
        return text

    def block(self, live: bool) -> None:
        while self.peek()[1] not in ("endif", "else", "elsif", "endfor", "") and self.peek()[0] != "end":
            self.statement(live)

    def statement(self, live: bool) -> None:
        word = self.peek()[1]
        if word == ";":
            self.take()
        elif word == "if":
            self.take()
            done = False
            while True:
                condition = self.skippable(live and not done)
                self.take("then")
                hit = live and not done and condition is not None and condition.true()
                self.block(hit)
                done = done or hit
                nxt = self.take()
                if nxt == "elsif":
                    continue
                if nxt == "else":
                    self.block(live and not done)
                    self.take("endif")
                elif nxt != "endif":
                    raise Unsupported(nxt)
                break
        elif word == "for":
            self.take()
            name = self.take()
            self.take("in")
            first = self.expression().num()
            self.take(":")
            last = self.expression().num()
            self.take("do")
            start = self.at
            broke = False
            for i in range(first, last + 1):
                self.at = start
                self.mem[name], self.types[name] = i, ("i", 32)
                self.broken = False
                self.block(live and not broke)
                broke = broke or self.broken
            if last < first:
                self.block(False)
            self.broken = False
            self.take("endfor")
        elif word == "break":
            self.take()
            if live:
                self.broken = True
        elif word == "declare":
            self.take()
            name = self.take()
            self.take(":")
            width = int(self.take().split("'")[0])
            if self.peek()[1] == "[":
                self.take()
                count = self.expression().num()
                self.take("]")
                self.mem[name] = [0] * count
                self.types[name] = ("b", width)
            else:
                self.mem[name] = 0
                self.types[name] = ("b", width)
        else:
            self.assignment(live and not getattr(self, "broken", False))

    def skippable(self, live: bool) -> V | None:
        try:
            return self.expression()
        except (ZeroDivisionError, OverflowError):
            if live:
                raise
            return None

    def assignment(self, live: bool) -> None:
        target = self.target()
        op = self.take()
        if op not in ("=", "+=", "-="):
            raise Unsupported(f"statement with {op}")
        value = self.expression()
        if not live:
            return
        if op != "=":
            value = self.arithmetic(op[0], self.load(target), value)
        self.store(target, value)

    # --- places: (name, index or None, hi, lo, type)
    def target(self) -> tuple[str, int | None, int, int, tuple[str, int] | None]:
        name = self.take()
        if name not in self.mem:
            self.mem[name] = 0
        index: int | None = None
        lo, width, typ = 0, 0, self.types.get(name)
        if isinstance(self.mem[name], list):
            self.take("[")
            index = self.expression().num()
            self.take("]")
        width = typ[1] if typ else 0
        sliced = False
        while True:
            if self.peek()[1] == ".":
                self.take()
                m = TYPE.match(self.take())
                if not m:
                    raise Unsupported("member")
                typ = (m.group(1), int(m.group(2)))
                width = min(width, typ[1]) if sliced else typ[1]  # a slice keeps its width
                typ = (typ[0], width) if sliced else typ
            elif self.peek()[1] == "[":
                self.take()
                hi = self.expression().num()
                if self.peek()[1] == ":":
                    self.take()
                    low = self.expression().num()
                else:
                    low = hi
                self.take("]")
                lo, width, sliced = lo + low, hi - low + 1, True
                typ = ("u" if typ is None or typ[0] in ("f", "bf") else typ[0], width)
            else:
                break
        return name, index, lo, width, typ

    def load(self, place: Any) -> V:
        name, index, lo, width, typ = place
        raw = self.mem[name] if index is None else self.mem[name][index]
        kind, full = typ or self.types.get(name, ("u", 32))
        width = width or full
        if width < 0:  # [lo : hi] reverses the bits
            n = 2 - width
            return V(kind, n, int(f"{raw >> (lo + width - 1) & ((1 << n) - 1):0{n}b}"[::-1], 2))
        return V(kind, width, raw >> lo & ((1 << width) - 1))

    def store(self, place: Any, value: V) -> None:
        name, index, lo, width, typ = place
        if typ is None:
            self.mem[name], self.types[name] = value.bits, (value.kind, value.width)
            return
        if typ[0] in ("f", "bf") and value.kind in ("f", "bf") and value.type != f"{typ[0]}{typ[1]}":
            value = number(typ[0], typ[1], value.num())
        elif typ[0] in ("f", "bf") and value.kind in ("i", "u") and typ[1] == value.width:
            pass  # bits
        elif value.kind == "i" and width > value.width:
            value = number("i", width, value.num())
        mask = (1 << width) - 1
        old = self.mem[name] if index is None else self.mem[name][index]
        new = old & ~(mask << lo) | (value.bits & mask) << lo
        if index is None:
            self.mem[name] = new
            if name not in self.types:
                self.types[name] = typ
        else:
            self.mem[name][index] = new

    # --- expressions
    def expression(self) -> V:
        condition = self.binary(0)
        if self.peek()[1] == "?":
            self.take()
            yes = self.expression()
            self.take(":")
            no = self.expression()
            return yes if condition.true() else no
        return condition

    def binary(self, level: int) -> V:
        if level == len(BINARY):
            return self.unary()
        left = self.binary(level + 1)
        while self.peek()[1] in BINARY[level]:
            op = self.take()
            left = self.arithmetic(op, left, self.binary(level + 1))
        return left

    def arithmetic(self, op: str, a: V, b: V) -> V:
        if op in ("&&", "||"):
            return V("u", 1, int((a.true() and b.true()) if op == "&&" else (a.true() or b.true())))
        x, y = a.num(), b.num()
        if op in ("==", "!=", "<>", "<", ">", "<=", ">="):
            if b.signed_zero and op == "==":
                return V("u", 1, int(x == 0 and math.copysign(1, x) == math.copysign(1, y)))
            hit = {
                "==": x == y,
                "!=": x != y,
                "<>": x < y or x > y,
                "<": x < y,
                ">": x > y,
                "<=": x <= y,
                ">=": x >= y,
            }[op]
            return V("u", 1, int(hit))
        if any(v.kind in ("f", "bf", "p") for v in (a, b)):
            return self.float_op(op, a, b)
        width = max(a.width, b.width)
        kind = "i" if a.kind == "i" and b.kind == "i" else "u"
        if op in ("<<", ">>"):
            return number(a.kind if a.kind != "b" else "u", a.width, x << y if op == "<<" else x >> y)
        value = {"+": x + y, "-": x - y, "*": x * y, "&": x & y, "|": x | y, "^": x ^ y}.get(op)
        if value is None:
            if op == "**":
                return V("p", 32, y)
            if op == "/" and y:
                value = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
            elif op == "%" and y:
                value = math.fmod(x, y)
            else:
                raise Unsupported(op)
        return number(kind, width, value)

    def float_op(self, op: str, a: V, b: V) -> V:
        wide = a if a.kind in ("f", "bf") and (b.kind not in ("f", "bf") or a.width >= b.width) else b
        if op == "**":  # always 2 ** integer: kept exact
            return V("p", 32, b.num())
        if a.kind == "p":
            a, b = b, a
        if b.kind == "p":
            x = a.num()
            if not math.isfinite(x) or x == 0:
                return a
            return V(a.kind, a.width, encode(Fraction(x) * Fraction(2) ** max(-3000, min(3000, b.bits)), a.type))
        x, y = float(a.num()), float(b.num())
        finite = math.isfinite(x) and math.isfinite(y)
        if not finite or op == "/":
            try:
                r = {
                    "+": x + y,
                    "-": x - y,
                    "*": x * y,
                    "/": (
                        x / y if y else math.copysign(math.inf, x) * math.copysign(1, y) if x and x == x else math.nan
                    ),
                }[op]
            except KeyError:
                raise Unsupported(op) from None
            if op == "/" and finite and y:
                return V(
                    wide.kind,
                    wide.width,
                    encode(Fraction(x) / Fraction(y), wide.type, math.copysign(1, x) * math.copysign(1, y) < 0),
                )
            return V(wide.kind, wide.width, encode(r, wide.type))
        exact = {"+": Fraction(x) + Fraction(y), "-": Fraction(x) - Fraction(y), "*": Fraction(x) * Fraction(y)}.get(op)
        if exact is None:
            raise Unsupported(op)
        zero_sign = math.copysign(1, {"+": x + y, "-": x - y, "*": math.copysign(1, x) * math.copysign(1, y)}[op]) < 0
        return V(wide.kind, wide.width, encode(exact, wide.type, zero_sign))

    def unary(self) -> V:
        _kind, text = self.peek()
        if text in ("-", "+", "!", "~"):
            self.take()
            v = self.unary()
            if v.kind == "f" and v.num() == 0 and self.tokens[self.at - 1][0] == "num":
                return V("f", v.width, v.bits | (text == "-") << (v.width - 1), True)
            if text == "+":
                return v
            if text == "!":
                return V("u", 1, int(not v.true()))
            if text == "~":
                return V(v.kind, v.width, ~v.bits & ((1 << v.width) - 1))
            if v.kind in ("f", "bf"):
                return V(v.kind, v.width, v.bits ^ 1 << (v.width - 1))
            return number("i" if v.kind != "u" else "u", v.width, -v.num())
        return self.postfix(self.primary())

    def postfix(self, v: V) -> V:
        sliced = False
        while self.peek()[1] in (".", "["):
            if self.take() == ".":
                m = TYPE.match(self.take())
                if not m:
                    raise Unsupported("member")
                width = int(m.group(2))
                if sliced and m.group(1) in "uib":
                    width = min(width, v.width)
                v = V(m.group(1), width, v.bits & ((1 << width) - 1))
            else:
                hi = self.expression().num()
                lo = hi
                if self.peek()[1] == ":":
                    self.take()
                    lo = self.expression().num()
                self.take("]")
                width, sliced = hi - lo + 1, True
                v = V("u", width, v.bits >> lo & ((1 << width) - 1))
        return v

    def primary(self) -> V:
        kind, text = self.peek()
        if text == "(":
            self.take()
            v = self.expression()
            self.take(")")
            return v
        if text == "{":
            self.take()
            parts = [self.expression()]
            while self.peek()[1] == ",":
                self.take()
                parts.append(self.expression())
            self.take("}")
            bits = width = 0
            for p in parts:
                bits, width = bits << p.width | p.bits, width + p.width
            return V("u", width, bits)
        if kind == "sized":
            self.take()
            width, digits = text.split("'")
            if "." in digits:
                return number("f", int(width), float(digits))
            return V("u", int(width), int(digits.rstrip("UIBF"), 0))
        if kind == "cast":
            self.take()
            width, letter = text.split("'")
            self.take("(")
            v = self.expression()
            self.take(")")
            return self.convert(v, letter.lower(), int(width))
        if kind == "num":
            self.take()
            return literal(text)
        if kind == "name":
            return self.name(text)
        raise Unsupported(f"{kind} {text}")

    def convert(self, v: V, kind: str, width: int) -> V:
        if v.kind == "p":
            return v
        if kind in ("f", "bf"):
            if v.kind in ("f", "bf"):
                return number(kind, width, v.num())
            if v.kind in ("b", "u") and (v.width == width or width == 16):  # 16'F(0xfe00) names bits
                return V(kind, width, v.bits)
            return number(kind, width, Fraction(v.num()))
        if v.kind in ("f", "bf"):
            x = v.num()
            if x != x:
                return V(kind, width, 0)
            lo, hi = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if kind == "i" else (0, (1 << width) - 1)
            return number(kind, width, lo if x <= lo else hi if x >= hi else math.trunc(x))
        return number(kind, width, v.num())

    def name(self, text: str) -> V:
        if text in ("INF", "NAN") and self.peek(1)[1] == ".":
            self.take(), self.take()
            fmt = self.take()
            return V(
                TYPE.match(fmt).group(1),
                int(TYPE.match(fmt).group(2)),
                encode(math.inf if text == "INF" else math.nan, fmt),
            )
        if text == "INF":
            self.take()
            return V("f", 64, encode(math.inf, "f64"))
        if self.peek(1)[1] == "(":
            from pseudocode_functions import call

            self.take(), self.take("(")
            args = []
            while self.peek()[1] != ")":
                args.append(self.expression())
                if self.peek()[1] == ",":
                    self.take()
            self.take(")")
            return call(self, text, args)
        if text not in self.mem:
            raise Unsupported(f"name {text}")
        return self.load(self.target())


def literal(text: str) -> V:
    m = re.match(r"^(0x[0-9a-fA-F]+|\d+\.\d+|\d+)(ULL|LL|U|F|L)?$", text)
    if not m:
        raise Unsupported(text)
    body, suffix = m.groups()
    if "." in body:
        return number("f", 32 if suffix == "F" else 64, float(body))
    value = int(body, 0)
    width = 64 if suffix in ("ULL", "LL") or value >> 32 else 32
    return V("u" if suffix in ("U", "ULL") or body.startswith("0x") else "i", width, value)
