"""The nodes of this pack, as ComfyUI looks them up."""

from .mixing import MixModels, OneMoreModel

NODE_CLASS_MAPPINGS = {
    "HDDMMixModels": MixModels,
    "HDDMOneMoreModel": OneMoreModel,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "HDDMMixModels": "Mix Models (velocity)",
    "HDDMOneMoreModel": "One More Model to Mix",
}
