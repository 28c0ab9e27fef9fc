"""What this machine lacks for a run, and what to do about it."""
