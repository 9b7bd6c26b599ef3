"""Advantages of the rewards of one group, in host floats.

Each function takes the scored rewards of the answers to one prompt. What compares them with each
other gives exactly 0 where nothing distinguishes them, whatever the rounding: where all are equal,
and for a reward alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, fsum, sqrt
from operator import mul


def less_mean(rewards: Sequence[float]) -> list[float]:
    """R_i - mean(R)."""
    if _is_uniform(rewards):
        return [0.0] * len(rewards)
    mean = fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def less_mean_of_others(rewards: Sequence[float]) -> list[float]:
    """R_i - mean of the others = (R_i - mean(R)) n / (n - 1)."""
    factor = len(rewards) / max(len(rewards) - 1, 1)
    return [centred * factor for centred in less_mean(rewards)]


def less_length_weighted_mean(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """R_i - sum_j n_j R_j / sum_j n_j, n_j the labels of answer j; 0 without any label."""
    total = sum(lengths)
    if _is_uniform(rewards) or total == 0:
        return [0.0] * len(rewards)
    mean = fsum(n * reward for n, reward in zip(lengths, rewards, strict=True)) / total
    return [reward - mean for reward in rewards]


def less_optimal_token_baseline(
    rewards: Sequence[float], energies: Sequence[Sequence[float]]
) -> list[list[float]]:
    """R_i - b_t for each label t of answer i, with the baseline of least variance at t.

        b_t = sum_j W_jt R_j / sum_j W_jt,   W_jt = sum_{s <= t} w_js

    over the answers j that have a label t. Where all W_jt are 0 they weigh alike; the end of an
    answer that is longer than the others has nothing to compare with and gets 0.

    Args:
        rewards: of the answers.
        energies: w_t = 1 - 2 p_t + sum_v p_v^2 of each answer's labels, the squared norm of the
            derivative of log p_t by the logits.
    """
    paths = [_cumulative(answer) for answer in energies]
    result: list[list[float]] = [[] for _ in rewards]
    for t in range(max(map(len, paths), default=0)):
        numbers = [number for number, path in enumerate(paths) if t < len(path)]
        weights = [paths[number][t] for number in numbers]
        if not any(weights):
            weights = [1.0] * len(numbers)
        present = [rewards[number] for number in numbers]
        mean = fsum(w * reward for w, reward in zip(weights, present, strict=True)) / fsum(weights)
        is_uniform = _is_uniform(present)
        for number, reward in zip(numbers, present, strict=True):
            result[number].append(0.0 if is_uniform else reward - mean)
    return result


def less_best_of_k(rewards: Sequence[float], k: int) -> tuple[list[float], float]:
    """E[max S | i in S] - E[max S] over the sets S of k of the rewards, and the std of max S.

    For rewards of 0 and 1 max S is pass@k: of n rewards with m zeros E[max S] is
    1 - C(m, k) / C(n, k), and a zero's term 1 - C(m - 1, k - 1) / C(n - 1, k - 1). With fewer than
    k rewards there is no set, and all is 0.
    """
    if len(rewards) < k or _is_uniform(rewards):
        return [0.0] * len(rewards), 0.0
    ordered = sorted(rewards)
    shares = _shares_of_best(len(rewards), k)
    mean = fsum(map(mul, shares, ordered))
    variance = fsum(s * (reward - mean) ** 2 for s, reward in zip(shares, ordered, strict=True))
    return [with_it - mean for with_it in _best_with_each(rewards, k)], sqrt(variance)


def less_best_without(rewards: Sequence[float], k: int) -> list[float]:
    """E[max S - max (S without i)] over the sets S of k of the rewards with i; k at least 2."""
    if len(rewards) < k or _is_uniform(rewards):
        return [0.0] * len(rewards)
    shares = _shares_of_best(len(rewards) - 1, k - 1)
    result = []
    for number, with_it in enumerate(_best_with_each(rewards, k)):
        others = sorted([*rewards[:number], *rewards[number + 1 :]])
        result.append(with_it - fsum(map(mul, shares, others)))
    return result


def sample_std(rewards: Sequence[float]) -> float:
    """The sample standard deviation (n - 1), 0 of fewer than two."""
    return sqrt(sample_variance(rewards))


def sample_variance(rewards: Sequence[float]) -> float:
    """The sample variance (n - 1), 0 of fewer than two."""
    if len(rewards) < 2:
        return 0.0
    mean = fsum(rewards) / len(rewards)
    return fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)


def _is_uniform(rewards: Sequence[float]) -> bool:
    return len(rewards) < 2 or min(rewards) == max(rewards)


def _cumulative(values: Sequence[float]) -> list[float]:
    """The sums of the first 1, 2, ... values, none of them below 0 by rounding."""
    sums, total = [], 0.0
    for value in values:
        total += max(value, 0.0)
        sums.append(total)
    return sums


def _shares_of_best(n: int, k: int) -> list[float]:
    """The share of the sets of k of n sorted numbers whose largest is the first, second, ..."""
    return [comb(place, k - 1) / comb(n, k) for place in range(n)]


def _best_with_each(rewards: Sequence[float], k: int) -> list[float]:
    """E[max S | i in S] of each reward, over the sets S of k of them."""
    n, total = len(rewards), comb(len(rewards) - 1, k - 1)
    order = sorted(range(n), key=rewards.__getitem__)
    result = [0.0] * n
    for place, number in enumerate(order):
        # It is the largest of its set, or one of those above it is, which is in the set with it.
        terms = [comb(place, k - 1) / total * rewards[number]]
        if k > 1:
            above = range(place + 1, n)
            terms += [comb(other - 1, k - 2) / total * rewards[order[other]] for other in above]
        result[number] = fsum(terms)
    return result
