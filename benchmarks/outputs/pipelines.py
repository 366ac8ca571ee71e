"""Pipelines: pictures to begin with, prompts of every family, experts in stock pipelines, and the service."""

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import CLIPTokenizer, T5Tokenizer

import hddm
from benchmarks.outputs.digests import Outputs, document, files_of, under
from benchmarks.outputs.workshop import Workshop, command, noise
from hddm.editing import Picture
from tests.checkpoint_files import SD_BETAS, dit, pixart, text_unet
from tests.component_files import texts_in, write_clip, write_t5, write_vae
from tests.ensemble_files import (
    flow_expert,
    saved,
    text_experts,
    write_ensemble,
    write_mixed,
    write_text,
)
from tests.pipelines import test_drop_in as stock_networks
from tests.pipelines import test_prompts_of_pipelines as stock_prompts

STRATEGIES = ("draw", "commit-0.5", "full", "top-2")
STEPS: dict[str, Any] = {"num_inference_steps": 4, "seed": 5}


def _opened(folder: Path) -> hddm.HDDMPipeline:
    pipe = hddm.HDDMPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _numbers(images: Any) -> Tensor:
    """Pixels of a list of images, or what a pipeline returns as a tensor."""
    return images if isinstance(images, Tensor) else torch.from_numpy(np.stack(images))


def _picture(side: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _mask(side: int) -> Image.Image:
    """White in the lower half."""
    pixels = np.zeros((side, side), np.uint8)
    pixels[side // 2 :] = 255
    return Image.fromarray(pixels)


def pictures(workshop: Workshop) -> Outputs:
    """Images that begin with a picture: strengths, masks, repeats, and edits from one class to another."""
    folder = workshop.folder("pictures")
    whole = write_ensemble(folder, [flow_expert(seed, num_classes=3) for seed in range(3)])
    pipe, old, mask = _opened(whole), _picture(4), _mask(4)

    def made(of: hddm.HDDMPipeline = pipe, **given: Any) -> Tensor:
        return _numbers(of(**STEPS | {"output_type": "latent", "image": old} | given).images)

    begun: dict[str, dict[str, Any]] = {
        **{f"strength {strength:g}": {"strength": strength} for strength in (0.3, 0.6, 1.0)},
        "mask": {"mask_image": mask},
        "mask, three repeats": {"mask_image": mask, "resampling_steps": 3},
        "mask, strength 0.6": {"mask_image": mask, "strength": 0.6, "resampling_steps": 2},
    }
    for (name, given), strategy in itertools.product(begun.items(), STRATEGIES):
        yield f"{name}/{strategy}", made(**given, strategy=strategy, batch_size=3)
        labelled = made(**given, strategy=strategy, class_labels=[0, 1, 2], guidance_scale=2.0)
        yield f"{name}/{strategy}/guided", labelled
    for (name, given), solver in itertools.product(begun.items(), ("euler", "heun")):
        yield f"{name}/{solver}", made(**given, solver=solver, strategy="full", batch_size=2)
    for strategy, solver, scale in itertools.product(
        ("draw", "full"), ("euler", "heun"), (1.0, 3.0)
    ):
        edit = {"edit_from": "a cat", "prompt": "a dog", "guidance_scale": scale, "strength": 0.8}
        yield (
            f"edit/{strategy}/{solver}/scale {scale:g}",
            made(**edit, strategy=strategy, solver=solver),
        )
    for strategy, output in itertools.product(("draw", "full"), ("pt", "pil")):
        given = {"mask_image": mask, "resampling_steps": 2, "batch_size": 3, "output_type": output}
        yield f"mask as {output}/{strategy}", made(**given, strategy=strategy)
    generators = [torch.Generator().manual_seed(k) for k in range(3)]
    drawn: dict[str, dict[str, Any]] = {
        "a generator": {"generator": torch.Generator().manual_seed(1), "batch_size": 3},
        "generators": {"generator": generators, "batch_size": 3},
        "given latents": {"latents": noise(3, 3, 4, 4, seed=8), "batch_size": 3},
    }
    for name, given in drawn.items():
        yield f"noise of {name}", made(**given, image=None, seed=None, strategy="full")
    start = Picture(noise(3, 3, 4, 4, seed=6), 0.7, noise(3, 1, 4, 4, seed=7) > 0, 2)
    for strategy in STRATEGIES:
        samples = hddm.sample(pipe.ensemble, 3, 5, 4, strategy, "heun", picture=start)
        yield f"hddm.sample of a picture/{strategy}", samples
    yield from under("latents", _pictures_of_latents(folder))
    yield from under("command", _pictures_by_command(folder, whole, workshop))


def _pictures_of_latents(folder: Path) -> Outputs:
    """A mixed ensemble with a VAE."""
    (folder / "mixed").mkdir()
    pipe = _opened(write_mixed(folder / "mixed"))
    height, width = pipe.image_size
    begun: dict[str, dict[str, Any]] = {
        "plain": {},
        "picture": {"image": _picture(width), "strength": 0.6},
        "larger picture": {"image": _picture(2 * width), "strength": 0.6},
        "mask": {"image": _picture(width), "mask_image": _mask(height), "resampling_steps": 2},
    }
    for (name, given), strategy in itertools.product(begun.items(), STRATEGIES):
        images = pipe(
            class_labels=[0, 3, 4], strategy=strategy, output_type="pt", **STEPS, **given
        ).images
        yield f"{name}/{strategy}", images


def _pictures_by_command(folder: Path, whole: Path, workshop: Workshop) -> Outputs:
    """What ``hddm sample`` writes: images, latents and its record."""
    _picture(4).save(folder / "old.png")
    _mask(4).save(folder / "mask.png")
    begin = f"--init-image {folder}/old.png --strategy full"
    lines = {
        "plain": "--start 3 --shift 2",
        "guided": "--class-labels cat,dog --guidance-scale 3 --guidance-interval 0.2 0.8",
        "rescaled": "--class-labels 7 --guidance-scale 3 --guidance-rescale 0.5 --cfg-channels 2",
        "latents": "--output-type latent --strategy full --router-every 2",
        "one expert": "--expert 2",
        "offloaded": "--offload disk --strategy top-2",
        "bfloat16": "--dtype bfloat16 --strategy full",
        "int8": "--quantize int8 --strategy full",
        "picture": f"{begin} --strength 0.5",
        "mask": f"{begin} --mask {folder}/mask.png --resampling-steps 2",
        "edit": f"{begin} --edit-from 'a cat' --prompt 'a dog'",
    }
    for name, options in lines.items():
        out = folder / "sampled" / name
        given = ("--num-images", 3, "--seed", 5, "--steps", 4, *shlex.split(options))
        command("sample", whole, *given, "--out", out)
        yield from under(name, files_of(out, workshop.root))


def _stable_diffusion(folder: Path, kind: str) -> diffusers.DiffusionPipeline:
    """Stable Diffusion 1 or 2 with random weights."""
    encoder = write_clip(folder)
    changes = {} if kind == "sd1" else {"use_linear_projection": True, "attention_head_dim": 4}
    prediction = "epsilon" if kind == "sd1" else "v_prediction"
    shift = None if kind == "sd1" else 0.1
    return diffusers.StableDiffusionPipeline(
        vae=write_vae(folder / "vae", factor=8, shift_factor=shift),
        unet=text_unet(**changes),
        scheduler=diffusers.DDIMScheduler(
            **SD_BETAS, prediction_type=prediction, clip_sample=False
        ),
        text_encoder=encoder,
        tokenizer=CLIPTokenizer.from_pretrained(folder / "tokenizer"),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _pixart(folder: Path, kind: str) -> diffusers.DiffusionPipeline:
    """PixArt-α or PixArt-Σ with random weights."""
    return getattr(diffusers, kind)(
        text_encoder=write_t5(folder, 12),
        tokenizer=T5Tokenizer.from_pretrained(folder / "tokenizer"),
        vae=write_vae(folder / "vae", factor=8),
        transformer=pixart(),
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )


PIPELINES = {
    "sd1": _stable_diffusion,
    "sd2": _stable_diffusion,
    **dict.fromkeys(stock_prompts.NAMES, lambda folder, name: stock_prompts.stock(name, folder)),
    "PixArtAlphaPipeline": _pixart,
    "PixArtSigmaPipeline": _pixart,
}
PROMPTS = ["a cat", "Two Dogs on a lawn", ""]
CAPTIONS = ("a cat,cats,a dog", "a dog")
"""Of two experts, one of them in common."""


def prompts(workshop: Workshop) -> Outputs:
    """Of a tiny pipeline of each family: its expert, conditions of prompts, and images."""
    folder = workshop.folder("prompts")
    for name, make in PIPELINES.items():
        own = folder / name
        own.mkdir()
        make(own, name).save_pretrained(own / "pipeline")
        size = {"sample_size": 8} if name == "flux" else {}
        hddm.convert(own / "pipeline", own / "expert", **size)
        files = files_of(own / "expert", workshop.root, kept=lambda path: len(path.parts) == 1)
        yield from under(name, files)
        yield from under(name, _images_of_prompts(own / "expert", workshop))
    yield from under("several encoders", _of_several_encoders(folder))
    yield from under("described", _described(folder, workshop))


def _images_of_prompts(expert: Path, workshop: Workshop) -> Outputs:
    pipe = _opened(expert)
    encoded = pipe.encode(PROMPTS, negative_prompt="a dog", guided=True)
    yield "conditions", encoded.given
    yield "negative conditions", encoded.negative
    for solver, scale in itertools.product(("euler", "adams-moulton"), (1.0, 3.0)):
        given: dict[str, Any] = {"output_type": "pt", "solver": solver, "guidance_scale": scale}
        if scale != 1:
            given["negative_prompt"] = "a dog"
        yield f"images/{solver}/scale {scale:g}", pipe(PROMPTS, **STEPS, **given).images
    old = _picture(pipe.image_size[1])
    yield (
        "images of a picture",
        pipe(PROMPTS, image=old, strength=0.5, output_type="pt", **STEPS).images,
    )
    edit = {"edit_from": "a cat", "image": old, "solver": "euler", "output_type": "pt"}
    yield "edited picture", pipe("a dog", **edit, **STEPS).images
    out = expert.with_name("sampled")
    line = "--prompt 'a cat' --prompt 'Two Dogs' --guidance-scale 3 --num-images 2 --steps 2"
    command("sample", expert, *shlex.split(line), "--out", out)
    yield from under("command", files_of(out, workshop.root))


def _of_several_encoders(folder: Path) -> Outputs:
    """Experts of several families in one ensemble, each with its own text encoders and VAE."""
    families = ("sd1", "sdxl", "sd3")
    hddm.assemble([folder / name / "expert" for name in families], folder / "several")
    pipe = _opened(folder / "several")
    encoded = pipe.encode(PROMPTS, guided=True)
    yield "conditions", encoded.given
    yield "negative conditions", encoded.negative
    for k, image in enumerate(pipe(PROMPTS * 2, guidance_scale=2.0, **STEPS).images):
        yield f"image {k}", torch.from_numpy(np.array(image))
    pipe.save_pretrained(folder / "saved")
    yield from under(
        "saved", files_of(folder / "saved", folder, kept=lambda path: len(path.parts) == 1)
    )


def _described(folder: Path, workshop: Workshop) -> Outputs:
    """Experts that prompts find by topics of their captions."""
    root = folder / "described"
    root.mkdir()
    write_vae(root / "vae")
    write_clip(root)
    texts = texts_in(root)
    for name, expert, captions in zip("ab", text_experts(), CAPTIONS, strict=True):
        saved(root / name, expert)
        places = ("--text-encoder", texts["text_encoder"], "--tokenizer", texts["tokenizer"])
        command("describe", root / name, "--text", captions, *places)
        yield from under(name, files_of(root / name, workshop.root))
    trusted = {"vae": root / "vae", "trust_components": True}
    hddm.assemble([root / "a", root / "b"], root / "both", **trusted, **texts)
    pipe = _opened(root / "both")
    asked = [*PROMPTS, "a dog"]
    yield "p(k | prompt)", pipe.encode(asked).prior
    yield "images", pipe(asked, output_type="pt", **STEPS).images


def _constant(x: Tensor, t: Tensor) -> Tensor:
    """A router of two experts that sees nothing."""
    return torch.tensor([[0.3, 0.7]]).to(x).expand(len(x), 2)


def drop_in(workshop: Workshop) -> Outputs:
    """Stock pipelines with an expert, or an ensemble, in place of their network."""
    folder = workshop.folder("drop-in")
    for name, family in stock_networks.FAMILIES.items():
        pipe = stock_networks.stock(name, folder / name)
        pipe.save_pretrained(folder / name / "pipeline")
        size = {"sample_size": 8} if "flux" in name else {}
        hddm.convert(folder / name / "pipeline", folder / name / "expert", **size)
        experts = [hddm.load(folder / name / "expert") for _ in range(2)]
        with torch.no_grad():
            for parameter in experts[1].network.parameters():
                parameter.mul_(0.9)
        models: dict[str, Any] = {"expert": experts[0]}
        for strategy in ("draw", "full", "commit-0.5"):
            models[strategy] = hddm.Ensemble(experts, _constant, strategy, [0.5, 0.5])
        for kind, model in models.items():
            setattr(pipe, family.part, hddm.drop_in(model, pipe))
            yield f"{name}/{kind}", stock_networks.latents(pipe, **family.inputs)
        if name == "sd":
            yield from _other_schedulers(pipe)
    yield "dit/expert", _images_of_dit(folder / "dit")


def _other_schedulers(pipe: diffusers.DiffusionPipeline) -> Outputs:
    config, inputs = pipe.scheduler.config, stock_networks.FAMILIES["sd"].inputs
    for name in stock_networks.SCHEDULERS.split():
        pipe.scheduler = getattr(diffusers, f"{name}Scheduler").from_config(config)
        yield f"sd/{name}Scheduler", stock_networks.latents(pipe, **inputs)


def _images_of_dit(folder: Path) -> Tensor:
    """Images by class, of a network that also predicts a variance."""
    network, vae = dit(num_embeds_ada_norm=1000), write_vae(folder / "vae")
    pipe = diffusers.DiTPipeline(network, vae, diffusers.DDIMScheduler())
    pipe.save_pretrained(folder / "pipeline")
    hddm.convert(folder / "pipeline", folder / "expert")
    pipe.transformer = hddm.drop_in(hddm.load(folder / "expert"), pipe)
    given: dict[str, Any] = {
        "class_labels": [3, 981],
        "guidance_scale": 3.0,
        "num_inference_steps": 4,
    }
    generator = torch.Generator().manual_seed(0)
    return torch.as_tensor(pipe(**given, generator=generator, output_type="pt").images)


def service(workshop: Workshop) -> Outputs:
    """Files that the HTTP service answers with, and what it says besides; its workers are in this process."""
    # Needs ray, which takes seconds to import.
    from tests.serving import test_front as fronts

    folder = workshop.folder("service")
    (folder / "text").mkdir()
    (folder / "mixed").mkdir()
    models = {
        "classes": write_ensemble(folder, [flow_expert(seed, num_classes=3) for seed in range(3)]),
        "text": write_text(folder / "text"),
        "mixed": write_mixed(folder / "mixed"),
    }
    for kind, model in models.items():
        front = fronts.front_of(model, batching=False)
        requests = [body for body, _ in fronts.WAYS[kind]]
        requests += [{"strategy": "full"}, {"strategy": "commit-0.5", "solver": "heun"}]
        for place, body in enumerate(requests):
            words = json.dumps(body, sort_keys=True)
            for number, file in enumerate(fronts.files_in(fronts.ask(front, n=2, **body))):
                yield f"{kind}/{place} {words}/{number}", file
        answer = fronts.talk(front, lambda client: client.get("/v1/models")).json()
        yield f"{kind}/models", document([one["id"] for one in answer["data"]], workshop.root)
