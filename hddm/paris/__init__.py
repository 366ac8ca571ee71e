"""The Paris release (arXiv:2510.03434) as it was published: text-to-image experts and their router.

    expert_0/ … expert_7/   diffusion_pytorch_model.safetensors
    router/                 pytorch_model.safetensors
    scheduler/  vae/  text_encoder/  tokenizer/

Its networks are `ExpertTransformer` and `RouterTransformer`, tensor for tensor. Their config files are not
read: sizes are those of the tensors, and the width of a head, which no tensor tells, is 72 in the experts and
64 in the router. All take 1000 t as time; the experts give the velocity of the common path.
"""

from hddm.paris.facts import TIME_SCALE as TIME_SCALE
from hddm.paris.parts import ParisPart as ParisPart
from hddm.paris.parts import is_paris as is_paris
from hddm.paris.parts import paris_experts as paris_experts
from hddm.paris.parts import paris_router as paris_router
