"""Where a cluster starts by default: its compose file and its ports. Help imports this file alone."""

from pathlib import Path
from typing import Final

BESIDE_US: Final = Path(__file__).parents[2] / "docker-compose.yml"  # this path holds in a checkout and in a wheel
FIRST_PORT: Final = 7400
NUM_PORTS: Final = 100  # ports from the first one on; a cluster uses no others
