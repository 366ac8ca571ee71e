"""Programs of networks: what they compute, and files that are refused before anything of them runs."""

import copy
import io
import json
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from einops import rearrange
from safetensors.torch import load_file
from torch import Tensor, nn

import hddm
from hddm.experts.expert_folders import open_expert
from hddm.networks.families.program import PROGRAMS
from hddm.networks.programs.archive import PROGRAM
from hddm.networks.programs.network import ProgramFile, ProgramNetwork
from hddm.networks.programs.operators import NAMES, operator_of
from hddm.networks.programs.permission import programs_allowed
from hddm.networks.transformers import ExpertTransformer
from hddm.networks.wrappers import NetworkWrapper
from tests.artefacts import refusal

SIDE = 8


class Convolutional(nn.Module):
    """A network of a class that nobody else has: convolutions, attention by einops, constants of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.labels = nn.Embedding(4, 16)
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 1)
        self.norm, self.qkv = nn.BatchNorm2d(16), nn.Linear(16, 48)
        self.register_buffer("frequencies", 2.0 ** torch.arange(8), persistent=False)
        self.places: Tensor
        self.register_buffer("places", torch.arange(SIDE))
        self.positions = nn.Embedding(SIDE, 16)

    def forward(self, x: Tensor, timestep: Tensor, class_labels: Tensor) -> Tensor:
        angles = timestep[:, None] * self.frequencies / 1000
        embedded = torch.cat([angles.sin(), angles.cos()], -1) + self.labels(class_labels)
        hidden = self.norm(self.first(x)) + embedded[:, :, None, None]
        hidden = hidden + self.positions(self.places).T[:, None]
        hidden = nn.functional.dropout(hidden, 0.1, self.training)
        rows = self.qkv(rearrange(hidden, "b c h w -> b (h w) c"))
        q, k, v = rearrange(rows, "b n (k g d) -> k b g n d", k=3, g=2)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        hidden += rearrange(mixed, "b g (h w) d -> b (g d) h w", h=SIDE)
        output: Tensor = self.last(hidden) * torch.tensor([0.5, 1.0, 2.0])[:, None, None]
        return output


class Linear(nn.Module):
    """The smallest network: its parts by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        rows = x.permute(0, 2, 3, 1).reshape(x.shape[0] * SIDE * SIDE, 3)
        output: Tensor = self.layer(rows).reshape(x.shape[0], SIDE, SIDE, 3).permute(0, 3, 1, 2)
        return output * timestep[:, None, None, None]


def _unet_with_text() -> nn.Module:
    return diffusers.UNet2DConditionModel(
        sample_size=SIDE,
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        mid_block_type=None,
        up_block_types=("UpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        attention_head_dim=2,
        cross_attention_dim=6,
    )


def _unet() -> nn.Module:
    return diffusers.UNet2DModel(
        sample_size=SIDE,
        in_channels=3,
        out_channels=3,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        attention_head_dim=8,
    )


def _dit() -> nn.Module:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=4,
        in_channels=4,
        num_layers=1,
        sample_size=SIDE,
        patch_size=2,
        num_embeds_ada_norm=3,
        norm_num_groups=4,
    )


def _own() -> nn.Module:
    return ExpertTransformer(
        sample_size=SIDE,
        in_channels=3,
        patch_size=2,
        hidden_size=16,
        depth=1,
        num_heads=2,
        num_classes=3,
    )


LABEL = {"class_labels": torch.tensor(1)}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, dict[str, Tensor]]] = {
    "own": (_own, 3, LABEL),
    "UNet2DModel": (_unet, 3, {}),
    "UNet2DConditionModel": (
        _unet_with_text,
        4,
        {"encoder_hidden_states": torch.linspace(-1, 1, 30).view(5, 6)},
    ),
    "DiT": (_dit, 4, LABEL),
    "a user's own": (Convolutional, 3, LABEL),
}


@dataclass(frozen=True)
class Exported:
    """A network, the folder of its program, and conditions of one sample."""

    network: nn.Module
    folder: Path
    shape: tuple[int, int, int]
    conditions: Mapping[str, Tensor]

    def inputs(self, batch: int) -> dict[str, Tensor]:
        noise = torch.Generator().manual_seed(batch)
        found = {
            "x": torch.randn(batch, *self.shape, generator=noise),
            "timestep": 999 * torch.rand(batch, generator=noise),
        }
        for name, value in self.conditions.items():
            found[name] = value[None].expand(batch, *value.shape)
        return found

    def opened(self) -> ProgramNetwork:
        with programs_allowed(True):
            network = open_expert(self.folder).read().network
        assert isinstance(network, ProgramNetwork)
        return network


def _export(network: nn.Module, folder: Path, channels: int, conditions: dict[str, Tensor]) -> Path:
    return hddm.export(
        network,
        folder,
        schedule=hddm.schedules.LinearSchedule(),
        prediction_type="flow_prediction",
        sample_shape=(channels, SIDE, SIDE),
        conditions=conditions,
        time_scale=1000.0,
    )


def _random(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    network = make().eval()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.2)
    return network


# What the others export, these do too.
_LONG = ("UNet2DModel", "DiT")
_PARAMS = [
    pytest.param(name, marks=[pytest.mark.slow] if name in _LONG else []) for name in NETWORKS
]


@pytest.fixture(scope="module", params=_PARAMS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    make, channels, conditions = NETWORKS[request.param]
    network = _random(make)
    folder = tmp_path_factory.mktemp("programs") / "expert"
    _export(network, folder, channels, conditions)
    called = network
    if isinstance(network, diffusers.ModelMixin):
        called = NetworkWrapper(network)
    return Exported(called, folder, (channels, SIDE, SIDE), conditions)


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    network = _random(Linear)
    folder = tmp_path_factory.mktemp("linear") / "expert"
    _export(network, folder, 3, {})
    return Exported(network, folder, (3, SIDE, SIDE), {})


@pytest.mark.slow
def test_a_program_is_its_network_at_any_batch_size(exported: Exported) -> None:
    program = exported.opened()
    for batch in (1, 3, 8):
        inputs = exported.inputs(batch)
        with torch.no_grad():
            expected, found = exported.network(**inputs), program(**inputs)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_program_are_those_of_its_network(exported: Exported) -> None:
    program, inputs = exported.opened(), exported.inputs(3)
    network = copy.deepcopy(exported.network).requires_grad_(True)
    program.requires_grad_(True).train()
    network(**inputs).square().mean().backward()
    program(**inputs).square().mean().backward()
    expected = {}
    for name, parameter in network.named_parameters():
        expected[name.removeprefix("model.")] = parameter.grad
    found = {name: parameter.grad for name, parameter in program.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 0.02)]
)
def test_a_program_runs_in_other_numbers(
    exported: Exported, dtype: torch.dtype, tolerance: float
) -> None:
    inputs = exported.inputs(2)
    program = exported.opened()
    with torch.no_grad():
        expected = program(**inputs)
        program.load_state_dict(
            {
                name: value.to(dtype) if value.is_floating_point() else value
                for name, value in program.state_dict().items()
            },
            assign=True,
        )
        found = program(**inputs | {"x": inputs["x"].to(dtype)})
    assert found.dtype == dtype
    assert (found - expected).abs().max() < tolerance * expected.abs().max()


def test_whole_numbers_among_the_weights_stay_whole() -> None:
    graph_dtype = torch.int64
    from hddm.networks.folders import cast

    held = {"places": torch.arange(3), "weight": torch.ones(2)}
    found = cast(held, torch.bfloat16)
    assert found["places"].dtype == graph_dtype
    assert found["weight"].dtype == torch.bfloat16


def test_torch_opens_the_file_and_runs_it_with_the_weights(linear: Exported) -> None:
    module = torch.export.load(linear.folder / PROGRAM).module()
    weights = load_file(linear.folder / "diffusion_pytorch_model.safetensors")
    module.load_state_dict(weights, strict=False, assign=True)
    inputs = linear.inputs(3)
    with torch.no_grad():
        found, expected = module(inputs["x"], inputs["timestep"]), linear.network(**inputs)
    torch.testing.assert_close(found, expected)


def test_the_file_holds_nothing_of_the_machine_that_made_it(linear: Exported) -> None:
    content = (linear.folder / PROGRAM).read_bytes()
    for text in (b"File ", b"site-packages", str(Path.cwd()).encode(), b"test_programs"):
        assert text not in content
    with zipfile.ZipFile(linear.folder / PROGRAM) as archive:
        sizes = {one.filename: one.file_size for one in archive.infolist()}
    assert all(size <= 4 for name, size in sizes.items() if "/weights/weight_" in name)
    assert all(size == 0 for name, size in sizes.items() if name.endswith(".pt"))


def test_torchs_own_loader_is_never_called(
    linear: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("torch's loader was called")

    monkeypatch.setattr(torch.export, "load", fail)
    monkeypatch.setattr(torch.export.pt2_archive._package, "load_pt2", fail)
    monkeypatch.setattr("pickle.loads", fail)
    monkeypatch.setattr("builtins.eval", fail)
    linear.opened()(**linear.inputs(2))


class Unusual(nn.Module):
    """A network that cannot become a program, for the reason that it is made with."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why, self.scale = why, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, timestep: Tensor) -> Any:
        output = x * self.scale
        if self.why == "values":
            return output if x.sum() > 0 else -output
        if self.why == "batch":
            return output.reshape(2, 3, SIDE, SIDE)
        if self.why == "chance":
            return output + torch.randn_like(output)
        if self.why == "tuple":
            return (output,)
        return output[:, :2]


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("values", "a Unusual cannot be exported: .*data-dependent"),
        ("batch", "a Unusual cannot be exported: it fixes the batch size"),
        ("chance", "a Unusual cannot be exported: the operator 'torch.ops.aten.randn"),
        ("tuple", "a Unusual cannot be exported: .*gives a tuple, and must give a tensor"),
        ("shape", r"gives \(2, 2, 8, 8\) for states \(2, 3, 8, 8\)"),
    ],
)
def test_a_network_that_is_no_program_is_named_with_the_cause(
    tmp_path: Path, why: str, said: str
) -> None:
    message = refusal(_export, Unusual(why), tmp_path / "expert", 3, {})
    assert re.search(said, message), message
    assert "\n" not in message
    assert not (tmp_path / "expert").exists()


def _entries(folder: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(folder / PROGRAM) as archive:
        return {one.filename: archive.read(one) for one in archive.infolist()}


def _zipped(entries: Mapping[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", kind) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return memory.getvalue()


def _twice(entries: Mapping[str, bytes]) -> bytes:
    memory = io.BytesIO(_zipped(entries))
    with zipfile.ZipFile(memory, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("program/models/model.json", b"{}")
    return memory.getvalue()


def _on_top(entries: Mapping[str, bytes]) -> bytes:
    content = bytearray(_zipped(entries))
    offsets = [found.start() for found in re.finditer(b"PK\x01\x02", content)]
    # The second entry's place becomes the first one's.
    content[offsets[1] + 42 : offsets[1] + 46] = content[offsets[0] + 42 : offsets[0] + 46]
    return bytes(content)


def _longer(entries: Mapping[str, bytes]) -> bytes:
    content = bytearray(_zipped(entries))
    last = content.rindex(b"PK\x01\x02")
    size = (2**31).to_bytes(4, "little")
    content[last + 20 : last + 28] = size + size
    return bytes(content)


ARCHIVES: dict[str, tuple[Callable[[dict[str, bytes]], bytes], str]] = {
    "no archive": (lambda entries: b"\x80\x04K\x01.", "cannot be read as a zip archive"),
    "nothing": (lambda entries: b"", "cannot be read as a zip archive"),
    "a path out of it": (
        lambda entries: _zipped(entries | {"program/../../evil": b""}),
        "is no part of a program",
    ),
    "an absolute path": (lambda entries: _zipped(entries | {"/etc/x": b""}), "is no part of"),
    "a pickle": (lambda entries: _zipped(entries | {"program/data.pkl": b"."}), "is no part of"),
    "a custom object": (
        lambda entries: _zipped(entries | {"program/data/constants/custom_obj_0": b"."}),
        "is no part of",
    ),
    "a library": (
        lambda entries: _zipped(entries | {"program/data/aotinductor/model/a.so": b"."}),
        "is no part of",
    ),
    "examples": (
        lambda entries: _zipped(entries | {"program/data/sample_inputs/model.pt": b"."}),
        "a pickle, which hddm.export leaves empty",
    ),
    "two folders": (
        lambda entries: _zipped(entries | {"other/data/weights/weight_77": b""}),
        "entries in 2 folders",
    ),
    "a bomb": (
        lambda entries: _zipped(
            entries | {"program/data/weights/weight_7": bytes(10**6)}, zipfile.ZIP_DEFLATED
        ),
        "has a compressed entry",
    ),
    "an entry twice": (_twice, "twice"),
    "entries on top of each other": (_on_top, "lies on top of another"),
    "a size beyond its end": (_longer, "more bytes than its own|cannot be read as a zip"),
    "no graph": (
        lambda entries: _zipped({"program/byteorder": b"little"}),
        "has no models/model.json",
    ),
}


@pytest.mark.parametrize("kind", list(ARCHIVES))
def test_a_hostile_archive_is_refused(linear: Exported, kind: str) -> None:
    make, said = ARCHIVES[kind]
    message = refusal(ProgramFile.of, make(_entries(linear.folder)))
    assert re.search(said, message), message
    assert "\n" not in message


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, linear: Exported) -> None:
    path = tmp_path / PROGRAM
    with path.open("wb") as file:
        file.truncate(2**28 + 1)
    with programs_allowed(True):
        assert "more than 268,435,456 bytes" in refusal(PROGRAMS.parts_in, tmp_path)


Graph = dict[str, Any]
EVIL = "__import__('os').system('touch evil')"


def _node(graph: Graph, number: int = 0) -> Graph:
    found: Graph = graph["graph_module"]["graph"]["nodes"][number]
    return found


def _first(graph: Graph, operator: str) -> Graph:
    nodes = graph["graph_module"]["graph"]["nodes"]
    found: Graph = next(one for one in nodes if one["target"].split(".")[-2] == operator)
    return found


def _value(graph: Graph, name: str = "x") -> Graph:
    found: Graph = graph["graph_module"]["graph"]["tensor_values"][name]
    return found


def _argument(graph: Graph, operator: str, name: str) -> Graph:
    inputs = _first(graph, operator)["inputs"]
    found: Graph = next(one for one in inputs if one["name"] == name)
    return found


def _with_foreign(graph: Graph, target: str) -> None:
    _node(graph)["target"] = target


GRAPHS: dict[str, tuple[Callable[[Graph], object], str]] = {
    "an operator of files": (
        lambda graph: _with_foreign(graph, "torch.ops.aten.from_file.default"),
        "'torch.ops.aten.from_file.default' is not one of those",
    ),
    "an operator of a package": (
        lambda graph: _with_foreign(graph, "torch.ops.evil.run.default"),
        "is not one of those",
    ),
    "a function of Python": (lambda graph: _with_foreign(graph, "os.system"), "is not one of"),
    "an operator on memory": (
        lambda graph: _with_foreign(graph, "torch.ops.aten.as_strided.default"),
        "is not one of those",
    ),
    "an operator that prints": (
        lambda graph: _with_foreign(graph, "torch.ops.aten._print.default"),
        "is not one of those",
    ),
    "an operator in place": (
        lambda graph: _with_foreign(graph, "torch.ops.aten.add.out"),
        "is not one of those",
    ),
    "another attribute": (
        lambda graph: _with_foreign(graph, "torch.ops.aten.add.__globals__"),
        "is not one of those",
    ),
    "an expression that is code": (
        lambda graph: _value(graph)["sizes"][0]["as_expr"].update(expr_str=EVIL),
        "the expression of a size is",
    ),
    "code in an inner size": (
        lambda graph: next(iter(graph["graph_module"]["graph"]["sym_int_values"].values()))[
            "as_expr"
        ].update(expr_str=f"Symbol('s1', positive=True, integer=True)+{EVIL}"),
        "the expression of a size is",
    ),
    "a size that is no number": (
        lambda graph: _value(graph, "p_layer_weight").update(sizes=[{"as_int": float("nan")}]),
        "a whole number is nan",
    ),
    "a size below zero": (
        lambda graph: _value(graph, "p_layer_weight").update(sizes=[{"as_int": -1}]),
        "has a size -1",
    ),
    "a huge weight": (
        lambda graph: _value(graph, "p_layer_weight").update(sizes=2 * [{"as_int": 2**31}]),
        "has the shape",
    ),
    "a truth value for a size": (
        lambda graph: _value(graph, "p_layer_weight").update(sizes=[{"as_int": True}]),
        "a whole number is True",
    ),
    "a fixed batch": (
        lambda graph: _value(graph).update(sizes=[{"as_int": 2}, *_value(graph)["sizes"][1:]]),
        "a batch that is not free",
    ),
    "a value that is not there": (
        lambda graph: _first(graph, "linear")["inputs"][0]["arg"].update(as_tensor={"name": "y"}),
        "'y' is used before it is defined",
    ),
    "a value twice": (
        lambda graph: graph["graph_module"]["graph"]["nodes"].append(_first(graph, "linear")),
        "is defined twice",
    ),
    "an argument of another kind": (
        lambda graph: _argument(graph, "permute", "dims").update(arg={"as_string": EVIL}),
        "dims is .*, and must be List",
    ),
    "a graph for an argument": (
        lambda graph: _argument(graph, "permute", "dims").update(arg={"as_graph": {}}),
        "and must be List",
    ),
    "an unknown argument": (
        lambda graph: _argument(graph, "linear", "bias").update(name="out"),
        "must be|has no argument 'out'",
    ),
    "a missing argument": (
        lambda graph: _first(graph, "linear")["inputs"].pop(1),
        "lacks its argument 'weight'",
    ),
    "a custom object": (
        lambda graph: graph["graph_module"]["signature"]["input_specs"].append({"custom_obj": {}}),
        "an input is of the kind 'custom_obj'",
    ),
    "a weight called by a path": (
        lambda graph: graph["graph_module"]["signature"]["input_specs"][0]["parameter"].update(
            parameter_name="../../x"
        ),
        "a weight is called",
    ),
    "an output that changes a buffer": (
        lambda graph: graph["graph_module"]["signature"]["output_specs"].append(
            {"buffer_mutation": {}}
        ),
        "it has 2 outputs",
    ),
    "too many nodes": (
        lambda graph: graph["graph_module"]["graph"].update(nodes=[{}] * 100_001),
        "100001 nodes",
    ),
    "another version": (
        lambda graph: graph["schema_version"].update(major=9),
        "version 9, of 8 alone",
    ),
    "no graph": (lambda graph: graph.clear(), "schema_version is None"),
    "a list for a graph": (lambda graph: graph.update(graph_module=[]), "graph_module is"),
    "a number for a name": (lambda graph: _node(graph).update(target=7), "target is 7"),
}


def _changed(entries: dict[str, bytes], change: Callable[[Graph], object]) -> bytes:
    name = next(one for one in entries if one.endswith("model.json"))
    graph = json.loads(entries[name])
    change(graph)
    return _zipped(entries | {name: json.dumps(graph).encode()})


@pytest.mark.parametrize("kind", list(GRAPHS))
def test_a_hostile_graph_is_refused(
    linear: Exported, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    change, said = GRAPHS[kind]
    message = refusal(ProgramFile.of, _changed(_entries(linear.folder), change))
    assert re.search(said, message), message
    assert "\n" not in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", [b"", b"[" * 10**5, b'{"a": ' + b"9" * 10**5 + b"}", b'{"a": 1, "a": 2}', b"\xff"]
)
def test_a_text_that_is_no_graph_is_refused(linear: Exported, text: bytes) -> None:
    entries = _entries(linear.folder)
    name = next(one for one in entries if one.endswith("model.json"))
    message = refusal(ProgramFile.of, _zipped(entries | {name: text}))
    assert "\n" not in message


def _network(content: bytes, **changes: Any) -> ProgramNetwork:
    file = ProgramFile.of(content)
    config = {"program": file.sha256, "sample_size": (SIDE, SIDE), "in_channels": 3}
    made: ProgramNetwork = PROGRAMS.network(file=file, **config | {"out_channels": 3} | changes)
    return made


def test_a_value_beyond_all_bounds_is_refused_before_it_takes_memory(linear: Exported) -> None:
    def grow(graph: Graph) -> None:
        # A row of the output of the first layer, repeated.
        node = _first(graph, "permute")
        node["target"] = "torch.ops.aten.repeat.default"
        node["inputs"] = [
            node["inputs"][0],
            {"name": "repeats", "arg": {"as_ints": [2**20, 2**10, 1, 1]}, "kind": 1},
        ]

    content = _changed(_entries(linear.folder), grow)
    assert "which is too large" in refusal(_network, content)


def test_a_program_and_its_config_must_fit(linear: Exported) -> None:
    content = (linear.folder / PROGRAM).read_bytes()
    assert "that of another program" in refusal(_network, content, program="0" * 64)
    assert "and its config says" in refusal(_network, content, in_channels=4)
    assert "an expert's output is (3, 6, 8, 8)" in refusal(_network, content, out_channels=6)
    assert "and its config says" in refusal(_network, content, conditions={"a": [1]})


def test_an_operator_that_draws_or_changes_its_input_is_none_of_the_list() -> None:
    for name in sorted(NAMES):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            found = operator_of(f"torch.ops.aten.{name}.{overload}")
            if found is None:
                continue
            tags = getattr(packet, overload).tags
            assert not getattr(packet, overload)._schema.is_mutable
            assert torch.Tag.data_dependent_output not in tags, (name, overload)
            if name != "dropout" and not name.startswith("scaled_dot"):
                assert torch.Tag.nondeterministic_seeded not in tags, (name, overload)
