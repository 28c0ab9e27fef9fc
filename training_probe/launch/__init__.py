"""Processes with torch: started under torchrun, watched, judged by how they ended."""
