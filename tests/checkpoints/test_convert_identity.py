"""Conversions keep what lies around a network: its VAE, its text encoder, and the tokens of no text."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hddm
from hddm.checkpoints.convert import write
from hddm.checkpoints.plan import plan_conversion
from hddm.data.shard_records import MEAN
from hddm.data.shards import Rows, Samples, Shard
from hddm.experts.assembly import assemble
from hddm.experts.records import NULL_FILE, read_expert_record
from hddm.experts.shard_images import check_fit
from hddm.networks.identity import VaeRecord
from hddm.networks.text_encoder import embed, text_encoder_record_of
from hddm.networks.vae import vae_record_of
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.settings import Conversion
from hddm.utils.records import write_manifest
from tests.artefacts import Command, edit_json, refusal
from tests.checkpoint_files import converted, pipeline, record_of, refused, text_unet
from tests.component_files import save_by_transformers, write_clip, write_vae
from tests.networks.test_vae import FILE, HALF

NOT_SAID = "note: its VAE is an unreadable AutoencoderKL"


def _text_pipeline(folder: Path, **vae: Any) -> Path:
    """A Stable Diffusion in small: UNet, VAE, CLIP."""
    write_vae(folder / "vae", **vae)
    write_clip(folder, tokens=6)
    return pipeline(folder, text_unet())


def _converted(hddm: Command, source: Path, *options: object) -> tuple[dict[str, Any], str]:
    out = source.parent / f"{source.name}-expert"
    text = converted(hddm, source, out, *options)
    return record_of(out), text


@pytest.mark.integration
def test_vae_and_text_encoder_of_a_pipeline_are_recorded_and_kept(
    hddm: Command, tmp_path: Path
) -> None:
    source = _text_pipeline(tmp_path / "sd", scaling_factor=0.13, shift_factor=0.1)
    facts, text = _converted(hddm, source)
    vae, encoder = vae_record_of(source / "vae"), text_encoder_record_of(source / "text_encoder", 6)
    assert (facts["latent_scale"], vae.scale, vae.shift) == (0.13, 0.13, 0.1)
    assert (encoder.tokens, encoder.width) == (6, 16)
    assert NOT_SAID not in text
    assert f"vae: AutoencoderKL, known by its encoder {vae.fingerprint}" in text
    assert f"text encoder: CLIPTextModel {encoder.fingerprint}, 6×16 tokens" in text
    shown = json.loads(hddm("inspect", tmp_path / "sd-expert", "--json")[1])
    again, _ = _converted(hddm, tmp_path / "sd-expert")
    edit_json(source / "model_index.json", _class_name="MyPipeline")
    assert "not recorded, since MyPipeline is no class whose" in converted(
        hddm, source, tmp_path / "mine"
    )
    for found in (facts, shown, again):
        assert (found["vae"], found["text_encoder"]) == (vae.model_dump(), encoder.model_dump())


@pytest.mark.integration
def test_a_variant_has_the_identity_of_the_plain_files(hddm: Command, tmp_path: Path) -> None:
    source = _text_pipeline(tmp_path / "sd")
    expected, _ = _converted(hddm, source)
    for part, name in (("unet", FILE), ("vae", FILE), ("text_encoder", "model.safetensors")):
        file = source / part / name
        weights = {key: value.half() for key, value in load_file(file).items()}
        save_file(weights, file.with_name(name.replace(".", ".fp16.", 1)))
        file.unlink()
    facts, _ = _converted(hddm, source.rename(tmp_path / "half"), "--variant", "fp16")
    assert (facts["vae"], facts["text_encoder"]) == (expected["vae"], expected["text_encoder"])


@pytest.mark.integration
def test_a_vae_that_cannot_be_read_is_no_hindrance_and_a_note(
    hddm: Command, tmp_path: Path
) -> None:
    source = _text_pipeline(tmp_path / "sd", scaling_factor=0.5)
    (source / "vae" / FILE).unlink()
    facts, text = _converted(hddm, source)
    assert (facts["vae"], facts["space"], facts["latent_scale"]) == (None, "latents", 0.5)
    unread = facts["unread_vae"]
    assert (unread["kind"], unread["fingerprint"], unread["scale"]) == ("AutoencoderKL", None, 0.5)
    assert text.count(NOT_SAID) == 1
    assert "kept: text_encoder, tokenizer; but no VAE to make pictures with" in text


@pytest.mark.integration
def test_an_expert_takes_the_text_encoder_beside_which_it_was_converted_and_no_other(
    hddm: Command, tmp_path: Path
) -> None:
    """Whichever version of transformers saved the tokenizer."""
    source, out = _text_pipeline(tmp_path / "sd"), tmp_path / "ensemble"
    save_by_transformers(source / "tokenizer")
    _, text = _converted(hddm, source)
    assert "no text: 6×16 tokens of the source's own" in text
    write_clip(tmp_path / "other", tokens=6, seed=1)

    def assembled(components: Path) -> tuple[int, str, str]:
        parts = (
            "--text-encoder",
            components / "text_encoder",
            "--tokenizer",
            components / "tokenizer",
        )
        return hddm(
            "assemble", tmp_path / "sd-expert", "--out", out, "--vae", source / "vae", *parts
        )

    code, _, error = assembled(tmp_path / "other")
    assert (code, str(tmp_path / "other" / "text_encoder") in error) == (1, True)
    assert assembled(source)[0] == 0
    pipe = HDDMPipeline.from_pretrained(out)
    empty = load_file(tmp_path / "sd-expert" / NULL_FILE)["encoder_hidden_states"]
    assert torch.allclose(
        embed(pipe.text_encoder, pipe.tokenizer, [""]).tokens[0], empty, atol=1e-6
    )


def test_an_index_that_names_no_class_is_said_to_name_none(hddm: Command, tmp_path: Path) -> None:
    source = _text_pipeline(tmp_path / "sd")
    edit_json(source / "model_index.json", _class_name=None)
    facts, text = _converted(hddm, source)
    assert facts["text_encoder"] is None
    said = "text encoder: not recorded, since its model_index.json names no class (_class_name); hddm can"
    assert said in text


@pytest.mark.parametrize("part", ["vae", "text_encoder"])
def test_a_part_outside_the_pipeline_is_refused_tokens(
    part: str, hddm: Command, tmp_path: Path
) -> None:
    source = _text_pipeline(tmp_path / "sd")
    (source / part).rename(tmp_path / "outside")
    os.symlink(tmp_path / "outside", source / part)
    assert "outside the folder" in refused(hddm, source)


def test_weights_of_a_vae_outside_its_folder_are_not_opened(hddm: Command, tmp_path: Path) -> None:
    source = _text_pipeline(tmp_path / "sd")
    (source / "vae" / FILE).rename(tmp_path / "outside")
    os.symlink(tmp_path / "outside", source / "vae" / HALF)
    facts, text = _converted(hddm, source)
    assert facts["vae"] is None
    assert "outside the folder" in text


def _quantised(folder: Path) -> None:
    weights = load_file(folder / FILE)
    name = "encoder.conv_in.weight"
    save_file(weights | {name: (100 * weights[name]).to(torch.int8)}, folder / FILE)


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        (
            lambda vae: edit_json(vae / "config.json", latents_mean=[0.0] * 4),
            "AutoencoderKL",
            "each channel",
        ),
        (
            lambda vae: edit_json(vae / "config.json", _class_name="VQModel"),
            "VQModel",
            "holds a VQModel",
        ),
        (_quantised, "AutoencoderKL", "holds quantised weights"),
        (
            lambda vae: edit_json(vae / "config.json", new_key=1),
            "AutoencoderKL",
            "no key 'new_key'",
        ),
    ],
    ids=["per channel", "another class", "quantised", "newer config"],
)
def test_a_vae_that_cannot_be_read_is_recorded_and_another_one_is_refused(
    change: Callable[[Path], object], kind: str, reason: str, tmp_path: Path
) -> None:
    source, expert, out = (
        _text_pipeline(tmp_path / "sd"),
        tmp_path / "expert",
        tmp_path / "ensemble",
    )
    change(source / "vae")
    write(plan_conversion(source, Conversion()), expert, check=False)
    unread = record_of(expert)["unread_vae"]
    assert (record_of(expert)["vae"], unread["kind"]) == (None, kind)
    assert reason in unread["reason"]
    assert str(tmp_path) not in unread["reason"]

    # Of the same class and scale.
    write_vae(tmp_path / "other", seed=1)
    error = refusal(assemble, [expert], out, vae=tmp_path / "other")
    assert f"{expert} has an unreadable {kind} (" in error
    assert "convert it anew beside a VAE of its own that can be read" in error
    assert not out.exists()

    # An expert of the other VAE is of another latent space, so the two are never mixed.
    other = _text_pipeline(tmp_path / "sd2", seed=1)
    write(plan_conversion(other, Conversion()), tmp_path / "expert2", check=False)
    assemble([expert, tmp_path / "expert2"], out)
    pair = hddm.load(out)
    assert isinstance(pair, hddm.Ensemble)
    assert not pair.are_alike()


def test_the_same_vae_is_taken_once_it_can_be_read(tmp_path: Path) -> None:
    source, expert = _text_pipeline(tmp_path / "sd"), tmp_path / "expert"
    edit_json(source / "vae" / "config.json", new_key=1)
    write(plan_conversion(source, Conversion()), expert, check=False)
    write_vae(tmp_path / "own")
    assemble([expert], tmp_path / "out", vae=tmp_path / "own")
    assert vae_record_of(tmp_path / "out" / "vae") == vae_record_of(tmp_path / "own")


def test_a_text_encoder_that_cannot_be_read_is_recorded_and_another_one_is_refused(
    tmp_path: Path,
) -> None:
    source, expert = _text_pipeline(tmp_path / "sd"), tmp_path / "expert"
    shutil.copytree(source / "text_encoder", tmp_path / "own")
    texts = {"text_encoder": tmp_path / "own", "tokenizer": source / "tokenizer"}
    edit_json(source / "text_encoder/config.json", architectures=["NewTextModel"])
    write(plan_conversion(source, Conversion()), expert, check=False)
    record = read_expert_record(expert)
    assert record.text_encoder is None
    unread = record.unread_text_encoder
    assert unread is not None
    assert unread.kind == "NewTextModel"
    assert str(tmp_path) not in unread.reason
    # The same weights under a class that hddm reads.
    assemble([expert], tmp_path / "same", **texts)

    write_clip(tmp_path / "other", seed=1)
    other = tmp_path / "other/text_encoder"
    error = refusal(assemble, [expert], tmp_path / "out", **(texts | {"text_encoder": other}))
    assert f"{expert} has an unreadable NewTextModel (" in error
    assert "convert it anew beside a text encoder of its own that can be read" in error

    # Without weights nothing says which encoder it was.
    (source / "text_encoder/model.safetensors").unlink()
    write(plan_conversion(source, Conversion()), tmp_path / "unknown", check=False)
    error = refusal(assemble, [tmp_path / "unknown"], tmp_path / "out", **texts)
    assert f"pass `trust_components` if it is that in {tmp_path / 'own'}" in error
    notes = assemble([tmp_path / "unknown"], tmp_path / "out", trust_components=True, **texts)
    assert any(note.endswith("taken on trust") for note in notes)


def test_shards_of_another_vae_are_refused_for_an_expert_whose_own_cannot_be_read(
    tmp_path: Path,
) -> None:
    source, expert = _text_pipeline(tmp_path / "sd"), tmp_path / "expert"
    edit_json(source / "vae" / "config.json", _class_name="VQModel")
    write(plan_conversion(source, Conversion()), expert, check=False)
    record = read_expert_record(expert)
    assert record.unread_vae is not None
    write_vae(tmp_path / "other", seed=1)
    other, latents = vae_record_of(tmp_path / "other"), torch.zeros(2, *record.sample_shape)
    same = other.model_copy(update={"fingerprint": record.unread_vae.fingerprint})

    def shard_of(vae: VaeRecord) -> Shard:
        return Shard(tmp_path, 0, 1, "a", (), Samples({MEAN: Rows((latents,))}, vae), None, vae=vae)

    check_fit(shard_of(same), record, None)
    error = refusal(check_fit, shard_of(other), record, None)
    assert "its VAE is not the expert's, an unreadable VQModel" in error


def test_a_folder_of_format_1_5_opens_without_these_fields(tmp_path: Path) -> None:
    expert = tmp_path / "expert"
    write(plan_conversion(_text_pipeline(tmp_path / "sd"), Conversion()), expert, check=False)
    facts = record_of(expert) | {"format": "1.5"}
    del facts["unread_vae"], facts["source"]["prediction_source"]
    (expert / "expert.json").write_text(json.dumps(facts))
    write_manifest(expert)
    assert read_expert_record(expert).latent_space == vae_record_of(tmp_path / "sd" / "vae")
