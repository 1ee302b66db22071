"""The same tiers behind a socket: a daemon that owns a node's host memory and slab, and looks after them by HTTP."""
