"""Which experts a sampling used: tallies against a router made by hand, and what is worth a warning."""

from collections import defaultdict

import pytest
import torch
from torch import Tensor

from hddm.ensemble import Ensemble
from hddm.expert_use import ExpertUse
from hddm.sampling import sample
from tests.cases import ConditionSum

NUM = 6


def _ensemble(strategy: str) -> Ensemble:
    """Expert 0 has most of the weight; some is 1's above t = 0.5, and below it 2's in every other row."""

    def router(x: Tensor, t: Tensor) -> Tensor:
        rows = torch.zeros(len(x), 3)
        rows[:, 0] = 0.6
        rows[:, 1] = torch.where(t >= 0.5, 0.4, 0.0)
        rows[::2, 2] = torch.where(t < 0.5, 0.4, 0.0)[::2]
        return rows / rows.sum(1, keepdim=True)

    return Ensemble([ConditionSum().field(sample_shape=(1, 2, 2))] * 3, router, strategy)


@pytest.mark.parametrize(("solver", "steps"), [("euler", 7), ("heun", 5), ("adams-moulton", 16)])
def test_a_report_tells_shares_and_runs_in_every_bin_of_time(solver: str, steps: int) -> None:
    use = ExpertUse(3)
    sample(_ensemble("full"), NUM, steps=steps, solver=solver, batch_size=4, use=use)
    times = [1 - i / steps for i in range(steps)]
    if solver == "heun":
        times += [1 - i / steps for i in range(1, steps + 1)]
    # The router of a batch sees 4 samples, then 2: every other one of each.
    early, late = [0.6, 0.4, 0.0], [(3 * 0.6 + 3 * 1.0) / 6, 0.0, 3 * 0.4 / 6]
    bins = defaultdict(list)
    for t in times:
        bins[min(int(t * 10 + 1e-9), 9)].append(t)
    report = use.report()
    assert [row["t"] for row in report["by_time"]] == [[k / 10, (k + 1) / 10] for k in sorted(bins)]
    for row, (_, within) in zip(report["by_time"], sorted(bins.items()), strict=True):
        shares = torch.tensor([early if t >= 0.5 else late for t in within]).mean(0)
        runs = torch.tensor(
            [[1.0, 1.0, 0.0] if t >= 0.5 else [1.0, 0.0, 0.5] for t in within]
        ).mean(0)
        assert row["shares"] == pytest.approx(shares.tolist(), abs=1e-4)
        assert row["runs"] == pytest.approx(runs.tolist(), abs=1e-4)
    whole = torch.tensor([early if t >= 0.5 else late for t in times]).mean(0)
    assert report["shares"] == pytest.approx(whole.tolist(), abs=1e-4)
    share_early = sum(t >= 0.5 for t in times) / len(times)
    assert report["experts_a_sample"] == pytest.approx(
        2 * share_early + 1.5 * (1 - share_early), abs=1e-4
    )


def test_only_what_runs_counts_at_every_call() -> None:
    one, kept = ExpertUse(3), ExpertUse(3)
    sample(_ensemble("top-1"), NUM, steps=4, use=one)
    assert one.shares.tolist() == [1, 0, 0]
    assert one.experts_a_sample == 1
    sample(_ensemble("full"), NUM, steps=10, router_every=10, use=kept)
    assert kept.shares.tolist() == pytest.approx([0.6, 0.4, 0.0])
    assert len(kept.report()["by_time"]) >= 9


NONE_OF, NEARLY_ALL = (
    "expert {} is never used",
    "expert {} takes {}% of the weight; is the router trained?",
)


@pytest.mark.parametrize(
    ("shares", "samples", "expected", "warnings"),
    [
        ([0.5, 0.3, 0.2], 100, None, []),
        ([0.91, 0.05, 0.04], 100, None, [NEARLY_ALL.format(0, 91)]),
        (
            [0.0, 0.0, 1.0],
            100,
            None,
            [NONE_OF.format(0), NONE_OF.format(1), NEARLY_ALL.format(2, 100)],
        ),
        # With draw, what each was to give.
        ([0.95, 0.05], 100, [50.0, 50.0], [NEARLY_ALL.format(0, 95)]),
        ([0.98, 0.0, 0.02], 100, [94.0, 4.0, 2.0], [NONE_OF.format(1)]),
        # An expert of whom one sample in a hundred is due may well have none.
        ([1.0, 0.0], 100, [99.0, 1.0], []),
        ([1.0, 0.0, 0.0], 1, [0.4, 0.3, 0.3], []),
        # Too few images to doubt the router.
        ([1.0, 0.0], 4, [2.0, 2.0], []),
    ],
    ids=str,
)
def test_an_expert_that_takes_nearly_all_or_nothing_is_worth_a_warning(
    shares: list[float], samples: int, expected: list[float] | None, warnings: list[str]
) -> None:
    use = ExpertUse(len(shares))
    counts = torch.tensor([round(share * samples) for share in shares])
    use.add(0.5, torch.eye(len(shares)).repeat_interleave(counts, 0))
    assert use.warnings(None if expected is None else torch.tensor(expected)) == warnings
