"""The exit status is that of the worst line, and no trouble is told without its way out."""

from __future__ import annotations

import pytest

from infinity.doctor.finding import Finding, Status, exit_status, failure, ok, warning

GOOD, SLOW, BAD = ok("a", "found"), warning("b", "found", "way out"), failure("c", "found", "way out")


@pytest.mark.parametrize(("findings", "status"), [([], 0), ([GOOD], 0), ([SLOW, GOOD], 1), ([BAD, SLOW, GOOD], 2), ([GOOD, BAD], 2)])
def test_the_exit_status_is_that_of_the_worst(findings, status):
    assert exit_status(findings) == status


@pytest.mark.parametrize("status", [Status.WARNING, Status.FAILURE])
def test_trouble_without_a_way_out_is_our_own_mistake(status):
    with pytest.raises(AssertionError, match="needs a way out"):
        Finding(subject="a", status=status, found="found")
