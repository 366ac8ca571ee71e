"""hddm evaluate --strategies: which strategy suits an ensemble, and what assembling recommends."""

import json
from pathlib import Path

import pytest

from hddm.experts.assembly import assemble, change
from tests.artefacts import Command, copied, printed
from tests.ensemble_files import derived


@pytest.mark.integration
def test_strategies_are_measured_alike_and_the_best_is_stored(
    ensemble: Path, images: Path, tmp_path: Path, hddm: Command
) -> None:
    own, out = copied(ensemble, tmp_path / "ensemble"), tmp_path / "out"
    call = ["evaluate", own, "--strategies", "top-1,draw", "--reference", images, "--num-images", 12]
    shown = printed(hddm, *call, "--allow-few", "--out", out)
    results = {name: json.loads((out / f"{name}.json").read_text()) for name in ("top-1", "draw")}
    assert results["top-1"]["features"]["hash"] == results["draw"]["features"]["hash"]
    assert {one["sampling"]["seed"] for one in results.values()} == {0}
    best = min(results, key=lambda name: results[name]["splits"][0]["distance"]["value"])
    assert f"hddm assemble {own} --strategy {best}" in shown
    made = (out / "top-1.json").stat().st_mtime_ns
    code, shown, err = hddm(*call, "--allow-few", "--out", out, "--store")
    assert (code, (out / "top-1.json").stat().st_mtime_ns) == (0, made)
    assert derived(own).strategy == best
    other = [*call, "--allow-few", "--out", out, "--held-out", images]
    code, _, err = hddm(*other)
    assert (code, f"{out}: holds results of other settings" in err, "held_out: was None, is " in err) == (
        1,
        True,
        True,
    )
    code, _, err = hddm(
        *["top-1,best" if one == "top-1,draw" else one for one in call], "--out", tmp_path / "new"
    )
    assert (code, "unknown strategy 'best'" in err, (tmp_path / "new").exists()) == (1, True, False)


def test_an_ensemble_draws_unless_another_strategy_is_named(
    ddpm_expert: Path, flow_expert: Path, router: Path, tmp_path: Path
) -> None:
    experts, routed, chosen = [ddpm_expert, flow_expert], tmp_path / "routed", tmp_path / "chosen"
    assemble(experts, routed, router)
    assemble(experts, chosen, router, strategy="top-1")
    assert (derived(routed).strategy, derived(chosen).strategy) == ("draw", "top-1")
    change(chosen, share={"0": 0.3})
    assert derived(chosen).strategy == "top-1"
