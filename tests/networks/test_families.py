"""Families: what a file says of its class, and a family of an installed package."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import hddm
from hddm.checkpoints.write_back import write_back
from hddm.condition_names import LABELS
from hddm.networks.families import families, known_family, layouts, pipelines
from hddm.networks.families.dit import DIT
from hddm.networks.families.family import Taken
from hddm.networks.families.stable_diffusion import STABLE_DIFFUSION
from hddm.networks.families.unet import UNET
from hddm.networks.folders import empty_network
from hddm.networks.transformers import ExpertTransformer
from hddm.networks.wrappers import compile_blocks
from hddm.training.adapters import targets_of
from hddm.utils.errors import Stopped, Unstated
from tests.artefacts import refusal
from tests.checkpoint_files import dit, pipeline

PACKAGE = r'''
"""A small network of an own package, and its family."""

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from hddm.condition_names import LABELS
from hddm.networks.families.family import Family, Pipeline, Taken


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, h):
        return h + self.down(torch.nn.functional.gelu(self.up(h)))


class Mixer(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self, sample_size=4, in_channels=1, width=16, depth=2, num_classes=None):
        super().__init__()
        self.enter = nn.Linear(in_channels * sample_size**2 + 1, width)
        # One row more: of no class.
        self.names = nn.Embedding(num_classes + 1, width) if num_classes else None
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.leave = nn.Linear(width, in_channels * sample_size**2)

    def forward(self, sample, time, label=None):
        h = self.enter(torch.cat([sample.flatten(1), time[:, None].to(sample) / 1000], 1))
        if self.names is not None:
            h = h + self.names(label)
        for block in self.blocks:
            h = block(h)
        return self.leave(h).view_as(sample)


class MixerFamily(Family):
    name = "Mixer"
    layout = "mine-mixer"
    depths = (("depth",),)
    blocks = ("Block",)
    lora_layers = r"blocks\.\d+\.(up|down)"
    network = Mixer

    def conditions(self, config):
        number = config["num_classes"]
        return Taken((LABELS,), number, number) if number else Taken()

    def call(self, model, x, timestep, conditions):
        return model(x, timestep, conditions.get(LABELS))

    def compared_size(self, config, size):
        return size


MIXER = MixerFamily()
'''
PIPELINE = """

from diffusers import DiffusionPipeline


class MixerPipeline(DiffusionPipeline):
    def __init__(self, denoiser, scheduler):
        super().__init__()
        self.register_modules(denoiser=denoiser, scheduler=scheduler)
"""
IN_PIPELINE = """pipelines = (Pipeline("MixerPipeline", network="denoiser"),)
    time_factor = 1

    def read_call(self, state, given):
        return state, {"timestep": given["time"], LABELS: given["label"]}
"""
SCHEDULER = {
    "_class_name": "DDPMScheduler",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
}


def _install(folder: Path, module: str = PACKAGE) -> None:
    """As pip does: a module, and the metadata of its distribution."""
    (folder / "mine.py").write_text(module)
    metadata = folder / "mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[hddm.families]\nmixer = mine:MIXER\n")


def _mixer(folder: Path, **changes: object) -> Path:
    """Write a Mixer as a tool would that does not know hddm; ``changes`` are of its config."""
    folder.mkdir()
    config = {"_class_name": "Mixer", "sample_size": 4, "in_channels": 1, "width": 16, "depth": 2}
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "scheduler_config.json").write_text(json.dumps(SCHEDULER))
    shapes = {"enter": (16, 17), "leave": (16, 16)}
    for k in range(2):
        shapes |= {f"blocks.{k}.up": (32, 16), f"blocks.{k}.down": (16, 32)}
    weights = {}
    for name, shape in shapes.items():
        weights[f"{name}.weight"] = torch.randn(shape) / 8
        weights[f"{name}.bias"] = torch.randn(shape[0]) / 8
    if "num_classes" in changes:
        weights["names.weight"] = torch.randn(3, 16)
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")
    return folder


def _run(packages: Path, *words: object) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join([str(packages), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hddm_cli", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _hddm(packages: Path, *words: object) -> str:
    ended = _run(packages, *words)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_a_family_of_an_installed_package_converts_samples_and_trains(
    shards: Path, tmp_path: Path
) -> None:
    packages, source = tmp_path / "packages", tmp_path / "source"
    packages.mkdir()
    _install(packages)
    _mixer(source)
    expert = tmp_path / "expert"
    told = _hddm(packages, "convert", source, "--out", expert)
    assert "layout: mine-mixer" in told
    assert "verify: outputs differ from the source's by at most" in told
    _hddm(
        packages,
        "sample",
        expert,
        "--out",
        tmp_path / "images",
        "--num-images",
        2,
        "--steps",
        2,
        "--compile",
    )
    assert len(list((tmp_path / "images").glob("*.png"))) == 2
    shard = shards / "shard_0"
    train = [
        "train",
        "expert",
        shard,
        "--init",
        expert,
        "--objective",
        "ddpm",
        "--steps",
        2,
        "--batch-size",
        4,
    ]
    _hddm(packages, *train, "--out", tmp_path / "tuned")
    _hddm(packages, *train, "--out", tmp_path / "lora", "--lora-rank", 2)
    assert (tmp_path / "lora" / "adapter_model.safetensors").is_file()
    back = _run(
        packages, "convert", expert, "--out", tmp_path / "back", "--to-layout", "mine-mixer"
    )
    said = "its family names the class of one in its field pipelines\n"
    # A slow machine also says how long it takes.
    assert back.returncode == 1
    assert back.stderr.endswith(said), back.stderr
    assert not (tmp_path / "back").exists()
    # Nothing in a folder adds a family: without the package it is refused.
    by_package = "; an installed package may add it (entry points hddm.families; installed: none)"
    for told in (
        refusal(hddm.load, expert),
        refusal(hddm.load, tmp_path / "lora"),
        refusal(hddm.convert, source, tmp_path / "again"),
        refusal(hddm.convert, expert, tmp_path / "again"),
    ):
        assert "holds a Mixer, not a" in told
        assert told.endswith(by_package)


def test_each_family_has_a_layout_and_pipelines_of_its_own() -> None:
    names = [one.layout for one in families().values() if one.layout]
    assert len(set(names)) == len(names) == len(layouts())
    own: list[str] = []
    for family in families().values():
        for one in family.pipelines:
            own += [one.name, *one.former_names]
    assert len(set(own)) == len(own) == len(pipelines())
    for family in families().values():
        assert family.network.__name__ == family.name


HEAD = """
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from hddm.networks.families.family import Family, Pipeline
"""
CLASS = """
class Mine(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self, sample_size=4):
        super().__init__()

class MineFamily(Family):
    name = "Mine"
    layout = "mine"
    depths = ()
    network = Mine
    {}

MIXER = MineFamily()
"""


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("MIXER = object()", "names no object of the class hddm.networks.families.family.Family"),
        (
            "import no_such_module",
            "cannot be loaded (ModuleNotFoundError: No module named 'no_such_module')",
        ),
        (
            "1 / 0",
            "cannot be loaded (ZeroDivisionError: division by zero); repair or uninstall the package",
        ),
        ("", "cannot be loaded (AttributeError: module"),
        (HEAD + "MIXER = Family()", "the family is called None, and the class of its network None"),
        (
            CLASS.format('name = "Other"'),
            "the family is called Other, and the class of its network Mine",
        ),
        (
            CLASS.format('name = "UNet2DModel"; network = type(name, (Mine,), {})'),
            "the class UNet2DModel has a family already, UNet2DModel; rename it there, or uninstall",
        ),
        (
            CLASS.format('layout = "diffusers-dit"'),
            "the layout diffusers-dit has a family already, DiTTransformer2DModel; rename it there",
        ),
        (
            CLASS.format('pipelines = (Pipeline("FluxPipeline"),)'),
            "the pipeline FluxPipeline has a family already, FluxTransformer2DModel; rename it there",
        ),
        (
            CLASS.format('former_norm = "ada_norm_single"'),
            "the former norm_type ada_norm_single has a family already, PixArtTransformer2DModel",
        ),
        (
            CLASS.format('depths = ("depth",)'),
            "depths is ('depth',), and must be of tuple[tuple[str, ...], ...]; correct it in the package",
        ),
        (
            CLASS.format("depths = Family.depths"),
            "depths names num_layers, which Mine does not take; name its arguments",
        ),
        (CLASS.format('blocks = ("Block")'), "blocks is 'Block', and must be of tuple[str, ...]"),
        (CLASS.format('lora_layers = "("'), "lora_layers is no regular expression (missing )"),
        (CLASS.format('layout = ""'), "layout is empty; name the one of its folders"),
        (
            CLASS.format("network = property(lambda self: 1 / 0)"),
            "cannot be loaded (ZeroDivisionError: division by zero)",
        ),
        (
            CLASS.format("blocks = property(lambda self: self.parts)"),
            "cannot be loaded (AttributeError: 'MineFamily' object has no attribute 'parts')",
        ),
        (
            CLASS.format("def Mine(): pass\n    network = Mine"),
            "Mine is no ModelMixin with ConfigMixin of diffusers",
        ),
        (
            CLASS.format("").replace("    @register_to_config\n", ""),
            "Mine is no ModelMixin with ConfigMixin of diffusers whose constructor is decorated",
        ),
        (
            CLASS.format("").replace("sample_size=4", "side=4"),
            "Mine takes no sample_size, so states_size must be False",
        ),
    ],
    ids=lambda value: value[-60:],
)
def test_a_package_whose_family_is_broken_or_has_a_name_that_is_taken_is_named(
    module: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, module if "class Mine" not in module else HEAD + module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    told = refusal(families.__wrapped__)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert told.startswith("package mine: entry point mixer = mine:MIXER of hddm.families: ")
    assert said in told


@pytest.fixture
def with_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], None]]:
    """Install a package with this module."""
    packages = tmp_path / "packages"

    def install(module: str) -> None:
        packages.mkdir()
        _install(packages, module)
        monkeypatch.syspath_prepend(packages)
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        families.cache_clear()

    yield install
    sys.modules.pop("mine", None)
    monkeypatch.undo()
    families.cache_clear()


@pytest.fixture
def with_family(with_package: Callable[[str], None]) -> Callable[[str], None]:
    """Install a package whose family has these lines in its class."""
    return lambda lines: with_package(HEAD + CLASS.format(lines))


def _mixer_with(lines: str) -> str:
    """The module of the Mixer, with further lines in its family."""
    return PACKAGE.replace("\n\n\nMIXER =", f"\n\n    {lines}\n\n\nMIXER =")


_CALLED = "return model(x, timestep, conditions[LABELS])"
_WRONG = [
    # Values that no network can have.
    ("def conditions(self, config): return Taken((LABELS))", "conditions() names 'class_labels'"),
    ("def conditions(self, config): return Taken((LABELS,))", "num_classes is None of a network"),
    (
        "def conditions(self, config): return Taken((LABELS,), '2')",
        "num_classes is '2', and must be",
    ),
    ("def conditions(self, config): return Taken((LABELS,), 2, 7)", "null_class is 7 of 2 classes"),
    # Of another kind than the method says.
    (
        "def conditions(self, config): return (LABELS,)",
        "conditions() returns ('class_labels',), and must return Taken; correct it there",
    ),
    (
        "def compared_size(self, config, size): return [4, 4]",
        "compared_size() returns [4, 4], and must return tuple[int, int]; correct it there",
    ),
    # What a method raises.
    (
        "def conditions(self, config): return Taken((LABELS,), config['classes'])",
        "conditions() fails (KeyError: 'classes'); correct it there",
    ),
    (
        "def conditions(self): return Taken()",
        "conditions() fails (TypeError: MixerFamily.conditions()",
    ),
    (
        "def channels(self, config): return config['depth'] / 0",
        "channels() fails (ZeroDivisionError",
    ),
    # What does not fit the network.
    ("def conditions(self, config): return Taken()", "call() fails (TypeError: embedding()"),
    ("def conditions(self, config): return Taken((LABELS,), 5, 5)", "call() fails (IndexError"),
    (
        "def conditions(self, config): return Taken((LABELS, 'mood'), 2, 2)",
        "has no example() of the condition mood, which conditions() names",
    ),
    ("call = Family.call", "call() fails (TypeError: Mixer.forward() got an unexpected keyword"),
    (
        f"def call(self, model, x, timestep, conditions): {_CALLED}.flatten(1)",
        "call() gives (3, 16) for states of (3, 1, 4, 4), and without a learned variance",
    ),
    (
        "def call(self, model, x, timestep, conditions): pass",
        "call() returns None, and must return Tensor",
    ),
    (
        "def has_variance_head(self, config): return True",
        "with a learned variance (has_variance_head) it is (3, 2, 4, 4)",
    ),
    (
        "def compared_size(self, config, size): return (2, 2)",
        "its Mixer does not run at 1×2×2, which compared_size() chooses; package mine: ",
    ),
]


@pytest.mark.parametrize(("lines", "said"), _WRONG, ids=lambda value: value[-60:])
def test_what_a_family_gets_wrong_is_told_with_its_package(
    lines: str, said: str, with_package: Callable[[str], None], tmp_path: Path
) -> None:
    source = _mixer(tmp_path / "source", num_classes=2)
    with_package(_mixer_with(lines))
    told = refusal(hddm.convert, source, tmp_path / "expert")
    assert "package mine: the family of Mixer: " in told
    assert said in told
    assert not (tmp_path / "expert").exists()


def test_a_label_of_none_that_the_network_has_no_row_for_is_found(
    with_package: Callable[[str], None], tmp_path: Path
) -> None:
    source = _mixer(tmp_path / "source", num_classes=2)
    # Three rows: the label of none is the last of three classes, or one more.
    with_package(_mixer_with("def conditions(self, config): return Taken((LABELS,), 3, 2)"))
    hddm.convert(source, tmp_path / "expert")
    source = _mixer(tmp_path / "other", num_classes=2)
    families()["Mixer"].conditions = lambda config: Taken((LABELS,), 3, 3)
    assert "call() fails (IndexError" in refusal(hddm.convert, source, tmp_path / "none")


def test_an_expert_of_an_earlier_family_is_refused_by_the_name_of_the_present_one(
    with_package: Callable[[str], None], tmp_path: Path
) -> None:
    with_package(PACKAGE)
    hddm.convert(_mixer(tmp_path / "source", num_classes=2), tmp_path / "expert")
    families()["Mixer"].conditions = lambda config: Taken()
    assert refusal(hddm.load, tmp_path / "expert") == (
        f"{tmp_path / 'expert'}: expert.json says conditions ('class_labels',), not (), which config.json "
        "says by the family of Mixer"
    )


@pytest.mark.parametrize(
    "error", [Stopped("stopped at step 3", 15), MemoryError(), Unstated("it", "has none", "steps")]
)
def test_an_error_that_is_no_fault_of_the_family_stays_as_it_is(
    error: Exception, with_family: Callable[[str], None]
) -> None:
    with_family("def patch(self, config): raise self.error")
    family = families()["Mine"]
    family.error = error
    with pytest.raises(type(error)) as caught:
        family.patch({})
    assert caught.value is error


def test_classes_of_a_config_that_fit_no_network_are_refused() -> None:
    said = "num_classes is None of a network that takes class_labels; it is 1 or more with them"
    assert said in refusal(DIT.conditions, {"num_embeds_ada_norm": None})
    assert "num_classes is -3 of" in refusal(UNET.conditions, {"num_class_embeds": -3})


def test_a_network_without_gradient_checkpointing_is_refused_before_its_run_begins(
    with_package: Callable[[str], None], shards: Path, tmp_path: Path
) -> None:
    expert, settings = tmp_path / "expert", {"objective": "ddpm", "steps": 2, "batch_size": 4}
    with_package(PACKAGE)
    hddm.convert(_mixer(tmp_path / "source"), expert)
    train = partial(hddm.train, shards / "shard_0", tmp_path / "tuned", init=expert, **settings)
    said = "`gradient_checkpointing`: Mixer does not support it, says diffusers; drop the option"
    assert refusal(train, gradient_checkpointing=True) == said
    train()
    assert (tmp_path / "tuned" / "expert.json").is_file()


def test_a_lora_expert_of_a_package_is_sampled_assembled_and_written_back(
    with_package: Callable[[str], None], shards: Path, tmp_path: Path
) -> None:
    source, expert = _mixer(tmp_path / "source", num_classes=2), tmp_path / "expert"
    with_package(_mixer_with(IN_PIPELINE) + PIPELINE)
    hddm.convert(source, expert)
    settings = {"objective": "ddpm", "steps": 2, "batch_size": 4, "lora_rank": 2}
    loras = [tmp_path / "lora0", tmp_path / "lora1"]
    for k, out in enumerate(loras):
        hddm.train(shards / f"shard_{k}", out, init=expert, **settings)
    hddm.assemble(loras, tmp_path / "ensemble")
    labels = torch.tensor([0, 1])
    images = hddm.sample(hddm.load(tmp_path / "ensemble"), 2, steps=2, class_labels=labels)
    assert images.shape == (2, 1, 4, 4)
    back = tmp_path / "back"
    write_back(loras[0], back, "mine-mixer")
    # It is opened again, by the class and module that its family has.
    again = hddm.convert(back, tmp_path / "again")
    pipe = sys.modules["mine"].MixerPipeline.from_pretrained(back)
    want = pipe.denoiser(images, torch.tensor([500, 20]), labels)
    pipe.denoiser = hddm.drop_in(again, pipe)
    torch.testing.assert_close(pipe.denoiser(images, torch.tensor([500, 20]), labels), want)
    families()["Mixer"].read_call = lambda state, given: (state, given)
    said = "read_call() of the family of Mixer gives no timestep, only time, label; the pipeline passed"
    assert said in refusal(pipe.denoiser, images, torch.tensor([500, 20]), labels)


def test_a_layout_of_a_package_cannot_have_the_name_of_a_layout_of_single_files(
    with_family: Callable[[str], None], tmp_path: Path
) -> None:
    source = pipeline(tmp_path / "source", dit())
    with_family('layout = "ldm"')
    assert refusal(hddm.convert, source, tmp_path / "expert") == (
        "layout ldm of the family of Mine: is one of single files; rename it in the package that has the "
        "family, or uninstall it"
    )


def test_blocks_of_another_family_are_not_compiled(with_family: Callable[[str], None]) -> None:
    with_family('blocks = ("Linear",)')
    own, inside = (
        ExpertTransformer(8, 1, 2, hidden_size=16, depth=2, num_heads=2) for _ in range(2)
    )
    # The second one is inside a network of no family.
    for network, names in (
        (own, {"ExpertBlock"}),
        (nn.Sequential(inside), {"ExpertBlock", "Linear"}),
    ):
        compile_blocks(network)
        compiled = [part for part in network.modules() if part._compiled_call_impl is not None]
        assert {type(part).__name__ for part in compiled} == names


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"addition_time_embed_dim": None},
            "addition_time_embed_dim is missing, which addition_embed_type",
        ),
        (
            {"projection_class_embeddings_input_dim": None},
            "projection_class_embeddings_input_dim is missing, which addition_embed_type text_time needs",
        ),
        (
            {"addition_time_embed_dim": "4"},
            "addition_time_embed_dim is 4, and must be a whole number",
        ),
        (
            {"projection_class_embeddings_input_dim": 24},
            "projection_class_embeddings_input_dim 24 of UNet2DConditionModel leaves no room for text_embeds",
        ),
    ],
    ids=str,
)
def test_sizes_that_the_vectors_of_sdxl_need_are_asked_for(
    change: dict[str, object], said: str
) -> None:
    config = {"addition_embed_type": "text_time", "addition_time_embed_dim": 4}
    config |= {"projection_class_embeddings_input_dim": 40, "cross_attention_dim": 16}
    assert "time_ids" in STABLE_DIFFUSION.conditions(config).conditions
    # Keys that a config leaves out are not there at all.
    changed = {key: value for key, value in (config | change).items() if value is not None}
    assert said in refusal(STABLE_DIFFUSION.conditions, changed)


TINY = {"sample_size": 4, "in_channels": 1, "hidden_size": 16, "num_heads": 2, "depth": 1}


def test_a_family_without_layers_to_adapt_is_named_where_an_adapter_is_asked_for() -> None:
    network = ExpertTransformer(**TINY)
    family = known_family(network)
    assert targets_of(network)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(family), "lora_layers", r"layers\.x")
        patch.setattr(type(family), "lora_parameters", "(?!)")
        said = refusal(targets_of, network)
    assert f"{family.name} has no layers to adapt" in said
    assert "lora_layers" in said


def test_a_network_of_many_small_blocks_is_no_danger(tmp_path: Path) -> None:
    """A block may have two tensors; what is bounded is a depth that no tensor fills."""
    family = known_family(ExpertTransformer(**TINY))
    built = empty_network(family.network, TINY | {"depth": 8}, 8, "config.json")
    assert len(built.layers) == 8
    said = refusal(empty_network, family.network, TINY | {"depth": 9}, 8, "config.json")
    assert "its depth is 9, and its 8 tensors are enough for 8" in said
