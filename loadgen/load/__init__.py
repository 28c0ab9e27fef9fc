"""What is sent and when: arrivals and prompts, drawn by seed before the clock starts. Pure."""
