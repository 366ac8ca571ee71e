"""Our own expert folders as sources: to be folded, re-initialised or written back to another layout."""

from pathlib import Path

from hddm.adapters import ADAPTER_WEIGHTS, base_beside, open_adapted
from hddm.checkpoints.diffusers_models import class_forward, own_table
from hddm.checkpoints.sources import Declared, Reading, Source
from hddm.errors import HddmError
from hddm.experts import (
    EXPERT_FILE,
    EXTRAS_FILE,
    FILES,
    FORMAT,
    ExpertFacts,
    read_nulls,
    remedy,
    without_adapter,
)
from hddm.facts import read_facts
from hddm.manifest import refuse_damaged
from hddm.model_folders import WEIGHTS, open_network
from hddm.networks import EXPERT_NETWORKS
from hddm.weight_files import read_safetensors

LAYOUT = "hddm"


def open_expert(folder: Path, reading: Reading) -> Source:
    """An expert folder; an adapter is merged into its base.

    Raises:
        HddmError: as `hddm.experts.read_expert`, or for options that only foreign sources have.
    """
    facts = read_facts(folder / EXPERT_FILE, ExpertFacts, FORMAT)
    files: tuple[Path, ...] = (folder / WEIGHTS,)
    if facts.adapter is None:
        network, weights, arguments = open_network(folder, EXPERT_NETWORKS)
    else:
        base = base_beside(folder, facts.adapter)
        files = (folder / ADAPTER_WEIGHTS, base / WEIGHTS)
        network, weights, arguments = open_adapted(folder, facts.adapter, base, EXPERT_NETWORKS)
        facts = without_adapter(facts)
    if reading.layout not in (None, LAYOUT):
        raise HddmError(f"--layout {reading.layout}: {folder} is an expert folder")
    if reading.weights not in (None, facts.weights):
        raise HddmError(f"--weights {reading.weights}: {folder} holds {facts.weights} weights")
    refuse_damaged(folder, EXPERT_FILE, FILES, remedy=remedy(folder))
    path = str(files[0])
    kind = type(network)
    return Source(
        path=folder,
        layout=LAYOUT,
        files=files,
        weights=weights,
        network=kind,
        arguments=arguments,
        table=own_table(kind, arguments, weights, path),
        forward=lambda: class_forward(kind, arguments, weights, path),
        declared=Declared(facts.schedule, str(folder / EXPERT_FILE), prediction_type=facts.prediction_type),
        sets=(facts.weights,),
        chosen=facts.weights,
        nulls={},
        is_latent=facts.space == "latents",
        latent_scale=facts.latent_scale,
        licence=facts.licence,
        facts=facts,
        kept=read_safetensors(folder / EXTRAS_FILE) if (folder / EXTRAS_FILE).exists() else {},
        null_tensors=read_nulls(folder),
    )
