import math

import pytest

from tandem.metrics.text import duration, short_number, shorten, trimmed, with_unit


def test_shortened_text_says_how_much_is_missing():
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdef", 2) == "ab… (+4 characters)"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (0.532, "0.5320"),
        (1234.5, "1234"),
        (-0.03125, "-0.03125"),
        (2.5e-6, "2.5e-06"),
        (123456.0, "1.23e+05"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_are_short_and_never_hide_a_nan(value, shown):
    assert short_number(value) == shown


def test_trailing_zeros_are_trimmed_only_after_a_point():
    assert [trimmed(n) for n in ("0.0200", "1.00", "100", "1.0e-06")] == [
        "0.02",
        "1",
        "100",
        "1.0e-06",
    ]


def test_durations_are_shown_in_the_unit_that_suits_them():
    seconds = (0.0, 0.0094, 0.412, 38.0, 59.7, 252.0, 11100.0)
    shown = ["0.00 s", "9.4 ms", "0.41 s", "38 s", "1 m 00 s", "4 m 12 s", "3 h 05 m"]
    assert [duration(s) for s in seconds] == shown


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.9375, "share", "93.8 %"),
        (3 * 2**29, "bytes", "1.50 GiB"),
        (5 * 2**20, "bytes", "5 MiB"),
        (61.0, "seconds", "1 m 01 s"),
        (12345.6, "tokens/s", "12,346"),
        (46.5, "tokens", "46.5"),
        (0.02, "normalized reward", "0.02"),
        (math.nan, "share", "nan"),
    ],
)
def test_values_are_shown_in_their_unit(value, unit, shown):
    assert with_unit(value, unit) == shown
