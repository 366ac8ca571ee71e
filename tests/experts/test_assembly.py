"""Assembling: parts are told apart by what they record, before any weight is read and anything written."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import hddm
from hddm.calibration_records import FILE_NAME as CALIBRATION
from hddm.experts.assembly import assemble, change
from hddm.experts.ensemble_records import SCHEDULER_FILE, read_model_index
from hddm.experts.expert_folders import field_of
from hddm.experts.records import EXPERT_FILE, ROUTER_FILE
from hddm.networks.text_encoder import text_encoder_record_of
from hddm.networks.transformers import ExpertTransformer
from hddm.networks.vae import vae_record_of
from hddm.utils.errors import HddmError
from hddm.utils.files import read_json
from hddm.utils.records import WEIGHTS
from tests.artefacts import contents, copied, edit_json, refusal, variant
from tests.checkpoint_files import record_of
from tests.component_files import write_clip, write_vae
from tests.conftest import Trio
from tests.ensemble_files import FLOW, derived, edit_members, flow_expert, load_ensemble, saved

VAE = {"kind": "AutoencoderKL", "fingerprint": "a" * 16, "scale": 0.18215, "shift": 0.0}
TEXT = {"kind": "CLIPTextModel", "fingerprint": "b" * 16, "tokens": 77, "width": 16}


@pytest.fixture(scope="module")
def all_three(trio: Trio) -> Path:
    """Beside its parts, so that files can be linked."""
    out = trio.shards.parent / "all"
    assert assemble(trio.experts, out, trio.router, strategy="full") == ()
    return out


def test_folders_and_fields_are_refused_by_one_rule(tmp_path: Path) -> None:
    made = [
        flow_expert(0),
        flow_expert(1, sample_size=8),
        flow_expert(2, {"noise_range": (0.5, 1)}),
    ]
    folders = [saved(tmp_path / str(k), one) for k, one in enumerate(made)]
    of_folders = _refusal(folders, tmp_path / "out", "moments", strategy="full")
    fields = [field_of(one) for one in made]
    with pytest.raises(HddmError, match="these experts do not fit together") as caught:
        hddm.Ensemble(fields, strategy="full")
    assert len(caught.value.details) == 2
    for line in caught.value.details:
        _, _, text = line.partition(": ")
        assert any(text in other for other in of_folders)


def _refusal(*arguments: Any, **options: Any) -> list[str]:
    with pytest.raises(HddmError) as caught:
        assemble(*arguments, **options)
    assert (
        str(caught.value).splitlines()[0]
        == "these parts do not fit together, and nothing was written:"
    )
    return list(caught.value.details)


@pytest.mark.integration
@torch.no_grad()
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1,), (2, 0)], ids=str)
def test_experts_in_any_order_and_number_get_their_outputs_of_the_router(
    order: tuple[int, ...], trio: Trio, all_three: Path, tmp_path: Path
) -> None:
    assemble([trio.experts[k] for k in order], tmp_path / "some", trio.router, strategy="full")
    whole, some = load_ensemble(all_three), load_ensemble(tmp_path / "some")
    x_t, t = (
        torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0)),
        torch.linspace(0, 1, 5),
    )
    of_all = whole.router(x_t, t)[:, list(order)]
    torch.testing.assert_close(some.router(x_t, t), of_all / of_all.sum(1, keepdim=True))
    labels = torch.zeros(5, dtype=torch.long)
    for mine, k in zip(some.experts, order, strict=True):
        same = whole.experts[k].velocity(x_t, t, class_labels=labels)
        assert torch.equal(mine.velocity(x_t, t, class_labels=labels), same)
    recorded = derived(tmp_path / "some").outputs
    assert recorded == order


def test_a_class_without_images_has_the_prior(trio: Trio, tmp_path: Path) -> None:
    changed = []
    for k, images in enumerate((10, 20, 10)):
        shard = record_of(trio.experts[k])["shard"] | {
            "images": images,
            "class_images": [images, 0],
        }
        changed.append(variant(trio.experts[k], tmp_path / f"{k}", shard=shard))
    (note,) = assemble(changed, tmp_path / "out", trio.router)
    assert note == "no shard has images of rows; 'draw' takes p(k) for them"
    facts = derived(tmp_path / "out")
    assert facts.class_prior == ((0.25, 0.5, 0.25), (0.25, 0.5, 0.25))


@pytest.mark.parametrize(
    ("accuracy", "chance", "is_noted"),
    [
        (0.4, 0.4, True),
        (0.44, 0.4, True),
        (0.45, 0.4, False),
        (1.0, 1.0, False),
        (None, 0.4, False),
    ],
)
def test_a_router_that_learnt_nothing_is_noted(
    accuracy: float | None, chance: float, is_noted: bool, trio: Trio, tmp_path: Path
) -> None:
    router = copied(trio.router, tmp_path)
    judged = {"accuracy": accuracy, "chance": chance, "deviation": 0.022}
    edit_json(router / ROUTER_FILE, training={"accuracy": judged})
    notes = assemble(trio.experts, tmp_path / "out", router)
    assert [note.startswith(f"{router} recognised shards no better") for note in notes] == [
        True
    ] * is_noted


def test_experts_without_a_shard_must_be_in_the_routers_order_and_number(
    trio: Trio, tmp_path: Path
) -> None:
    lost = variant(trio.experts[1], tmp_path / "lost", shard=None)
    (line,) = _refusal([trio.experts[0], lost], tmp_path / "out", trio.router)
    assert line.startswith(
        f"{trio.router}: distinguishes 3 shards, and there are 2 experts; {lost}"
    )
    assert _refusal([trio.experts[2], lost, trio.experts[0]], tmp_path / "out", trio.router) == [
        f"{trio.experts[2]}: was trained on the shard of output 2 of {trio.router}, not 0",
        f"{trio.experts[0]}: was trained on the shard of output 0 of {trio.router}, not 2",
    ]
    assert not (tmp_path / "out").exists()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("shifts", "expected"), [((3.0, 3.0, 3.0), 3.0), ((1.0, 3.0, 3.0), 1.0)], ids=str
)
def test_the_shift_is_the_common_one(
    shifts: tuple[float, ...], expected: float, trio: Trio, tmp_path: Path
) -> None:
    experts = [
        variant(e, tmp_path / e.name, shift=s) for e, s in zip(trio.experts, shifts, strict=True)
    ]
    notes = assemble(experts, tmp_path / "out", trio.router)
    scheduler = read_json(tmp_path / "out" / SCHEDULER_FILE)
    assert derived(tmp_path / "out").shift == scheduler["shift"] == expected
    assert len(notes) == len(set(shifts)) - 1
    if notes:
        assert f"has 1 (1 ({experts[0]}), 3 ({experts[1]}), 3 ({experts[2]}));" in notes[0]


def _latent(source: Path, target: Path, **changes: Any) -> Path:
    """An expert of latents with classes and text, and a network that fits its record."""
    text = {"conditions": ["class_labels", "encoder_hidden_states"], "text_encoder": TEXT}
    latent = {"space": "latents", "sample_shape": [4, 8, 8], "latent_scale": 0.18215, "vae": VAE}
    record = {**text, **latent, **changes}
    shutil.copytree(source, target)
    (target / CALIBRATION).unlink()
    channels, side, _ = record["sample_shape"]
    sizes = {
        "in_channels": channels,
        "sample_size": side,
        "num_classes": 2,
        "text_dim": TEXT["width"],
    }
    ExpertTransformer(**FLOW | sizes).save_pretrained(target)
    edit_json(target / EXPERT_FILE, **record)
    return target


def test_every_difference_is_told_at_once_a_line_an_expert(trio: Trio, tmp_path: Path) -> None:
    """The weights are gone, so what is told comes from the records."""
    first, second = (_latent(trio.experts[k], tmp_path / f"{k}") for k in (0, 1))
    shard = record_of(trio.experts[2])["shard"] | {
        "partition": "c" * 64,
        "num_shards": 5,
        "hash": "d" * 64,
    }
    other = _latent(
        trio.experts[2],
        tmp_path / "other",
        sample_shape=[16, 8, 8],
        latent_scale=0.13,
        vae=VAE | {"fingerprint": "e" * 16, "scale": 0.13, "shift": 0.1},
        text_encoder=TEXT | {"fingerprint": "f" * 16, "tokens": 120, "width": 32},
        classes=["columns", "dots"],
        shard=shard,
    )
    of_one = record_of(trio.experts[0])["shard"] | {"class_images": []}
    pixels = variant(
        trio.experts[0], tmp_path / "pixels", classes=["columns"], null_class=1, shard=of_one
    )
    given = [first, second, other, pixels]
    for folder in given:
        (folder / WEIGHTS).unlink()
    before = contents(tmp_path)
    lines = _refusal(given, tmp_path / "out", trio.router)
    shard_of_first = record_of(first)["shard"]["hash"]
    assert lines == [
        f"{other}: sample_shape (16, 8, 8), not (4, 8, 8); latent_scale 0.13, not 0.18215; "
        f"VAE {'e' * 16}, not {'a' * 16}; VAE's scale 0.13, not 0.18215; VAE's shift 0.1, not 0.0; "
        "so it can be drawn, without a router, and not mixed; "
        f"was trained on a shard that {trio.router} does not know ({'d' * 12}); train a router on all shards "
        "and pass it with `router`",
        f"{pixels}: sample_shape (1, 4, 4), not (4, 8, 8); space pixels, not latents; latent_scale 1.0, not "
        "0.18215; so it can be drawn, without a router, and not mixed; was trained on the same shard "
        f"({shard_of_first[:12]}) as {first}; leave one out, or divide it by `share`",
        f"{trio.router}: sample_shape (1, 4, 4), not (4, 8, 8)",
    ]
    assert contents(tmp_path) == before


def test_what_is_not_recorded_is_no_difference_but_said(trio: Trio, tmp_path: Path) -> None:
    known = _latent(trio.experts[0], tmp_path / "known")
    unknown = _latent(
        trio.experts[1], tmp_path / "unknown", vae=None, text_encoder=None, latent_scale=None
    )
    refused = _refusal([known, unknown], tmp_path / "out")
    assert refused == [
        f"{unknown}: does not record its VAE; pass `trust_components` if it is that of the others; does not "
        "record its text encoder; pass `trust_components` if it is that of the others"
    ]
    notes = assemble([known, unknown], tmp_path / "out", trust_components=True)
    for what in ("VAE", "text encoder", "latent scale"):
        assert f"{unknown} does not record its {what}; taken on trust" in notes
    trusted = [one["trusted"] for one in read_json(tmp_path / "out/ensemble.json")["experts"][1:]]
    assert trusted == [["vae", "text_encoder"]]
    assert "trusted" not in read_json(tmp_path / "out/ensemble.json")["experts"][0]
    # What was decided is not asked again.
    change(tmp_path / "out", strategy="draw")
    high = _latent(trio.experts[0], tmp_path / "high", shard=None, noise_range=(0.6, 1.0))
    low = _latent(trio.experts[1], tmp_path / "low", shard=None, noise_range=(0.0, 0.6), vae=None)
    assemble([high, low], tmp_path / "pair", domain=[["high", "low"]], trust_components=True)


def test_a_vae_that_is_stated_serves_the_expert_whose_channels_it_has(
    trio: Trio, tmp_path: Path
) -> None:
    """As of a network alone in a file, beside an expert that keeps another VAE."""
    for name, channels in (("small", 4), ("wide", 8)):
        write_vae(tmp_path / name, latent_channels=channels)
    own = vae_record_of(tmp_path / "small").model_dump()
    scale = {"latent_scale": own["scale"]}
    known = _latent(trio.experts[0], tmp_path / "known", vae=own, text_encoder=None, **scale)
    shutil.copytree(tmp_path / "small", known / "vae")
    wide = {"space": "latents", "sample_shape": (8, 4, 4), "latent_scale": None}
    silent = saved(tmp_path / "silent", flow_expert(0, wide, in_channels=8))
    parts = {"vae": tmp_path / "wide"}
    refused = _refusal([known, silent], tmp_path / "out", **parts)
    assert refused == [
        f"{silent}: does not record its VAE; pass `trust_components` if it is that in {tmp_path / 'wide'}"
    ]
    assemble([known, silent], tmp_path / "out", trust_components=True, **parts)
    assert derived(tmp_path / "out").vaes == (0, 1)
    # In an ensemble of its own first, and beside the other one later.
    assemble([silent], tmp_path / "alone", trust_components=True, **parts)
    change(tmp_path / "alone", add=[known], out=tmp_path / "later")
    assert derived(tmp_path / "later").vaes == (0, 1)


def test_encoders_taken_on_trust_stay_with_chosen_experts(trio: Trio, tmp_path: Path) -> None:
    silent = _latent(trio.experts[0], tmp_path / "silent", vae=None, text_encoder=None)
    known = _latent(trio.experts[1], tmp_path / "known")
    assemble([silent, known], tmp_path / "out", trust_components=True)
    vae, text = VAE | {"fingerprint": "c" * 16}, TEXT | {"fingerprint": "d" * 16}
    edit_members(tmp_path / "out", vae=[vae, None], text_encoder=[text, None])
    for chosen in (None, [0, 1], [1, 0]):
        parts = load_ensemble(tmp_path / "out", experts=chosen).parts
        found = [(part.vae.fingerprint[0], part.text_encoder.fingerprint[0]) for part in parts]
        assert found == [[("c", "d"), ("a", "b")][k] for k in chosen or (0, 1)]


def test_chosen_experts_need_a_share(trio: Trio, tmp_path: Path) -> None:
    assemble(trio.experts[:2], tmp_path / "out", share={"e0": 0.0, "e1": 1.0})
    assert load_ensemble(tmp_path / "out", experts=[1]).prior.tolist() == [1.0]
    assert "prior must be 1 non-negative numbers" in refusal(
        load_ensemble, tmp_path / "out", experts=[0]
    )


def _components(root: Path, vae: dict[str, Any], clip: dict[str, Any]) -> dict[str, Path]:
    write_vae(root / "vae", **vae)
    write_clip(root, **clip)
    return {name: root / name for name in ("vae", "text_encoder", "tokenizer")}


def test_components_go_in_and_are_named(trio: Trio, tmp_path: Path) -> None:
    parts = _components(tmp_path, {}, {})
    (tmp_path / "vae" / "pytorch_model.bin").write_bytes(b"pickle")
    (tmp_path / "vae" / "LICENSE").write_text("CC0")
    text = text_encoder_record_of(tmp_path / "text_encoder", 77).model_dump()
    vae = vae_record_of(tmp_path / "vae").model_dump()
    experts = [
        _latent(e, tmp_path / e.name, vae=vae, latent_scale=vae["scale"], text_encoder=text)
        for e in trio.experts
    ]
    assert assemble(experts, tmp_path / "out", **parts) == ()
    index = read_model_index(tmp_path / "out")
    assert [index[name] for name in parts] == [
        ("diffusers", "AutoencoderKL"),
        ("transformers", "CLIPTextModel"),
        ("transformers", "CLIPTokenizer"),
    ]
    for name, folder in parts.items():
        expected = {k: v for k, v in contents(folder).items() if not k.endswith(".bin")}
        assert contents(tmp_path / "out" / name) == expected
    assert (tmp_path / "out" / "vae" / WEIGHTS).samefile(parts["vae"] / WEIGHTS)


def test_components_are_held_against_what_the_experts_record(trio: Trio, tmp_path: Path) -> None:
    other_vae = {"latent_channels": 8, "scaling_factor": 0.5, "shift_factor": 0.25}
    parts = _components(tmp_path, other_vae, {"width": 32, "tokens": 50})
    expert = _latent(trio.experts[0], tmp_path / "expert")
    vae, text = _refusal([expert], tmp_path / "out", **parts)
    assert vae.startswith(f"{parts['vae']}: 8 latent channels, and {expert} has 4; fingerprint ")
    assert vae.endswith(
        f"scale 0.5, and {expert} records 0.18215; shift 0.25, and {expert} records 0.0"
    )
    assert (
        text
        == f"{parts['text_encoder']}: is the text encoder of none of these experts; leave it out"
    )


def test_components_without_a_record_are_compared_by_scale_and_width(
    trio: Trio, tmp_path: Path
) -> None:
    parts = _components(tmp_path, {"scaling_factor": 0.5}, {"width": 16})
    expert = _latent(trio.experts[0], tmp_path / "expert", vae=None, text_encoder=None)
    edit_json(expert / "config.json", text_dim=4096)
    first, *_ = _refusal([expert], tmp_path / "out", **parts)
    assert f"pass `trust_components` if it is that in {tmp_path / 'vae'}" in first
    assert f"pass `trust_components` if it is that in {tmp_path / 'text_encoder'}" in first
    assert _refusal([expert], tmp_path / "out", trust_components=True, **parts) == [
        f"{tmp_path / 'vae'}: scale 0.5, and {expert} has 0.18215",
        f"{tmp_path / 'text_encoder'}: tokens 16 wide, and {expert} takes 4096",
    ]


def test_components_that_nobody_needs_are_refused(trio: Trio, tmp_path: Path) -> None:
    parts = _components(tmp_path, {}, {})
    assert _refusal(trio.experts, tmp_path / "out", **parts) == [
        f"{tmp_path / 'vae'}: is the VAE of none of these experts; leave it out",
        f"{tmp_path / 'text_encoder'}: is the text encoder of none of these experts; leave it out",
    ]
    with pytest.raises(HddmError, match="`text_encoder` and `tokenizer` go together"):
        assemble(trio.experts, tmp_path / "out", text_encoder=tmp_path / "text_encoder")


@pytest.mark.parametrize(
    ("outputs", "line"),
    [
        ([1, 0, 2], "experts/0: was trained on the shard of output 0 of router, not 1"),
        ([0, 1, 3], "router: has outputs 0 to 2, and the ensemble takes [3]"),
    ],
    ids=str,
)
def test_swapped_parts_are_told(
    outputs: list[int], line: str, all_three: Path, tmp_path: Path
) -> None:
    folder = copied(all_three, tmp_path)
    edit_members(folder, output=outputs)
    said = refusal(hddm.load, folder)
    assert line in said
    assert "assemble it anew" in said


def test_only_files_at_the_top_of_an_expert_are_taken_and_no_links_out(
    trio: Trio, tmp_path: Path
) -> None:
    expert, router = copied(trio.experts[0], tmp_path), copied(trio.router, tmp_path)
    before = contents(expert)
    for folder in (expert, router):
        (folder / "samples").mkdir()
        (folder / "samples" / "0.png").write_bytes(b"pixels")
        (folder / "above").symlink_to(tmp_path)
    assemble([expert, trio.experts[1]], tmp_path / "out", router)
    assert contents(tmp_path / "out" / "experts" / "0") == before
    assert contents(tmp_path / "out" / "router") == contents(trio.router)
    (tmp_path / "key").write_text("secret")
    (expert / "notes.txt").symlink_to(tmp_path / "key")
    with pytest.raises(HddmError, match=r"notes\.txt: is a link to .*key, outside the folder"):
        assemble([expert], tmp_path / "other")


@pytest.mark.parametrize(
    ("names", "strategy", "message"),
    [
        (["ddpm", "flow"], "top-5", "top-5 needs 5 experts and there are 2"),
        (["ddpm", "flow"], "full", "strategy 'full' needs a router"),
        ([], "draw", "needs at least one"),
    ],
)
def test_what_makes_no_ensemble_is_refused(
    names: list[str], strategy: str, message: str, ensemble: Path, tmp_path: Path
) -> None:
    with pytest.raises(HddmError, match=message):
        assemble([ensemble.parent / name for name in names], tmp_path / "out", strategy=strategy)
    assert not list(tmp_path.iterdir())
