"""What is varied: one line of text per setting, which is also its name in the results."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields

from paddlenlp_nebula.codec.codec import Codec
from paddlenlp_nebula.codec.feedback import ErrorFeedback
from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.strategy.outer import OuterOptimizer
from paddlenlp_nebula.strategy.pace import Pace

__all__ = ["DENSE", "Setting"]

DENSE = "every_step fp32"


@dataclass(frozen=True)
class Setting:
    """A strategy and its options, by the names of NebulaArguments without ``sync_``.

    ``every_step fp32``, or ``local_steps int8 every=100 outer=nesterov outer_lr=0.7 outer_momentum=0.9``.

    Attributes:
        strategy: ``every_step`` or ``local_steps``.
        codec: its spec.
        every: H, also growing: ``2..30``.
        outer, outer_lr, outer_momentum: the outer optimizer.
        feedback_decay: of error feedback, which every lossy codec has.
        final_codec: of the last round.
        keep_unsent: whether a member keeps its unsent change.
        lr: peak learning rate of AdamW; 0: the dense one, see `training.Training`.
    """

    strategy: str
    codec: str
    every: str = "1"
    outer: str = "average"
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    feedback_decay: float = 1.0
    final_codec: str = "int8"
    keep_unsent: bool = False
    lr: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Setting:
        """The setting that a line names."""
        strategy, codec, *rest = shlex.split(text)
        kinds = {field.name: type(field.default) for field in fields(cls)}
        options = {}
        for word in rest:
            name, equals, value = word.partition("=")
            if strategy not in ("every_step", "local_steps") or name not in kinds:
                raise ValueError(
                    f"a setting must be like {DENSE!r}, its options among {', '.join(kinds)}, got {text!r}"
                )
            options[name] = kinds[name](value) if equals else True
        return cls(strategy, codec, **options)

    def __str__(self) -> str:
        words = [self.strategy, self.codec]
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                words.append(field.name if value is True else f"{field.name}={value}")
        return " ".join(words)

    @property
    def pace(self) -> Pace:
        return Pace.parse(self.every)

    @property
    def outer_optimizer(self) -> OuterOptimizer:
        return OuterOptimizer(self.outer, self.outer_lr, self.outer_momentum)

    def wire_codec(self) -> Codec:
        """A fresh codec, with error feedback where the product has it."""
        codec: Codec = codec_from_spec(self.codec)
        return codec if codec.lossless or codec.own_feedback else ErrorFeedback(codec, self.feedback_decay)
