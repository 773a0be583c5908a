"""Epsilon, against the library's own accountants, and that no round is forgotten."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import dp_accounting
import numpy as np
import pytest

from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.ledger.ledger import Ledger
from paddlenlp_nebula.privacy.accountant import Accountant, sum_multiplier

DELTA = 1e-5
HALVES = {"west": np.float32(0.5), "east": np.float32(0.5)}


def spent(accountant: Accountant, rounds: int, share: dict[str, np.float32]) -> dict[str, float]:
    for _ in range(rounds):
        accountant.spend(share)
    return accountant.report()


def by_the_library(*events: tuple[float, int]) -> float:
    """Epsilon of some rounds at each of some multipliers, from the library's accountant of privacy loss distributions."""
    accountant = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    for multiplier, rounds in events:
        accountant.compose(dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(multiplier), rounds))
    return float(accountant.get_epsilon(DELTA))


@pytest.mark.parametrize(("multiplier", "rounds"), [(1.0, 1), (4.0, 30), (30.0, 1000)])
def test_epsilon_is_that_of_the_library(multiplier: float, rounds: int) -> None:
    report = spent(Accountant(multiplier, 2, DELTA), rounds, HALVES)
    assert report["privacy_epsilon"] == pytest.approx(by_the_library((multiplier, rounds)), rel=1e-4)
    # Another cluster sees this one's update with this one's part of the noise alone.
    assert report["privacy_epsilon_members"] == pytest.approx(
        by_the_library((multiplier / math.sqrt(2), rounds)), rel=1e-4
    )
    assert (report["privacy_delta"], report["privacy_rounds"]) == (DELTA, rounds)


def test_one_round_is_the_analytic_gaussian_mechanism() -> None:
    """Balle and Wang 2018 (arXiv 1805.06530), theorem 8, computed here."""
    epsilon = spent(Accountant(1.5, 2, DELTA), 1, HALVES)["privacy_epsilon"]

    def phi(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    mu = 1 / 1.5
    assert phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu) == pytest.approx(
        DELTA, rel=1e-6
    )


def test_a_lost_cluster_takes_its_noise_along() -> None:
    """Three of four remain: the noise in the sum is sqrt(3/4) of what it was."""
    accountant = Accountant(2.0, 4, DELTA)
    spent(accountant, 10, {name: np.float32(1 / 4) for name in "abcd"})
    report = spent(accountant, 5, {name: np.float32(1 / 3) for name in "abc"})
    assert report["privacy_epsilon"] == pytest.approx(by_the_library((2.0, 10), (2.0 * math.sqrt(3 / 4), 5)), rel=1e-4)


def test_behind_a_lossy_codec_each_cluster_has_its_own_noise_alone() -> None:
    report = spent(Accountant(2.0, 4, DELTA, summed=False), 3, {name: np.float32(1 / 4) for name in "abcd"})
    assert report["privacy_epsilon"] == report["privacy_epsilon_members"]
    assert report["privacy_epsilon"] == pytest.approx(by_the_library((1.0, 3)), rel=1e-4)


def test_with_secure_aggregation_a_member_knows_but_its_own_noise() -> None:
    quarters = {name: np.float32(1 / 4) for name in "abcd"}
    report = spent(Accountant(2.0, 4, DELTA, hidden=True), 3, quarters)
    assert report["privacy_epsilon_members"] == pytest.approx(by_the_library((2.0 * math.sqrt(3 / 4), 3)), rel=1e-4)


def test_the_heaviest_member_is_hidden_least() -> None:
    """Noise of 1 from each, weights 3/4 and 1/4: sqrt(9/16 + 1/16) against a change of 3/4."""
    assert sum_multiplier(1.0, [0.75, 0.25]) == pytest.approx(math.sqrt(10) / 3)


def test_nothing_sent_costs_nothing() -> None:
    assert Accountant(1.0, 2, DELTA).report()["privacy_epsilon"] == 0.0


def test_a_resumed_run_goes_on_counting() -> None:
    first, second, whole = (Ledger(privacy=Accountant(1.0, 2, DELTA)) for _ in range(3))
    assert first.privacy is not None
    assert second.privacy is not None
    assert whole.privacy is not None
    spent(first.privacy, 7, HALVES)
    second.restore(json.loads(json.dumps(first.state())))
    spent(second.privacy, 3, HALVES)
    assert second.report()["privacy_epsilon"] == spent(whole.privacy, 10, HALVES)["privacy_epsilon"]
    assert not second.degradations


def test_rounds_without_noise_before_are_named() -> None:
    ledger = Ledger(privacy=Accountant(1.0, 2, DELTA))
    ledger.restore({"rounds": 12})
    assert ledger.degradations == ["privacy_epsilon does not count the 12 rounds of the checkpoint, which had no noise"]


def test_rounds_between_a_checkpoint_and_a_crash_are_counted(tmp_path: Path) -> None:
    journal = tmp_path / "new" / "nebula_privacy.json"
    crashed = Accountant(1.0, 2, DELTA)
    assert crashed.keep_journal(journal, resumed=False) is None
    spent(crashed, 4, HALVES)
    at_checkpoint = crashed.state()
    report = spent(crashed, 2, HALVES)
    resumed = Accountant(1.0, 2, DELTA)
    resumed.restore(at_checkpoint)
    assert resumed.keep_journal(journal, resumed=True) is None
    assert resumed.report() == report
    assert [path.name for path in journal.parent.iterdir()] == [journal.name]


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "[]",
        "{}",
        '{"rounds": 1e999, "model": 1.0, "members": 1.0}',
        '{"rounds": 3, "model": NaN, "members": 1.0}',
    ],
)
def test_a_journal_that_is_lost_is_named(tmp_path: Path, content: str | None) -> None:
    journal = tmp_path / "nebula_privacy.json"
    if content is not None:
        journal.write_text(content)
    sentence = Accountant(1.0, 2, DELTA).keep_journal(journal, resumed=True)
    assert sentence is not None
    assert sentence.endswith("privacy_epsilon does not count those that were taken after the checkpoint")


def test_no_round_is_sent_that_cannot_be_counted(tmp_path: Path) -> None:
    accountant = Accountant(1.0, 2, DELTA)
    accountant.keep_journal(tmp_path / "gone" / "nebula_privacy.json", resumed=False)
    (tmp_path / "gone").rmdir()
    with pytest.raises(NebulaError, match="must count each round with noise before it is sent"):
        accountant.spend(HALVES)


def test_the_library_is_loaded_only_to_compute() -> None:
    program = """
import sys
from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.privacy.accountant import Accountant
NebulaArguments("west", "west,east", "loopback", privacy_clip_norm=1.0, privacy_noise_multiplier=1.0,
                sync_weight="equal", sync_quorum=2)
accountant = Accountant(1.0, 2, 1e-5)
assert "dp_accounting" not in sys.modules
accountant.spend({"west": 0.5, "east": 0.5})
accountant.report()
assert "dp_accounting" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
