"""Which comparisons of the regimes count, decided before their seeds were run, and what came out of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hddm.evaluation.compare import Gap, gap_over_seeds, holm

Figures = Mapping[str, Mapping[str, Mapping[str, float]]]
"""A score by row, training seed and name of the score."""

SMALLEST = {"mean error": 0.02, "bits": 0.02, "distance": 0.1}
"""Smallest differences that matter: of mean error and distance as parts of the base's, of bits as they are.

Another classifier changes the ratio of two distances by 2 to 3 %, so a tenth is well beyond the ruler.
"""


@dataclass(frozen=True)
class Question:
    """Whether one row is ahead of another."""

    asks: str
    row: str
    base: str


_OF_SHARDS = (
    Question("Two objectives or one, drawn?", "two and two: draw", "four flow: draw"),
    Question("Two objectives or one, mixed?", "two and two: full", "four flow: full"),
    Question(
        "Is mixing ahead of drawing, two objectives?", "two and two: full", "two and two: draw"
    ),
    Question("Is mixing ahead of drawing, flow?", "four flow: full", "four flow: draw"),
    Question(
        "Are four flow experts ahead of one model of equal compute?",
        "four flow: draw",
        "one flow model, equal compute",
    ),
)
_PAPER = Question(
    "Is the paper's own case ahead of one model of equal compute?",
    "two and two: top-2",
    "one flow model, equal compute",
)

QUESTIONS: Mapping[str, Sequence[Question]] = {
    "same-data": (
        Question(
            "Does a second objective help a mix?",
            "flow and DDPM (epsilon): by reliability",
            "two flow: by reliability",
        ),
        Question(
            "Is the mix ahead of one model of equal compute?",
            "flow and DDPM (epsilon): by reliability",
            "flow, twice the steps",
        ),
        Question(
            "Is mixing ahead of drawing?",
            "flow and DDPM (epsilon): by reliability",
            "flow and DDPM (epsilon): drawn",
        ),
        Question(
            "Do weights by noise level beat equal ones?",
            "two flow: by reliability",
            "two flow: averaged",
        ),
        Question(
            "The same, for two objectives",
            "flow and DDPM (epsilon): by reliability",
            "flow and DDPM (epsilon): averaged",
        ),
        Question(
            "Is averaging two flow experts ahead of one model of equal compute?",
            "two flow: averaged",
            "flow, twice the steps",
        ),
    ),
    "by-noise": (
        Question(
            "Is a pair by noise level ahead of one model of equal compute?",
            "DDPM (epsilon) below 0.15, flow above",
            "flow",
        ),
        Question(
            "Does the objective matter below t = 0.15?",
            "DDPM (epsilon) below 0.15, flow above",
            "flow below 0.15, flow above",
        ),
    ),
    "from-one": (*_OF_SHARDS, _PAPER),
    "disjoint": _OF_SHARDS,
    "overlapping": _OF_SHARDS,
}


@dataclass(frozen=True)
class Answer:
    """What one score says to one question."""

    question: Question
    score: str
    gap: Gap
    level: float
    smallest: float
    seeds: int

    @property
    def interval(self) -> tuple[float, float]:
        """Of the gap, corrected for the number of comparisons."""
        return self.gap.interval(self.level)

    @property
    def verdict(self) -> str:
        """``ahead``, ``behind``, ``level``, or ``open`` where the seeds cannot tell."""
        low, high = self.interval
        if -self.smallest < low and high < self.smallest:
            return "level"
        if low <= 0 <= high:
            return "open"
        if abs(self.gap.mean) < self.smallest:
            return "level"
        return "ahead" if high < 0 else "behind"


def answers(regime: str, figures: Figures) -> list[Answer]:
    """Answers to a regime's questions by all scores that both rows have, corrected for their number."""
    found: list[tuple[Question, str, Gap, float, int]] = []
    for question in QUESTIONS[regime]:
        row, base = figures[question.row], figures[question.base]
        for score, smallest in SMALLEST.items():
            if not all(score in one for one in (*row.values(), *base.values())):
                continue
            ours = {seed: one[score] for seed, one in row.items()}
            theirs = {seed: one[score] for seed, one in base.items()}
            if score != "bits":
                smallest *= sum(theirs.values()) / len(theirs)
            found.append((question, score, gap_over_seeds(ours, theirs), smallest, len(ours)))
    levels = holm([gap for _, _, gap, _, _ in found])
    made = []
    for (question, score, gap, smallest, seeds), level in zip(found, levels, strict=True):
        made.append(Answer(question, score, gap, level, smallest, seeds))
    return made


def verdict_table(found: Sequence[Answer]) -> list[str]:
    """A line per question, a column per score: gap, interval and verdict."""
    lines = [
        "| question | row | against | " + " | ".join(SMALLEST) + " |",
        "|---|---|---|" + "---|" * len(SMALLEST),
    ]
    by_question: dict[Question, dict[str, Answer]] = {}
    for answer in found:
        by_question.setdefault(answer.question, {})[answer.score] = answer
    for question, own in by_question.items():
        cells = [question.asks, question.row, question.base]
        for score in SMALLEST:
            cells.append(_said(own[score]) if score in own else "–")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _said(answer: Answer) -> str:
    low, high = answer.interval
    return f"{answer.gap.mean:+.3g} ({low:+.3g} … {high:+.3g}): **{answer.verdict}**"


READING = (
    "Gaps of the row from the other, paired by training seed, with 95 % intervals by Student, corrected by "
    "Holm for the comparisons of the regime; less is better for every score. Decided beforehand: the "
    f"questions, and the smallest differences that matter ({SMALLEST['mean error']:.0%} of the mean error, "
    f"{SMALLEST['bits']} bits per dimension, {SMALLEST['distance']:.0%} of the distance). *ahead*, *behind*: "
    "the interval leaves out 0, and the gap is large enough to matter. *level*: the gap, or its interval, is "
    "smaller than what matters. *open*: these seeds cannot tell."
)
