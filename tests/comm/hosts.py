"""Hosts: network namespaces that a bridge joins, where they may be made."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

HOSTS = ("10.231.7.1", "10.231.7.2", "10.231.7.3")


@contextmanager
def joined_hosts(count: int) -> Iterator[list[str]]:
    """The names of network namespaces, each with its end, eth0, of a link to a bridge.

    A program of tests/programs.py starts in the namespace of that name.  The other end of the
    link of host k is `port{k}` in the namespace `bridge_of(hosts)`.
    """
    names = [f"sw{os.getpid()}{side}" for side in "abc"[:count]]
    bridge = bridge_of(names)
    commands = [f"ip netns add {name}" for name in (bridge, *names)]
    commands += [f"ip -n {bridge} link add br0 type bridge", f"ip -n {bridge} link set br0 up"]
    for k, name in enumerate(names):
        commands += [
            f"ip link add eth0 netns {name} type veth peer port{k} netns {bridge}",
            f"ip -n {bridge} link set port{k} master br0",
            f"ip -n {bridge} link set port{k} up",
            f"ip -n {name} addr add {HOSTS[k]}/24 dev eth0",
            *(f"ip -n {name} link set {device} up" for device in ("lo", "eth0")),
        ]
    try:
        for command in commands:
            made = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"no network namespaces here: {command}: {made.stderr.strip()}")
        yield names
    except FileNotFoundError:
        pytest.skip("no network namespaces here: there is no command 'ip'")
    finally:
        for name in (bridge, *names):
            with suppress(FileNotFoundError):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def bridge_of(hosts: list[str]) -> str:
    return f"{hosts[0][:-1]}z"


def set_link(hosts: list[str], host: int, state: str) -> None:
    command = ["ip", "-n", bridge_of(hosts), "link", "set", f"port{host}", state]
    subprocess.run(command, check=True)


def enter_host(name: str) -> None:
    """Move this process, which has no threads yet, to a host."""
    with Path("/run/netns", name).open() as namespace:
        ctypes.CDLL(None).setns(namespace.fileno(), 0)


def processes_on(host: str) -> list[int]:
    command = ["ip", "netns", "pids", host]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(pid) for pid in found.stdout.split()]
