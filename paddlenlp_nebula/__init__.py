"""Train one PaddleNLP model on several clusters over slow wide-area links.

Importing this package starts nothing and imports neither Paddle nor MPI: the public names are
loaded on first use (PEP 562), which also keeps the courier processes light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddlenlp_nebula.arguments import NebulaArguments
    from paddlenlp_nebula.callback import NebulaCallback
    from paddlenlp_nebula.trainer import NebulaTrainer

__all__ = ["NebulaArguments", "NebulaCallback", "NebulaTrainer", "__version__"]

__version__ = "0.1.0"

_HOME = {"NebulaArguments": "arguments", "NebulaCallback": "callback", "NebulaTrainer": "trainer"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
