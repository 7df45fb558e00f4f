"""Tests that fail are in the batteries' table too, not only missing from it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.battery.figures import FAILED, record


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
    report = yield
    if report.failed:
        why = str(call.excinfo.value).strip().splitlines() if call.excinfo else []
        record(item.nodeid, **{FAILED: f"in {report.when}: {why[0] if why else '?'}"[:200]})
    return report
