"""Mean, spread, paired t-tests and Holm's correction."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal

Verdict = Literal["better", "worse", "undecided"]
LEVEL = 0.95  # of intervals; a verdict needs p below the rest


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One method minus another, seed by seed. `low` and `high` bound the mean difference with 95 %.

    `p` is of the paired t-test, two-sided; `corrected` is Holm's, over all differences that are judged together,
    and decides the verdict.
    """

    mean: float
    seeds: tuple[int, ...]
    gain: bool  # the mean is on the better side of 0
    low: float | None = None
    high: float | None = None
    p: float | None = None
    corrected: float | None = None
    verdict: Verdict = "undecided"


def std_of(values: Sequence[float]) -> float | None:
    """The sample standard deviation; None for a single value, whose spread nobody knows."""
    return stdev(values) if len(values) > 1 else None


def paired_difference(
    ours: Mapping[int, float], theirs: Mapping[int, float], *, higher_is_better: bool = True
) -> Difference | None:
    """Ours minus theirs over the seeds that both have, or None where they share none.

    The verdict stays `undecided` while the interval contains 0 (p >= 0.05), with fewer than two seeds, and where
    all differences are equal to the last digit: then the spread is not zero but unknown, as with
    accuracies of a small test set, which come in steps.

    >>> paired_difference({0: 92.0, 1: 92.5, 2: 92.3}, {0: 91.0, 1: 91.4, 2: 91.4}).verdict
    'better'
    """
    seeds = tuple(sorted(ours.keys() & theirs.keys()))
    if not seeds:
        return None
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    mean, std = fmean(differences), std_of(differences)
    found = Difference(mean=mean, seeds=seeds, gain=mean > 0 if higher_is_better else mean < 0)
    if std is None or std < 1e-9:
        return found
    from scipy.special import stdtr, stdtrit  # comes with scikit-learn

    error, freedom = std / math.sqrt(len(seeds)), len(seeds) - 1
    half = float(stdtrit(freedom, (1 + LEVEL) / 2)) * error
    p = 2 * float(stdtr(freedom, -abs(mean) / error))
    return corrected([replace(found, low=mean - half, high=mean + half, p=p)])[0]


def corrected(family: Sequence[Difference]) -> list[Difference]:
    """Differences that are judged together, by Holm's step-down correction of their p-values.

    >>> one = paired_difference({0: 92.0, 1: 92.5, 2: 92.3}, {0: 91.0, 1: 91.4, 2: 91.4})
    >>> [round(each.corrected, 3) for each in (one, *corrected([one, one, one]))]
    [0.003, 0.01, 0.01, 0.01]
    """
    known = sorted((each.p, place) for place, each in enumerate(family) if each.p is not None)
    found, highest = list(family), 0.0
    for rank, (p, place) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        decided: Verdict = "better" if found[place].gain else "worse"
        verdict = decided if highest < 1 - LEVEL else "undecided"
        found[place] = replace(found[place], corrected=highest, verdict=verdict)
    return found
