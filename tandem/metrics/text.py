"""Numbers and long texts, formatted for people."""

from __future__ import annotations

import math


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters, with a count of the rest."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}… (+{len(text) - limit} characters)"


def short_number(value: float, digits: int = 4) -> str:
    """About `digits` significant digits: 0.5320, 1234, 2.5e-06, nan."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        return f"{value:.{decimals}f}"
    return f"{value:.{digits - 1}g}"


def duration(seconds: float) -> str:
    """Seconds as text: 9.4 ms, 0.41 s, 38 s, 4 m 12 s, 3 h 05 m."""
    if 0 < seconds < 0.1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} m"


def with_unit(value: float, unit: str, digits: int = 3) -> str:
    """A number with its unit: shares as percentages, bytes as GiB, seconds as a duration, TFLOP/s
    below 1 as GFLOP/s."""
    if not math.isfinite(value):
        return short_number(value)
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit == "bytes":
        gib = value / 2**30
        return f"{gib:.2f} GiB" if gib >= 1 else f"{value / 2**20:.0f} MiB"
    if unit == "seconds":
        return duration(value)
    if unit == "TFLOP/s" and 0 < value < 1:
        return f"{trimmed(short_number(1000 * value, digits))} GFLOP/s"
    if unit == "TFLOP/s":
        return f"{trimmed(short_number(value, digits))} TFLOP/s"
    if unit in ("tokens/s", "samples/s", "tokens", "answers", "updates") and abs(value) >= 100:
        return f"{value:,.0f}"
    return trimmed(short_number(value, digits))


def trimmed(number: str) -> str:
    """A printed number without trailing zeros: 0.0200 is 0.02."""
    return number.rstrip("0").rstrip(".") if "." in number and "e" not in number else number
