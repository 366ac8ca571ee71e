"""Records of scores: what an evaluation writes, read and compared without torch.

`hddm.evaluation.measures` computes the figures, `hddm.evaluation.scores` all of them for a set of images.
"""

from typing import Annotated, Literal

from pydantic import Field

from hddm.utils.records import Count, OpenRecord, Share

Number = Annotated[float, Field(ge=-1e30, le=1e30)]
"""A number whose square, and sums of it, are finite too."""


Width = Annotated[Number, Field(ge=0)]


FEWEST_IMAGES = 4
"""Fewest images per side that all measures work for."""


class Distance(OpenRecord):
    """A Fréchet distance and the half-width of its 95 % interval from resampling one side."""

    value: Number
    half_width: Width | None = None
    few_images: bool = False
    """True if one side has no more images than features, so the distance does not compare."""


class KernelDistance(OpenRecord):
    """Squared maximum mean discrepancy (may be negative for similar sets) and its standard error.

    The error is over draws of the samples, with a fixed reference.
    """

    value: Number
    standard_error: Width = 0.0


class PrecisionRecall(OpenRecord):
    """Shares in [0, 1]; both depend on the number of ``images`` per side, so only equal numbers compare."""

    precision: Share
    recall: Share
    images: Annotated[Count, Field(ge=1)]


class ConditionDiversity(OpenRecord):
    """Mean distance between the features of two images of one condition, averaged over ``conditions``.

    ``reference`` is that of training images of the same classes, if any.
    """

    distance: Literal["features"] = "features"
    """Older results may have another, which does not compare."""
    conditions: Count = 0
    images: Number
    reference: Number | None = None


class Memorisation(OpenRecord):
    """Distances of samples to their nearest training image, against those of held-out images.

    ``ratio`` of the means is about 1 if samples are as far from the training images as held-out images are,
    well below 1 if they repeat them, above 1 if they are off the data. ``half_width`` is that of its 95 %
    interval. ``share_near`` is the share of samples nearer to a training image than 95 % of the held-out
    images are: 0.05 for fresh images; None with ``few_images``. ``copies`` counts held-out images that are
    also training images, which hides memorisation. If ``mirrored``, distances are to the nearer of a training
    image and its mirror image; otherwise a mirrored copy passes for a new image.
    """

    ratio: Number
    half_width: Width | None = None
    share_near: Share | None = None
    few_images: bool = False
    copies: Count = 0
    mirrored: bool = False


RECOGNISED = 0.9
"""An image is recognised if the classifier's probability of some class is above this."""
LEARNED = 0.5
"""A model has learned if its samples are recognised at least this many times as often as real images, and
have at least this many times the precision and the recall of real images."""


Split = Literal["training", "validation", "held_out"]
"""Images that models are trained on, that settings are chosen by, and that nothing is chosen by."""


class SplitScores(OpenRecord):
    """Scores against the images of one ``split``.

    The kernel distance, and the ``overlap`` with training images, are None unless the scorer is complete.
    """

    split: Split
    distance: Distance | None = None
    """None where a domain has no more images than features."""
    kernel: KernelDistance | None = None
    overlap: PrecisionRecall | None = None
    real_overlap: PrecisionRecall | None = None
    """Of as many training images in the place of the samples; None if the split is of training images."""


class DomainScores(OpenRecord):
    """Scores of the samples of one domain, by the classifier: their number and ``share`` of all samples.

    Distances are of these samples to the domain's own images. Precision and recall are of all samples, so
    recall is the share of the domain's images with a sample close by.
    """

    domain: str
    images: Count
    share: Share
    splits: tuple[SplitScores, ...] = ()


class Recognised(OpenRecord):
    """Shares of the samples and of real images that a classifier recognises, and its classes of the samples.

    Real images are those not trained on, where there are some. ``classes`` counts the samples of each class
    by name, or number; ``first`` lists the classes of the first samples.
    """

    share: Share
    real: Share
    classes: dict[str, Count] = Field(default_factory=dict)
    first: tuple[str, ...] = ()


class Scores(OpenRecord):
    """Scores of a set of ``images``.

    What needs images not trained on, labels, domains or a classifier is None or empty without them.
    The diversity within conditions needs a complete `Scorer`. ``label_accuracy`` is the share of samples of
    the class that they were made for.
    """

    images: Count = 0
    splits: tuple[SplitScores, ...] = ()
    diversity: Number | None = None
    memorisation: Memorisation | None = None
    within_conditions: ConditionDiversity | None = None
    recognised: Recognised | None = None
    domains: tuple[DomainScores, ...] = ()
    label_accuracy: Share | None = None

    @property
    def beside_real(self) -> dict[str, tuple[float, float]]:
        """Share recognised, precision and recall: of the samples, and of real images.

        They show whether a model has learned (`LEARNED`). Only those that were measured are there; precision
        and recall are on images not trained on.
        """
        found: dict[str, tuple[float, float]] = {}
        if self.recognised is not None:
            found["recognised"] = self.recognised.share, self.recognised.real
        for one in self.splits:
            if one.overlap is not None and one.real_overlap is not None:
                found["precision"] = one.overlap.precision, one.real_overlap.precision
                found["recall"] = one.overlap.recall, one.real_overlap.recall
        return found

    def to(self, split: Split) -> Distance | None:
        """Fréchet distance to the images of ``split``, None if there were none."""
        return next((one.distance for one in self.splits if one.split == split), None)


class FeaturesRecord(OpenRecord):
    """The features that distances are measured on.

    ``hash`` is of the weights, ``resize`` describes the resizing to the network's input, ``choice`` the
    reason for these features, ``device`` where the network runs.
    """

    name: str
    dimensions: Count = 0
    hash: str = ""
    resize: str = "none"
    choice: str = ""
    device: str = "cpu"


Role = Literal["images", "reference", "validation", "held_out"]
"""Role of a path: samples, training images, or images that no model was trained on."""


class SamplingRecord(OpenRecord):
    """What evaluations read of ``sampling.json``."""

    source: str | None = None
    source_sha256: str | None = None
    num_images: Count | None = None
    start: Count = 0
    class_labels: tuple[Annotated[int, Field(strict=True, ge=0, lt=2**31)], ...] | None = None
    class_names: tuple[str, ...] | None = None
    prompts: tuple[str, ...] | None = None


class DataRecord(OpenRecord):
    """Record of measured images; ``hash`` covers all pixels, whatever their order, names and encoding.

    ``shape`` is (C, H, W), with C = 3 where some images are in colour; ``skipped`` names unreadable ones.
    """

    path: str = ""
    images: Count
    hash: str
    shape: tuple[Count, ...] = ()
    skipped: tuple[str, ...] = ()
