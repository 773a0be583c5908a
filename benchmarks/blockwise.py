"""Block-wise distillation by two processes of this machine: teacher relaying against re-running the teacher.

    python benchmarks/blockwise.py           # a minute; prints JSON
    python benchmarks/blockwise.py --tiny    # seconds; its times mean nothing

Both schemes run in turn in the same two processes, one thread each, on the same batches: stages with a queue between
them, assigned by measured times, and two halves of every batch with averaged gradients. There is no wide-area link.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Setting:
    blocks: int = 4
    teacher_layers: int = 8
    student_layers: int = 4
    width: int = 256
    samples: int = 8
    length: int = 64
    batches: int = 12
    repeats: int = 3


TINY = Setting(teacher_layers=4, width=32, length=8, samples=4, batches=2, repeats=1)
VOCABULARY = 1000


class Worker:
    """One of the two processes.

    Args:
        rank: 0 or 1.
        setting: of the run.
        line: carries activations from rank 0 to rank 1; None ends a run.
        peer: to the other one, for gradients and for starting together.
    """

    def __init__(self, rank: int, setting: Setting, line: Any, peer: Any) -> None:
        self.rank, self.setting, self.line, self.peer = rank, setting, line, peer

    def pairs(self, average: Any = None) -> list[Any]:
        import paddle
        from paddlenlp.transformers import BertConfig, BertModel

        from paddlenlp_nebula.distill.blockwise.blocks import parts_of
        from paddlenlp_nebula.distill.blockwise.pair import pairs_of

        paddle.seed(1)
        teacher, student = (
            parts_of(
                BertModel(
                    BertConfig(
                        vocab_size=VOCABULARY,
                        hidden_size=self.setting.width,
                        num_hidden_layers=layers,
                        num_attention_heads=4,
                        intermediate_size=4 * self.setting.width,
                        hidden_dropout_prob=0.0,
                        attention_probs_dropout_prob=0.0,
                    )
                )
            )
            for layers in (self.setting.teacher_layers, self.setting.student_layers)
        )

        def optimizer(parameters: list[Any]) -> Any:
            return paddle.optimizer.AdamW(learning_rate=1e-3, parameters=parameters)

        return pairs_of(teacher, student, self.setting.blocks, optimizer, average)

    def batches(self, part: slice = slice(None)) -> Iterator[Any]:
        from paddlenlp_nebula.distill.blockwise.stage import Activation

        draw, shape = np.random.default_rng(2), (self.setting.samples, self.setting.length)
        for number in range(self.setting.batches):
            yield Activation(number, np.ones(shape, dtype=bool)[part], draw.integers(1, VOCABULARY, shape)[part])

    def average(self, parameters: Sequence[Any], rows: int) -> None:
        """Both halves have as many rows. Rank 1 speaks second: a pipe holds less than a block's gradients."""
        own = np.concatenate([parameter.grad.numpy().ravel() for parameter in parameters])
        if self.rank == 0:
            self.peer.send_bytes(own)
        other = np.frombuffer(self.peer.recv_bytes(), dtype=np.float32)
        if self.rank == 1:
            self.peer.send_bytes(own)
        mean, start = (own + other) / 2, 0
        for parameter in parameters:
            stop = start + parameter.grad.size
            parameter.grad.set_value(mean[start:stop].reshape(parameter.grad.shape))
            start = stop

    def relaying(self, pairs: list[Any]) -> list[list[float]]:
        from paddlenlp_nebula.distill.blockwise.stage import run_stage

        if self.rank:
            return list(run_stage(pairs, iter(self.line.get, None), None))
        losses = list(run_stage(pairs, self.batches(), self.line.put))
        self.line.put(None)
        return losses

    def recomputing(self, pairs: list[Any]) -> list[list[float]]:
        from paddlenlp_nebula.distill.blockwise.stage import recomputing

        half = self.setting.samples // 2
        return list(recomputing(pairs, self.batches(slice(self.rank * half, (self.rank + 1) * half))))

    def cut(self) -> int:
        """Where rank 0's stage ends, from its measured times."""
        from paddlenlp_nebula.distill.blockwise.assign import assign
        from paddlenlp_nebula.distill.blockwise.measure import block_times

        if self.rank:
            return int(self.peer.recv())
        times = block_times(self.pairs(), next(self.batches()))
        stages = assign([times, times], [0.0] * (self.setting.blocks - 1)).stages
        self.peer.send(stages[0].stop)
        return stages[0].stop

    def together(self) -> None:
        self.peer.send(True)
        self.peer.recv()

    def run(self) -> dict[str, Any]:
        cut = self.cut()
        seconds: dict[str, list[float]] = {"relaying": [], "recomputing": []}
        losses = {}
        for _ in range(1 + self.setting.repeats):  # the first is not counted
            for scheme in seconds:
                relaying = scheme == "relaying"
                pairs = self.pairs(None if relaying else self.average)
                if relaying:
                    pairs = pairs[cut:] if self.rank else pairs[:cut]
                self.together()
                began = time.perf_counter()
                losses[scheme] = self.relaying(pairs) if relaying else self.recomputing(pairs)
                self.together()
                seconds[scheme].append(time.perf_counter() - began)
        return {"cut": cut, "seconds": {scheme: times[1:] for scheme, times in seconds.items()}, "losses": losses}


def work(rank: int, setting: Setting, line: Any, peer: Any, answers: Any) -> None:
    try:
        answers.put((rank, Worker(rank, setting, line, peer).run()))
    except Exception as error:
        answers.put((rank, repr(error)))
        raise


def measure(setting: Setting) -> dict[str, Any]:
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    line, answers, ends = context.Queue(), context.Queue(), context.Pipe()
    workers = [context.Process(target=work, args=(rank, setting, line, ends[rank], answers)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    try:
        found = {}
        for _ in workers:
            rank, answer = answers.get(timeout=500)
            if isinstance(answer, str):
                raise SystemExit(f"process {rank} failed: {answer}")
            found[rank] = answer
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    relayed = np.concatenate([np.array(found[rank]["losses"]["relaying"]) for rank in (0, 1)], axis=1)
    recomputed = np.mean([found[rank]["losses"]["recomputing"] for rank in (0, 1)], axis=0)
    best = {scheme: min(times) for scheme, times in found[0]["seconds"].items()}
    return {
        **asdict(setting),
        "cut": found[0]["cut"],
        "seconds": found[0]["seconds"],
        "speed_up": best["recomputing"] / best["relaying"],
        "largest_relative_difference_of_losses": float(np.max(np.abs(relayed - recomputed) / relayed)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="sizes for tests")
    print(json.dumps(measure(TINY if parser.parse_args().tiny else Setting()), indent=1))


if __name__ == "__main__":
    main()
