"""The test bed of many hosts: network namespaces of this machine that know nothing of each other.

A host has its own network, name, processes, /dev/shm and /tmp. All hang on one switch, the bridge
of the host ``head``, where launchers run. Nothing of it has a name outside: namespaces, interfaces
and addresses exist as long as process 1 of their host does, which dies with this process. So
several beds can stand side by side, and nothing is left of one, however its maker ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HEAD = "head"
NODES = ("node1", "node2", "node3")
BRIDGE = "br0"
NETWORK = "10.77.0"
_ROOT = Path(__file__).resolve().parent.parent.parent
_PREFIX = "mpidist-hosts-"
_PROGRAMS = ("ip", "mount", "nsenter", "unshare")
# Hydra's proxies leave it in /tmp when they are killed.
_LEFT_BY_LAUNCHERS = ("hydra_hwloc_xmlfile_",)
_PR_SET_PDEATHSIG = 1
_UNSHARE = ("unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child")


def problem():
    """Why there can be no test bed here, and what to do; empty if there can."""
    if os.geteuid() != 0:
        return "it needs root, for network namespaces; run it as root (sudo, or a container)"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"it needs {', '.join(missing)}; install iproute2 and util-linux"
    test = f"ip link add {BRIDGE} type bridge && ip link add node type veth peer name eth0"
    command = [*_UNSHARE, "--mount-proc", "sh", "-c", f"{test} && mount -t tmpfs tmpfs /dev/shm"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return (
            f"no namespaces with a bridge, veth and mounts can be made ({tried.stderr.strip()}); "
            "give the container CAP_SYS_ADMIN and CAP_NET_ADMIN, or take another machine"
        )
    return ""


class Host:
    """One host; see :class:`Hosts`.

    Attributes:
        name: Its name.
        address: Its address in the network.
        pid: Of the process that keeps its namespaces, as seen from outside.
    """

    def __init__(self, folder, name, address, shared):
        self.name = name
        self.address = address
        self._shared = {path.parts[2] for path in shared}
        command = [*_UNSHARE, "--mount-proc", sys.executable, "-I", "-S"]
        program = str(Path(__file__).with_name("host_init.py"))
        self._keeper = subprocess.Popen(
            [*command, program, str(folder), name, *map(str, shared)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests, which then end the hosts
            preexec_fn=_die_with_parent,
        )
        self.pid = self._keeper.pid
        if self._keeper.stdout.readline() != "ready\n":
            self.close()
            raise RuntimeError(f"host {name} cannot be made; what its process 1 said is above")

    @property
    def hardware(self):
        """Hardware address of a node's interface: the bytes of the other one."""
        return "02:00:" + ":".join(f"{int(byte):02x}" for byte in self.address.split("."))

    def ip(self, *words):
        """Run ``ip`` in the network of this host."""
        enter = ["nsenter", f"--net=/proc/{self.pid}/ns/net"]
        subprocess.run([*enter, "ip", *map(str, words)], check=True)

    def path(self, name):
        """A file of this host, as seen from outside."""
        return Path(f"/proc/{self.pid}/root{name}")

    def processes(self):
        """Command lines of all processes but the first, by pid as seen inside."""
        found = {}
        for folder in self.path("/proc").glob("[0-9]*"):
            try:
                line = (folder / "cmdline").read_bytes()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if folder.name != "1" and state not in "ZX":
                found[int(folder.name)] = line.replace(b"\0", b" ").decode(errors="replace")
        return found

    def files(self):
        """What lies in its /dev/shm and /tmp, but for shared folders; as seen from outside."""
        found = [*self.path("/dev/shm").iterdir(), *self.path("/tmp").iterdir()]
        found = [path for path in found if path.name not in self._shared]
        return [path for path in found if not path.name.startswith(_LEFT_BY_LAUNCHERS)]

    def close(self):
        """End the host with all its processes."""
        self._keeper.kill()
        self._keeper.wait()
        self._keeper.stdout.read()  # up to the end of process 1
        self._keeper.stdout.close()


class Hosts:
    """The head and some nodes, each joined to the head's bridge by a cable of its own.

    Args:
        shared: Folders that all hosts see, as on a shared file system. What is not below /tmp is
            seen by all anyway.

    Attributes:
        folder: Of this bed.
        shell: A program that takes the place of ssh.
        nodes: The hosts to run on, by name.
        head: The host that launchers run on.
    """

    def __init__(self, shared=()):
        _remove_abandoned()
        self.folder, self._lock = _locked_folder()
        self.shell = self.folder / "shell"
        program = Path(__file__).with_name("host_shell.py")
        words = shlex.join([sys.executable, "-I", "-S", str(program), str(self.folder)])
        self.shell.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        self.shell.chmod(0o755)
        self._made = []
        addresses = {name: f"{NETWORK}.{n}" for n, name in enumerate((HEAD, *NODES), 1)}
        table = [f"{address} {name}\n" for name, address in addresses.items()]
        (self.folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *table]))
        places = _below_tmp([self.folder, _ROOT, sys.prefix, sys.base_prefix, *shared])
        try:
            for name, address in addresses.items():
                self._made.append(Host(self.folder, name, address, places))
            self._join()
        except BaseException:
            self.close()
            raise

    @property
    def head(self):
        return self._made[0]

    @property
    def nodes(self):
        return {host.name: host for host in self._made[1:]}

    def _join(self):
        """Build the network."""
        self.head.ip("link", "add", BRIDGE, "type", "bridge")
        self.head.ip("addr", "add", f"{self.head.address}/24", "dev", BRIDGE)
        self.head.ip("link", "set", BRIDGE, "up")
        for name, host in self.nodes.items():
            peer = ("peer", "name", "eth0", "address", host.hardware, "netns", host.pid)
            self.head.ip("link", "add", name, "type", "veth", *peer)
            self.head.ip("link", "set", name, "master", BRIDGE, "up")
            host.ip("addr", "add", f"{host.address}/24", "dev", "eth0")
            host.ip("link", "set", "eth0", "up")
            # As behind a router: nobody says that a host is not there, it only does not answer.
            for other in self.nodes.values():
                entry = (other.address, "lladdr", other.hardware, "dev", "eth0")
                host.ip("neigh", "replace", *entry, "nud", "permanent")

    def cut(self, name):
        """Pull a node's cable: nothing arrives any more, and nobody is told."""
        self.head.ip("link", "set", "dev", name, "down")

    def mend(self, name):
        """Put the cable back."""
        self.head.ip("link", "set", "dev", name, "up")

    def command(self, host, words):
        """The command line that runs another on a host.

        It has the environment and the folder of whoever runs it, and ends when that process ends.
        """
        return [str(self.shell), "-t", host, f"exec {shlex.join(map(str, words))}"]

    def remains(self):
        """What runs on the hosts, and lies in their own folders, in words."""
        found = []
        for host in self._made:
            found += [f"{host.name}: {line}" for line in host.processes().values()]
            found += [f"{host.name}: {path}" for path in host.files()]
        return found

    def await_end(self, limit_s):
        """Wait until nothing runs on the hosts any more, or the time is over."""
        deadline = time.monotonic() + limit_s
        while any(host.processes() for host in self._made) and time.monotonic() < deadline:
            time.sleep(0.02)

    def clear(self):
        """End all that runs on the hosts, and remove the files."""
        self.end_processes()
        for host in self._made:
            for path in host.files():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def end_processes(self):
        """End all that runs on the hosts."""
        for host in self._made:
            if host.processes():
                subprocess.run([self.shell, host.name, "kill -9 -1"], check=False)

    def close(self):
        """End all hosts, and leave nothing."""
        for host in self._made:
            host.close()
        shutil.rmtree(self.folder)
        os.close(self._lock)


def _below_tmp(paths):
    """The folders that a private /tmp would hide; none of them inside another."""
    below = {Path(path).resolve() for path in paths}
    below = {path for path in below if path.is_relative_to("/tmp")}
    return sorted(path for path in below if not below & set(path.parents))


def _locked_folder():
    """A folder, and a descriptor that holds a lock on it; it gets its name once it is locked."""
    folder = Path(tempfile.mkdtemp(prefix="mpidist-new-"))
    lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder.rename(folder.with_name(folder.name.replace("mpidist-new-", _PREFIX))), lock


def _remove_abandoned():
    """Remove the folders of beds whose makers were killed; the hosts have died with them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another has removed it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)  # another may be at it, too
        except BlockingIOError:
            continue  # its maker lives
        finally:
            os.close(lock)


def _die_with_parent():
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
