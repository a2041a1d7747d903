"""Time endpoints over mpi and tcp against plain mpi4py and plain ZeroMQ.

    mpidist run -n 2 scripts/bench_endpoint.py [--json results.json]

Rank 1 serves rank 0. "round trip" sends an array and receives it back, one at a time. The first row
sends the array as the body of messages, the other rows as a buffer. "stream" sends arrays with four
under way, and an empty message answers each. Every time is a median, in microseconds a request. The
sides take turns in one run. "of raw" is the time of plain mpi4py or ZeroMQ over ours. Over tcp,
large buffers go through shared memory, as within a host. With --sockets they go through sockets, as
between hosts. The last table is about an idle server: the time of the first request, and the share
of a core that the waiting server uses.
"""

import argparse
import statistics
import time

import numpy as np
import zmq
from _bench import alternate, report, size_text

from mpidist import Reply, open_endpoint
from mpidist.mpi import world
from mpidist.rpc import tcp_connection

SIZES = [8, 1 << 10, 32 << 10, 1 << 20, 4 << 20, 16 << 20]
UNDER_WAY = 4
TAG, REPLY_TAG = 1, 2


def main():
    """Serve on rank 1 and measure on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    parser.add_argument("--idle", type=float, default=2.0, help="seconds without requests")
    parser.add_argument("--sockets", action="store_true", help="share no memory over tcp")
    args = parser.parse_args()
    if args.sockets:
        tcp_connection._open_offered = lambda reference: None
    comm = world().comm
    if comm.size != 2:
        raise SystemExit("start it on 2 ranks: mpidist run -n 2 scripts/bench_endpoint.py")
    if comm.rank == 1:
        Server(comm).serve()
        return
    client = Client(comm)
    sizes = [size for size in SIZES if size <= args.largest]
    columns = ["size", "mpi us", "mpi4py us", "of raw", "tcp us", "zmq us", "of raw"]
    for title in ("round trip", "stream"):
        rows = [client.compare(title, nbytes, args.rounds) for nbytes in sizes]
        if title == "round trip":
            rows.insert(0, client.compare(title, SIZES[0], args.rounds, in_body=True))
        path = args.json and args.json.replace(".json", f"-{title.replace(' ', '-')}.json")
        report(title, columns, rows, {}, path)
    path = args.json and args.json.replace(".json", "-idle.json")
    columns = ["transport", "first request us", "% of a core"]
    report(
        "after idling", columns, [client.idle(kind, args.idle) for kind in ("mpi", "tcp")], {}, path
    )
    client.stop()


class Server:
    """Rank 1: carries out the orders of rank 0, by an endpoint or by a raw peer."""

    def __init__(self, comm):
        self.comm = comm
        self.endpoints = {kind: open_endpoint(kind) for kind in ("mpi", "tcp")}
        self.served = 0
        for endpoint in self.endpoints.values():
            endpoint.register("bench", {"Echo": self.echo, "Put": self.put, "End": self.end})
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        addresses = {kind: str(endpoint.address) for kind, endpoint in self.endpoints.items()}
        comm.send((addresses, port), 0)

    def serve(self):
        """Carry out orders until the last one."""
        while (order := self.comm.recv(source=0, tag=TAG)) is not None:
            kind, title, nbytes = order
            if kind in self.endpoints:
                self.ended = False
                begin = time.process_time()
                self.endpoints[kind].serve(lambda: self.ended)
                self.comm.send(time.process_time() - begin, 0, REPLY_TAG)
            else:
                getattr(self, kind)(title, nbytes)
        for endpoint in self.endpoints.values():
            endpoint.close()
        self.context.destroy(0)

    def echo(self, request):
        """Return the body and the buffers of the request."""
        return Reply(request.body, request.buffers)

    def put(self, request):
        """Accept the request without a result."""

    def end(self, request):
        """End the turn of the endpoint."""
        self.ended = True

    def mpi4py(self, title, nbytes):
        """Echo or receive arrays over mpi4py until an empty array comes."""
        array = np.empty(nbytes, np.uint8)
        while True:
            status = self.receive_raw(array)
            if status.count == 0:
                return
            self.comm.Send(array if title == "round trip" else array[:0], 0, REPLY_TAG)

    def receive_raw(self, array):
        """Receive one message of rank 0 and return its status."""
        from mpi4py import MPI

        status = MPI.Status()
        self.comm.Recv(array, 0, TAG, status)
        return status

    def zmq(self, title, nbytes):
        """Echo or receive arrays over ZeroMQ until an empty array comes."""
        while True:
            name, frame = self.socket.recv_multipart(copy=False)
            if len(frame) == 0:
                return
            self.socket.send_multipart([name, frame if title == "round trip" else b""], copy=False)


class Client:
    """Rank 0: sends requests, by an endpoint or by a raw peer."""

    def __init__(self, comm):
        self.comm = comm
        self.addresses, port = comm.recv(source=1)
        self.endpoints = {kind: open_endpoint(kind) for kind in ("mpi", "tcp")}
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def compare(self, title, nbytes, rounds, in_body=False):
        """Return a row of a table."""
        data, out = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        count = max(2 * UNDER_WAY, min(400, (64 << 20) // nbytes))
        echo = title == "round trip"
        turns = {
            "mpi": lambda: self.ask("mpi", echo, data, out, count, in_body),
            "mpi4py": lambda: self.ask_mpi4py(echo, data, out, count),
            "tcp": lambda: self.ask("tcp", echo, data, out, count, in_body),
            "zmq": lambda: self.ask_zmq(echo, data, out, count),
        }
        sides = {kind: self.turn(kind, title, nbytes, turn) for kind, turn in turns.items()}
        times = alternate(sides, rounds, 0.0, warm=sides)
        us = {kind: 1e6 * seconds / count for kind, seconds in times.items()}
        ratios = {"mpi": us["mpi4py"] / us["mpi"], "tcp": us["zmq"] / us["tcp"]}
        return [
            size_text(nbytes) + (" body" if in_body else ""),
            us["mpi"], us["mpi4py"], ratios["mpi"], us["tcp"], us["zmq"], ratios["tcp"],
        ]  # fmt: skip

    def turn(self, kind, title, nbytes, ask):
        """Return a function for a turn of a side.

        The function sends an order to rank 1, sends the requests, and ends the turn.
        """

        def run():
            self.comm.send((kind, title, nbytes), 1, TAG)
            ask()
            if kind in self.endpoints:
                self.endpoints[kind].call(self.addresses[kind], "bench/End").wait()
                self.comm.recv(source=1, tag=REPLY_TAG)
            elif kind == "mpi4py":
                self.comm.Send(np.empty(0, np.uint8), 1, TAG)
            else:
                self.socket.send(b"")

        return run

    def ask(self, kind, echo, data, out, count, in_body):
        """Send requests to the endpoint."""
        endpoint, address = self.endpoints[kind], self.addresses[kind]
        if in_body:
            for _ in range(count):
                endpoint.call(address, "bench/Echo", data.tobytes()).wait()
        elif echo:
            for _ in range(count):
                endpoint.call(address, "bench/Echo", b"", [data], into=[out]).wait()
        else:
            works = []
            for _ in range(count):
                works.append(endpoint.call(address, "bench/Put", b"", [data]))
                if len(works) == UNDER_WAY:
                    works.pop(0).wait()
            for work in works:
                work.wait()

    def ask_mpi4py(self, echo, data, out, count):
        """Send the same arrays over mpi4py."""
        if echo:
            for _ in range(count):
                self.comm.Send(data, 1, TAG)
                self.comm.Recv(out, 1, REPLY_TAG)
            return
        under_way = []
        for _ in range(count):
            under_way.append(
                (self.comm.Isend(data, 1, TAG), self.comm.Irecv(out[:0], 1, REPLY_TAG))
            )
            if len(under_way) == UNDER_WAY:
                for request in under_way.pop(0):
                    request.Wait()
        for pair in under_way:
            for request in pair:
                request.Wait()

    def ask_zmq(self, echo, data, out, count):
        """Send the same arrays over ZeroMQ."""
        under_way = 0
        for _ in range(count):
            self.socket.send(data, copy=False)
            under_way += 1
            if echo:
                frame = self.socket.recv(copy=False)
                np.copyto(out, np.frombuffer(frame.buffer, np.uint8))
                under_way = 0
            elif under_way == UNDER_WAY:
                self.socket.recv()
                under_way -= 1
        for _ in range(under_way):
            self.socket.recv()

    def idle(self, kind, seconds):
        """Return a row about an idle server.

        The row has the median time of the first request and the share of a core in percent.
        """
        first = []
        data = np.ones(8, np.uint8)
        for _ in range(9):
            self.comm.send((kind, "", 8), 1, TAG)
            time.sleep(seconds / 9)
            begin = time.perf_counter()
            self.endpoints[kind].call(self.addresses[kind], "bench/Echo", b"", [data]).wait()
            first.append(time.perf_counter() - begin)
            self.endpoints[kind].call(self.addresses[kind], "bench/End").wait()
            self.comm.recv(source=1, tag=REPLY_TAG)
        self.comm.send((kind, "", 8), 1, TAG)
        time.sleep(seconds)
        self.endpoints[kind].call(self.addresses[kind], "bench/End").wait()
        busy = self.comm.recv(source=1, tag=REPLY_TAG)
        return [kind, 1e6 * statistics.median(first), 100 * busy / seconds]

    def stop(self):
        """Stop rank 1 and close the endpoints."""
        self.comm.send(None, 1, TAG)
        for endpoint in self.endpoints.values():
            endpoint.close()
        self.context.destroy(0)


if __name__ == "__main__":
    main()
