"""What is varied: one line of text per setting, which is also its name in the results."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields, replace

from paddlenlp_nebula.arguments import NebulaArguments

__all__ = ["DENSE", "Setting"]

DENSE = "every_step fp32"
"""The reference, at the learning rate of `training.Training`."""


@dataclass(frozen=True)
class Setting:
    """A strategy and its options, by the names of NebulaArguments without ``sync_``, and a learning rate.

    ``every_step fp32``, or ``local_steps int8 every=100 outer=nesterov outer_lr=0.7 outer_momentum=0.9``.

    Attributes:
        strategy, codec, every, outer, outer_lr, outer_momentum, feedback_decay, final_codec, keep_unsent: see
            NebulaArguments; an empty ``final_codec`` is its default.
        lr: peak learning rate of AdamW; 0: that of `training.Training`.
        warm_up: steps in which it rises; 0: those of `training.Training`.
    """

    strategy: str
    codec: str
    every: str = "1"
    outer: str = "average"
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    feedback_decay: float = 1.0
    final_codec: str = ""
    keep_unsent: bool = False
    lr: float = 0.0
    warm_up: int = 0

    @classmethod
    def parse(cls, text: str) -> Setting:
        """The setting that a line names.

        Raises:
            ValueError: it has an unknown option.
        """
        strategy, codec, *rest = shlex.split(text)
        kinds = {field.name: type(field.default) for field in fields(cls)[2:]}
        options = {}
        for word in rest:
            name, equals, value = word.partition("=")
            if name not in kinds:
                raise ValueError(
                    f"a setting must be like {DENSE!r}, its options among {', '.join(kinds)}, got {text!r}"
                )
            options[name] = kinds[name](value) if equals else True
        return cls(strategy, codec, **options)

    @property
    def dense(self) -> bool:
        """Whether it is the reference, at whatever learning rate and warm-up."""
        return str(replace(self, lr=0.0, warm_up=0)) == DENSE

    def __str__(self) -> str:
        words = [self.strategy, self.codec]
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                words.append(field.name if value is True else f"{field.name}={value}")
        return " ".join(words)

    def arguments(self, clusters: int) -> NebulaArguments:
        """The same for the product.

        Raises:
            ConfigurationError: the product refuses it.
        """
        names = [f"cluster{index}" for index in range(clusters)]
        ours = [field.name for field in fields(self) if field.name not in ("lr", "warm_up")]
        options = {f"sync_{name}": getattr(self, name) for name in ours}
        options["sync_final_codec"] = self.final_codec or None
        return NebulaArguments(cluster=names[0], clusters=",".join(names), rendezvous="loopback", **options)
