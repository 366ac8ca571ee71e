"""Routers that see the condition, against mixtures with classes whose posteriors are known.

Shards hold classes in unlike amounts, and images of one class look unlike in each, so that class and state
tell each other's shard: the correction of a router that sees no class is wrong here.
"""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from hddm.calibration import Calibration, Moments
from hddm.condition_names import LABELS, TEXT
from hddm.conditions import Conditions
from hddm.ensemble import Ensemble, Part
from hddm.reliability import ReliabilityRouter
from hddm.router_condition import RouterCondition
from hddm.routers import Router
from hddm.running import posterior_of
from hddm.sampling import batches, plan, sample
from hddm.schedules import LinearSchedule
from hddm.times import first_step
from hddm.velocity import VelocityField
from tests.cases import ConditionSum
from tests.oracles import GaussianMixture, exact_router, relative_error

SHAPE = (1, 2, 2)
NAMES = ("cat", "dog")
NO_CLASS = len(NAMES)
PRIOR = (0.6, 0.4)
COUNTS = torch.tensor([[0.7, 0.3], [0.2, 0.8]], dtype=torch.float64)
"""p(class | k), a row for each shard."""
JOINT = torch.tensor(PRIOR, dtype=torch.float64)[:, None] * COUNTS
OF_CLASS = JOINT / JOINT.sum(0)
"""p(k | class), (K, classes)."""
DATA = [[GaussianMixture.random(10 * k + c, modes=2, dim=4) for c in (0, 1)] for k in (0, 1)]
"""Images of each shard and class."""


def _of_shard(k: int) -> GaussianMixture:
    return GaussianMixture.union(DATA[k], COUNTS[k].tolist())


def _of_class(label: int) -> GaussianMixture:
    return GaussianMixture.union([shard[label] for shard in DATA], OF_CLASS[:, label].tolist())


class _Exact:
    """The exact velocity of a shard's images of each class; of all of them for no class."""

    def __init__(self, k: int) -> None:
        self.mixtures = [*DATA[k], _of_shard(k)]

    def __call__(self, x: Tensor, t: Tensor, class_labels: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        for label in class_labels.unique().tolist():
            here = class_labels == label
            found[here] = self.mixtures[label].velocity(x[here], t[here]).to(x)
        return found


class _ExactRouter:
    """p(k | x_t, t, class); it keeps the classes that it was asked about."""

    def __init__(self, names: tuple[str, ...] = NAMES) -> None:
        self.condition = RouterCondition(LABELS, torch.tensor(len(names)), names)
        self.own = [NAMES.index(name) for name in names]
        self.asked: list[list[int]] = []
        self.routers = [
            *(exact_router([shard[c] for shard in DATA], OF_CLASS[:, c].tolist()) for c in (0, 1)),
            exact_router([_of_shard(0), _of_shard(1)], PRIOR),
        ]

    def __call__(self, x_t: Tensor, t: Tensor, class_labels: Tensor | None = None) -> Tensor:
        labels = torch.full((len(x_t),), NO_CLASS)
        if class_labels is not None:
            labels = torch.tensor([*self.own, NO_CLASS])[class_labels]
        self.asked.append(labels.tolist())
        found = torch.zeros(len(x_t), 2, dtype=torch.float64)
        for label in labels.unique().tolist():
            here = labels == label
            found[here] = self.routers[label](x_t[here], t[here])
        return found


def _ensemble(router: object, strategy: str = "full") -> Ensemble:
    null = {LABELS: torch.tensor(NO_CLASS)}
    parts = []
    for k in (0, 1):
        field = VelocityField(
            _Exact(k),
            LinearSchedule(),
            "flow_prediction",
            conditions=(LABELS,),
            null_conditions=null,
            sample_shape=SHAPE,
            classes=NAMES,
        )
        shares = dict(zip(NAMES, OF_CLASS[k].tolist(), strict=True))
        parts.append(Part(field, PRIOR[k], shares))
    return Ensemble(parts, router, strategy)  # type: ignore[arg-type]


@pytest.mark.parametrize("label", [0, 1])
def test_a_router_that_sees_the_class_makes_the_exact_velocity_of_the_class(label: int) -> None:
    x, t = _of_class(label).states_at(0.4, 200, 3, SHAPE)
    labels = torch.full((200,), label)
    exact = _of_class(label).velocity(x, t)
    seeing = _ensemble(_ExactRouter())
    assert relative_error(seeing.velocity(x, t, class_labels=labels), exact) < 1e-9
    # Nothing is corrected a second time, and p(k | class) alone would not do.
    blind = _ensemble(exact_router([_of_shard(0), _of_shard(1)], PRIOR))
    assert relative_error(blind.velocity(x, t, class_labels=labels), exact) > 1e-3


def test_samples_of_several_classes_and_of_none_have_their_own_posteriors() -> None:
    x, t = GaussianMixture.union([_of_shard(0), _of_shard(1)], PRIOR).states_at(0.5, 9, 1, SHAPE)
    labels = torch.tensor([0, 1, NO_CLASS] * 3)
    ensemble, router = _ensemble(_ExactRouter()), _ExactRouter()
    found = ensemble.weights(x, t, conditions={LABELS: labels})
    torch.testing.assert_close(found, router(x, t, labels).to(found), rtol=1e-9, atol=0)


def test_draws_follow_the_routers_p_of_the_class_at_noise() -> None:
    """p(k | class) of the router differs from that of the counts, which the ensemble would draw from."""
    told = torch.tensor([[0.9, 0.1], [0.25, 0.75], [0.5, 0.5]])
    times: list[float] = []

    def router(x_t: Tensor, t: Tensor, class_labels: Tensor) -> Tensor:
        times.extend(t.tolist())
        return told[class_labels]

    router.condition = RouterCondition(LABELS, torch.tensor(NO_CLASS), NAMES)  # type: ignore[attr-defined]
    how = plan(_ensemble(router, "draw"), steps=2)
    labels = torch.arange(6000) % 3
    drawn = torch.zeros(6000, dtype=torch.long)
    for batch in batches(how, range(6000), Conditions({LABELS: labels}), 512):
        assert batch.expert is not None
        drawn[batch.rows] = batch.expert
    assert set(times) == {1.0}
    # Samples of no class have p(k).
    for label, share in enumerate((0.9, 0.25, PRIOR[0])):
        found = (drawn[labels == label] == 0).double().mean().item()
        assert found == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("strategy", ["draw", "commit-0.5", "full"])
def test_samples_of_a_class_have_the_moments_of_its_data(strategy: str) -> None:
    labels = torch.zeros(1500, dtype=torch.long)
    model = _ensemble(_ExactRouter(), strategy)
    found = sample(model, 1500, steps=16, batch_size=1500, class_labels=labels).flatten(1)
    exact = _of_class(0)
    deviation = exact.covariance.diagonal().sqrt()
    assert ((found.mean(0) - exact.mean).abs() < 0.12 * deviation).all()
    assert ((found.std(0) / deviation).log().abs() < 0.1).all()


def test_a_prior_of_the_caller_comes_first_and_the_router_is_asked_without() -> None:
    router = _ExactRouter()
    ensemble, labels = _ensemble(router), torch.tensor([0, 1])
    x, t = _of_class(0).states_at(0.6, 2, 5, SHAPE)
    prior = torch.tensor([[0.3, 0.7]] * 2, dtype=torch.float64)
    found = ensemble.weights(x, t, conditions={LABELS: labels}, prior=prior)
    assert router.asked == [[NO_CLASS, NO_CLASS]]
    expected = router.routers[NO_CLASS](x, t) * prior / torch.tensor(PRIOR)
    torch.testing.assert_close(found, (expected / expected.sum(1, keepdim=True)).to(found))
    begun = posterior_of(ensemble, x, 1.0, Conditions({LABELS: labels}, {}, prior))
    assert torch.equal(begun, prior)


def test_a_class_that_the_router_does_not_see_is_routed_by_counts() -> None:
    """The router numbers "dog" 0 and knows no "cat"."""
    router = _ExactRouter(("dog",))
    ensemble, labels = _ensemble(router), torch.tensor([0, 1])
    x, t = _of_class(0).states_at(0.6, 2, 5, SHAPE)
    found = ensemble.weights(x, t, conditions={LABELS: labels})
    assert router.asked == [[NO_CLASS, 1]]
    corrected = router.routers[NO_CLASS](x, t)[0] * OF_CLASS[:, 0] / torch.tensor(PRIOR)
    torch.testing.assert_close(found[0], (corrected / corrected.sum()).to(found))
    torch.testing.assert_close(found[1], router.routers[1](x, t)[1].to(found))
    begun = posterior_of(ensemble, x, 1.0, Conditions({LABELS: labels}))
    torch.testing.assert_close(begun[0], OF_CLASS[:, 0])


def test_the_negative_branch_uses_the_weights_of_the_positive_one() -> None:
    router = _ExactRouter()
    model = _ensemble(router)
    sample(
        model,
        2,
        steps=2,
        solver="euler",
        guidance_scale=2.0,
        class_labels=torch.tensor([0, 1]),
        negative={LABELS: torch.tensor([1, 0])},
    )
    assert router.asked == [[0, 1]] * len(router.asked)
    assert router.asked


def test_the_first_step_mixes_experts_by_the_routers_p_of_the_condition() -> None:
    told = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])

    def router(x_t: Tensor, t: Tensor, class_labels: Tensor) -> Tensor:
        return told[class_labels]

    router.condition = RouterCondition(LABELS, torch.tensor(NO_CLASS), NAMES)  # type: ignore[attr-defined]
    model = _ensemble(router)
    moments = []
    for k, field in enumerate(model.experts):
        values, vectors = torch.linalg.eigh(_of_shard(k).covariance)
        deviations = torch.cat([values, values.new_ones(1)])
        moments.append(Moments(_of_shard(k).mean, vectors, deviations))
        field.calibration = Calibration(moments[k], torch.tensor([0, 1]), torch.zeros(2, 5))
    x = torch.randn(3, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    given = {LABELS: torch.tensor([0, 1, NO_CLASS])}
    moved = first_step(model, x, 1.0, 0.9, None, Conditions(given), plan(model).guidance)
    reached = [one.flow(x.flatten(1), 1.0, 0.9, None).view_as(x) for one in moments]
    # Samples of no class have p(k).
    expected = [reached[0][0], reached[1][1], PRIOR[0] * reached[0][2] + PRIOR[1] * reached[1][2]]
    torch.testing.assert_close(moved, torch.stack(expected))


def test_factors_of_reliability_multiply_what_it_sees_and_do_not_draw() -> None:
    exact = _ExactRouter()
    router = ReliabilityRouter([0.0], [[0.25, 0.75]], exact)
    ensemble, labels = _ensemble(router), torch.tensor([0, 1])
    x, t = _of_class(0).states_at(0.6, 2, 5, SHAPE)
    product = exact(x, t, labels) * torch.tensor([0.25, 0.75])
    expected = product / product.sum(1, keepdim=True)
    found = ensemble.weights(x, t, conditions={LABELS: labels})
    torch.testing.assert_close(found, expected.to(found))
    noise = torch.randn(2, *SHAPE, dtype=torch.float64)
    begun = posterior_of(ensemble, noise, 1.0, Conditions({LABELS: labels}))
    torch.testing.assert_close(begun, exact(noise, torch.ones(2), labels).to(begun))
    assert isinstance(ensemble.router, ReliabilityRouter)


class _Logits:
    """Logits of three shards by class, whatever the state."""

    TABLE = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 1.0], [0.0, 0.0, 0.0]])

    def __call__(self, x: Tensor, timestep: Tensor, class_labels: Tensor) -> Tensor:
        return self.TABLE[class_labels].to(x)


def test_leaving_outputs_out_conditions_the_posterior_on_the_rest() -> None:
    sees = RouterCondition(LABELS, torch.tensor(2), NAMES)
    x, t = torch.zeros(3, *SHAPE), torch.full((3,), 0.5)
    labels = {LABELS: torch.tensor([0, 1, 2])}
    whole = Router(_Logits(), condition=sees)(x, t, **labels)
    rest = Router(_Logits(), outputs=[2, 0], condition=sees)(x, t, **labels)
    kept = whole[:, [2, 0]]
    torch.testing.assert_close(rest, kept / kept.sum(1, keepdim=True))
    # Without the condition it is asked with the null one.
    torch.testing.assert_close(Router(_Logits(), condition=sees)(x, t), torch.full((3, 3), 1 / 3))


def test_shares_set_by_hand_change_the_posterior_as_bayes_rule_has_it() -> None:
    """p(k | c) p'(k) / p(k), and experts of one output divide it."""
    sees = RouterCondition(LABELS, torch.tensor(2), NAMES)
    x, t = torch.zeros(2, *SHAPE), torch.full((2,), 0.5)
    labels = {LABELS: torch.tensor([0, 1])}
    trained, own = [10, 30, 60], torch.tensor([0.5, 0.3, 0.2, 0.0])
    outputs = [0, 1, 1, 2]
    router = Router(
        _Logits(),
        outputs=outputs,
        shares=own.tolist(),
        condition=sees,
        trained_shares=trained,
    )
    whole = Router(_Logits(), condition=sees)(x, t, **labels)
    expected = whole[:, outputs] * own / torch.tensor(trained)[outputs]
    found = router(x, t, **labels)
    torch.testing.assert_close(found, expected / expected.sum(1, keepdim=True))


@pytest.mark.parametrize(
    ("given", "known"),
    [({}, None), ({TEXT: torch.zeros(2, 3, 4)}, None), ({f"{TEXT}_2": torch.zeros(2, 3, 4)}, 2)],
    ids=["none", "of another encoder", "of its encoder"],
)
def test_tokens_are_those_of_its_own_text_encoder(
    given: Mapping[str, Tensor], known: int | None
) -> None:
    sees = RouterCondition(TEXT, torch.ones(3, 4), given_as=f"{TEXT}_2")
    found = sees.known(given, ())
    assert (None if found is None else int(found.sum())) == known
    if known is not None:
        assert sees.values(given, ()) == {TEXT: given[f"{TEXT}_2"]}
    assert torch.equal(sees.nulls(2, torch.device("cpu"))[TEXT], torch.ones(2, 3, 4))


def test_an_expert_that_cannot_take_the_prompt_has_no_weight() -> None:
    """The router prefers the expert without text, which no prompt is for."""

    def router(x_t: Tensor, t: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        return torch.tensor([[0.2, 0.2, 0.6]]).expand(len(x_t), 3)

    router.condition = RouterCondition(TEXT, torch.zeros(1, 1))  # type: ignore[attr-defined]
    fields = [ConditionSum().field(TEXT, sample_shape=SHAPE) for _ in range(2)]
    fields.append(ConditionSum().field(sample_shape=SHAPE))
    model = Ensemble(fields, router, "full")
    x, given = torch.zeros(2, *SHAPE), {TEXT: torch.ones(2, 1, 1)}
    expected = torch.tensor([[0.5, 0.5, 0.0]] * 2)
    for t in (0.5, 1.0):
        found = posterior_of(model, x, t, Conditions(given))
        torch.testing.assert_close(found.float(), expected)
