"""ELF: what a compiled object holds, read without tools.

`nm` and `readelf` are not on every machine that has a compiler, and cubins and AMD code objects are ELF files too.
Only 64-bit little-endian files are read; others count as unreadable.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

WRITE, ALLOC, TLS = 0x1, 0x2, 0x400
RELOCATED = ".data.rel.ro"
"""Constants whose addresses the linker fills in: this section and those named .data.rel.ro.SOMETHING, no others."""
UNWINDER = ".data.rel.local.DW.ref.__gxx_personality_v0"
"""One address. g++ refers to its unwinder where a parallel loop streams a store, which it does not know to be free of
exceptions."""
START_CODE = (".init_array", ".ctors", ".preinit_array", ".fini_array", ".dtors", ".init", ".fini")
START_KINDS = (14, 15, 16)
"""Types of section: addresses of functions called at load, at unload, and before everything else."""
COMMON, GLOBAL, RESOLVED = 0xFFF2, 1, 10
"""A symbol's home when the linker makes room for it in writable memory; its binding when other files see it before
their own; its type when a function is called at load to find its address (ifunc, target_clones)."""
_REGISTERS, _FRAME = 0x2F, 0x11
"""Attributes of a cubin's `.nv.info`: registers per thread, bytes of stack per thread (spills and local arrays)."""


@dataclass(frozen=True)
class Section:
    """One section: name, flags, `size` in bytes (also where nothing is stored, as in .bss), content, link fields."""

    name: str
    kind: int
    flags: int
    size: int
    data: bytes
    link: int
    info: int


def sections(blob: bytes) -> list[Section]:
    """All sections. Raises ValueError for what is no readable ELF file."""
    if blob[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit little-endian ELF file")
    try:
        start = struct.unpack_from("<Q", blob, 0x28)[0]
        step, count, names = struct.unpack_from("<HHH", blob, 0x3A)
        rows = [struct.unpack_from("<IIQQQQIIQQ", blob, start + step * i) for i in range(count)]
        table = blob[rows[names][4] : rows[names][4] + rows[names][5]]
        return [
            Section(
                name=_text(table, name),
                kind=kind,
                flags=flags,
                size=size,
                data=b"" if kind == 8 else blob[offset : offset + size],
                link=link,
                info=info,
            )
            for name, kind, flags, _, offset, size, link, info, _, _ in rows
        ]
    except (struct.error, IndexError):
        raise ValueError("a broken ELF file") from None


@dataclass(frozen=True)
class Symbol:
    """One name of the symbol table: `home` 0 means that it is expected of others."""

    name: str
    kind: int
    binding: int
    home: int
    size: int


def symbols(blob: bytes) -> list[Symbol]:
    """All named symbols. Raises ValueError for what is no readable ELF file."""
    parts = sections(blob)
    out: list[Symbol] = []
    for part in parts:
        if part.kind != 2:
            continue
        if part.link >= len(parts):
            raise ValueError("a symbol table without names")
        names = parts[part.link].data
        for place in range(24, len(part.data) - 23, 24):
            name, info, _, home, _, size = struct.unpack_from("<IBBHQQ", part.data, place)
            if name:
                out.append(Symbol(_text(names, name), info & 15, info >> 4, home, size))
    return out


def undefined(blob: bytes) -> list[str]:
    """Names that an object expects others to define."""
    return [symbol.name for symbol in symbols(blob) if symbol.home == 0]


def exported(blob: bytes) -> list[str]:
    """Names that an object defines and that other files could take for their own; inline functions are not meant."""
    return [symbol.name for symbol in symbols(blob) if symbol.home and symbol.binding == GLOBAL]


def start_code(blob: bytes) -> str:
    """What runs by itself when an object is loaded, by name; empty: there is nothing."""
    for part in sections(blob):
        if part.size and (part.kind in START_KINDS or part.name.startswith(START_CODE)):
            return part.name
    return next((symbol.name for symbol in symbols(blob) if symbol.kind == RESOLVED), "")


def writable(blob: bytes) -> str:
    """What keeps state between calls, by its name or its section's; empty: there is nothing."""
    parts = sections(blob)
    table = symbols(blob)
    for number, part in enumerate(parts):
        kept = part.size and part.flags & ALLOC and part.flags & (WRITE | TLS)
        if not kept or part.name == RELOCATED or part.name.startswith((f"{RELOCATED}.", *START_CODE)):
            continue
        inside = [symbol.name for symbol in table if symbol.home == number]
        if part.name == UNWINDER and part.size == 8 and inside == [UNWINDER.removeprefix(".data.rel.local.")]:
            continue
        return inside[0] if inside else part.name
    return next((symbol.name for symbol in table if symbol.home == COMMON), "")


def cubin_facts(blob: bytes) -> dict[str, dict[str, int]]:
    """Per kernel of a cubin: `registers` and `stack_bytes` per thread, as the assembler left them."""
    parts = sections(blob)
    symbols = next((s for s in parts if s.kind == 2), None)
    names = parts[symbols.link].data if symbols is not None else b""
    facts: dict[str, dict[str, int]] = {}
    for part in parts:
        if part.name != ".nv.info" or symbols is None:
            continue
        place = 0
        while place + 4 <= len(part.data):
            form, attribute, size = struct.unpack_from("<BBH", part.data, place)
            place += 4
            if form != 4:  # the value is in the size field itself
                continue
            if attribute in (_REGISTERS, _FRAME) and size >= 8:
                index, value = struct.unpack_from("<II", part.data, place)
                name = _text(names, struct.unpack_from("<I", symbols.data, 24 * index)[0])
                key = "registers" if attribute == _REGISTERS else "stack_bytes"
                facts.setdefault(name, {})[key] = value
            place += size
    return facts


def _text(table: bytes, start: int) -> str:
    end = table.find(b"\0", start)
    return table[start : end if end >= 0 else len(table)].decode(errors="replace")
