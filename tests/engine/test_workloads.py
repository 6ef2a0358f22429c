"""Random workloads of everything that a request may ask for: each answer is what the request gives alone."""

from __future__ import annotations

import pytest

from .workload import Workload


@pytest.mark.parametrize("seed", range(64))
def test_any_workload_gives_each_request_its_own_answer(seed: int) -> None:
    """B33, and the pool whole again after each (B03, B05, B08). `tests/soak.py` has many more of them."""
    work = Workload(seed)
    work.run(arrivals=30)
    work.check()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "prefix"])
def test_where_nothing_goes_wrong_all_end_by_themselves(policy: str) -> None:
    work = Workload(7, faults=False, scheduling_policy=policy)
    work.run(arrivals=40)
    work.check()
    reasons = {answer.finish_reason for output in work.told.values() for answer in output.outputs}
    assert reasons == {"stop", "length"}
