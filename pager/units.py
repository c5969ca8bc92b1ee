"""Sizes in bytes: parsing what users write, printing what users read. GiB is 2**30, GB is 10**9."""

from __future__ import annotations

import re

from pager.errors import ConfigError

_FACTORS = {
    "": 1,
    "b": 1,
    "k": 2**10,
    "kib": 2**10,
    "kb": 10**3,
    "m": 2**20,
    "mib": 2**20,
    "mb": 10**6,
    "g": 2**30,
    "gib": 2**30,
    "gb": 10**9,
    "t": 2**40,
    "tib": 2**40,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_size(size: int | str, *, name: str = "size") -> int:
    """Bytes in ``size``: an int as it is, or text such as ``"128KiB"``, ``"1.5 GiB"``, ``"24GB"``.

    ``name`` is the knob named in the error. Raises TypeError for other types, ConfigError (a ValueError) for
    text that is not a size, for a decimal without a unit, and for negative numbers.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise TypeError(f'{name} is {size!r}; expected bytes as an int or text such as "8GiB"')
    if isinstance(size, int):
        if size < 0:
            raise ConfigError(f"{name} is {size}; a size in bytes cannot be negative")
        return size
    match = _SIZE.fullmatch(size)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f'{name} is {size!r}; expected a number and a unit, such as "8GiB", "512MiB", "128KiB"'
        )
    if factor == 1 and "." in match.group(1):
        raise ConfigError(
            f"{name} is {size!r}, a decimal without a unit; give a fraction as a float (without quotes), or bytes "
            'as text with a unit, such as "8GiB"'
        )
    return round(float(match.group(1)) * factor)


def format_bytes(num_bytes: float) -> str:
    """``num_bytes`` for people, in binary units: ``"1.50 GiB"``, ``"128.00 KiB"``, ``"17 B"``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_at_least(num_bytes: int) -> str:
    """As :func:`format_bytes`, rounded up: who takes the number at its word has enough."""
    unit = 1
    while num_bytes >= 1024 * unit:
        unit *= 1024
    return format_bytes(ceil_div(num_bytes * 100, unit) * unit / 100)


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient rounded up, for non-negative integers."""
    return -(-numerator // denominator)


def even_slices(total: int, most: int, align: int = 1) -> int:
    """The length of slices of ``total`` that are about equally long, at most ``most`` each, and multiples of ``align``.

    ``most`` is taken as one ``align`` where it is less. The last slice may be shorter.
    """
    most = max(most // align, 1) * align
    return min(ceil_div(ceil_div(total, max(ceil_div(total, most), 1)), align) * align, most)
