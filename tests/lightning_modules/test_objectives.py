import pytest
import torch

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.functional import (
    ShortScores,
    mutual_information,
    soft_influence,
    threshold_weights,
    top_fraction_weights,
)
from lightning_modules.objectives import (
    Interpolated,
    LongCE,
    MutualInformation,
    Normalized,
    Rho1,
    Scheduled,
    Sparse,
    StoredInfluence,
    Wrapper,
    find_step_dependent,
)
from lightning_modules.training.preflight import check_influence, check_stored

pytestmark = pytest.mark.core


def test_stored_influence_is_taken_as_it_is_and_capped():
    stored = torch.tensor([0.5, 1.0, 3.0, 5.0])
    weights = StoredInfluence(3.0).token_weights(-torch.rand(4), torch.rand(4), {"influence": stored})
    assert weights.tolist() == [0.5, 1.0, 3.0, 3.0]


def test_stored_weights_capped_lower_than_the_objective_says_are_refused():
    check_stored(StoredInfluence(gamma=5.0), {"gamma": 5.0})
    check_stored(StoredInfluence(gamma=2.0), {"gamma": 5.0})
    check_stored(LongCE(gamma=5.0), None)
    check_stored(Interpolated(StoredInfluence(gamma=2.0), 0.5), {"gamma": 2.0})
    with pytest.raises(ValueError, match=r"capped at 2, below the `gamma` 5"):
        check_stored(StoredInfluence(gamma=5.0), {"gamma": 2.0})
    with pytest.raises(ValueError, match=r"capped at 3, below the `gamma` 5"):  # the mean's own cap is 3
        check_stored(Scheduled(Interpolated(StoredInfluence(gamma=5.0), 0.5)), {"gamma": 3.0})
    with pytest.raises(ValueError, match=r"has weights, and the objective Rho1 needs reference losses"):
        check_stored(Rho1(), {"gamma": 5.0})
    with pytest.raises(ValueError, match=r"has reference losses, and the objective StoredInfluence needs weights"):
        check_stored(Interpolated(StoredInfluence()), {"gamma": None})


GENERATOR = torch.Generator().manual_seed(1)
BATCH = {"labels": torch.ones(2, 50, dtype=torch.int64).index_fill(1, torch.tensor([0, 7]), IGNORE_INDEX)}
PAIR = (-torch.rand(2, 50, generator=GENERATOR), -9 * torch.rand(2, 50, generator=GENERATOR))


def mean_one(weights):
    """Weights scaled to a mean of 1 over the scored tokens of each sequence, one sequence at a time in float64."""
    rows = []
    for row, labels in zip(weights.double(), BATCH["labels"], strict=True):
        mean = row[labels != IGNORE_INDEX].mean()
        rows.append(row / mean if mean > 0 else torch.ones_like(row))
    return torch.stack(rows).float()


@pytest.mark.parametrize(
    ("objective", "weights"),
    [
        (MutualInformation(), mutual_information(*PAIR)),
        (MutualInformation("negative", 2.0), mutual_information(*PAIR, part="negative", shift=2.0)),
        (Sparse(0.1), threshold_weights(*PAIR, threshold=0.1)),
        (Sparse(fraction=0.25), top_fraction_weights(*PAIR, BATCH["labels"] != IGNORE_INDEX, fraction=0.25)),
        (Normalized(LongCE(3.0)), soft_influence(*PAIR, gamma=3.0)),
    ],
)
def test_weights_with_a_mean_of_1_over_each_sequence(objective, weights):
    assert objective.uses_short_context
    assert objective.largest_weight is None
    scored = BATCH["labels"].ne(IGNORE_INDEX)
    found = objective(PAIR[0], ShortScores(PAIR[1], scored), BATCH)
    torch.testing.assert_close(found, mean_one(weights).masked_fill(~scored, 0))
    torch.testing.assert_close(found.sum(-1), scored.sum(-1).float())
    without = objective(PAIR[0], ShortScores(PAIR[0], scored), BATCH)
    assert torch.equal(without, scored.float()), "no token differs"


def test_defaults_of_objectives():
    assert Sparse().threshold == 0.5
    assert torch.equal(
        MutualInformation().token_weights(*PAIR, BATCH), MutualInformation("positive", 1.0).token_weights(*PAIR, BATCH)
    )
    torch.testing.assert_close(
        Interpolated(LongCE()).token_weights(*PAIR, BATCH), 0.5 + 0.5 * soft_influence(*PAIR, gamma=5.0)
    )
    schedule = Scheduled(LongCE())
    assert all(schedule.at_step(step).token_weights(*PAIR, BATCH).ne(1).any() for step in (0, 1, 10**9)), "always on"


@pytest.mark.parametrize("gamma", [1.3, 5.0, 9.7])
@pytest.mark.parametrize("share", [0.0, 0.35, 1.0])
def test_interpolated_is_a_mean_with_cross_entropy_and_keeps_what_is_at_the_cap(gamma, share):
    objective = Interpolated(LongCE(gamma), share)
    weight = soft_influence(*PAIR, gamma=gamma)
    torch.testing.assert_close(objective.token_weights(*PAIR, BATCH), share + (1 - share) * weight)
    at_cap = weight == torch.tensor(gamma)
    assert 0 < at_cap.sum() < at_cap.numel()
    found = objective.token_weights(*PAIR, BATCH) >= torch.tensor(objective.largest_weight)
    assert torch.equal(found, at_cap | (share == 1))


def test_weights_carry_no_gradient_whatever_an_objective_computes():
    class Likelihood(LongCE):
        def token_weights(self, long, short, batch):
            return long.exp()

    long = PAIR[0].clone().requires_grad_()
    assert not Likelihood()(long, None, BATCH).requires_grad


def test_wrappers_are_like_what_they_wrap():
    for wrap in (Interpolated, Normalized, Scheduled):
        assert wrap(LongCE()).uses_short_context
        assert not wrap(StoredInfluence()).uses_short_context
        assert wrap(StoredInfluence()).uses_stored == "weights"
    assert Normalized(LongCE()).largest_weight is None


def test_stored_weights_and_the_objective_fit_together():
    check_influence(LongCE(), None)
    check_influence(Normalized(Interpolated(StoredInfluence())), "in 'weights'")
    with pytest.raises(ValueError, match=r"StoredInfluence.*`data\.influence`"):
        check_influence(StoredInfluence(), None)
    with pytest.raises(ValueError, match=r"LongCE.*in 'weights'"):
        check_influence(LongCE(), "in 'weights'")


def test_a_schedule_goes_from_cross_entropy_to_the_weights_and_back():
    objective = Scheduled(LongCE(5.0), start=2, warmup=4, stop=8)
    weight = soft_influence(*PAIR)
    full = {3: 0.25, 4: 0.5, 5: 0.75, 6: 1.0, 7: 1.0}
    for step in range(12):
        now = objective.at_step(step)
        assert now.uses_short_context == (step in full), step
        part = full.get(step, 0.0)
        torch.testing.assert_close(now.token_weights(*PAIR, BATCH), (1 - part) + part * weight)
        assert now.largest_weight == (pytest.approx(1 + 4 * part) if part else None)
    assert isinstance(Scheduled(LongCE()).at_step(0), LongCE)
    assert LongCE().at_step(7).gamma == 5.0


def test_a_schedule_within_another_objective():
    half = 0.5 + 0.5 * soft_influence(*PAIR)
    outside, inside = Normalized(Scheduled(LongCE(), warmup=2)), Scheduled(Normalized(LongCE()), warmup=2)
    for objective in (outside, inside):
        assert not objective.at_step(0).uses_short_context
    torch.testing.assert_close(outside.at_step(1).token_weights(*PAIR, BATCH), mean_one(half))
    expected = 0.5 + 0.5 * mean_one(soft_influence(*PAIR))
    torch.testing.assert_close(inside.at_step(1).token_weights(*PAIR, BATCH), expected)
    assert Interpolated(Scheduled(LongCE(), stop=1), 0.3).at_step(1).token_weights(*PAIR, BATCH).eq(1).all()


def test_a_schedule_is_found_inside_wrappers():
    schedule = Scheduled(LongCE(), start=2)
    for objective in (schedule, Normalized(schedule), Interpolated(Normalized(schedule))):
        assert find_step_dependent(objective) is schedule
    for objective in (LongCE(), Normalized(Interpolated(LongCE()))):
        assert find_step_dependent(objective) is None

    class Growing(Wrapper):
        def at_step(self, step):
            return self.objective if step else LongCE(1.0)

    growing = Growing(LongCE())
    assert find_step_dependent(Normalized(growing)) is growing


def test_a_wrapper_of_the_users_own_keeps_the_schedule():
    class Doubled(Wrapper):
        def token_weights(self, long, short, batch):
            return 2 * self.objective.token_weights(long, short, batch)

    objective = Doubled(Scheduled(LongCE(5.0), stop=3))
    torch.testing.assert_close(objective.at_step(2).token_weights(*PAIR, BATCH), 2 * soft_influence(*PAIR))
    assert objective.at_step(2).largest_weight == 5.0
    assert not objective.at_step(3).uses_short_context
    assert objective.at_step(3).token_weights(*PAIR, BATCH).eq(2).all()
    assert objective.uses_short_context, "the objective itself stays as it is"


@pytest.mark.parametrize(
    ("option", "make"),
    [
        ("cross_entropy_share", lambda: Interpolated(LongCE(), 1.5)),
        ("cross_entropy_share", lambda: Interpolated(LongCE(), float("nan"))),
        ("stop", lambda: Scheduled(LongCE(), start=3, stop=3)),
        ("stop", lambda: Scheduled(LongCE(), warmup=3, stop=1)),
        ("part", lambda: MutualInformation("both")),
        ("threshold", lambda: Sparse(-1.0)),
        ("fraction", lambda: Sparse(fraction=0.0)),
    ],
)
def test_numbers_without_a_meaning_are_refused(option, make):
    with pytest.raises(ValueError, match=f"`{option}`"):
        make()
