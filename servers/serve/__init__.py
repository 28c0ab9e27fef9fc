"""The embedded server in real time: HTTP, faults, telemetry, and the timing of replies. No dialect, no GPU model."""
