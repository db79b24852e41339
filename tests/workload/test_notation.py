"""fio's way to write sizes, times and lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.workload.notation import format_size, parse_bool, parse_range, parse_seconds, parse_size, split_names

POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@given(st.integers(0, 1 << 20), st.sampled_from(sorted(POWERS)), st.booleans(), st.booleans(), st.booleans())
def test_kb_base_1024_has_the_prefixes_the_other_way_round(number, prefix, is_iec, has_b, is_upper):
    is_iec = is_iec and bool(prefix)
    text = f"{number}{prefix}{'i' if is_iec else ''}{'b' if has_b else ''}"
    text = text.upper() if is_upper else text
    assert parse_size(text) == number * (1000 if is_iec else 1024) ** POWERS[prefix]
    assert parse_size(text, 1000) == number * (1024 if is_iec else 1000) ** POWERS[prefix]


@given(st.integers(1, 1 << 50))
def test_a_printed_size_is_exact(nbytes):
    text = format_size(nbytes)
    assert parse_size(text.replace("iB", "")) == nbytes


@pytest.mark.parametrize("text", ["", "k", "4q", "-1", "1.5m", "4k4", "4i", "(2*2)", "20%", "1z", "9999999p", "0x"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"size|file holds"):
        parse_size(text)


def test_examples_of_the_manual():
    assert parse_size("0x1000") == 4096
    assert parse_range("1k-4k") == parse_range("4k:1k") == (1024, 4096)
    assert [parse_seconds(text) for text in ("10", "10s", "10m", "2h", "1d", "500ms", "250usec")] == [10, 10, 600, 7200, 86400, 0.5, 0.00025]
    assert [parse_bool(text) for text in ("1", "0", "true", "false")] == [True, False, True, False]
    assert split_names(r"/dev/dsk/foo@3,0\:c:/dev/sdb") == ("/dev/dsk/foo@3,0:c", "/dev/sdb")


@pytest.mark.parametrize(
    ("parse", "text"),
    [(parse_range, "4k"), (parse_range, "4k-x"), (parse_seconds, "1w"), (parse_seconds, ""), (parse_bool, "yes"), (split_names, "a::b")],
)
def test_other_malformed_values_are_refused(parse, text):
    with pytest.raises(ValueError, match=repr(text) if parse is not parse_range else "not a"):
        parse(text)
