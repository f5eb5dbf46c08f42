"""Clients behind Flower: the only place that imports flwr and ray (extras `flower`, `flower-simulation`)."""

import os

# Both read these when they are imported, so they are set before. Neither then tells anybody of this run, asks for news or
# installs anything.
FLOWER_SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
_SWITCHES = {
    **FLOWER_SWITCHES,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns that it will be so
}
if not os.environ.get("RAY_ADDRESS"):
    _SWITCHES["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # on every system: Ray listens to this machine only
for _name, _value in _SWITCHES.items():
    os.environ.setdefault(_name, _value)
