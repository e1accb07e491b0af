"""Which update policy runs: what the plan resolves, what the run does, and what its records name."""

import itertools
import json

import pytest

from tests.support.inspection import policy
from tests.support.inspection.insides import BarrierPolicy, DelayedPolicy, OverlappedPolicy
from tests.support.models import ParityGPT, batch
from tests.support.pairwise import by_turns
from tests.support.plan_requests import plan_request
from tests.support.trainers import PLACEMENTS, tiered
from tiered_zero.plan.request import choose_update_policy

CLASSES = {"barrier": BarrierPolicy, "overlapped": OverlappedPolicy, "delayed": DelayedPolicy}
ALL_TIERS = [{"device"}, {"host"}, {"nvme"}, {"device", "host"}, {"device", "nvme"}, {"host", "nvme"}]


@pytest.mark.parametrize("shares_cores", [False, True])
@pytest.mark.parametrize("tiers", ALL_TIERS, ids=lambda tiers: "+".join(sorted(tiers)))
def test_a_request_is_honoured_wherever_the_policy_has_work_of_its_own(tiers, shares_cores):
    for requested, checks in itertools.product(["barrier", "overlapped", "delayed"], [False, True]):
        request = plan_request(update=requested, shares_cores=shares_cores, clips=checks)
        choice = choose_update_policy(request, tiers)
        on_device = requested == "overlapped" and tiers == {"device"}
        assert choice.policy == ("barrier" if on_device else requested)
        assert choice.reason in choice.text
        in_backward = requested == "overlapped" and not checks and "device" not in tiers
        assert choice.optimizer_in_backward == in_backward


def test_auto_takes_barrier_where_nothing_would_be_gained():
    def auto(*tiers, shares_cores):
        request = plan_request(shares_cores=shares_cores, clips=True)
        return choose_update_policy(request, tiers).policy

    assert auto("host", shares_cores=True) == auto("device", shares_cores=False) == "barrier"
    assert auto("host", shares_cores=False) == auto("nvme", shares_cores=True) == "overlapped"
    assert auto("host", "nvme", shares_cores=True) == auto("device", "host", shares_cores=False) == "overlapped"


@pytest.mark.parametrize(
    ("placement", "update"),
    [
        (placement, update)
        for placement, update in by_turns(PLACEMENTS, [None, "delayed", "overlapped", "barrier"], 2)
        if update != "delayed" or placement[1] != "none"  # refused: all optimizer state is on the device
    ],
)
def test_the_planned_policy_runs_and_is_what_the_record_names(placement, update, swap_path, tmp_path, caplog):
    caplog.set_level("INFO", "tiered_zero")
    report = tmp_path / "report.jsonl"
    runtime = {"update": update, "report": str(report)}
    with tiered(ParityGPT(), swap_path, placement, runtime=runtime) as engine:
        choice = engine.plan.update_policy
        assert type(policy(engine)) is CLASSES[choice.policy]
        if update is not None and placement[1] != "none":
            assert choice.policy == update, "a request is honoured"
        engine.backward(engine(*batch(0)))
        engine.step()
    assert [line for line in caplog.messages if line.startswith("update policy:")] == [choice.text]
    assert json.loads(report.read_text().splitlines()[0])["facts"]["update"] == choice.policy
