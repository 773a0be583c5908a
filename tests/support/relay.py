"""Holds packets back: ``relay.py DELAY_S LOSS DEVICE ADDRESS=NAMESPACE_FILE...``, started by ``wan.py``.

Makes a TUN device in each namespace, reads packets from each and writes them, after the delay, to the device
of the address they are for. Obeys orders on standard input, a JSON object per line, and answers each with a line of
its own; ends with its input, and then the devices are gone too. An order sets any of

    {"cut": [ADDRESS...], "parted": [[ADDRESS, ADDRESS]...], "loss": {ADDRESS: SHARE}}     from now on
    {"damage": ADDRESS, "seed": N, "mend": true}     a byte in the next full packet from there, once
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import selectors
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Any

_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_CLONE_NEWNET = 0x40000000
_PACKET_BYTES = 1 << 16
_QUEUE_PACKETS = 20_000  # as a router's memory: beyond it packets are lost
_BATCH = 64  # packets read from one device before the others get their turn
_TCP = 6
_FULL_BYTES = 1000  # of payload: less is an acknowledgement or a word between couriers


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


class Weather:
    """What becomes of a packet on the way. Addresses are packed IPv4 ones."""

    def __init__(self, loss: float) -> None:
        self._everywhere = loss
        self._cut: set[bytes] = set()
        self._parted: set[frozenset[bytes]] = set()
        self._loss: dict[bytes, float] = {}
        self._damage: dict[bytes, tuple[random.Random, bool]] = {}

    def obey(self, order: dict[str, Any]) -> None:
        if "cut" in order:
            self._cut = {socket.inet_aton(address) for address in order["cut"]}
        if "parted" in order:
            self._parted = {frozenset(map(socket.inet_aton, pair)) for pair in order["parted"]}
        if "loss" in order:
            self._loss = {socket.inet_aton(address): share for address, share in order["loss"].items()}
        if "damage" in order:
            self._damage[socket.inet_aton(order["damage"])] = random.Random(order["seed"]), order["mend"]

    def passes(self, packet: bytes) -> bytes | None:
        """The packet as it arrives, or None if it does not."""
        source, target = packet[12:16], packet[16:20]
        if source in self._cut or target in self._cut or frozenset((source, target)) in self._parted:
            return None
        loss = self._everywhere or max(self._loss.get(source, 0.0), self._loss.get(target, 0.0))
        if loss and random.random() < loss:
            return None
        if source in self._damage and (damaged := damage(packet, *self._damage[source])) is not None:
            del self._damage[source]
            return damaged
        return packet


def damage(packet: bytes, source: random.Random, mend: bool) -> bytes | None:
    """An IPv4 packet with one byte of its TCP payload changed; None if it carries too little.

    Args:
        packet: headers included.
        source: chooses the byte and its new value.
        mend: correct TCP's checksum, so that TCP hands the damage on instead of asking for the packet again.
    """
    header = 4 * (packet[0] & 15)
    payload = header + 4 * (packet[header + 12] >> 4) if packet[9] == _TCP else len(packet)
    if len(packet) - payload < _FULL_BYTES:
        return None
    changed = bytearray(packet)
    changed[source.randrange(payload, len(packet))] ^= source.randrange(1, 256)
    if mend:
        changed[header + 16 : header + 18] = b"\0\0"
        length = len(changed) - header
        pseudo = packet[12:20] + struct.pack("!BBH", 0, _TCP, length)
        words = pseudo + bytes(changed[header:]) + b"\0" * (length % 2)
        total = sum(struct.unpack(f"!{len(words) // 2}H", words))
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        changed[header + 16 : header + 18] = struct.pack("!H", ~total & 0xFFFF)
    return bytes(changed)


def relay(delay_s: float, weather: Weather, tuns: dict[bytes, int]) -> None:
    """Work until standard input ends. ``tuns``: packed IPv4 address -> device."""
    waiting: deque[tuple[float, int, bytes]] = deque()
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
                weather.obey(json.loads(order))
                os.write(1, b"done\n")
                continue
            for _ in range(_BATCH):
                try:
                    packet = os.read(key.fd, _PACKET_BYTES)
                except BlockingIOError:
                    break
                target = packet[16:20]
                if (
                    target in tuns
                    and len(waiting) < _QUEUE_PACKETS
                    and (arriving := weather.passes(packet)) is not None
                ):
                    waiting.append((time.monotonic() + delay_s, tuns[target], arriving))
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
    relay(delay_s, Weather(loss), tuns)


if __name__ == "__main__":
    main()
