"""Chooses the device that a recipe names."""

from __future__ import annotations

from paddlenlp_nebula.errors import ConfigurationError

__all__ = ["use_device"]


def use_device(name: str) -> None:
    """Make ``name`` (``cpu``, ``gpu``, ...) Paddle's device.

    Raises:
        ConfigurationError: if this machine's Paddle cannot use it.
    """
    import paddle

    try:
        paddle.set_device(name)
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ConfigurationError(
            [f"device must be one that Paddle can use here, got {name!r} ({reason}); without a GPU, set device: cpu"]
        ) from None
