"""How a run starts Ray on its machine."""

import pytest
from ray._private import parameter, services, utils

from msrl_graph.runtime.process.cluster_join import without_idle_servers


@pytest.mark.parametrize("logs", [True, False])
def test_ray_starts_without_the_servers_that_no_run_uses_and_later_as_before(logs):
    before = (parameter.RayParams, services.start_api_server, utils.get_dashboard_dependency_error)
    with pytest.raises(KeyError), without_idle_servers(logs):
        params = parameter.RayParams(no_monitor=False)
        assert isinstance(params, before[0])
        assert params.no_monitor and params.include_log_monitor == logs
        assert services.start_api_server(False, False, port=1) == (None, None)
        assert utils.get_dashboard_dependency_error() is not None
        raise KeyError
    assert (parameter.RayParams, services.start_api_server, utils.get_dashboard_dependency_error) == before
