"""The nodes of this pack, as ComfyUI looks them up."""

from .ensembles import LoadEnsemble
from .mixing import MixModels, OneMoreModel
from .server import Server

NODE_CLASS_MAPPINGS = {
    "HDDMMixModels": MixModels,
    "HDDMOneMoreModel": OneMoreModel,
    "HDDMLoadEnsemble": LoadEnsemble,
    "HDDMServer": Server,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "HDDMMixModels": "Mix Models (velocity)",
    "HDDMOneMoreModel": "One More Model to Mix",
    "HDDMLoadEnsemble": "Load hddm Ensemble",
    "HDDMServer": "hddm Server",
}
