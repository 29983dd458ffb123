"""Commands that install packages name a place that has them."""

import json

import pytest

from msrl_graph.backends import packages

WHEEL = {"url": "file:///shelf/msrl_graph-1-py3-none-any.whl", "archive_info": {}}


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///my%20work/graph", "dir_info": {"editable": True}}, "--editable '/my work/graph[run]'"),
        ({"url": "file:///work/graph", "dir_info": {}}, "'msrl-graph[run] @ file:///work/graph'"),
        (WHEEL, "'msrl-graph[run] @ file:///shelf/msrl_graph-1-py3-none-any.whl'"),
        (None, "'msrl-graph[run]'"),
    ],
    ids=["editable", "folder", "wheel", "index"],
)
def test_an_extra_comes_from_where_the_package_came_from(origin, command, tmp_path, monkeypatch):
    """pip's record of the origin is there unless the package came from an index. `make test-wheel` runs the command."""
    installed = tmp_path / "msrl_graph-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: msrl-graph\nVersion: 1\n")
    if origin:
        (installed / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    assert packages.make_extra_command("run") == f"pip install {command}"
