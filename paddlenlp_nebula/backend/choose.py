"""The settings' choice of a backend."""

from __future__ import annotations

from collections.abc import Sequence

from paddlenlp_nebula.backend.backend import Backend
from paddlenlp_nebula.backend.device import DeviceBackend
from paddlenlp_nebula.backend.host import HOST
from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.tensors import Tensor

__all__ = ["choose_backend"]


def choose_backend(
    setting: str, parameters: Sequence[Tensor], only_host: str | None = None
) -> tuple[Backend, str | None]:
    """What ``sync_backend`` asks for, and why ``auto`` takes the host although parameters lie on a device, if it does.

    Args:
        setting: "auto": the device if parameters lie on anything but a CPU; "host"; "device", which may be a CPU, too.
        parameters: those that travel.
        only_host: the reason, if the settings leave nothing but the host, such as "sync_lora_merge='product' ...".

    Raises:
        ConfigurationError: "device" cannot be.
    """
    places = sorted({str(parameter.place) for parameter in parameters})
    if setting == "host" or (setting == "auto" and all(parameter.place.is_cpu_place() for parameter in parameters)):
        return HOST, None
    reason = only_host
    if len(places) > 1:
        reason = f"the parameters that travel lie in several places ({', '.join(places)})"
    if reason is None:
        return DeviceBackend(parameters[0].place), None
    if setting == "device":
        raise ConfigurationError([f"sync_backend must be 'auto' or 'host' where {reason}, got 'device'"])
    return HOST, f"sync_backend='auto' takes the host although parameters lie on a device ({places[0]}): {reason}"
