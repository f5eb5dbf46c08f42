"""Clients on other machines, behind Flower: the only package that imports flwr (extra `flower`)."""

import os

# Flower reads these when it is imported: no telemetry, no questions for updates, no packages installed.
FLOWER_SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
os.environ.update({**FLOWER_SWITCHES, **os.environ})
