"""Experts and a router as one velocity field.

    v(x, t) = sum_k w_k(x, t) v_k(x, t)

With w_k = p(k | x_t), the posterior of the shard, this is exactly the velocity of all the data (DDM,
arXiv:2501.05450, section 3.2). An expert of noise or of clean images counts too: its field converts what it
predicts to a velocity (`VelocityField.guided`). A strategy (`hddm.strategies`) sets small weights to 0, and
experts of weight 0 do not run.

A router that sees no condition is corrected where p(k | class) is known: samples of a class are routed by

    p(k | x_t, class) = p(k | x_t) p(k | class) / p(k),  normalised,

which is exact where class and x_t are independent given k. Without this correction, an expert may be used for
a class that it has never seen. p(k | prompt) takes the place of p(k | class) where it is provided.

A router that sees the condition c (`hddm.router_condition`) is p(k | x_t, t, c) itself, and nothing corrects
it. At t = 1, where the state is noise alone, it is p(k | c), from which samples begin (`Ensemble.begun`). A
p(k | …) that the caller provides takes the place of what the router would make of the condition: it is asked
without, and corrected as above.

If the experts of a domain divide t among them (`hddm.parts`), k stands for a domain in the formulas above. t
decides which of its experts runs, and that one has all of the domain's probability:

    p(k | x_t, t) = [low_k <= t < high_k] sum_j p(j | x_t)     over the experts j of k's domain

Where two noise ranges meet, the expert of higher noise runs; the range that ends at 1 includes t = 1.
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hddm.choice import Choice
from hddm.condition_names import LABELS
from hddm.conditions import Inputs, check_names, check_negative, check_rows
from hddm.fit import Findings, compare
from hddm.guidance import Guidance
from hddm.networks.calls import finished_together
from hddm.networks.offload import expect_step, in_best_order
from hddm.networks.sample_sizes import Size
from hddm.networks.shared import AdaptedNetwork
from hddm.parts import Part as Part
from hddm.parts import Parts
from hddm.reliability import ReliabilityRouter
from hddm.router_condition import RouterCondition
from hddm.routers import NONE, answer_of, given_condition
from hddm.strategies import Strategy, refuse_unrouted
from hddm.utils.errors import HddmError
from hddm.utils.tensors import to_float64
from hddm.velocity import VelocityField, check_states, check_times

Asked = tuple[Tensor, Tensor, Inputs, Tensor | None]
"""Arguments of `VelocityField.guided`."""


class Ensemble(Parts):
    """Velocity field of ``experts`` mixed by ``router``.

    Args:
        experts: velocity fields on the common path, one per shard, or a `Part` for each.
        router: ``router(x_t, t)`` to probabilities (batch, K). Not needed for ``draw``, or for one domain.
            One with a ``condition`` (`hddm.router_condition.RouterCondition`) gets that as a keyword, too.
        strategy: see `hddm.strategies`; can be set later. The default is valid for any number of experts; an
            ensemble loaded from a folder uses the one recorded there.
        prior: p(k) (K,) in any unit, in place of the parts' weights: ``draw`` draws from it, and the
            correction by class divides by it. Values of a domain's experts add up.
        shift: of the time grid that its samples want (`hddm.times.time_grid`).

    Raises:
        HddmError: for no experts or such that do not go together, a strategy that is unknown or not for them,
            an invalid prior, or a domain whose noise ranges do not cover [0, 1] once.
    """

    def __init__(
        self,
        experts: Sequence[VelocityField | Part],
        router: Callable[..., Tensor] | None = None,
        strategy: str = "nucleus-0.9",
        prior: Sequence[float] | Tensor | None = None,
        *,
        shift: float = 1.0,
    ) -> None:
        super().__init__(experts, prior)
        self.router = router
        self.strategy = strategy
        self.shift = shift

    is_resized = False
    """True if its router was left out, since samples are of another size (`at_sizes`)."""

    def __repr__(self) -> str:
        routed = "no router" if self.router is None else "a router"
        about = f"{len(self.parts)} experts, {self.strategy}, {routed}"
        return f"<Ensemble of {about}, samples {self.sample_shape}>"

    @property
    def strategy(self) -> str:
        """Name of the current strategy."""
        return self._name

    @strategy.setter
    def strategy(self, name: str) -> None:
        parsed, found = Strategy.parse(name), Findings()
        compare(self.candidates, are_mixed=parsed.kind != "draw", found=found)
        found.refuse(f"strategy {name!r}: these experts do not fit together:")
        parsed.check(self.num_domains)
        self._name, self._strategy = name, parsed

    @property
    def commits_at(self) -> float | None:
        """The time x of ``commit-x``; None under another strategy."""
        return self._strategy.value if self._strategy.kind == "commit" else None

    def under(self, strategy: str) -> "Ensemble":
        """The same ensemble under another strategy; this one keeps its own."""
        other = copy.copy(self)
        other.strategy = strategy
        return other

    def at_sizes(self, sizes: Sequence[Size], pixels: Sequence[int]) -> "Ensemble":
        """The same ensemble for samples of other heights and widths, of each expert's latents.

        A picture has as many ``pixels`` to one side of an expert's samples. A router that sees samples sees
        those of its own size alone, and is left out where any differs; weights by noise level alone stay.
        Raises `HddmError` for sizes that the networks do not take, a line for each expert.
        """
        found, parts = Findings(), []
        for k, (part, size, factor) in enumerate(zip(self.parts, sizes, pixels, strict=True)):
            with found.errors_of(f"expert {k}"):
                parts.append(replace(part, field=part.field.at_size(size, factor)))
        found.refuse("these experts do not make pictures of this size:")
        if all(one.field is mine.field for one, mine in zip(parts, self.parts, strict=True)):
            return self
        left_out = []
        for k, (one, mine) in enumerate(zip(parts, self.parts, strict=True)):
            if mine.field.calibration is not None and one.field.calibration is None:
                left_out.append(str(k))
        if left_out:
            warnings.warn(
                f"a calibration is of one size alone: those of expert {', '.join(left_out)} are left out",
                stacklevel=2,
            )
        router = None
        if isinstance(self.router, ReliabilityRouter) and self.router.base is None:
            router = self.router
        other = Ensemble(parts, router, self.strategy, self.prior, shift=self.shift)
        other.is_resized = router is None and self.router is not None
        return other

    def velocity(
        self,
        x_t: Tensor,
        t: Tensor,
        guidance_scale: float | Guidance = 1.0,
        negative: Mapping[str, Tensor] | None = None,
        expert: Tensor | None = None,
        then: Tensor | None = None,
        **conditions: Tensor,
    ) -> Tensor:
        """Velocity of the mixture.

        An expert sees the samples that need it and no others; one that nobody needs does not run.

        Args:
            x_t: (batch, …).
            t: (batch,) in [0, 1].
            guidance_scale: applied by each expert, before mixing; 1 for none, or a `Guidance`.
            negative: conditions of the negative branch.
            expert: (batch,) index of one expert for each sample, instead of the strategy; at each t, the
                expert of its domain that covers t runs.
            then: as in `VelocityField.velocity`.
            conditions: keywords of the experts' networks; each expert gets those that it declares.

        Raises:
            HddmError: as `VelocityField.velocity`; for a strategy that needs a router where there is none;
                for ``draw``, and for ``commit-x`` at or below x, without ``expert``; for conditions that no
                expert, or not ``expert``, can take.
        """
        check_states(x_t, self.sample_shape)
        times = check_times(x_t, t).cpu()
        guidance = Guidance.of(guidance_scale)
        check_names(conditions, self.conditions, self.velocity)
        check_names(negative or {}, self.conditions)
        for branch in (conditions, negative or {}):
            check_rows(len(x_t), branch)
        check_negative(guidance, negative or {})
        choice = Choice(self.weights(x_t, times, expert, conditions))
        self.check_able(choice.weights, conditions)
        self.refuse_kinds(choice.rows)
        inputs = self.inputs_by_expert(x_t, choice, guidance, negative or {}, conditions)
        self.check_inputs(inputs)
        return self.mix(x_t, times, choice, inputs, then)

    def inputs_by_expert(
        self,
        x_t: Tensor,
        choice: Choice,
        guidance: Guidance,
        negative: Mapping[str, Tensor],
        conditions: Mapping[str, Tensor],
    ) -> dict[int, Inputs]:
        """The inputs of each expert that is chosen, for its samples, checked; raises as `velocity`."""
        shared = self.conditions_by_expert(guidance, negative, conditions)
        found = {}
        for k, (here, _) in choice.parts(x_t.device).items():
            whole = self.experts[k].inputs(x_t, *shared[k])
            found[k] = whole if here is None else whole.rows(here)
        return found

    def check_inputs(self, inputs: Mapping[int, Inputs]) -> None:
        """Raise an `HddmError` for class labels that their expert has no embedding of; reads the device."""
        for k, own in inputs.items():
            for branch in (own.conditions, own.negative):
                self.experts[k].check_range(branch)

    def mix(
        self,
        x_t: Tensor,
        times: Tensor,
        choice: Choice,
        inputs: Mapping[int, Inputs],
        then: Tensor | None = None,
    ) -> Tensor:
        """As `velocity`, without its checks; nothing is read back from the device.

        Experts that share the weights of a base run in one call of it, as far as their samples are no more
        than the batch: under ``draw`` all of them, and where each sample has several experts, one by one.

        Args:
            x_t: (batch, …).
            times: (batch,) in float64 on the CPU.
            choice: the weights, zero for an expert that does not cover its row's time.
            inputs: of each expert, for the rows that it is chosen for.
            then: the end of the step, a scalar or (batch,), on the CPU.
        """
        mixed = torch.zeros_like(x_t, dtype=torch.promote_types(x_t.dtype, torch.float32))
        parts = choice.parts(x_t.device)

        def asked_of(k: int) -> Asked:
            here, _ = parts[k]
            own, rows = x_t if here is None else x_t[here], choice.rows[k]
            end = then if then is None or then.ndim == 0 else then[rows]
            return own.to(mixed.dtype), times[rows], inputs[k], end

        rows = {k: len(choice.rows[k]) for k in parts}
        found = self.guided_by(rows, len(x_t), asked_of)
        # By index, so that rounding does not depend on which expert ran first.
        for k, (here, share) in sorted(parts.items()):
            weighted = share.view(-1, *[1] * (x_t.ndim - 1)).to(mixed) * found[k]
            if here is None:
                mixed += weighted
            else:
                mixed.index_add_(0, here, weighted)
        return mixed.to(x_t.dtype)

    def guided_by(
        self, rows: Mapping[int, int], batch: int, asked_of: Callable[[int], Asked]
    ) -> dict[int, Tensor]:
        """`VelocityField.guided` of each expert, called with ``asked_of(k)``.

        Those whose weights are already on the device run first. ``rows`` are the numbers of samples of each
        expert, out of a ``batch`` of so many.
        """
        found = dict[int, Tensor]()
        packs = self._packs(rows, batch)
        expect_step(self.experts[pack[0]].network for pack in packs)
        for pack in packs:
            if len(pack) == 1:
                found[pack[0]] = self.experts[pack[0]].guided(*asked_of(pack[0]))
            else:
                calls = {k: self.experts[k].guided_calls(*asked_of(k)) for k in pack}
                found.update(finished_together(calls))
        return found

    def _packs(self, rows: Mapping[int, int], batch: int) -> list[list[int]]:
        """Experts in the order in which they run; those of one list run together."""
        packs, latest = list[list[int]](), dict[int | None, list[int]]()
        for k in in_best_order({k: self.experts[k].network for k in rows}):
            base = self._base_of(k)
            pack = latest.get(base)
            if pack is not None and sum(rows[one] for one in pack) + rows[k] <= batch:
                pack.append(k)
                continue
            packs.append([k])
            if base is not None:
                latest[base] = packs[-1]
        return packs

    def _base_of(self, k: int) -> int | None:
        """Equal for experts whose network calls can run as one; None where they cannot."""
        one = self.experts[k]
        # A subclass may make its velocity in another way.
        is_plain = type(one).guided is VelocityField.guided
        if is_plain and isinstance(one.network, AdaptedNetwork) and one.network.is_sharing:
            return id(one.network.shared)
        return None

    def weights(
        self,
        x_t: Tensor,
        t: Tensor,
        expert: Tensor | None = None,
        conditions: Mapping[str, Tensor] | None = None,
        prior: Tensor | None = None,
    ) -> Tensor:
        """Weights (batch, K) of the experts at x_t (batch, …) and t (batch,), by the strategy, on the CPU.

        ``prior`` (batch, K) is p(k | prompt), as in `prior_of`. Raises `HddmError` as `velocity`.
        """
        if expert is not None:
            if expert.shape != (len(x_t),):
                raise HddmError(
                    f"expert= takes {len(x_t)} indices, one per state, not {expert.tolist()}"
                )
            return self.at(t, Choice.of(expert.cpu(), len(self.experts)).weights)
        given = conditions or {}
        shares = self.shares_of(len(x_t), given, prior)
        return self.routed(x_t, t.cpu(), shares, self.seen_by_router(given, prior))

    @property
    def router_condition(self) -> RouterCondition | None:
        """What the router sees of the samples' conditions; None for nothing, and without a router."""
        found: RouterCondition | None = getattr(self.router, "condition", None)
        return found if self.num_domains > 1 else None

    def is_seen(
        self, conditions: Mapping[str, Tensor], prior: Tensor | None = None
    ) -> Tensor | None:
        """Which samples (num,) the router tells apart by a condition, on the CPU; None for none of them.

        With a ``prior`` that is provided it is asked without condition.
        """
        sees = self.router_condition
        if sees is None or prior is not None:
            return None
        return sees.known(conditions, self.classes)

    def seen_by_router(
        self, conditions: Mapping[str, Tensor], prior: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        """The conditions that the router gets, by its own keyword; see `is_seen`."""
        sees = self.router_condition
        if sees is None or self.is_seen(conditions, prior) is None:
            return NONE
        return sees.values(conditions, self.classes)

    def shares_of(
        self, num: int, conditions: Mapping[str, Tensor], prior: Tensor | None = None
    ) -> Tensor | None:
        """p(k | class or prompt) of each sample, to correct the router; None where only p(k) is known.

        Samples whose condition the router sees have p(k) among the experts that are able (`Parts.able`).
        """
        is_known = prior is not None or (LABELS in conditions and self.knows_classes)
        if not is_known and self.able(num, conditions) is None:
            return None
        shares, is_seen = self.prior_of(num, conditions, prior), self.is_seen(conditions, prior)
        if is_seen is None:
            return shares
        among_able = self.prior_of(num, conditions, self.prior.expand(num, -1))
        return torch.where(is_seen[:, None], among_able, shares)

    def begun(
        self,
        x: Tensor,
        s: float,
        conditions: Mapping[str, Tensor],
        prior: Tensor | None = None,
    ) -> Tensor:
        """p(k | condition) (batch, K) of samples that begin with noise x (batch, …) at ``s``, on the CPU.

        It is the answer of a router that sees their condition, else `prior_of`.
        """
        known, is_seen = self.prior_of(len(x), conditions, prior), self.is_seen(conditions, prior)
        if is_seen is None:
            return known
        full = self.under("full")
        if isinstance(full.router, ReliabilityRouter):
            # Errors at a noise level say how to mix, and nothing of whose the condition is.
            full.router = full.router.base
        t = torch.full((len(x),), s, dtype=torch.float64)
        routed = full.weights(x.to(self.device), t, None, conditions)
        return torch.where(is_seen[:, None], routed.to(known), known)

    def routed(
        self,
        x_t: Tensor,
        t: Tensor,
        shares: Tensor | None,
        seen: Mapping[str, Tensor] = NONE,
        may_be_nan: bool = False,
    ) -> Tensor:
        """Weights (batch, K) at x_t (batch, …) and t (batch,), which is on the CPU, by strategy and router.

        For ``shares`` see `shares_of`, for ``seen`` `seen_by_router`, for ``may_be_nan`` `answer_of`.
        """
        strategy = self._strategy
        if strategy.kind == "commit" and (t > strategy.value).all():
            strategy = Strategy("full")
        if self.num_domains > 1 and strategy.keeps_one:
            raise HddmError(
                f"strategy {self.strategy!r} keeps one expert per sample: pass expert= indices, or use "
                "hddm.sample, which draws them"
            )
        if self.num_domains == 1:
            return self.at(t, torch.eye(len(self.experts))[:1].expand(len(x_t), -1))
        if self.router is None:
            refuse_unrouted(self.strategy, self.is_resized)
        assert self.router is not None
        probabilities = answer_of(self.router, x_t, t, len(self.experts), seen, may_be_nan)
        if shares is not None:
            probabilities = given_condition(probabilities, self.prior, shares)
        return strategy.weights(self.at(t, probabilities))

    def at(self, t: Tensor, weights: Tensor) -> Tensor:
        """``weights`` (batch, K), moved within each domain to the expert that covers t (batch,)."""
        if self.num_domains == len(self.experts):
            return weights
        domains = torch.tensor(self.domains)
        covers = torch.stack([one.covers(to_float64(t).cpu()) for one in self.experts], 1)
        return (weights @ (domains[:, None] == domains).to(weights)) * covers
