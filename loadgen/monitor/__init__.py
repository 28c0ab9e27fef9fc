"""What is watched beside a run, outside the client's process: server metrics, GPUs, snapshots, the exporter."""
