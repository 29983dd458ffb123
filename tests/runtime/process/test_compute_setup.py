"""The store by which ranks find each other."""

import socket

import psutil
from torch._C._distributed_c10d import TCPStore

from msrl_graph.runtime.process.compute_setup import open_store


def test_the_ranks_store_listens_at_one_address():
    store = open_store("127.0.0.1")
    here = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [a.ip for a in here if a.port == store.port] == ["127.0.0.1"]
    other = TCPStore("127.0.0.1", store.port, is_master=False)
    other.set("a", "b")
    assert store.get("a") == b"b"
    with socket.socket() as elsewhere:
        assert elsewhere.connect_ex(("127.0.0.2", store.port))
