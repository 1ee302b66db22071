"""One client of a daemon, for service_overhead.py: `_service_client.py SOCKET STEPS`. It attaches as engines do.

Prints as JSON: the seconds it took to attach, whether it kept that connection, its steps and those that stored nothing.
"""

import hashlib
import json
import sys
import time

from _rig import Shape

from kvtier.connector import open_tiers
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import Wanted

PARENT = b"p" * 32
FINGERPRINT = b"service_overhead, many clients".ljust(32, b".")

# Attach, and make steps that store a block of eight sequences each, without a pause.
socket, num_steps = sys.argv[1], int(sys.argv[2])
start = time.monotonic()
tiers = open_tiers(Config.load(host={"size": "16MiB"}, service={"socket": socket}), FINGERPRINT, Shape(16, 4096))
seconds = time.monotonic() - start
member, num_empty = getattr(tiers, "member", None), 0
for number in range(num_steps):
    names = [hashlib.sha256(b"%d" % (8 * number + n)).digest() for n in range(8)]
    reservations = tiers.reserve([Wanted([name], PARENT, PARENT) for name in names])
    num_empty += all(reservation is None for reservation in reservations)
    filled = [each for each in reservations if each is not None and len(each)]
    tiers.seal_each([(each, [b"\0" * 64], tiers.epoch) for each in filled])
    time.sleep(0.01)
kept = member is not None and getattr(tiers, "member", None) == member
print(json.dumps({"seconds": seconds, "kept": kept, "steps": num_steps, "empty": num_empty}))
tiers.close()
