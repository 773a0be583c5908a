"""Playing a schedule of faults on three clusters that train, and the figures of it."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.chaos.fleet import Fleet, Hang
from tests.chaos.injection import Injector
from tests.chaos.schedule import ANYTHING, Fault, plan
from tests.chaos.witness import Done, Witness, needless, unreported
from tests.faults.jobs import Zygote
from tests.support.wan import wide_area

__all__ = ["Setting", "play", "problems", "schedule_for"]

_TICK_S = 0.05
_PORT = 47000


@dataclass(frozen=True, slots=True)
class Setting:
    """What trains, over what.

    Attributes:
        name: of the setting.
        strategy, every, codec: as in NebulaArguments.
        clusters: their names.
        doors: how many of them, from the first on, keep a door.
        steps: optimizer steps of the training.
        pace_s: added to a step's own 10 ms.
        step_s: what a step takes a cluster that is alone, so that faults come no thicker than planned.
        timeout_s: ``sync_timeout_s``.
        rate_mbit, rtt_ms: of the network; None, 0 for none.
        seed: of model, data order and schedule.
        kinds: of faults.
        overlap: share of the faults that do not wait for the one before to end.
    """

    name: str
    strategy: str
    every: str = "5"
    codec: str = "fp32"
    clusters: tuple[str, ...] = ("west", "mid", "east")
    doors: int = 2
    steps: int = 600
    pace_s: float = 0.05
    step_s: float = 0.06
    timeout_s: float = 5.0
    rate_mbit: float | None = 50.0
    rtt_ms: float = 20.0
    seed: int = 1
    kinds: tuple[str, ...] = ANYTHING
    overlap: float = 0.15

    @property
    def undisturbed(self) -> Setting:
        """The same training where neither steps nor network take time; it ends with the same loss."""
        return replace(self, pace_s=0.0, rate_mbit=None, rtt_ms=0.0)

    @property
    def patience_s(self) -> float:
        """How long a cluster may take no step: it may wait for one after the other, start anew and catch up."""
        return 4 * self.timeout_s + 20

    def argv(self) -> list[str]:
        """Of the trainers."""
        every = ["--every", self.every] if self.strategy == "local_steps" else []
        return [
            *("--steps", str(self.steps), "--strategy", self.strategy, *every, "--codec", self.codec),
            *("--timeout", str(self.timeout_s), "--pace", str(self.pace_s), "--seed", str(self.seed)),
        ]


def schedule_for(setting: Setting) -> list[Fault]:
    """The faults of a setting, by its seed."""
    return plan(
        setting.seed,
        setting.clusters,
        steps=setting.steps,
        step_s=setting.step_s,
        deadline_s=setting.timeout_s,
        settle_s=2.5,
        kinds=setting.kinds,
        overlap=setting.overlap,
    )


def play(
    setting: Setting,
    schedule: Sequence[Fault],
    folder: Path,
    zygote: Zygote,
    say: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """Train once while the faults of a schedule happen.

    Args:
        setting: what trains.
        schedule: in the order of their steps; empty for an undisturbed run.
        folder: an empty one, for everything that the clusters leave behind.
        zygote: of ``tests.chaos.trainee``.
        say: told what happens.

    Returns:
        Figures (JSON); what went wrong with the product is in them, see `problems`.
    """
    began = time.monotonic()
    with wide_area(setting.clusters, rate_mbit=setting.rate_mbit, rtt_ms=setting.rtt_ms) as wan:
        rendezvous = ",".join(f"{site.address}:{_PORT}" for site in wan.sites[: setting.doors])
        with Fleet(wan, zygote, folder, setting.argv(), rendezvous, setting.patience_s) as fleet:
            witness = Witness({name: cluster.folder for name, cluster in fleet.clusters.items()})
            injector = Injector(wan, fleet, setting.rate_mbit)
            game = _Game(fleet, witness, injector, list(schedule), say)
            hang = None
            try:
                game.run()
            except Hang as error:
                hang = str(error)
                say(hang)
            return {
                "setting": asdict(setting),
                "schedule": [fault.entry() for fault in schedule],
                "duration_s": round(time.monotonic() - began, 1),
                "hangs": 0 if hang is None else 1,
                "hang": hang,
                "timeline": game.timeline,
                **_figures(setting, fleet, witness, game.done, game.skipped),
            }


class _Game:
    """Faults at their steps, each undone in its time, while the clusters are looked after."""

    def __init__(
        self, fleet: Fleet, witness: Witness, injector: Injector, schedule: list[Fault], say: Callable[[str], None]
    ) -> None:
        self.fleet = fleet
        self.done: list[Done] = []
        self.skipped: list[Fault] = []
        self.timeline: list[tuple[float, int]] = []  # seconds, monotonic; steps that all have taken by then
        self._witness = witness
        self._injector = injector
        self._coming = schedule
        self._going: list[tuple[Done, Callable[[], None]]] = []
        self._say = say

    def run(self) -> None:
        while not self.fleet.done:
            time.sleep(_TICK_S)
            self.fleet.tend()
            self._note_progress()
            heard = len(self._witness.said)
            self._witness.look()
            for word in self._witness.said[heard:]:
                self._say(f"step {self.fleet.step}: {word.cluster} says: {word.sentence}")
            self._undo()
            while self._coming and self.fleet.step >= self._coming[0].at_step:
                self._do(self._coming.pop(0))
        self._witness.look()

    def _note_progress(self) -> None:
        """From the moment that all train on, once per second."""
        clusters = self.fleet.clusters.values()
        now = time.monotonic()
        if all(cluster.step for cluster in clusters) and (not self.timeline or now - self.timeline[-1][0] >= 1):
            self.timeline.append((round(now, 2), sum(cluster.taken for cluster in clusters)))

    def _do(self, fault: Fault) -> None:
        began, together = time.monotonic(), self._witness.together(fault)
        undo = self._injector.begin(fault)
        self._say(f"step {self.fleet.step}: {fault.what} {'-'.join(fault.target)}, {fault.duration_s:g} s"
                  + (" (cannot be done now)" if undo is None else ""))  # fmt: skip
        if undo is None:
            self.skipped.append(fault)
            return
        done = Done(fault, began, began + fault.duration_s, together)
        self.done.append(done)
        self._going.append((done, undo))

    def _undo(self) -> None:
        for done, undo in list(self._going):
            if time.monotonic() >= done.ended:
                undo()
                self._going.remove((done, undo))
                self.done[self.done.index(done)] = replace(done, ended=time.monotonic())
                self.fleet.excuse()


def _figures(
    setting: Setting, fleet: Fleet, witness: Witness, done: Sequence[Done], skipped: Sequence[Fault]
) -> dict[str, Any]:
    reports, finals = {}, {}
    for name, cluster in fleet.clusters.items():
        for found, path in ((reports, "out/nebula_report.json"), (finals, "final.json")):
            if (cluster.folder / path).exists():
                found[name] = json.loads((cluster.folder / path).read_text())
    digests = {name: report["parameter_digest"] for name, report in reports.items()}
    missed = unreported(done, witness.said, setting.timeout_s)
    returns = {word.back for word in witness.said if word.back}
    rounds: dict[int, int] = {}  # number -> members
    for entries in witness.rounds.values():
        for number, entry in entries.items():
            rounds[number] = max(rounds.get(number, 0), entry["members"])
    return {
        "training_s": round(fleet.training_s, 1),
        "faults_injected": len(done),
        "faults_skipped": len(skipped),
        "unreported_losses": len(missed),
        "unreported": [one.fault.entry() for one in missed],
        "needless_losses": [
            f"{word.cluster}: {word.sentence}" for word in needless(done, witness.said, setting.timeout_s)
        ],
        "crashes": {name: cluster.crashes for name, cluster in fleet.clusters.items() if cluster.crashes},
        "starts": {name: cluster.starts for name, cluster in fleet.clusters.items()},
        "returns": len(returns),
        "samples_merged": sum(one.work for one in returns if one.merged),
        "samples_dropped": sum(one.work for one in returns if not one.merged),
        "rounds": len(rounds),
        "rounds_lost": sum(members < len(setting.clusters) for members in rounds.values()),
        "bytes_sent": sum(report["bytes_sent"] for report in reports.values()),
        "bytes_resent": _resent(witness),
        "steps": {name: report["steps"] for name, report in reports.items()},
        "members": {name: report["members"] for name, report in reports.items()},
        "digests": digests,
        "digests_equal": len(digests) == len(setting.clusters) and len(set(digests.values())) == 1,
        "loss": statistics.fmean(final["loss"] for final in finals.values()) if finals else None,
        "degradations": {name: report["degradations"] for name, report in reports.items()},
        "events": {name: report.get("events", []) for name, report in reports.items()},
    }


def _resent(witness: Witness) -> int:
    """Bytes that rounds took beyond what a round of as many members usually takes."""
    resent = 0
    for entries in witness.rounds.values():
        usual = {
            members: statistics.median(e["bytes_sent"] for e in entries.values() if e["members"] == members)
            for members in {entry["members"] for entry in entries.values()}
        }
        resent += sum(max(0, int(e["bytes_sent"] - usual[e["members"]])) for e in entries.values())
    return resent


def problems(result: dict[str, Any]) -> list[str]:
    """What a run shows to be wrong with the product; empty when all is well."""
    found = []
    if result["hangs"]:
        found.append(f"a hang: {result['hang'].splitlines()[0]}")
    found += [f"nobody has reported {fault}" for fault in result["unreported"]]
    found += [f"a loss without a reason: {words}" for words in result["needless_losses"]]
    found += [f"{name} has ended by itself: {how}" for name, crashes in result["crashes"].items() for how in crashes]
    if not result["digests_equal"]:
        found.append(f"the clusters end with different parameters: {result['digests']}, members {result['members']}")
    return found
