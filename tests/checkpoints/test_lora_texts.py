"""LoRA files that change text encoders too, or have learned tokens: applied or dropped, as the user says."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPTextModel

from hddm.checkpoints.convert import write
from hddm.checkpoints.lora import convert_lora
from hddm.checkpoints.plan import plan_conversion
from hddm.experts.expert_folders import open_expert
from hddm.experts.kept import whole_components
from hddm.inspection.folders import inspected
from hddm.networks.prompts import texts_record_of
from hddm.networks.text_encoder import embed, read_text_encoder
from hddm.networks.tokenizer import read_tokenizer
from hddm.settings import Conversion
from hddm.utils.errors import UsageError
from tests.artefacts import Command
from tests.checkpoint_files import SD_BETAS, pipeline, record_of, refused, text_unet
from tests.component_files import write_clip, write_vae
from tests.lora_files import kohya
from tests.pipelines.test_prompts_of_pipelines import stock

WIDTH = 16
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An expert with a CLIP of two layers."""
    root = tmp_path_factory.mktemp("base")
    source = root / "source"
    pipeline(source, text_unet(), DDIMScheduler(**SD_BETAS, prediction_type="epsilon"))
    write_vae(source / "vae")
    write_clip(source, num_hidden_layers=2)
    write(plan_conversion(source, Conversion()), root / "base")
    return root / "base"


def _changes(name: Callable[[str, str], str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Factors of all layers of CLIP's attention, and the changes that they make, by layer."""
    noise = torch.Generator().manual_seed(3)
    content, changes = {}, {}
    for number in range(2):
        for one in PROJECTIONS:
            layer = f"encoder.layers.{number}.self_attn.{one}"
            a = 0.3 * torch.randn(2, WIDTH, generator=noise)
            b = 0.3 * torch.randn(WIDTH, 2, generator=noise)
            content[name(layer, "down")], content[name(layer, "up")] = a, b
            changes[layer] = b @ a
    return content, changes


def _kohya(layer: str, part: str) -> str:
    return f"lora_te_text_model_{layer.replace('.', '_')}.lora_{part}.weight"


def _peft(layer: str, part: str) -> str:
    return f"text_encoder.text_model.{layer}.lora_{'A' if part == 'down' else 'B'}.weight"


def _of_2023(layer: str, part: str) -> str:
    module, _, leaf = layer.rpartition(".")
    return f"text_encoder.text_model.{module}.to_{leaf.partition('_')[0]}_lora.{part}.weight"


def _linear_layer(layer: str, part: str) -> str:
    return f"text_encoder.text_model.{layer}.lora_linear_layer.{part}.weight"


@pytest.mark.parametrize("name", [_kohya, _peft, _of_2023, _linear_layer])
def test_applied_the_expert_has_a_text_encoder_of_its_own(
    name: Callable[[str, str], str], base: Path, tmp_path: Path
) -> None:
    content, changes = _changes(name)
    save_file(content | kohya(text_unet()), tmp_path / "lora.safetensors")
    lines = convert_lora(
        tmp_path / "lora.safetensors", base, tmp_path / "out", text_encoder_lora="apply"
    )
    assert "text_encoder: 8 layers merged, so the expert has its own" in lines
    own = read_text_encoder(tmp_path / "out" / "text_encoder")
    before = CLIPTextModel.from_pretrained(base / "text_encoder")
    known, found = before.state_dict(), own.state_dict()
    for key in known:
        change = changes.get(key.removeprefix("text_model.").removesuffix(".weight"), 0.0)
        torch.testing.assert_close(found[key], known[key] + change, rtol=0, atol=1e-6)
    # Its record, its empty prompt and its manifest are those of the new encoder.
    record, of_base = record_of(tmp_path / "out"), record_of(base)
    place, words = tmp_path / "out" / "text_encoder", tmp_path / "out" / "tokenizer"
    assert record["text_encoder"] == texts_record_of(place, words).model_dump()
    assert record["text_encoder"]["fingerprint"] != of_base["text_encoder"]["fingerprint"]
    empty = embed(own, read_tokenizer(words), [""]).tokens[0]
    assert torch.equal(open_expert(tmp_path / "out").nulls["encoder_hidden_states"], empty)
    whole_components(tmp_path / "out")
    whole_components(base)


@pytest.mark.slow
def test_the_fingerprint_tells_two_loras_apart_although_they_change_large_tensors_alone(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if these tensors were as large as those of a real CLIP.
    monkeypatch.setattr("hddm.networks.identity._LARGEST", WIDTH)
    marks = [texts_record_of(base / "text_encoder", base / "tokenizer").fingerprint]
    for number in (1, 2, 1):
        content = {key: number * one for key, one in _changes(_kohya)[0].items()}
        save_file(content, tmp_path / "lora.safetensors")
        out = tmp_path / f"out_{len(marks)}"
        convert_lora(tmp_path / "lora.safetensors", base, out, text_encoder_lora="apply")
        marks.append(record_of(out)["text_encoder"]["fingerprint"])
    assert len(set(marks)) == 3
    assert marks[1] == marks[3]


def test_dropped_the_text_encoder_is_the_bases(base: Path, tmp_path: Path) -> None:
    content, _ = _changes(_kohya)
    save_file(content | kohya(text_unet()), tmp_path / "lora.safetensors")
    lines = convert_lora(
        tmp_path / "lora.safetensors", base, tmp_path / "out", text_encoder_lora="drop"
    )
    (note,) = [line for line in lines if line.startswith("note: ")]
    assert "16 tensors in it change a text encoder" in note
    assert "dropped, so prompts are read as by the base" in note
    assert record_of(tmp_path / "out")["text_encoder"] == record_of(base)["text_encoder"]
    name = "text_encoder/model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()


@pytest.mark.integration
def test_the_second_encoder_of_sdxl_is_changed_by_its_number(tmp_path: Path, hddm: Command) -> None:
    source, pipe = tmp_path / "source", stock("sdxl", tmp_path / "parts")
    pipe.save_pretrained(source)
    network = pipe.unet
    write(plan_conversion(source, Conversion()), tmp_path / "base")
    encoder = tmp_path / "base" / "text_encoder" / "text_encoder_2"
    width = read_text_encoder(encoder).config.hidden_size
    layer = "encoder.layers.0.self_attn.q_proj"
    stem = f"lora_te2_text_model_{layer.replace('.', '_')}"
    a, b = torch.ones(1, width), torch.linspace(0, 1, width)[:, None]
    content = {f"{stem}.lora_down.weight": a, f"{stem}.lora_up.weight": b.contiguous()}
    save_file(content | kohya(network), tmp_path / "lora.safetensors")
    convert_lora(
        tmp_path / "lora.safetensors",
        tmp_path / "base",
        tmp_path / "out",
        text_encoder_lora="apply",
    )
    for name in ("text_encoder", "text_encoder_2"):
        inner = Path("text_encoder") / name
        after = read_text_encoder(tmp_path / "out" / inner).state_dict()
        for key, before in read_text_encoder(tmp_path / "base" / inner).state_dict().items():
            is_it = name.endswith("2") and key.removeprefix("text_model.") == f"{layer}.weight"
            expected = before + b @ a if is_it else before
            torch.testing.assert_close(after[key], expected, rtol=0, atol=1e-6)
    prompt = ("--num-images", 1, "--steps", 1, "--prompt", "a cat")
    assert hddm("sample", tmp_path / "out", "--out", tmp_path / "pictures", *prompt)[0] == 0


def test_a_decision_is_asked_for_and_refused_where_there_is_none(
    base: Path, tmp_path: Path, hddm: Command
) -> None:
    content, _ = _changes(_kohya)
    path = tmp_path / "lora.safetensors"
    save_file(content | kohya(text_unet()), path)
    error = refused(hddm, path, "--base", base)
    assert "16 tensors in it change a text encoder ('lora_te_text_model_encoder_layers_0" in error
    assert "pass --text-encoder-lora apply, for an expert with a text encoder of its own" in error
    described = inspected(path)
    assert described["text_encoder_tensors"] == 16
    assert described["read_by"].endswith("--text-encoder-lora apply|drop")
    save_file(kohya(text_unet()), path)
    with pytest.raises(UsageError, match="changes no text encoder; drop the option"):
        convert_lora(path, base, tmp_path / "out", text_encoder_lora="drop")
    # Without a base, nothing is changed that has text encoders.
    error = refused(hddm, base, "--text-encoder-lora", "drop")
    assert "--text-encoder-lora: belongs to a LoRA file; pass --base" in error


def test_an_encoder_that_the_base_lacks_or_that_does_not_fit_is_named(
    base: Path, tmp_path: Path
) -> None:
    path, lacking = tmp_path / "lora.safetensors", Path(shutil.copytree(base, tmp_path / "base"))
    content, _ = _changes(_kohya)
    save_file(content, path)
    for name in ("text_encoder", "tokenizer"):
        shutil.rmtree(lacking / name)
    with pytest.raises(ValueError, match="keeps no text encoder; pass `text_encoder_lora` drop"):
        convert_lora(path, lacking, tmp_path / "out", text_encoder_lora="apply")
    save_file({_kohya("encoder.layers.7.mlp.fc1", "down"): torch.ones(2, WIDTH)}, path)
    with pytest.raises(
        ValueError, match=r"'text_model_encoder_layers_7_mlp_fc1' is no layer of it"
    ):
        convert_lora(path, base, tmp_path / "out", text_encoder_lora="apply")
    layer = "encoder.layers.0.self_attn.q_proj"
    wrong = {_kohya(layer, "down"): torch.ones(2, 5), _kohya(layer, "up"): torch.ones(WIDTH, 2)}
    save_file(wrong, path)
    with pytest.raises(
        ValueError, match=r"has down \(2, 5\) and up \(16, 2\) for a weight \(16, 16\)"
    ):
        convert_lora(path, base, tmp_path / "out", text_encoder_lora="apply")
    nan = {_kohya(layer, "down"): torch.full((2, WIDTH), torch.nan)}
    save_file(nan | {_kohya(layer, "up"): torch.ones(WIDTH, 2)}, path)
    with pytest.raises(ValueError, match="holds NaN or Inf"):
        convert_lora(path, base, tmp_path / "out", text_encoder_lora="apply")
    assert not (tmp_path / "out").exists()


def test_learned_tokens_are_named_and_dropped_on_request(
    base: Path, tmp_path: Path, hddm: Command
) -> None:
    path = tmp_path / "lora.safetensors"
    tokens = {"<s1>": torch.ones(WIDTH), "bundle_emb.mine.string_to_param.*": torch.ones(2, WIDTH)}
    save_file(kohya(text_unet()) | tokens, path, {"<s1>": "<embed>"})
    error = refused(hddm, path, "--base", base)
    assert "it has learned the tokens <s1>, mine; pass --text-encoder-lora drop" in error
    error = refused(hddm, path, "--base", base, "--text-encoder-lora", "apply")
    assert "hddm adds no tokens to a tokenizer; pass --text-encoder-lora drop" in error
    assert inspected(path)["learned_tokens"] == ["<s1>", "mine"]
    convert_lora(path, base, tmp_path / "out", text_encoder_lora="drop")


@pytest.mark.integration
def test_an_ensemble_with_the_base_keeps_both_text_encoders(
    base: Path, tmp_path: Path, hddm: Command
) -> None:
    content, _ = _changes(_kohya)
    save_file(content | kohya(text_unet()), tmp_path / "lora.safetensors")
    out = tmp_path / "out"
    convert_lora(tmp_path / "lora.safetensors", base, out, text_encoder_lora="apply")
    whole = tmp_path / "ensemble"
    code, said, error = hddm("assemble", base, out, "--out", whole)
    assert code == 0, said + error
    for name, expert in (("text_encoder", base), ("text_encoder_2", out)):
        own = (expert / "text_encoder" / "model.safetensors").read_bytes()
        assert (whole / name / "model.safetensors").read_bytes() == own
