"""Nodes for ComfyUI that make small models whose pictures are known, to test hddm's node pack with.

ComfyUI's loaders know networks of published sizes alone. `TestModel` builds `comfy.model_base.BaseModel`
around a small network instead, with ComfyUI's own ``model_sampling`` for what the network predicts.

Two networks exist. ``unet`` is ComfyUI's UNet with random weights, read as an estimate of the clean picture.
``shapes`` is the exact denoiser of a mixture of Gaussians, each of them around a drawn picture. `TestBlend`
is the weighted sum of two such denoisers in closed form, as one model.
"""

import json
import math
import sys
from pathlib import Path

import comfy.controlnet
import comfy.latent_formats
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models_base
import folder_paths
import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from torch import nn

SIDE = 16
VARIANCE = 0.02
COLOURS = {
    "red": (0.9, 0.2, 0.2),
    "green": (0.2, 0.75, 0.3),
    "blue": (0.2, 0.35, 0.9),
    "yellow": (0.95, 0.85, 0.2),
}
TYPES = {
    "eps": comfy.model_base.ModelType.EPS,
    "v": comfy.model_base.ModelType.V_PREDICTION,
    "flow": comfy.model_base.ModelType.FLOW,
    "edm": comfy.model_base.ModelType.EDM,
}
FORMATS = {"SD15": comfy.latent_formats.SD15, "SDXL": comfy.latent_formats.SDXL}
WIDTHS = {"one": 16, "other": 24, "full": 768}
"""How wide the texts of a text encoder are."""
FACTORS = torch.tensor(comfy.latent_formats.SD15().latent_rgb_factors)


def _latents_of(rgb):
    """Latents (…, 4) of colours (…, 3) in [0, 1], by the factors of ComfyUI's previews."""
    return (rgb * 2 - 1) @ torch.linalg.pinv(FACTORS)


def _pictures(shape):
    """Means (4, 4, SIDE, SIDE) of the mixture: one shape in four colours and places, on white or grey."""
    rows = torch.arange(SIDE).float()
    y, x = torch.meshgrid(rows, rows, indexing="ij")
    found = []
    for k, colour in enumerate(COLOURS.values()):
        cy, cx = 5 + 5 * (k // 2), 5 + 5 * (k % 2)
        if shape == "circles":
            inside = (y - cy).square() + (x - cx).square() <= 20
            ground = 0.95
        else:
            inside = torch.maximum((y - cy).abs(), (x - cx).abs()) <= 3.5
            ground = 0.75
        rgb = torch.full((SIDE, SIDE, 3), ground)
        rgb[inside] = torch.tensor(colour)
        found.append(_latents_of(rgb).permute(2, 0, 1))
    return torch.stack(found)


def exact_denoised(means, x, t, code):
    """E[x_0 | x_t] on x_t = (1 - t) x_0 + t eps, of equal Gaussians around ``means``; code 0 for all."""
    deviation = ((1 - t) ** 2 * VARIANCE + t**2) ** 0.5
    centred = x[:, None] - (1 - t) * means
    log_p = -centred.square().sum((2, 3, 4)) / (2 * deviation**2)
    for row, wanted in enumerate(code.tolist()):
        if wanted:
            others = [k for k in range(len(means)) if k != wanted - 1]
            log_p[row, others] = -math.inf
    p = log_p.softmax(1)[:, :, None, None, None]
    gain = (1 - t) * VARIANCE / deviation**2
    return (p * (means + gain * centred)).sum(1)


class Picture(nn.Module):
    """A network that knows the clean picture, and says what its objective wants to hear."""

    def __init__(self, objective, dtype=torch.float32, device=None, operations=None, **unused):
        super().__init__()
        self.objective, self.dtype = objective, torch.float32

    def denoised(self, x, t, context):
        raise NotImplementedError

    def forward(self, x, timesteps, context=None, transformer_options=None, **unused):
        sigma = float(transformer_options["sigmas"][0])
        if self.objective == "flow":
            t, whole = sigma, x
            picture = self.denoised(x, t, context)
            return (whole - picture) / sigma
        size = math.sqrt(sigma**2 + 1)
        whole, t = x * size, sigma / (1 + sigma)
        picture = self.denoised(whole * (1 - t), t, context)
        if self.objective == "eps":
            return (whole - picture) / sigma
        v = (whole / size**2 - picture) * size / sigma
        return -v if self.objective == "edm" else v


class Shapes(Picture):
    """Exact denoiser of the mixture around one shape."""

    def __init__(self, shape, encoder, **settings):
        super().__init__(**settings)
        self.encoder = encoder
        self.register_buffer("means", _pictures(shape))
        self.anchor = nn.Parameter(torch.zeros(1))

    def denoised(self, x, t, context):
        return exact_denoised(self.means.to(x), x, t, code_of(context, self.encoder))


def code_of(context, encoder):
    """Which picture a text asks for, encoded by this text encoder; 0 for any."""
    value = context[:, 0, 0].round().long()
    return -value if encoder == "other" else value


class Blend(Picture):
    """The weighted sum of the exact denoisers of circles and squares, guided each by its own cfg."""

    def __init__(self, weight, cfg, is_halved, **settings):
        super().__init__(**settings)
        self.weight, self.cfg, self.is_halved = weight, cfg, is_halved
        self.register_buffer("circles", _pictures("circles"))
        self.register_buffer("squares", _pictures("squares"))
        self.anchor = nn.Parameter(torch.zeros(1))

    def denoised(self, x, t, context):
        code = code_of(context, "one")
        found = []
        for means, cfg in zip((self.circles, self.squares), self.cfg, strict=True):
            with_text = exact_denoised(means.to(x), x, t, code)
            without = exact_denoised(means.to(x), x, t, torch.zeros_like(code))
            found.append(without + cfg * (with_text - without))
        high, low, first, last = self.weight
        share = min(max((t - low) / (high - low), 0), 1) if high > low else 1.0
        weight = last + share * (first - last)
        if self.is_halved:
            weight = torch.zeros(SIDE)
            weight[: SIDE // 2] = 1
            weight = weight.to(x)
        return weight * found[0] + (1 - weight) * found[1]


class Unet(Picture):
    """ComfyUI's UNet, small, with random weights."""

    def __init__(self, objective, seed, **settings):
        super().__init__(objective, **settings)
        from comfy import ops

        self.net = UNetModel(
            image_size=SIDE,
            in_channels=4,
            out_channels=4,
            model_channels=32,
            num_res_blocks=[1],
            channel_mult=[1],
            num_heads=2,
            use_spatial_transformer=True,
            transformer_depth=[1],
            transformer_depth_output=[1, 1],
            transformer_depth_middle=1,
            context_dim=16,
            legacy=False,
            dtype=torch.float32,
            operations=settings.get("operations") or ops.disable_weight_init,
        )
        draws = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in self.net.named_parameters():
                fan = weight[0].numel() if weight.ndim > 1 else 1
                drawn = torch.randn(weight.shape, generator=draws)
                if weight.ndim > 1:
                    weight.copy_(drawn / fan**0.5)
                else:
                    weight.copy_(
                        torch.ones_like(weight) if name.endswith("weight") else 0.1 * drawn
                    )

    def denoised(self, x, t, context):
        times = torch.full((len(x),), 1000 * t, device=x.device)
        return torch.tanh(self.net(x, times, context=context, transformer_options={}))


def _model(network, objective, latents, settings, width, memory=0.1):
    class Config(comfy.supported_models_base.BASE):
        latent_format = FORMATS[latents]
        memory_usage_factor = memory

    config = Config(
        {"context_dim": width, "objective": objective, "dtype": torch.float32, **settings}
    )
    config.unet_extra_config = {}
    made = {"objective": objective, **settings}

    def build(**given):
        return network(**made, operations=given.get("operations"), device=given.get("device"))

    model = comfy.model_base.BaseModel(config, TYPES[objective], unet_model=build)
    device = comfy.model_management.get_torch_device()
    offload = comfy.model_management.unet_offload_device()
    return comfy.model_patcher.ModelPatcher(model.eval(), device, offload)


class TestText:
    """A text encoder that understands four colours."""

    def __init__(self, encoder):
        self.sign, self.width = (-1 if encoder == "other" else 1), WIDTHS[encoder]

    def tokenize(self, text, **unused):
        return text

    def encode_from_tokens_scheduled(self, text, **unused):
        names = list(COLOURS)
        code = next((names.index(word) + 1 for word in text.split() if word in names), 0)
        encoded = torch.zeros(1, 4, self.width)
        encoded[..., 0] = self.sign * code
        return [[encoded, {"pooled_output": None}]]


class TestVAE:
    """Colours of latents, eight pixels to a side."""

    def decode(self, latents):
        scaled = latents * comfy.latent_formats.SD15().scale_factor
        rgb = (scaled.permute(0, 2, 3, 1) @ FACTORS + 1) / 2
        wide = rgb.repeat_interleave(8, 1).repeat_interleave(8, 2)
        return wide.clamp(0, 1)

    def encode(self, pixels):
        rgb = pixels[:, ::8, ::8, :3]
        return _latents_of(rgb).permute(0, 3, 1, 2) / comfy.latent_formats.SD15().scale_factor


class TestModel:
    CATEGORY = "hddm/test"
    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "network": (["unet", "circles", "squares"],),
                "objective": (list(TYPES),),
                "seed": ("INT", {"default": 0, "min": 0, "max": 1000}),
                "latents": (list(FORMATS),),
                "encoder": (list(WIDTHS),),
            }
        }

    def make(self, network, objective, seed, latents, encoder):
        if network == "unet":
            # It works in more memory than the others.
            model = _model(Unet, objective, latents, {"seed": seed}, 16, memory=0.4)
        else:
            settings = {"shape": network, "encoder": encoder}
            model = _model(Shapes, objective, latents, settings, WIDTHS[encoder])
        return model, TestText(encoder), TestVAE()


class TestBlend:
    CATEGORY = "hddm/test"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):
        number = ("FLOAT", {"default": 1.0})
        names = ("high", "low", "weight_high", "weight_low", "cfg_circles", "cfg_squares")
        return {
            "required": {
                "objective": (list(TYPES),),
                **dict.fromkeys(names, number),
                "is_halved": ("BOOLEAN", {"default": False}),
            }
        }

    def make(
        self, objective, high, low, weight_high, weight_low, cfg_circles, cfg_squares, is_halved
    ):
        weight = (high, low, weight_high, weight_low)
        settings = {"weight": weight, "cfg": (cfg_circles, cfg_squares), "is_halved": is_halved}
        return (_model(Blend, objective, "SD15", settings, 16),)


class TestLora:
    """A change of rank 1 of all matrices, through ComfyUI's patching."""

    CATEGORY = "hddm/test"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "seed": ("INT", {"default": 0})}}

    def patch(self, model, seed):
        patched, draws = model.clone(), torch.Generator().manual_seed(seed)
        changes = {}
        for name, weight in model.model.state_dict().items():
            if name.startswith("diffusion_model.net.") and weight.ndim == 2:
                change = torch.randn(weight.shape, generator=draws) * 0.5 / weight.shape[1] ** 0.5
                changes[name] = (change,)
        patched.add_patches(changes, 1.0)
        return (patched,)


class TestSave:
    CATEGORY = "hddm/test"
    RETURN_TYPES = ()
    FUNCTION = "save"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",), "name": ("STRING", {"default": "x"})}}

    def save(self, samples, name):
        torch.save(
            samples["samples"].cpu(), Path(folder_paths.get_output_directory()) / f"{name}.pt"
        )
        return {}


class TestModules:
    """Where hddm was found, and whether diffusers was imported."""

    CATEGORY = "hddm/test"
    RETURN_TYPES = ()
    FUNCTION = "save"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"name": ("STRING", {"default": "modules"})}}

    def save(self, name):
        import hddm

        facts = {
            "hddm": "vendor" if "vendor" in Path(hddm.__file__).parts else "elsewhere",
            "diffusers": "diffusers" in sys.modules,
        }
        path = Path(folder_paths.get_output_directory()) / f"{name}.json"
        path.write_text(json.dumps(facts))
        return {}


class TestStarted:
    """A model that writes a file once it is asked for pictures, so that a test knows when to cancel it."""

    CATEGORY = "hddm/test"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "name": ("STRING", {"default": "started"})}}

    def patch(self, model, name):
        patched, path = model.clone(), Path(folder_paths.get_output_directory()) / name

        def guidance(args):
            path.touch()
            return args["denoised"]

        patched.set_model_sampler_post_cfg_function(guidance)
        return (patched,)


class LargeControl(comfy.controlnet.ControlBase):
    """A ControlNet that changes nothing, and says that it works in many bytes."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def copy(self):
        twin = LargeControl(self.size)
        self.copy_to(twin)
        return twin

    def get_control(self, *inputs, **options):
        return None

    def inference_memory_requirements(self, dtype):
        return self.size


class TestControl:
    CATEGORY = "hddm/test"
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "put"

    @classmethod
    def INPUT_TYPES(cls):
        size = ("INT", {"default": 0, "min": 0, "max": 2**40})
        return {"required": {"conditioning": ("CONDITIONING",), "size": size}}

    def put(self, conditioning, size):
        control = LargeControl(size)
        return ([[text, {**facts, "control": control}] for text, facts in conditioning],)


SEEN = {"asked": [], "loads": 0, "unloads": 0}
"""What ComfyUI's management of memory was asked to do since `TestLoads` told it."""


def _count_loads():
    management = comfy.model_management
    load, unload_all = management.load_models_gpu, management.unload_all_models
    load_one = comfy.model_patcher.ModelPatcher.load

    def load_models_gpu(models, memory_required=0, *args, **options):
        SEEN["asked"].append(memory_required)
        return load(models, memory_required, *args, **options)

    def unload_all_models():
        SEEN["unloads"] += 1
        return unload_all()

    def load_weights(self, *args, **options):
        SEEN["loads"] += 1
        return load_one(self, *args, **options)

    management.load_models_gpu, management.unload_all_models = load_models_gpu, unload_all_models
    comfy.model_patcher.ModelPatcher.load = load_weights


_count_loads()


class TestLoads:
    """Tell what was loaded before some latents were there, and forget it."""

    CATEGORY = "hddm/test"
    RETURN_TYPES = ()
    FUNCTION = "save"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",), "name": ("STRING", {"default": "loads"})}}

    def save(self, samples, name):
        path = Path(folder_paths.get_output_directory()) / f"{name}.json"
        path.write_text(json.dumps(SEEN))
        SEEN.update(asked=[], loads=0, unloads=0)
        return {}


class TestRoom:
    """Load a model on a GPU that has so many bytes free; there is no GPU, and it must not get that far."""

    CATEGORY = "hddm/test"
    RETURN_TYPES = ()
    FUNCTION = "load"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "free": ("INT", {"default": 0})}}

    def load(self, model, free):
        before = comfy.model_management.get_free_memory
        comfy.model_management.get_free_memory = lambda *unused: free
        try:
            model.clone().partially_load(torch.device("cuda:0"), 2**40)
        finally:
            comfy.model_management.get_free_memory = before
        return {}


class TestWhole:
    """Ask for a part of a model to be loaded and to be unloaded, and tell how much is loaded then."""

    CATEGORY = "hddm/test"
    RETURN_TYPES = ()
    FUNCTION = "load"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "name": ("STRING", {"default": "whole"})}}

    def load(self, model, name):
        patcher, device = model.clone(), torch.device("cpu")
        patcher.detach()
        patcher.partially_load(device, 1)
        loaded = patcher.loaded_size()
        freed = patcher.partially_unload(device, 1)
        facts = {"size": patcher.model_size(), "loaded": loaded, "freed": freed}
        facts["left"] = patcher.loaded_size()
        patcher.detach()
        path = Path(folder_paths.get_output_directory()) / f"{name}.json"
        path.write_text(json.dumps(facts))
        return {}


NODES = (
    TestModel,
    TestBlend,
    TestLora,
    TestSave,
    TestModules,
    TestStarted,
    TestControl,
    TestLoads,
    TestRoom,
    TestWhole,
)
NODE_CLASS_MAPPINGS = {f"HDDM{one.__name__}": one for one in NODES}
