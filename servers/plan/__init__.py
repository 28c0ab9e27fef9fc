"""`loadgen plan`: which GPUs would carry a load, and what the load would then cost."""
