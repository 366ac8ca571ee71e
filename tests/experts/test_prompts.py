"""Ensembles asked by prompt: topics of captions, several text encoders, classes by name, several kinds."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler

import hddm
from hddm.experts.assembly import assemble, change
from hddm.experts.topics import describe_topic, topic_of
from hddm.networks.text_encoder import embed, read_text_encoder
from hddm.networks.tokenizer import read_tokenizer
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.prompt_router import SPREAD, PromptRouter, Topic
from hddm.utils.errors import HddmError
from hddm.utils.records import write_manifest
from tests.artefacts import Command, contents, edit_json, printed, refusal
from tests.checkpoint_files import SD_BETAS, converted, pipeline, pixart, record_of, text_unet
from tests.component_files import texts_in, write_clip, write_t5, write_vae
from tests.ensemble_files import derived, flow_expert, load_ensemble, saved, shard_of, text_experts
from tests.ldm_files import tiny_pipeline

STEPS = {"num_inference_steps": 3, "output_type": "pt"}


def test_captions_in_common_go_to_experts_as_often_as_they_have_them() -> None:
    """Four captions at independent embeddings: p(k | caption) is what counting them gives."""
    noise = torch.Generator().manual_seed(0)
    captions = torch.randn(4, 6, generator=noise, dtype=torch.float64)
    counts = torch.tensor([[40, 10, 30, 10], [10, 40, 30, 40], [20, 20, 10, 30]])
    topics = [topic_of(captions[row > 0], row[row > 0].tolist()) for row in counts]
    prior = counts.sum(1).double()
    router = PromptRouter([topics[0], None, *topics[1:]], [prior[0], 7.0, *prior[1:]], ridge=0)
    found = router(5 * captions)
    torch.testing.assert_close(
        found[:, [0, 2, 3]], (counts / counts.sum(0)).T.double(), rtol=0, atol=1e-6
    )
    assert not found[:, 1].any()
    # Other shares of experts change p(k | caption) as Bayes' rule has it.
    expected = (counts.double() / prior[:, None]).T * torch.tensor(
        [1.0, 5.0, 1.0], dtype=torch.float64
    )
    found = PromptRouter(topics, [1.0, 5.0, 1.0], ridge=0)(captions)
    torch.testing.assert_close(found, expected / expected.sum(1, keepdim=True), rtol=0, atol=1e-6)


def test_variance_around_clusters_makes_prompts_less_sure() -> None:
    """Of two experts with a cluster each, the bound is least at W_1 - W_0 = (m_1 - m_0) / 2s."""
    means = torch.tensor([[0.6, 0.8, 0.0], [0.8, 0.6, 0.0]], dtype=torch.float64)
    one, variance = torch.ones(1, dtype=torch.float64), 6.0
    router = PromptRouter([Topic(mean[None], one, variance) for mean in means], [1, 1], ridge=0)
    prompts = torch.nn.functional.normalize(torch.rand(5, 3, dtype=torch.float64) + 0.2, dim=1)
    logits = (prompts - means.mean(0)) @ (means[1] - means[0]) / (2 * SPREAD * variance)
    assert (logits.abs() < 2).all()
    torch.testing.assert_close(router(prompts)[:, 1], logits.sigmoid(), rtol=0, atol=1e-6)


def test_domains_that_lie_apart_get_their_prompts_alone() -> None:
    """Captions that no expert was described by, of two well-separated domains of many wordings."""
    noise = torch.Generator().manual_seed(0)
    centres = torch.randn(2, 1, 64, generator=noise)
    described, asked = (centres + 0.5 * torch.randn(2, n, 64, generator=noise) for n in (400, 50))
    router = PromptRouter([topic_of(one) for one in described], [0.5, 0.5])
    for k, prompts in enumerate(asked):
        assert (router(prompts)[:, k] > 0.999).all()
    few = PromptRouter([topic_of(one[:2]) for one in described], [0.5, 0.5])
    assert all((few(prompts).argmax(1) == k).all() for k, prompts in enumerate(asked))


@pytest.mark.integration
def test_a_topic_is_kilobytes_and_reads_back(tmp_path: Path) -> None:
    write_clip(tmp_path)
    for folder, captions in (("a", "a cat\n\ncats\n"), ("b", "dog\n")):
        saved(tmp_path / folder, text_experts(1)[0])
        (tmp_path / f"{folder}.txt").write_text(captions)
        texts = texts_in(tmp_path)
        before = contents(tmp_path / folder)
        record = describe_topic(tmp_path / folder, tmp_path / f"{folder}.txt", **texts)
        after = contents(tmp_path / folder)
        assert {name: after[name] for name in before if name != "manifest.json"} == {
            name: one for name, one in before.items() if name != "manifest.json"
        }
        assert len(after["topic.safetensors"]) < 1000
        assert b"cat" not in after["topic.safetensors"].split(b"}", 1)[1]
    topic = Topic.load(tmp_path / "a")
    assert topic is not None
    assert (record.count, topic.record.count) == (1, 2)
    encoder, tokenizer = (
        read_text_encoder(texts["text_encoder"]),
        read_tokenizer(texts["tokenizer"]),
    )
    expected = topic_of(embed(encoder, tokenizer, ["a cat", "cats"]).pooled)
    torch.testing.assert_close(topic.means, expected.means, rtol=1e-3, atol=1e-3)
    assert topic.parts.tolist() == [0.5, 0.5]
    assert assemble(
        [tmp_path / "a", tmp_path / "b"], tmp_path / "both", **texts, trust_components=True
    )
    pipe = HDDMPipeline.from_pretrained(tmp_path / "both")
    given = pipe.encode(["a cat", "dog"])
    assert given.prior.argmax(1).tolist() == [0, 1]
    for k in (0, 1):
        # Inside the ensemble, with its own text encoder: one routes no prompts, both do.
        (tmp_path / "both" / "experts" / str(k) / "topic.safetensors").unlink()
        write_manifest(tmp_path / "both" / "experts" / str(k))
    write_manifest(tmp_path / "both")
    for k, text in enumerate(("dog", "a cat")):
        describe_topic(tmp_path / "both" / "experts" / str(k), text=text)
        assert derived(tmp_path / "both").topics == (0 if k else None)
    pipe.save_pretrained(tmp_path / "saved")
    again = HDDMPipeline.from_pretrained(tmp_path / "saved").encode(["a cat", "dog"])
    assert torch.equal(given.prior, again.prior)


@pytest.fixture(scope="module")
def two_encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of one VAE: a UNet with CLIP and a transformer with T5, as converted from pipelines."""
    root = tmp_path_factory.mktemp("two")
    scheduler = DDIMScheduler(**SD_BETAS, prediction_type="epsilon")
    for name, network in (("sd", text_unet(0)), ("px", pixart(0))):
        pipeline(root / name, network, scheduler)
        write_vae(root / name / "vae")
    write_clip(root / "sd")
    write_t5(root / "px", width=12)
    return root


def _in_a_new_process(folder: Path, *calls: dict[str, Any]) -> list[torch.Tensor]:
    """Images of each call of the pipeline in ``folder``, with seed 3 and `STEPS`."""
    made = folder.with_suffix(".pt")
    code = f"""if True:
        import torch
        from hddm import HDDMPipeline
        torch.set_num_threads(1)
        pipe = HDDMPipeline.from_pretrained({str(folder)!r})
        torch.save([pipe(**one, seed=3, **{STEPS!r}).images for one in {calls!r}], {str(made)!r})
    """
    subprocess.run([sys.executable, "-c", code], check=True)
    images: list[torch.Tensor] = torch.load(made)
    return images


def _converted(root: Path, out: Path, hddm: Command) -> tuple[Path, Path]:
    for name in ("sd", "px"):
        converted(hddm, root / name, out / name)
    return out / "sd", out / "px"


@pytest.mark.slow
def test_each_expert_reads_a_prompt_by_its_own_text_encoder(
    two_encoders: Path, tmp_path: Path, hddm: Command
) -> None:
    sd, px = _converted(two_encoders, tmp_path, hddm)
    assemble([sd, px], tmp_path / "both")
    facts = derived(tmp_path / "both")
    assert (facts.texts, facts.vaes, facts.topics) == ((0, 1), (0, 0), None)
    assert not (tmp_path / "both" / "vae_2").exists()
    pipe = HDDMPipeline.from_pretrained(tmp_path / "both")
    prompts = ["a cat", "two dogs"]
    guided = STEPS | {"guidance_scale": 2.0}
    for k, folder in enumerate((sd, px)):
        own = HDDMPipeline.from_pretrained(folder)(prompts, seed=3, **guided).images
        torch.testing.assert_close(pipe(prompts, seed=3, expert=k, **guided).images, own)
    drawn = pipe(prompts * 4, seed=3, **STEPS)
    assert (drawn.expert_use.shares > 0).all()
    (elsewhere,) = _in_a_new_process(tmp_path / "both", {"prompt": prompts * 4})
    assert torch.equal(elsewhere, drawn.images)
    # Without T5's expert the folder is that of one text encoder again.
    change(tmp_path / "both", remove=[1])
    assert derived(tmp_path / "both").texts == (0,)
    assert not (tmp_path / "both" / "text_encoder_2").exists()


def test_padding_of_t5_has_no_effect(two_encoders: Path, tmp_path: Path, hddm: Command) -> None:
    """As in diffusers' pipeline, which masks it: the tokens of the prompt alone give the same."""
    _, px = _converted(two_encoders, tmp_path, hddm)
    pipe = HDDMPipeline.from_pretrained(px)
    given = pipe.encode(["a cat"]).given
    length = int(given["encoder_attention_mask"].sum())
    short = {name: value[:, :length] for name, value in given.items()}
    x, t = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0.5])
    field = pipe.ensemble.experts[0]
    torch.testing.assert_close(field.velocity(x, t, **given), field.velocity(x, t, **short))
    assert (
        field.velocity(x, t, **short)
        - field.velocity(
            x, t, **short | {"encoder_hidden_states": short["encoder_hidden_states"] * 2}
        )
    ).abs().max() > 1e-4


@pytest.mark.integration
def test_topics_of_two_text_encoders_are_refused(
    two_encoders: Path, tmp_path: Path, hddm: Command
) -> None:
    sd, px = _converted(two_encoders, tmp_path, hddm)
    notes = []
    for expert, text in ((sd, "cats"), (px, "dogs")):
        notes += assemble([sd, px], tmp_path / f"both_{text}")
        code, out, err = hddm("describe", expert, "--text", text)
        assert (code, out) == (0, f"{expert}: described by 1 phrase: {text}\n")
    assert any(f"since {px} has no topic; hddm describe makes one" in note for note in notes)
    message = refusal(assemble, [sd, px], tmp_path / "no")
    assert f"{px}: is described by another text encoder than {sd}; describe both by one" in message
    encoder = ("--text-encoder", sd / "text_encoder", "--tokenizer", sd / "tokenizer")
    hddm("describe", px, "--text", "dogs", *encoder)
    assemble([sd, px], tmp_path / "routed")
    assert derived(tmp_path / "routed").topics == 0
    options = ("--prompt", "dogs", "--num-images", 2, "--steps", 2)
    printed(hddm, "sample", tmp_path / "routed", "--out", tmp_path / "s", *options)
    assert "p(k | condition) is not known" not in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--captions, --data, --text: pass one of the three"),
        (("--captions", "{file}"), "keeps no text encoder; pass --text-encoder and --tokenizer"),
        (("--data", "{shard}"), "holds no captions"),
    ],
    ids=str,
)
def test_descriptions_that_cannot_be_made_are_one_line(
    options: tuple[str, ...],
    words: str,
    class_expert: Path,
    shards: Path,
    tmp_path: Path,
    hddm: Command,
) -> None:
    expert = shutil.copytree(class_expert, tmp_path / "expert")
    (tmp_path / "captions.txt").write_text("a cat\n")
    names = {"file": tmp_path / "captions.txt", "shard": shards / "shard_0"}
    given = [one.format(**names) for one in options]
    before = contents(expert)
    code, _, err = hddm("describe", expert, *given)
    assert code in (1, 2)
    assert err.count("\n") == 1
    assert words in err
    assert contents(expert) == before


def test_an_expert_of_classes_answers_prompts_that_name_one(tmp_path: Path) -> None:
    write_clip(tmp_path)
    latents = {"space": "latents", "latent_scale": None}
    by_class = flow_expert(
        0, latents | {"classes": ("dog", "hot dog")}, in_channels=4, num_classes=2
    )
    by_text = text_experts(1)[0]
    for name, expert in (("classes", by_class), ("text", by_text)):
        saved(tmp_path / name, expert)
    texts = texts_in(tmp_path)
    assemble(
        [tmp_path / "classes", tmp_path / "text"], tmp_path / "both", **texts, trust_components=True
    )
    pipe = HDDMPipeline.from_pretrained(tmp_path / "both")
    given = pipe.encode(["a cat", "a Dog!", "hot dogs", "one hot dog"])
    assert given.prior.tolist() == [[0, 1], [0.5, 0.5], [0, 1], [0.5, 0.5]]
    x, t = (
        torch.randn(4, 4, 4, 4, generator=torch.Generator().manual_seed(0)),
        torch.full((4,), 0.5),
    )
    found = pipe.ensemble.velocity(x, t, expert=torch.tensor([1, 0, 1, 0]), **given.given)
    alone = hddm.load(tmp_path / "classes").velocity(
        x[1::2], t[1::2], class_labels=torch.tensor([0, 1])
    )
    torch.testing.assert_close(found[1::2], alone)
    # What captions say of the expert of text leaves the other its share of what names its classes.
    describe_topic(tmp_path / "both/experts/1", text="a cat, cats")
    described = HDDMPipeline.from_pretrained(tmp_path / "both")
    told = described.encode(["a cat", "a Dog!", "hot dogs", "one hot dog"])
    assert told.prior.tolist() == [[0, 1], [0.5, 0.5], [0, 1], [0.5, 0.5]]
    # Asked by class, the expert of text has no part.
    assert pipe.ensemble.prior_of(1, {"class_labels": torch.tensor([1])}).tolist() == [[1, 0]]


def test_a_class_that_a_prompt_names_goes_to_those_who_have_its_images(tmp_path: Path) -> None:
    """Found by reading: experts of one class list were asked by share, also for what they never saw."""
    classes = ("seven", "eight")
    write_clip(tmp_path)
    texts = texts_in(tmp_path)
    latents = {"space": "latents", "latent_scale": None, "classes": classes}
    for seed, (name, images) in enumerate({"old": (30, 0), "new": (10, 40)}.items()):
        shard = shard_of(name, sum(images), images)
        saved(
            tmp_path / name,
            flow_expert(seed, latents | {"shard": shard}, in_channels=4, num_classes=2),
        )
    asked, experts = ["a seven", "one eight"], [tmp_path / "old", tmp_path / "new"]
    assemble(experts, tmp_path / "both", trust_components=True)
    # No text encoder is needed to find names.
    given = HDDMPipeline.from_pretrained(tmp_path / "both").encode(asked)
    assert torch.equal(given.prior, torch.tensor([[0.75, 0.25], [0, 1]], dtype=torch.float64))
    # With topics they decide, but not against what is known of the classes.
    for expert, text in zip(experts, ("a seven, one eight", "a seven"), strict=True):
        describe_topic(expert, text=text, **texts)
    assemble(experts, tmp_path / "described", **texts, trust_components=True)
    given = HDDMPipeline.from_pretrained(tmp_path / "described").encode(asked)
    assert given.prior[1].tolist() == [0, 1]
    assert (given.prior[0] > 0).all()


def _two_sizes(root: Path) -> list[Path]:
    sizes = {"small": flow_expert(0), "large": flow_expert(1, sample_size=8)}
    return [saved(root / name, expert) for name, expert in sizes.items()]


def test_experts_of_other_sizes_and_latents_are_drawn_and_decoded_each(tmp_path: Path) -> None:
    both, sizes = tmp_path / "both", _two_sizes(tmp_path)
    notes = assemble(sizes, both)
    (note,) = [one for one in notes if one.startswith("experts make samples of several kinds")]
    assert "large: sample_shape (3, 8, 8), not (3, 4, 4)" in note
    pipe = HDDMPipeline.from_pretrained(both)
    images = pipe(seed=5, batch_size=8, num_inference_steps=3).images
    widths = {image.width for image in images}
    assert widths == {4, 8}
    for i, image in enumerate(images):
        alone = HDDMPipeline.from_pretrained(tmp_path / ("small" if image.width == 4 else "large"))
        assert image.tobytes() == alone(seed=5, start=i, num_inference_steps=3).images[0].tobytes()
    ensemble = load_ensemble(both)
    assert "several kinds (expert 1: sample_shape (3, 8, 8), not (3, 4, 4))" in refusal(
        hddm.sample, ensemble, 2
    )
    with pytest.raises(HddmError, match="strategy 'top-1': these experts do not fit together:"):
        ensemble.strategy = "top-1"
    assert hddm.sample(ensemble, 2, steps=2, expert=1).shape == (2, 3, 8, 8)
    message = refusal(assemble, sizes, tmp_path / "no", "moments", strategy="top-1")
    assert "so it can be drawn, without a router, and not mixed" in message


def _of_another_latent_space(two_encoders: Path, root: Path, hddm: Command) -> None:
    """Assemble ``both`` of ``a`` and ``b``, which has another VAE."""
    other = shutil.copytree(two_encoders / "sd", root / "source")
    write_vae(other / "vae", seed=1)
    converted(hddm, two_encoders / "sd", root / "a")
    converted(hddm, other, root / "b")
    assemble([root / "a", root / "b"], root / "both")


@pytest.mark.slow
def test_two_latent_spaces_have_a_vae_each(
    two_encoders: Path, tmp_path: Path, hddm: Command
) -> None:
    _of_another_latent_space(two_encoders, tmp_path, hddm)
    both = tmp_path / "both"
    assert derived(both).vaes == (0, 1)
    pipe = HDDMPipeline.from_pretrained(both)
    images = pipe(["a cat"] * 6, seed=1, num_inference_steps=2).images
    chosen = {}
    for k, folder in enumerate((tmp_path / "a", tmp_path / "b")):
        own = HDDMPipeline.from_pretrained(folder)(
            ["a cat"] * 6, seed=1, num_inference_steps=2
        ).images
        for i, (one, image) in enumerate(zip(own, images, strict=True)):
            # Batches of other sizes round differently.
            if np.abs(np.array(one).astype(int) - np.array(image)).max() <= 1:
                chosen[i] = k
    assert set(chosen) == set(range(6))
    assert set(chosen.values()) == {0, 1}


@pytest.mark.integration
def test_changes_keep_what_experts_have_and_refuse_what_would_mix(
    two_encoders: Path, tmp_path: Path, hddm: Command
) -> None:
    """Found by reading: an encoder lost, a topic of another encoder, a merge of two noise ranges."""
    source = shutil.copytree(two_encoders / "px", tmp_path / "source")
    texts = texts_in(tmp_path)
    for name, folder in texts.items():
        (source / name).rename(folder)
    sd, px = tmp_path / "sd", tmp_path / "px"
    converted(hddm, two_encoders / "sd", sd)
    converted(hddm, source, px)
    both = tmp_path / "both"
    assemble([sd, px], both, **texts, trust_components=True)
    assert derived(both).texts == (0, 1)
    change(both, share={"0": 0.3})
    assert derived(both).texts == (0, 1)
    assert (both / "text_encoder_2").exists()
    for k in (0, 1):
        describe_topic(both / "experts" / str(k), text="cats")
    before = contents(both)
    message = refusal(describe_topic, both / "experts/0", text="dogs", **texts)
    assert "use that one for both" in message
    assert contents(both) == before


@pytest.mark.integration
def test_of_two_latent_spaces_either_can_go(
    two_encoders: Path, tmp_path: Path, hddm: Command
) -> None:
    _of_another_latent_space(two_encoders, tmp_path, hddm)
    for k, kept in ((0, "vae_2"), (1, "vae")):
        change(tmp_path / "both", remove=[k], out=tmp_path / f"without_{k}")
        weights = "diffusion_pytorch_model.safetensors"
        one = (tmp_path / f"without_{k}" / "vae" / weights).read_bytes()
        assert one == (tmp_path / "both" / kept / weights).read_bytes()
    # The weights of an expert that was not chosen need not be there.
    (tmp_path / "both" / "experts" / "0" / weights).unlink()
    assert len(load_ensemble(tmp_path / "both", experts=[1]).experts) == 1


@pytest.mark.slow
def test_encoders_of_one_kind_that_pad_differently_stay_apart(
    tmp_path: Path, hddm: Command
) -> None:
    """Padding counts for CLIP: with another word, all pictures of an expert would change."""
    records = []
    for name, pad in (("usual", None), ("other", "<|endoftext|>")):
        tiny_pipeline(tmp_path / name, "XL")
        place = tmp_path / name / "pipeline"
        if pad is not None:
            for file in ("tokenizer_config.json", "special_tokens_map.json"):
                if (place / "tokenizer_2" / file).exists():
                    edit_json(place / "tokenizer_2" / file, pad_token=pad)
        converted(hddm, place, tmp_path / f"expert-{name}")
        records.append(record_of(tmp_path / f"expert-{name}")["text_encoder"])
    assert records[0]["fingerprint"] != records[1]["fingerprint"]
    both = tmp_path / "both"
    assemble([tmp_path / "expert-usual", tmp_path / "expert-other"], both)
    assert (both / "text_encoder_2").exists()
    pair = HDDMPipeline.from_pretrained(both)
    call = {"num_inference_steps": 2, "seed": 0, "output_type": "latent"}
    for number, name in enumerate(("usual", "other")):
        alone = HDDMPipeline.from_pretrained(tmp_path / f"expert-{name}")
        torch.testing.assert_close(
            pair("cat", expert=number, **call).images, alone("cat", **call).images
        )
