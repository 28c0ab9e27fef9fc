"""Many machines: one load from all of them, on a Ray cluster (`--on ray`)."""
