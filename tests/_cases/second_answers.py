"""Handlers that answer a request twice, and checks of the reply and the log."""

from __future__ import annotations

import logging

from _cases.endpoints import LIMIT_S, wait_until
from mpidist import LATER, Reply

LOGGER = "mpidist.rpc.endpoint"


def replies_twice(request):
    request.reply(b"first")
    request.reply(b"second")
    return LATER


def fails_after_its_reply(request):
    request.reply(b"first")
    request.fail(ValueError("a late error"))
    return LATER


def replies_after_its_failure(request):
    request.fail(KeyError("first"))
    request.reply(b"second")
    return LATER


def returns_a_reply_after_its_reply(request):
    request.reply(b"first")
    return Reply(b"second")


def returns_none_after_its_reply(request):
    request.reply(b"first")


def raises_after_its_reply(request):
    request.reply(b"first")
    raise RuntimeError("a late error")


def exits_after_its_reply(request):
    request.reply(b"first")
    raise SystemExit(3)


HANDLERS = (
    replies_twice,
    fails_after_its_reply,
    replies_after_its_failure,
    returns_a_reply_after_its_reply,
    returns_none_after_its_reply,
    raises_after_its_reply,
    exits_after_its_reply,
)
# Log text for the second reply, besides method and peer.
TOLD = {
    fails_after_its_reply: "ValueError: a late error",
    raises_after_its_reply: "RuntimeError: a late error",
    exits_after_its_reply: "SystemExit: 3",
}


def serve(endpoint, handler):
    """Serve ``twice/Answer`` on a thread. Return a list that collects the calling peers."""
    peers = []
    endpoint.register("twice", {"Answer": lambda r: peers.append(r.process) or handler(r)})
    endpoint.serve_in_thread()
    return peers


def answer_of(endpoint, address):
    """Call ``twice/Answer``. Return the body of the first reply, or the name of its error."""
    work = endpoint.call(address, "twice/Answer", timeout=LIMIT_S)
    try:
        return work.result().body
    except Exception as error:
        return type(error).__name__


def check_answer(handler, answer):
    """Assert that the first answer has arrived."""
    assert answer == ("UnknownError" if handler is replies_after_its_failure else b"first")


def check_log(caplog, handler, peer):
    """Assert that the second reply was logged as an error, once, with method and peer."""

    def told():
        return [
            record
            for record in caplog.records
            if record.name == LOGGER and "second reply" in record.getMessage()
        ]

    wait_until(told)
    (record,) = told()
    assert record.levelno == logging.ERROR
    assert f"a second reply to twice/Answer of {peer} is dropped" in record.getMessage()
    if handler in TOLD:
        assert TOLD[handler] in caplog.text
    else:
        assert record.exc_info is None
