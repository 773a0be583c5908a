"""Host codec -> its twin on a device."""

from __future__ import annotations

from paddlenlp_nebula.codec.cast import Cast
from paddlenlp_nebula.codec.codec import Codec
from paddlenlp_nebula.codec.device.cast import DeviceCast
from paddlenlp_nebula.codec.device.codec import DeviceCodec
from paddlenlp_nebula.codec.device.dgc import DeviceDeepGradientCompression
from paddlenlp_nebula.codec.device.feedback import DeviceErrorFeedback
from paddlenlp_nebula.codec.device.lowrank import DeviceLowRank
from paddlenlp_nebula.codec.device.quantize import DeviceQuantization
from paddlenlp_nebula.codec.device.randomk import DeviceRandomK
from paddlenlp_nebula.codec.device.topk import DeviceTopK
from paddlenlp_nebula.codec.dgc import DeepGradientCompression
from paddlenlp_nebula.codec.feedback import ErrorFeedback
from paddlenlp_nebula.codec.lowrank import LowRank
from paddlenlp_nebula.codec.quantize import Quantization
from paddlenlp_nebula.codec.randomk import RandomK
from paddlenlp_nebula.codec.topk import TopK
from paddlenlp_nebula.errors import ConfigurationError

__all__ = ["device_codec"]


def device_codec(codec: Codec) -> DeviceCodec:
    """The codec with the same payloads, for tensors on any of Paddle's devices.

    Raises:
        ConfigurationError: it has none.
    """
    match codec:
        case Cast():
            return DeviceCast(codec)
        case Quantization():
            return DeviceQuantization(codec)
        case TopK():
            return DeviceTopK(codec)
        case LowRank():
            return DeviceLowRank(codec)
        case DeepGradientCompression():
            return DeviceDeepGradientCompression(codec)
        case RandomK():
            return DeviceRandomK(codec, device_codec(codec.inner))
        case ErrorFeedback():
            return DeviceErrorFeedback(codec, device_codec(codec.codec))
    raise ConfigurationError(
        [f"sync_codec={codec.spec!r} must have a device backend to encode on a device: it has none"]
    )
