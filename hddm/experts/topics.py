"""Description of an expert by its captions, by which `hddm.prompt_router.PromptRouter` routes prompts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hddm.data.shard_records import captions_of, read_images_manifest
from hddm.experts.ensemble_folders import replace_file
from hddm.experts.ensemble_records import kept_components, read_ensemble_record
from hddm.experts.records import read_expert_record
from hddm.networks.prompts import read_texts, refuse_without_tokenizer, several_in, texts_record_of
from hddm.networks.text_encoder import embed
from hddm.networks.tokenizer import read_tokenizer
from hddm.prompt_router import Topic
from hddm.topic_records import TOPIC, TopicRecord
from hddm.utils.errors import HddmError, UsageError, counted, optional
from hddm.utils.files import read_whole, restore
from hddm.utils.progress import Progress
from hddm.utils.records import ensemble_around
from hddm.utils.streams import Use, seed_of
from hddm.utils.tensors import to_float64

LARGEST_CAPTIONS = 2**28
"""Bytes of the largest file of captions."""
BATCH = 64
MAX_CLUSTERS = 32


def describe_topic(
    folder: Path,
    captions: Path | None = None,
    data: Path | None = None,
    text: str | None = None,
    text_encoder: Path | None = None,
    tokenizer: Path | None = None,
) -> TopicRecord:
    """Write ``topic.safetensors`` of an expert folder: what its captions are about, in kilobytes.

    Provide one of ``captions`` (a file, one caption per line), ``data`` (a shard with captions) and ``text``
    (phrases, comma-separated, that stand for captions). The text encoder defaults to the one in the folder of
    the expert or of the ensemble around it. An ensemble routes prompts if all its experts of text have topics
    by one encoder. The folder is replaced as by `replace_file`.

    Raises `HddmError` for a folder that is no expert, no captions, or no text encoder.
    """
    if sum(one is not None for one in (captions, data, text)) != 1:
        raise UsageError("`captions`, `data`, `text`: pass one of the three")
    restore(folder.resolve())
    record = read_expert_record(folder)
    texts, source = _texts(captions, data, text)
    encoder, words = _encoder(folder, text_encoder, tokenizer)
    network = read_texts(encoder)
    tokens = None if words is None else read_tokenizer(words)
    embedded, counts = [], Counter(texts)
    distinct = list(counts)
    with Progress(len(distinct), "encode captions") as progress:
        for start in range(0, len(distinct), BATCH):
            batch = distinct[start : start + BATCH]
            if tokens is None:
                made = network.embed(batch, warns=False)
            else:
                made = embed(network, tokens, batch, warns=False)
            embedded.append(made.pooled)
            progress(len(batch))
    # Topics compare one vector per caption, which several text encoders make narrower than their tokens.
    encoder_record = texts_record_of(encoder, words).model_copy(
        update={"width": embedded[0].shape[1]}
    )
    topic = topic_of(torch.cat(embedded), list(counts.values()))
    known = TopicRecord(
        count=len(texts), source=source, variance=topic.variance, text_encoder=encoder_record
    )
    whole = ensemble_around(folder.resolve())
    if whole is not None:
        for member in read_ensemble_record(whole).experts:
            place = whole / member.folder
            other = None if place.samefile(folder) else Topic.load(place)
            if (
                other
                and other.record
                and other.record.text_encoder.fingerprint != encoder_record.fingerprint
            ):
                text = f"{place} was described with another text encoder; use that one for both"
                raise HddmError(f"{encoder}: {text}")
    replace_file(folder, record, TOPIC, replace(topic, record=known).save)
    return known


def topic_of(embeddings: Tensor, counts: Sequence[int] | None = None) -> Topic:
    """At most `MAX_CLUSTERS` clusters by k-means of captions' ``embeddings`` (N, D).

    ``counts`` says how many captions have each embedding; None for one each.
    """
    unit = torch.nn.functional.normalize(to_float64(embeddings).cpu(), dim=1)
    parts = torch.tensor(counts or [1] * len(unit), dtype=torch.float64)
    parts /= parts.sum()
    clusters = min(MAX_CLUSTERS, len(unit.unique(dim=0)))
    clustering = optional("sklearn.cluster", "hddm describe", "train")
    kmeans = clustering.KMeans(clusters, n_init=1, random_state=seed_of(0, Use.TOPICS) % 2**32)
    found = kmeans.fit(unit.numpy(), sample_weight=parts.numpy())
    own = torch.nn.functional.one_hot(torch.from_numpy(found.labels_).long(), clusters).double()
    shares = parts @ own
    means = (own * parts[:, None]).T @ unit / shares[:, None]
    return Topic(means, shares, float(parts @ (unit - own @ means).square().sum(1)))


def _texts(captions: Path | None, data: Path | None, text: str | None) -> tuple[Sequence[str], str]:
    """Captions, and where they come from."""
    if text is not None:
        found, source = [one.strip() for one in text.split(",")], text
    elif captions is not None:
        try:
            found = read_whole(captions, LARGEST_CAPTIONS).decode().splitlines()
        except UnicodeDecodeError as error:
            raise HddmError(f"{captions}: is not UTF-8 text ({error}); save it as such") from error
        source = f"{counted(len(found), 'line')} of {captions.name}"
    elif data is not None:
        manifest = read_images_manifest(data)
        found, source = list(captions_of(manifest.images) or ()), f"shard {manifest.hash}"
    kept = [one for one in found if one.strip()]
    if not kept:
        raise HddmError(f"{captions or data or '`text`'}: holds no captions")
    return kept, source


def _encoder(
    folder: Path, text_encoder: Path | None, tokenizer: Path | None
) -> tuple[Path, Path | None]:
    """Folders of the text encoder and its tokenizer; a folder of prompts has the latter inside."""
    refuse_without_tokenizer(text_encoder, tokenizer)
    if text_encoder is not None:
        return text_encoder, tokenizer
    for place in (folder, ensemble_around(folder.resolve())):
        kept = {} if place is None else kept_components(place)
        encoder, words = kept.get("text_encoder"), kept.get("tokenizer")
        if encoder is not None and (words is not None or several_in(encoder) is not None):
            return encoder, words
    raise HddmError(f"{folder}: keeps no text encoder; pass `text_encoder` and `tokenizer`")
