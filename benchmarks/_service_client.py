"""One client of a daemon, for service_overhead.py: `_service_client.py SOCKET STEPS`. It attaches as engines do.

Prints 1 if it kept that connection all the while, else 0.
"""

import hashlib
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
tiers = open_tiers(Config.load(host={"size": "16MiB"}, service={"socket": socket}), FINGERPRINT, Shape(16, 4096))
member = getattr(tiers, "member", None)
for number in range(num_steps):
    names = [hashlib.sha256(b"%d" % (8 * number + n)).digest() for n in range(8)]
    reservations = tiers.reserve([Wanted([name], PARENT, PARENT) for name in names])
    filled = [each for each in reservations if each is not None and len(each)]
    tiers.seal_each([(each, [b"\0" * 64], tiers.epoch) for each in filled])
    time.sleep(0.01)
print(int(member is not None and getattr(tiers, "member", None) == member))
tiers.close()
