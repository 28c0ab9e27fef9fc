"""The hot path: requests go out on time, every read is stamped once, and each reply ends as one record."""
