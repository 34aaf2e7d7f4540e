"""Two hosts: network namespaces that one link joins, where they may be made."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

HOSTS = ("10.231.7.1", "10.231.7.2")


@contextmanager
def two_hosts() -> Iterator[list[list[str]]]:
    """What enters each of two network namespaces, which one link joins."""
    names = [f"sw{os.getpid()}{side}" for side in "ab"]
    commands = [f"ip netns add {name}" for name in names]
    commands.append(f"ip link add eth0 netns {names[0]} type veth peer eth0 netns {names[1]}")
    for name, address in zip(names, HOSTS, strict=True):
        commands.append(f"ip -n {name} addr add {address}/24 dev eth0")
        commands += [f"ip -n {name} link set {device} up" for device in ("lo", "eth0")]
    try:
        for command in commands:
            made = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"no network namespaces here: {command}: {made.stderr.strip()}")
        gloo = ["env", "GLOO_SOCKET_IFNAME=eth0"]
        yield [["ip", "netns", "exec", name, *gloo] for name in names]
    except FileNotFoundError:
        pytest.skip("no network namespaces here: there is no command 'ip'")
    finally:
        for name in names:
            with suppress(FileNotFoundError):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
