"""Settings of benchmarks: presets are whole, and slips in a file are named."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import benchmarks.heterogeneity
from hddm.benchmark.models import check_rows
from hddm.benchmark.presets import chosen, load_settings, parse_settings, preset_names
from hddm.benchmark.settings import parse_seeds, points_of
from hddm.benchmark.trainings import Training
from hddm.training.settings import ExpertSettings
from hddm.utils.errors import HddmError
from tests.benchmark_files import CONTENT, of_models, settings

HETEROGENEITY = Path(benchmarks.heterogeneity.__file__).parent


def test_the_presets_are_there_and_choose_before_they_confirm() -> None:
    quick, *others = sorted(preset_names(), key=lambda name: name != "quickstart")
    assert quick == "quickstart"
    assert others == ["cifar10", "cifar10-small", "digits", "grow-cifar10", "grow-digits"]
    for name in others:
        preset = load_settings(name)
        assert preset.name == name
        assert preset.score_on == "validation"
        number = 2 if name == "grow-cifar10" else 5
        fresh = (5, 6, 7, 8, 9)[:number]
        assert (preset.seeds, preset.confirmation_seeds) == ((0, 1, 2, 3, 4)[:number], fresh)
        confirming = chosen(preset, held_out=True)
        assert (confirming.score_on, confirming.seeds) == ("held-out", fresh)
        check_rows(preset)


@pytest.mark.parametrize("path", sorted(HETEROGENEITY.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_row_of_a_benchmark_in_the_repository_can_be_sampled(path: Path) -> None:
    check_rows(load_settings(str(path)))


def test_a_training_is_found_again_by_the_warm_up_that_its_default_comes_to() -> None:
    def job(**changes: object) -> str:
        settings = {"objective": "flow", "steps": 500, **changes}
        return Training(Path("shard"), "hash", ExpertSettings.model_validate(settings)).job.hash

    assert job() == job(warmup=50) != job(warmup=100)
    assert job(steps=2000) == job(steps=2000, warmup=100)


def test_trainings_of_the_presets_are_found_again_by_the_hashes_that_they_had() -> None:
    digits, quick = load_settings("digits"), load_settings("quickstart")
    trained = (digits.expert("flow", 0), digits.single("flow", 0, 5000), quick.expert("ddpm", 3))
    found = [Training(Path("shard"), "hash", one).job.hash[:12] for one in trained]
    assert found == ["ed030434c3f1", "83a0355fc684", "5f0239796471"]


def test_a_file_of_ones_own_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(CONTENT))
    assert load_settings(str(path)) == settings()


def _training(**parts: dict[str, Any]) -> dict[str, Any]:
    return {"training": CONTENT["training"] | parts}


def _model(**said: Any) -> dict[str, Any]:
    return {"models": [{"name": "a"} | said]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dta": {}}, "unknown key 'dta'; did you mean 'data'"),
        ({"partition": {"shrads": 2}}, "unknown key 'partition.shrads'; did you mean 'shards'"),
        (_model(knd="single"), "'models.0.knd'; did you mean 'kind'"),
        (_training(expert={"stpes": 3}), "'training.expert.stpes'; did you mean 'steps'"),
        (_model(training={"sze": "tiny"}), "model 'a': unknown key 'training.sze'; did you mean 'size'"),
        (_model(training={"seed": 3}), "'models.0.training': seed is set by the"),
        (_training(ddpm={"size": "hueg"}), "key 'training.ddpm.size' (is 'hueg'): choose one of"),
        (_training(expert={}), "key 'training.expert.steps': is required"),
        (_training(router={"steps": 0}), "key 'training.router.steps' (is 0): must be 1 or more"),
        (
            _model(kind="single", training={"size": "hueg"}),
            "model 'a': key 'training.size' (is 'hueg'): choose one of tiny",
        ),
        (
            _model(kind="single") | _training(single={"batch_size": 0}),
            "key 'training.single.batch_size' (is 0): must be 1 or more",
        ),
        (
            _model(converted=0.5, training={"batch_size": 6})
            | _training(ddpm={"gradient_accumulation_steps": 4}),
            "model 'a': training.expert and training.ddpm and training: batch_size 6 does not divide into 4",
        ),
        ({"sampling": {"solver": "eular"}}, "key 'sampling.solver' (is 'eular'): choose one of"),
        ({"sampling": {"strategy": "top-0"}}, "key 'sampling.strategy' (is 'top-0'): choose commit-X"),
        ({"tables": [{"name": "a", "vary": {"step": [3]}}]}, "unknown sampling setting 'step'"),
        ({"tables": [{"name": "a", "models": ["b"]}]}, "there is no model 'b'"),
        ({"data": {"source": "digits"}}, "score_on: validation needs data.validation_share"),
        (_model(kind="finished"), "path and kind: finished must be given together"),
        (_model(kind="single", converted=0.5), "converted and init are for ensembles"),
        (_model(kind="single", init="b"), "converted and init are for ensembles"),
        (_model(objectives="ddpm", converted=0.5), "a: converted is for flow experts"),
        (_model(objectives="0=ddpm,1=ddpm", init="b"), "a: init is for flow experts"),
        (
            _model(kind="finished", path="b", objectives="ddpm"),
            "a: is finished, so training and objectives do not apply",
        ),
        (_model(kind="finished", path="b", training={"steps": 3}), "a: is finished, so training"),
        ({"models": [{"name": "a"}, {"name": "a"}]}, "two models are called 'a'"),
        (
            {"models": [{"name": "mixed 1:1"}, {"name": "mixed 1-1"}]},
            "models 'mixed 1:1' and 'mixed 1-1' would share the folder 'mixed-1-1'",
        ),
        (
            {"models": [{"name": "A", "kind": "single"}, {"name": "a"}]},
            "models 'A' and 'a' would share the folder 'a'",
        ),
        (_model(name="模型"), "model '模型' has no letter a-z or digit"),
        (_model(name="Ensembles", kind="single"), "model 'Ensembles' would use the folder 'ensembles'"),
        (_model(objectives=63), "write it in quotes"),
        ({"seeds": [0, 1, 0]}, "0 is listed twice; list each once"),
        ({"tables": [{"name": "a", "models": ["mixed 1:1"] * 2}]}, "'mixed 1:1' is listed twice"),
        ({"tables": [{"name": "a", "vary": {"steps": [3, 3]}}]}, "3 is listed twice"),
        (_model(objectives="1:3"), "are of 4 experts, and partition.shards"),
        (_model(kind="single", domain="old"), "a: there is no domain 'old'; domains are none"),
        (_model(domain="old"), "a: domain and begins_with are for single models"),
        (_model(kind="single", begins_with="b"), "a: there is no single model 'b' before it"),
        (_model(kind="grown"), "a: kinds merged and grown go together with the names of two or more"),
        (_model(kind="merged", of=["a", "b"]), "a: there is no single model 'a' before it"),
        (_model(kind="grown", of=["a", "b"], objectives="ddpm"), "a: is made of others, so training"),
        ({"partition": {"shards": 10**9}}, "'partition.shards' (is 1000000000): must be 4096 or less"),
        ({"partition": {"shards": 3, "classes": {"old": ["a"], "new": ["b"]}}}, "classes has 2 domains"),
        ({"partition": {"shards": 2, "classes": {"old": ["a"], "new": ["b"]}}}, "set features: classifier"),
        (
            _model() | {"training": {"expert": CONTENT["training"]["expert"]}},
            "key 'training.router.steps': is required",
        ),
    ],
)
def test_a_slip_is_named_with_its_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(HddmError) as error:
        parse_settings(CONTENT | {"tables": [{"name": "models"}], "compare": {}} | changes, "mine.yaml")
    assert message in error.value.message
    assert error.value.message.startswith("mine.yaml: ")


@pytest.mark.parametrize("objectives", ["flow", "1:1"])
def test_experts_that_may_be_flow_start_from_others(objectives: str) -> None:
    for start in ({"converted": 0.5}, {"init": "expert"}):
        assert of_models({"name": "a", "objectives": objectives, **start}).models[0].name == "a"


def test_an_unknown_preset_names_those_that_there_are() -> None:
    known = "cifar10, cifar10-small, digits, grow-cifar10, grow-digits, quickstart"
    with pytest.raises(HddmError, match=rf"digit: no such preset; .*{known}; did you mean 'digits'\?"):
        load_settings("digit")
    with pytest.raises(HddmError, match=r"nowhere\.yaml: no such file"):
        load_settings("./nowhere.yaml")


def test_a_table_varies_one_setting_after_the_other_from_its_base() -> None:
    table = {"name": "a", "vary": {"solver": ["euler", "heun"], "steps": [2, 5]}}
    for product, expected in (
        (False, [("euler", 2), ("heun", 2), ("euler", 5)]),
        (True, [("euler", 2), ("euler", 5), ("heun", 2), ("heun", 5)]),
    ):
        found = settings(tables=[table | {"product": product}])
        points = points_of(found, found.tables[0])
        assert [(point.solver, point.steps) for point in points] == expected


def test_a_seed_chooses_or_confirms_and_never_does_both() -> None:
    with pytest.raises(HddmError, match="miniature: seed 0 is in both seeds and confirmation_seeds"):
        chosen(settings(confirmation_seeds=[0, 5]))
    with pytest.raises(HddmError, match=r"seeds 3,5: seed 5 is reserved for confirmation"):
        chosen(settings(), seeds="3,5")
    with pytest.raises(HddmError, match="seed 0 is used to choose settings"):
        chosen(settings(), seeds="0,5", held_out=True)
    assert chosen(settings(score_on="held-out")).seeds == (5,)


def test_seeds_are_ranges_and_lists() -> None:
    found = [parse_seeds(text) for text in ("0-4", "5,6", "0-1,7")]
    assert found == [(0, 1, 2, 3, 4), (5, 6), (0, 1, 7)]
    for text in ("", "a", "4-2", "-1"):
        with pytest.raises(HddmError, match="is not a seed"):
            parse_seeds(text)
    with pytest.raises(HddmError, match="is listed twice"):
        parse_seeds("0-2,1")


def test_a_file_says_seeds_as_the_command_line_does_and_has_a_table_of_all_models_unasked() -> None:
    content = {key: value for key, value in CONTENT.items() if key != "tables"}
    read = parse_settings(content | {"seeds": "0-2,7", "confirmation_seeds": [8]}, "mine.yaml")
    assert (read.seeds, read.confirmation_seeds) == ((0, 1, 2, 7), (8,))
    assert [(table.name, table.models) for table in read.tables] == [("models", ())]
    with pytest.raises(
        HddmError, match=r"^mine.yaml: key 'seeds' \(is '0-x'\): 0-x: '0-x' is not a seed; write"
    ):
        parse_settings(content | {"seeds": "0-x"}, "mine.yaml")
