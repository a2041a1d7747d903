"""The test bed of several hosts: isolated network namespaces on this machine.

Each host has its own network, name, processes, /dev/shm and /tmp. A bridge on the host ``head``
connects all hosts, and launchers run on that host. Namespaces, interfaces and addresses have no
names outside of the bed. They exist as long as process 1 of their host, and that process dies with
this process. So several beds can exist side by side, and a killed bed leaves no process and no
interface.
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
# Hydra's proxies leave these files in /tmp when they are killed.
_LEFT_BY_LAUNCHERS = ("hydra_hwloc_xmlfile_",)
_PR_SET_PDEATHSIG = 1
_UNSHARE = ("unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child")


def problem():
    """Return the reason why no test bed can run here and the remedy, or an empty string."""
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
    """A host of the test bed; see :class:`Hosts`.

    Attributes:
        name: Its name.
        address: Its IP address in the bed.
        pid: Outside pid of the process that holds the namespaces.
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
            start_new_session=True,  # Ctrl-C must reach only the tests, which then end the hosts
            preexec_fn=_die_with_parent,
        )
        self.pid = self._keeper.pid
        if self._keeper.stdout.readline() != "ready\n":
            self.close()
            raise RuntimeError(f"host {name} cannot be made; what its process 1 said is above")

    @property
    def hardware(self):
        """The MAC address of the node's interface, made from the bytes of the IP address."""
        return "02:00:" + ":".join(f"{int(byte):02x}" for byte in self.address.split("."))

    def ip(self, *words):
        """Run ``ip`` in the network namespace of this host."""
        enter = ["nsenter", f"--net=/proc/{self.pid}/ns/net"]
        subprocess.run([*enter, "ip", *map(str, words)], check=True)

    def path(self, name):
        """Return the outside path of a file of this host."""
        return Path(f"/proc/{self.pid}/root{name}")

    def processes(self):
        """Return the command lines of all processes except process 1, by inside pid."""
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
        """Return the outside paths of the entries of /dev/shm and /tmp.

        Shared folders, and files that launchers leave, are omitted.
        """
        found = [*self.path("/dev/shm").iterdir(), *self.path("/tmp").iterdir()]
        found = [path for path in found if path.name not in self._shared]
        return [path for path in found if not path.name.startswith(_LEFT_BY_LAUNCHERS)]

    def close(self):
        """End the host and all its processes."""
        self._keeper.kill()
        self._keeper.wait()
        self._keeper.stdout.read()  # returns at the end of process 1
        self._keeper.stdout.close()


class Hosts:
    """A test bed: the host ``head`` and nodes, each connected to the bridge by a veth pair.

    Args:
        shared: Folders visible on all hosts, as on a shared file system. Folders outside of /tmp
            are visible on all hosts anyway.

    Attributes:
        folder: The folder of this bed.
        shell: A program that replaces ssh.
        nodes: The hosts for ranks, by name.
        head: The host for launchers.
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
        """Create the bridge and connect the nodes."""
        self.head.ip("link", "add", BRIDGE, "type", "bridge")
        self.head.ip("addr", "add", f"{self.head.address}/24", "dev", BRIDGE)
        self.head.ip("link", "set", BRIDGE, "up")
        for name, host in self.nodes.items():
            peer = ("peer", "name", "eth0", "address", host.hardware, "netns", host.pid)
            self.head.ip("link", "add", name, "type", "veth", *peer)
            self.head.ip("link", "set", name, "master", BRIDGE, "up")
            host.ip("addr", "add", f"{host.address}/24", "dev", "eth0")
            host.ip("link", "set", "eth0", "up")
            # As behind a router, a lost host only stops answering: ARP reports no error.
            for other in self.nodes.values():
                entry = (other.address, "lladdr", other.hardware, "dev", "eth0")
                host.ip("neigh", "replace", *entry, "nud", "permanent")

    def cut(self, name):
        """Take down the link of a node. Packets are lost without an error."""
        self.head.ip("link", "set", "dev", name, "down")

    def mend(self, name):
        """Restore the link of a node."""
        self.head.ip("link", "set", "dev", name, "up")

    def power_off(self, name):
        """End all processes of a node. It does not answer any more."""
        (self.folder / f"{name}.socket").rename(self.folder / f"{name}.off")
        self.cut(name)
        enter = ["nsenter", f"--pid=/proc/{self.nodes[name].pid}/ns/pid_for_children"]
        subprocess.run([*enter, "sh", "-c", "kill -9 -1"], check=True)

    def power_on(self, name):
        """Let a node answer again, without its earlier processes and files."""
        (self.folder / f"{name}.off").rename(self.folder / f"{name}.socket")
        self.mend(name)
        # Connections of the killed processes may have found no address of the other side.
        self.nodes[name].ip("neigh", "flush", "dev", "eth0")
        self.head.ip("neigh", "flush", "dev", BRIDGE)
        self.clear()

    def command(self, host, words):
        """Return the command line that runs a command on a host.

        The command has the environment and the folder of its caller, and ends when the caller ends.
        """
        return [str(self.shell), "-t", host, f"exec {shlex.join(map(str, words))}"]

    def remains(self):
        """Return a line of text for each process and each file left on the hosts."""
        found = []
        for host in self._made:
            found += [f"{host.name}: {line}" for line in host.processes().values()]
            found += [f"{host.name}: {path}" for path in host.files()]
        return found

    def await_end(self, limit_s):
        """Wait until no process is left on the hosts, or the limit is over."""
        deadline = time.monotonic() + limit_s
        while any(host.processes() for host in self._made) and time.monotonic() < deadline:
            time.sleep(0.02)

    def clear(self):
        """Kill all processes of the hosts and remove the files."""
        self.end_processes()
        for host in self._made:
            for path in host.files():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def end_processes(self):
        """Kill all processes of the hosts."""
        for host in self._made:
            if host.processes():
                subprocess.run([self.shell, host.name, "kill -9 -1"], check=False)

    def close(self):
        """End all hosts and remove the folder."""
        for host in self._made:
            host.close()
        shutil.rmtree(self.folder)
        os.close(self._lock)


def _below_tmp(paths):
    """Return the folders that a private /tmp would hide, without folders nested in another."""
    below = {Path(path).resolve() for path in paths}
    below = {path for path in below if path.is_relative_to("/tmp")}
    return sorted(path for path in below if not below & set(path.parents))


def _locked_folder():
    """Create a folder. Return it with a descriptor that holds a lock on it.

    The folder gets its final name once it is locked.
    """
    folder = Path(tempfile.mkdtemp(prefix="mpidist-new-"))
    lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder.rename(folder.with_name(folder.name.replace("mpidist-new-", _PREFIX))), lock


def _remove_abandoned():
    """Remove the folders of beds with a killed creator. Their hosts died with the creator."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another process has removed the folder
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)  # another process may do the same
        except BlockingIOError:
            continue  # the creator is alive
        finally:
            os.close(lock)


def _die_with_parent():
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
