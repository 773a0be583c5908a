"""Holds packets back: ``relay.py DELAY_S LOSS DEVICE ADDRESS=NAMESPACE_FILE...``, started by ``wan.py``.

Makes a TUN device in each namespace, reads packets from each and writes them, after the delay, to the device
of the address they are for. Obeys ``cut ADDRESS...`` and ``restore`` on standard input and ends with it; then
the devices are gone too.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import selectors
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_CLONE_NEWNET = 0x40000000
_PACKET_BYTES = 1 << 16
_QUEUE_PACKETS = 20_000  # as a router's memory: beyond it packets are lost
_BATCH = 64  # packets read from one device before the others get their turn


def open_tun(namespace: str, device: str) -> int:
    """A TUN device in another network namespace; this process stays in that one."""
    libc = ctypes.CDLL(None, use_errno=True)
    there = os.open(namespace, os.O_RDONLY)
    if libc.setns(there, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(there)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TUN_WITHOUT_HEADER))
    return tun


def relay(delay_s: float, loss: float, tuns: dict[bytes, int]) -> None:
    """Work until standard input ends. ``tuns``: packed IPv4 address -> device."""
    waiting: deque[tuple[float, int, bytes]] = deque()
    cut: set[bytes] = set()
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    for tun in tuns.values():
        selector.register(tun, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select(max(0.0, waiting[0][0] - time.monotonic()) if waiting else None):
            if key.fd == 0:
                order = os.read(0, 4096)
                if not order:
                    return
                words = order.decode().split()
                cut = {socket.inet_aton(word) for word in words[1:]} if words[0] == "cut" else set()
                os.write(1, b"done\n")
                continue
            for _ in range(_BATCH):
                try:
                    packet = os.read(key.fd, _PACKET_BYTES)
                except BlockingIOError:
                    break
                source, target = packet[12:16], packet[16:20]
                lost = source in cut or target in cut or (loss and random.random() < loss)
                if target in tuns and not lost and len(waiting) < _QUEUE_PACKETS:
                    waiting.append((time.monotonic() + delay_s, tuns[target], packet))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, tun, packet = waiting.popleft()
            with suppress(OSError):  # a device that is down takes nothing
                os.write(tun, packet)


def main() -> None:
    delay_s, loss, device = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    pairs = (argument.split("=", 1) for argument in sys.argv[4:])
    tuns = {socket.inet_aton(address): open_tun(namespace, device) for address, namespace in pairs}
    os.write(1, b"ready\n")
    relay(delay_s, loss, tuns)


if __name__ == "__main__":
    main()
