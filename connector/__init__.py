"""What an engine talks to: an engine-neutral scheduler side, a worker side, and the plan that crosses between them."""
